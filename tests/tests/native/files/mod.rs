//! Files of real boxes, through the runtime's handle: each action, and attacks of a guest.

mod actions;
mod archives;
mod errors;
mod hostile;
mod large;
mod races;
mod shared_memory;
mod watch;

use box_protocol::actions::{
    FileChunk, FileOutcome, FileRead, FileReadParams, FileStat, FileStatInfo, FileWrite,
    FileWriteParams,
};
use box_protocol::{BoxError, Code};
use box_rpc::Action;
use box_runtime::{Caller, DataPlane};
use box_tests::machine::{Machine, printed, spec};
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// A box and the calls for its files.
#[derive(Clone, Copy)]
struct BoxFiles<'a> {
    machine: &'a Machine,
    session: &'static str,
    /// The spec of the box, which each of its commands repeats.
    shape: &'static Value,
}

impl<'a> BoxFiles<'a> {
    /// A box with the default spec.
    async fn new(machine: &'a Machine, session: &'static str) -> Self {
        Self::with(machine, session, json!({})).await
    }

    /// A box with this spec.
    async fn with(machine: &'a Machine, session: &'static str, mut shape: Value) -> Self {
        shape["box_id"] = json!(session);
        let inside = Self {
            machine,
            session,
            shape: Box::leak(Box::new(shape)),
        };
        inside.run("true").await;
        inside
    }

    fn params<T: serde::de::DeserializeOwned>(self, mut params: Value) -> T {
        params["box_id"] = json!(self.session);
        serde_json::from_value(params).unwrap()
    }

    async fn ask<A: DataPlane>(self, params: Value) -> Result<A::Result, BoxError> {
        let params: A::Params = self.params(params);
        self.machine
            .runtime
            .forward::<A>(&Caller::Local, &params)
            .await
    }

    /// Makes a call that must succeed.
    async fn done<A: DataPlane>(self, params: Value) -> A::Result {
        let call_params = params.to_string();
        let answer = self.ask::<A>(params).await;
        answer.unwrap_or_else(|error| {
            panic!(
                "{}: {} {call_params}: {error:?}",
                self.machine.name,
                A::NAME
            )
        })
    }

    /// Makes a call that must be refused, and returns the error code.
    async fn refused<A: DataPlane>(self, params: Value) -> Code
    where
        A::Result: std::fmt::Debug,
    {
        let call_params = params.to_string();
        match self.ask::<A>(params).await {
            Err(error) => error.code(),
            Ok(result) => panic!(
                "{}: {} {call_params}: {result:?}",
                self.machine.name,
                A::NAME
            ),
        }
    }

    async fn write_with(
        self,
        path: &str,
        data: &[u8],
        mut more: Value,
    ) -> Result<FileStatInfo, BoxError> {
        more["path"] = json!(path);
        more["data"] = json!("");
        let mut params: FileWriteParams = self.params(more);
        params.data = data.to_vec().into();
        let runtime = &self.machine.runtime;
        runtime.forward::<FileWrite>(&Caller::Local, &params).await
    }

    async fn write(self, path: &str, data: impl AsRef<[u8]>) -> FileStatInfo {
        let written = self.write_with(path, data.as_ref(), json!({})).await;
        written.unwrap_or_else(|error| panic!("{path}: {error:?}"))
    }

    async fn stream<A: DataPlane + Action<Chunk = FileChunk>>(
        self,
        params: Value,
    ) -> (Result<A::Result, BoxError>, Vec<u8>) {
        let params: A::Params = self.params(params);
        let (to, mut chunks) = mpsc::channel(2);
        let caller = Caller::Local;
        let running = self
            .machine
            .runtime
            .forward_streamed::<A>(&caller, &params, to);
        let (result, bytes) = tokio::join!(running, async {
            let mut bytes = Vec::new();
            while let Some(chunk) = chunks.recv().await {
                bytes.extend_from_slice(&chunk.data);
            }
            bytes
        });
        (result, bytes)
    }

    async fn read(self, path: &str) -> Vec<u8> {
        let (result, bytes) = self.stream::<FileRead>(json!({"path": path})).await;
        let info = result.unwrap_or_else(|error| panic!("{path}: {error:?}"));
        assert_eq!(info.path, path);
        bytes
    }

    async fn text(self, path: &str) -> String {
        String::from_utf8(self.read(path).await).unwrap()
    }

    /// The error code of a read that must be refused.
    async fn unreadable(self, path: &str) -> Code {
        let params: FileReadParams = self.params(json!({"path": path}));
        let (to, _chunks) = mpsc::channel(2);
        let runtime = &self.machine.runtime;
        let caller = Caller::Local;
        let read = runtime.forward_streamed::<FileRead>(&caller, &params, to);
        read.await.unwrap_err().code()
    }

    async fn stat(self, path: &str) -> Result<FileStatInfo, Code> {
        let answer = self.done::<FileStat>(json!({"paths": [path]})).await;
        match answer.paths.into_values().next().unwrap() {
            FileOutcome::Stat(info) => Ok(info),
            FileOutcome::Error(fault) => Err(fault.code),
        }
    }

    /// Runs a command that must succeed, and returns its output.
    async fn run(self, cmd: &str) -> String {
        let mut asked = self.shape.clone();
        asked["cmd"] = json!(cmd);
        let ran = self.machine.exec_spec(spec(asked)).await;
        let ran = ran.unwrap_or_else(|error| panic!("{}: {cmd}: {error:?}", self.machine.name));
        printed(&ran).to_owned()
    }
}
