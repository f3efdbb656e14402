//! The actions of a test server. Tests learn the server's state through them, because over stdio
//! the server is another process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use box_rpc::{Action, Call, Code, Empty, Handle, Never, Router, RpcError, contract};
use serde::{Deserialize, Serialize};

/// Declares an action with its types.
macro_rules! action {
    ($(#[$doc:meta])* $name:ident = $wire:literal, $params:ty => $result:ty, $chunk:ty) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name;

        impl Action for $name {
            const NAME: &'static str = $wire;
            type Params = $params;
            type Result = $result;
            type Chunk = $chunk;
        }
    };
}

/// A text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Text {
    /// The text.
    pub text: String,
}

impl Text {
    /// A text.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into() }
    }
}

/// A number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Number {
    /// The number.
    pub n: u64,
}

/// How to fail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The error code.
    pub code: Code,
    /// The error message.
    pub message: String,
}

/// What the server has observed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Waits begun.
    pub begun: u64,
    /// Waits that finished.
    pub finished: u64,
    /// Waits that were dropped.
    pub dropped: u64,
    /// Chunks sent.
    pub chunks: u64,
    /// Runs by name.
    pub runs: HashMap<String, u64>,
    /// Noted texts, in order.
    pub notes: Vec<String>,
    /// Unparsable texts on this connection.
    pub unparsable: u64,
    /// Messages over the limit on this connection.
    pub oversized: u64,
}

action!(/// Answers with its parameters.
    Echo = "echo", Text => Text, Never);
action!(/// Answers after `n` milliseconds.
    Wait = "wait", Number => Number, Never);
action!(/// Streams `n` chunks, numbered from 0, and answers with the sum of the numbers. Without
    /// credit it answers with the sum only.
    Count = "count", Number => Number, Number);
action!(/// Streams chunks without an end.
    Flow = "flow", Empty => Empty, Text);
action!(/// Fails with this error.
    Fail = "fail", Failure => Empty, Never);
action!(/// Panics; after a pause if `n` is not 0.
    Panic = "panic", Number => Empty, Never);
action!(/// Notes a text, in the order of the calls.
    Note = "note", Text => Empty, Never);
action!(/// Runs once per call under a name, slowly enough to be interrupted.
    Run = "run", Text => Number, Never);
action!(/// Calls the caller's `echo` and answers with its answer.
    Back = "back", Text => Text, Never);
action!(/// Answers with a text of `n` bytes.
    Big = "big", Number => Text, Never);
action!(/// Answers with the name of the caller.
    Who = "who", Empty => Text, Never);
action!(/// Ends the server's process at once, as `kill -9` would. Only for a server that is a separate process.
    Exit = "exit", Empty => Empty, Never);
action!(/// Answers with what the server has observed.
    Probe = "probe", Empty => Seen, Never);

contract! {
    /// Every action of a test server.
    pub Served: Echo, Wait, Count, Flow, Fail, Panic, Note, Run, Back, Big, Who, Exit, Probe
}

/// The state of a test server.
#[derive(Debug, Default)]
pub struct Server {
    begun: AtomicU64,
    finished: AtomicU64,
    dropped: AtomicU64,
    chunks: AtomicU64,
    runs: Mutex<HashMap<String, u64>>,
    notes: Mutex<Vec<String>>,
}

impl Server {
    /// Waits that were begun.
    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }

    /// A router that serves everything.
    pub fn router(self: Arc<Self>) -> Router {
        Served::router(self).build()
    }
}

fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::SeqCst);
}

/// Counts a wait that is dropped before it finishes.
struct Dropped<'a>(&'a AtomicU64, bool);

impl Drop for Dropped<'_> {
    fn drop(&mut self) {
        if !self.1 {
            add(self.0);
        }
    }
}

impl Handle<Echo> for Server {
    async fn handle(&self, params: Text, _: Call<Echo>) -> Result<Text, RpcError> {
        Ok(params)
    }
}

