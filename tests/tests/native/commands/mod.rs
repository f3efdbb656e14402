//! Commands as objects: started, found again, read by any client, fed, signalled, forgotten.

mod ending;
mod reading;
mod starting;
mod stdin;

use box_protocol::actions::{
    CommandAttachParams, CommandChunk, CommandStartParams, CommandStartResult, ReadEnd, StreamName,
};
use box_protocol::{BoxError, CommandInfo};
use box_runtime::Caller;
use box_tests::machine::{Machine, on_each_machine, printed};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// The chunks that a reader received.
#[derive(Debug, Default)]
struct Received {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    gaps: u64,
    started: Option<CommandInfo>,
    /// The streams in order of arrival.
    order: Vec<StreamName>,
}

impl Received {
    fn take(&mut self, chunk: CommandChunk) {
        let (stream, bytes) = match chunk {
            CommandChunk::Started(info) => return self.started = Some(*info),
            CommandChunk::Gap(gap) => return self.gaps += gap.bytes,
            CommandChunk::Text(piece) => (piece.stream, piece.data.into_bytes()),
            CommandChunk::Bytes(piece) => (piece.stream, piece.data.to_vec()),
            CommandChunk::Display(shown) => panic!("{shown:?}"),
        };
        self.order.push(stream);
        match stream {
            StreamName::Stdout => self.stdout.extend_from_slice(&bytes),
            StreamName::Stderr => self.stderr.extend_from_slice(&bytes),
        }
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }
}

fn start(program: Value, more: Value) -> CommandStartParams {
    let params = json!({"box_id": "c", "program": program, "cwd": "/tmp"});
    params_with(params, &more)
}

/// Parameters about a command of the box.
fn about<T: DeserializeOwned>(id: &str, more: &Value) -> T {
    params_with(json!({"box_id": "c", "command_id": id}), more)
}

fn params_with<T: DeserializeOwned>(mut params: Value, more: &Value) -> T {
    for (name, value) in more.as_object().unwrap() {
        params[name] = value.clone();
    }
    serde_json::from_value(params).unwrap()
}

/// Receives chunks until the last one.
async fn received(mut chunks: mpsc::Receiver<CommandChunk>) -> Received {
    let mut got = Received::default();
    while let Some(chunk) = chunks.recv().await {
        got.take(chunk);
    }
    got
}

fn text(text: &str, more: Value) -> CommandStartParams {
    start(json!({"text": text}), more)
}

async fn run(
    machine: &Machine,
    params: CommandStartParams,
) -> Result<CommandStartResult, BoxError> {
    machine
        .runtime
        .start_command(&Caller::Local, params, None)
        .await
}

/// Starts a command and reads it to its end.
async fn read_through(
    machine: &Machine,
    mut params: CommandStartParams,
) -> (Received, CommandStartResult) {
    params.attach.get_or_insert_default();
    let (sender, chunks) = mpsc::channel(4);
    let caller = Caller::Local;
    let running = machine.runtime.start_command(&caller, params, Some(sender));
    let (result, got) = tokio::join!(running, received(chunks));
    (got, result.unwrap())
}

async fn attach(
    machine: &Machine,
    id: &str,
    more: Value,
) -> Result<(Received, CommandInfo, ReadEnd), BoxError> {
    let params: CommandAttachParams = about(id, &more);
    let (sender, chunks) = mpsc::channel(4);
    let caller = Caller::Local;
    let running = machine.runtime.attach_command(&caller, params, sender);
    let (result, got) = tokio::join!(running, received(chunks));
    result.map(|result| (got, result.info, result.read))
}

async fn kill(machine: &Machine, id: &str, more: Value) -> Result<(CommandInfo, bool), BoxError> {
    let params = about(id, &more);
    let killed = machine.runtime.kill_command(&Caller::Local, params).await?;
    Ok((killed.info, killed.already))
}

async fn input(machine: &Machine, id: &str, more: Value) -> Result<u64, BoxError> {
    let params = about(id, &more);
    let wrote = machine
        .runtime
        .input_command(&Caller::Local, params)
        .await?;
    Ok(wrote.accepted)
}

async fn get(machine: &Machine, id: &str) -> Result<CommandInfo, BoxError> {
    let key = about(id, &json!({}));
    machine.runtime.get_command(&Caller::Local, key).await
}

/// The box that every test here uses.
async fn with_box(test: impl AsyncFn(&Machine)) {
    on_each_machine(async |machine| {
        printed(&machine.exec("c", "true").await);
        test(machine).await;
    })
    .await;
}
