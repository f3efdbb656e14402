//! The terminal: a websocket to a shell with a terminal of its own.
//!
//! Messages are JSON with `type` and `data`. The client sends `input`, `resize` and `pong`. The server sends `session_id`,
//! `ready`, `output` and `error`.

use axum::response::Response;
use box_protocol::actions::{
    CommandAttachParams, CommandAttachResult, CommandChunk, CommandInputParams, CommandKey,
    CommandStartParams, OnDisconnect, ReadFrom, Stdin, TerminalSize,
};
use box_protocol::{BoxError, BoxId, CommandId, Program};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::GATEWAY;
use super::envelope::{Failure, done};
use super::provisioner::url_of;
use crate::http::body::Params;
use crate::http::context::{Context, InBox};
use crate::http::input::{Input, InputWriter};
use crate::http::socket::{Incoming, Socket, SocketReceiver, SocketSender, Upgrade};
use crate::http::stream::{Step, StreamedCall};

/// The start of the ids of terminals.
const PREFIX: &str = "terminal-";

/// How long a terminal lives without a client, in milliseconds.
const DETACHED_MS: u64 = 10 * 60 * 1000;

/// The output that a client gets again when it returns.
const REPLAY_BYTES: u64 = 64 * 1024;

/// The size of a terminal until the client sends one.
const SIZE: TerminalSize = TerminalSize { cols: 80, rows: 24 };

/// Returns the address of a new terminal. Its shell starts when a client connects.
pub(super) async fn url(context: Context, InBox(box_id): InBox) -> Result<Response, Failure> {
    let id = CommandId::fresh();
    let info = context.get(&box_id).await?;
    let base = url_of(&context, &info);
    let base = base.replacen("http", "ws", 1);
    Ok(done(format!("{base}/v1/shell/ws?session_id={id}")))
}

/// Starts a shell with a terminal, unless it runs.
async fn open(context: &Context, box_id: &BoxId, id: &CommandId) -> Result<CommandId, BoxError> {
    let command_id = CommandId::new(format!("{PREFIX}{id}"))?;
    let mut params = CommandStartParams {
        command_id: Some(command_id.clone()),
        stdin: Stdin::Open,
        pty: Some(SIZE),
        detached_ms: Some(DETACHED_MS),
        on_disconnect: OnDisconnect::Keep,
        ..CommandStartParams::new(box_id.clone(), Program::argv(["bash", "-i"])?)
    };
    params.env.insert("TERM", "xterm-256color")?;
    context.start_command(&GATEWAY, params, None).await?;
    Ok(command_id)
}

/// Connects a client to a terminal, or to a new one.
pub(super) async fn connect(
    context: Context,
    InBox(box_id): InBox,
    params: Params,
    upgrade: Upgrade,
) -> Result<Response, Failure> {
    let id = match params.get("session_id") {
        Some(id) => CommandId::new(id)?,
        None => CommandId::fresh(),
    };
    let command_id = open(&context, &box_id, &id).await?;
    let terminal = Terminal {
        context: context.clone(),
        box_id,
        command_id,
    };
    Ok(upgrade.serve(context, async move |socket| {
        terminal.serve(socket, &id).await;
    }))
}

/// A message of the client.
#[derive(Debug, Deserialize)]
struct Message {
    r#type: String,
    #[serde(default)]
    data: Value,
}

struct Terminal {
    context: Context,
    box_id: BoxId,
    command_id: CommandId,
}

impl Terminal {
    /// Sends the output, and acts on the messages of the client, until one of them ends.
    async fn serve(&self, socket: Socket, id: &CommandId) {
        let (sender, mut receiver) = socket.split();
        for message in [message("session_id", id), message("ready", Value::Null)] {
            if !sender.send_text(message).await {
                return;
            }
        }
        let key = CommandKey {
            box_id: self.box_id.clone(),
            command_id: self.command_id.clone(),
        };
        let (mut input, failures) = InputWriter::new(self.context.clone(), key);
        let closed = tokio::select! {
            closed = self.send_output(&sender) => closed,
            closed = self.listen(&mut receiver, &sender, &mut input) => closed,
            () = report(failures, &sender) => None,
        };
        if let Some((status, reason)) = closed {
            receiver.close(status, reason).await;
        }
    }

    /// Sends the output; returns the close status, or `None` if the client has left.
    async fn send_output(&self, socket: &SocketSender) -> Option<(u16, &'static str)> {
        let mut output = self.output();
        loop {
            match output.next().await {
                Step::Chunk(CommandChunk::Text(piece)) => {
                    if !socket.send_text(message("output", piece.data)).await {
                        return None;
                    }
                }
                Step::Chunk(_) | Step::Idle => {}
                Step::End(_) => return Some((1000, "the shell has ended")),
            }
        }
    }

    /// Acts on messages until the client leaves or the server stops.
    async fn listen(
        &self,
        receiver: &mut SocketReceiver,
        socket: &SocketSender,
        input: &mut InputWriter,
    ) -> Option<(u16, &'static str)> {
        loop {
            let handled = match receiver.receive().await {
                Incoming::Text(text) => self.handle(&text, input).await,
                Incoming::Binary(_) => Err("messages must be text".to_owned()),
                Incoming::Left => return None,
                Incoming::Stopping(status) => return Some((status, "the server is stopping")),
            };
            if let Err(problem) = handled
                && !socket.send_text(message("error", problem)).await
            {
                return None;
            }
        }
    }

    fn output(&self) -> StreamedCall<CommandChunk, CommandAttachResult> {
        let params = CommandAttachParams {
            from: ReadFrom::Tail(REPLAY_BYTES),
            ..CommandAttachParams::new(self.box_id.clone(), self.command_id.clone())
        };
        let context = self.context.clone();
        StreamedCall::new(|chunks| async move {
            let runtime = context.runtime();
            runtime
                .attach_command(&context.caller, params, chunks)
                .await
        })
    }

    async fn handle(&self, text: &str, input: &mut InputWriter) -> Result<(), String> {
        let malformed = |error: serde_json::Error| format!("message: {error}");
        let failed = |error: BoxError| error.message().to_owned();
        let message: Message = serde_json::from_str(text).map_err(malformed)?;
        match message.r#type.as_str() {
            "input" => {
                let text: String = serde_json::from_value(message.data).map_err(malformed)?;
                input.write(Input::Data(text.into())).await.map_err(failed)
            }
            "resize" => {
                let size = serde_json::from_value(message.data).map_err(malformed)?;
                let (box_id, id) = (self.box_id.clone(), self.command_id.clone());
                let params = CommandInputParams {
                    size: Some(size),
                    ..CommandInputParams::new(box_id, id)
                };
                let runtime = self.context.runtime();
                let resized = runtime.input_command(&self.context.caller, params).await;
                resized.map(drop).map_err(failed)
            }
            "ping" | "pong" => Ok(()),
            other => Err(format!("type: {other:?} is unknown")),
        }
    }
}

/// Sends failed writes until the client has left.
async fn report(mut failures: mpsc::Receiver<BoxError>, socket: &SocketSender) {
    while let Some(error) = failures.recv().await {
        if !socket.send_text(message("error", error.message())).await {
            return;
        }
    }
}

fn message(kind: &str, data: impl serde::Serialize) -> String {
    json!({"type": kind, "data": data}).to_string()
}