impl Handle<Wait> for Server {
    async fn handle(&self, params: Number, _: Call<Wait>) -> Result<Number, RpcError> {
        add(&self.begun);
        let mut dropped = Dropped(&self.dropped, false);
        tokio::time::sleep(Duration::from_millis(params.n)).await;
        dropped.1 = true;
        add(&self.finished);
        Ok(params)
    }
}

impl Handle<Count> for Server {
    async fn handle(&self, params: Number, mut call: Call<Count>) -> Result<Number, RpcError> {
        let mut dropped = Dropped(&self.dropped, false);
        let mut sum = 0;
        for n in 0..params.n {
            if let Some(chunks) = call.chunks() {
                chunks.send(&Number { n }).await?;
                add(&self.chunks);
            }
            sum += n;
        }
        dropped.1 = true;
        Ok(Number { n: sum })
    }
}

impl Handle<Flow> for Server {
    async fn handle(&self, _: Empty, mut call: Call<Flow>) -> Result<Empty, RpcError> {
        let _dropped = Dropped(&self.dropped, false);
        let chunk = Text::new("x".repeat(1000));
        let Some(chunks) = call.chunks() else {
            return Ok(Empty {});
        };
        loop {
            chunks.send(&chunk).await?;
            add(&self.chunks);
        }
    }
}

impl Handle<Fail> for Server {
    async fn handle(&self, params: Failure, _: Call<Fail>) -> Result<Empty, RpcError> {
        Err(RpcError::new(params.code, params.message))
    }
}

impl Handle<Panic> for Server {
    #[allow(clippy::panic)] // the purpose of this action
    async fn handle(&self, params: Number, _: Call<Panic>) -> Result<Empty, RpcError> {
        if params.n > 0 {
            tokio::time::sleep(Duration::from_millis(params.n)).await;
        }
        panic!("panic on request");
    }
}

impl Handle<Note> for Server {
    async fn handle(&self, params: Text, _: Call<Note>) -> Result<Empty, RpcError> {
        self.notes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(params.text);
        tokio::task::yield_now().await;
        Ok(Empty {})
    }
}

impl Handle<Run> for Server {
    async fn handle(&self, params: Text, _: Call<Run>) -> Result<Number, RpcError> {
        let mut dropped = Dropped(&self.dropped, false);
        let n = {
            let mut runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
            let run = runs.entry(params.text).or_default();
            *run += 1;
            *run
        };
        tokio::time::sleep(Duration::from_millis(20)).await;
        dropped.1 = true;
        Ok(Number { n })
    }
}

impl Handle<Back> for Server {
    async fn handle(&self, params: Text, call: Call<Back>) -> Result<Text, RpcError> {
        Ok(call.peer().call::<Echo>(&params).await?)
    }
}

impl Handle<Big> for Server {
    async fn handle(&self, params: Number, _: Call<Big>) -> Result<Text, RpcError> {
        let size = usize::try_from(params.n).map_err(|_| RpcError::validation("n is too large"))?;
        Ok(Text::new("x".repeat(size)))
    }
}

impl Handle<Who> for Server {
    async fn handle(&self, _: Empty, call: Call<Who>) -> Result<Text, RpcError> {
        Ok(Text::new(&*call.caller().name()))
    }
}

impl Handle<Exit> for Server {
    async fn handle(&self, _: Empty, _: Call<Exit>) -> Result<Empty, RpcError> {
        std::process::exit(9)
    }
}

impl Handle<Probe> for Server {
    async fn handle(&self, _: Empty, call: Call<Probe>) -> Result<Seen, RpcError> {
        let read = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        let stats = call.peer().stats();
        Ok(Seen {
            begun: read(&self.begun),
            finished: read(&self.finished),
            dropped: read(&self.dropped),
            chunks: read(&self.chunks),
            runs: self
                .runs
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
            notes: self
                .notes
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
            unparsable: stats.unparsable,
            oversized: stats.oversized,
        })
    }
}
