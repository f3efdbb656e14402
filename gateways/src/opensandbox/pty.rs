//! Terminals over a websocket.
//!
//! A terminal is a command that starts with its first reader and outlives it. Its output continues at an offset.

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{
    CommandAttachParams, CommandAttachResult, CommandChunk, CommandInputParams, CommandKey,
    CommandKillParams, CommandStartParams, Exclusive, OnDisconnect, ReadFrom, ReadWhy, Stdin,
    StreamName, TerminalSize, View,
};
use box_protocol::{BoxError, CommandId, CommandInfo, CommandState, Note, Program};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::mpsc;

use super::GATEWAY;
use super::command::{LastId, expanded, find, refused};
use super::error::Error;
use crate::http::body::{OptionalJson, Params};
use crate::http::context::{Context, InBox};
use crate::http::input::{Input, InputWriter};
use crate::http::refusal::{Refusal, json_response};
use crate::http::socket::{Incoming, Socket, SocketReceiver, SocketSender, Upgrade};
use crate::http::stream::{Step, StreamedCall};

/// The size of a terminal before the client sets one.
const SIZE: TerminalSize = TerminalSize { cols: 80, rows: 24 };

/// An interactive shell: bash, if the sandbox has it.
const SHELL: &str = "if command -v bash >/dev/null; then exec bash; fi; exec sh";

/// The close status of a client whose terminal another one took over.
const TAKEN_OVER: u16 = 4001;

/// The close status of a socket that ends normally.
const NORMAL: u16 = 1000;

/// The code of an error about input.
const INPUT_FAILED: &str = "STDIN_WRITE_FAILED";

/// The first bytes of binary messages.
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const REPLAY: u8 = 3;

/// What the record of a command does not hold of a terminal.
#[derive(Debug, Serialize, Deserialize)]
struct TerminalNote {
    pty: bool,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct CreateRequest {
    cwd: Option<String>,
    command: Option<String>,
}

/// Creates a terminal, which starts with its first websocket.
pub(super) async fn create(
    context: Context,
    InBox(box_id): InBox,
    OptionalJson(request): OptionalJson<CreateRequest>,
) -> Result<Response, Error> {
    let command = request.command.filter(|command| !command.trim().is_empty());
    let text = command.unwrap_or_else(|| SHELL.to_owned());
    // The command starts later, so its start cannot refuse the directory now.
    let cwd = match request.cwd.as_deref().filter(|cwd| !cwd.is_empty()) {
        Some(cwd) => Some(expanded(&context, &box_id, cwd).await?),
        None => None,
    };
    let params = CommandStartParams {
        command_id: Some(CommandId::fresh()),
        cwd,
        hold: true,
        ..CommandStartParams::new(box_id, Program::text(text)?)
    };
    let started = start(&context, params, true).await?;
    let body = json!({"session_id": started.command_id});
    Ok(json_response(StatusCode::CREATED, &body))
}

async fn start(
    context: &Context,
    params: CommandStartParams,
    pty: bool,
) -> Result<CommandInfo, Error> {
    let params = CommandStartParams {
        stdin: Stdin::Open,
        pty: pty.then_some(SIZE),
        on_disconnect: OnDisconnect::Keep,
        retain_ms: Some(-1),
        note: Some(Note::new(&TerminalNote { pty })?),
        ..params
    };
    let box_id = params.box_id.clone();
    let started = context.start_command(&GATEWAY, params, None).await;
    // The holder of a capability has another name for the box than its owner.
    let info = started.map_err(refused)?.info;
    Ok(CommandInfo { box_id, ..info })
}

/// Returns a terminal of a path, and whether it has a terminal or pipes.
async fn terminal(
    context: &Context,
    InBox(box_id): InBox,
    id: &str,
) -> Result<(CommandInfo, bool), Error> {
    let unknown = || Error::no_context("pty session", id);
    let info = match find(context, box_id, id).await {
        Err(error) if error.is_missing() => return Err(unknown()),
        info => info?,
    };
    let kept = info.note.as_ref().and_then(Note::read::<TerminalNote>);
    let pty = kept.ok_or_else(unknown)?.pty;
    Ok((info, pty))
}

pub(super) async fn status(
    context: Context,
    in_box: InBox,
    LastId(id): LastId,
) -> Result<Response, Error> {
    let (info, _) = terminal(&context, in_box, &id).await?;
    let body = json!({
        "session_id": info.command_id,
        "running": info.state == CommandState::Running,
        "output_offset": info.size.sum(),
    });
    Ok(json_response(StatusCode::OK, &body))
}

pub(super) async fn delete(
    context: Context,
    in_box: InBox,
    LastId(id): LastId,
) -> Result<StatusCode, Error> {
    let (info, _) = terminal(&context, in_box, &id).await?;
    let kill = CommandKillParams {
        grace_ms: Some(0),
        forget: true,
        ..CommandKillParams::new(info.box_id, info.command_id)
    };
    context
        .runtime()
        .kill_command(&context.caller, kill)
        .await?;
    Ok(StatusCode::OK)
}

/// Attaches a client to a terminal.
pub(super) async fn socket(
    context: Context,
    in_box: InBox,
    LastId(id): LastId,
    params: Params,
    upgrade: Result<Upgrade, Refusal>,
) -> Result<Response, Error> {
    // Of two first clients, one starts the terminal.
    let _turn = context.turn(&in_box.0, &format!("pty {id}")).await?;
    let (mut info, mut pty) = terminal(&context, in_box, &id).await?;
    let upgrade = upgrade.map_err(|_| {
        let message = "this path requires a websocket upgrade, version 13";
        Error::new(StatusCode::UPGRADE_REQUIRED, "UPGRADE_REQUIRED", message)
    })?;
    let takeover = params.flag("takeover")?;
    let since: Option<u64> = params.parsed("since", "must be an offset in bytes")?;
    if info.attached && !takeover {
        return Err(already_connected(&id));
    }
    if info.state == CommandState::Held {
        // The client chooses between a terminal and pipes when it starts the shell.
        pty = params.get("pty") != Some("0");
        let params = CommandStartParams {
            command_id: Some(info.command_id.clone()),
            cwd: Some(info.cwd.clone()),
            replace: true,
            ..CommandStartParams::new(info.box_id.clone(), info.program.clone())
        };
        info = start(&context, params, pty).await?;
    }
    let end = info.size.sum();
    let since = since.unwrap_or(0).min(end);
    let exclusive = if takeover {
        Exclusive::Take
    } else {
        Exclusive::Refuse
    };
    let output = attach(&context, &info, since, exclusive);
    // The next client finds this one attached, also if the terminal has no output yet.
    let output = output.begun_within(attached(&context, &info)).await;
    let output = output.map_err(|error| {
        if error.message().starts_with("exclusive:") {
            already_connected(&id)
        } else {
            error.into()
        }
    })?;
    let terminal = Terminal {
        end,
        since,
        context: context.clone(),
        info,
        pty,
    };
    Ok(upgrade.serve(context, |socket| terminal.run(socket, output)))
}

fn already_connected(id: &str) -> Error {
    let message = format!("another client is connected to pty session {id}");
    Error::new(StatusCode::CONFLICT, "ALREADY_CONNECTED", message)
}

/// The call that reads the output of a terminal.
type Output = StreamedCall<CommandChunk, CommandAttachResult>;

/// Reads the output of a terminal from an offset, as its only client.
fn attach(context: &Context, info: &CommandInfo, since: u64, exclusive: Exclusive) -> Output {
    let params = CommandAttachParams {
        from: ReadFrom::Pos(since),
        view: View::Bytes,
        exclusive: Some(exclusive),
        ..CommandAttachParams::new(info.box_id.clone(), info.command_id.clone())
    };
    let context = context.clone();
    StreamedCall::new(|chunks| async move {
        let runtime = context.runtime();
        runtime
            .attach_command(&context.caller, params, chunks)
            .await
    })
}

/// Waits until a terminal has a client, or is gone.
async fn attached(context: &Context, info: &CommandInfo) {
    let id = info.command_id.as_str();
    while let Ok(found) = find(context, info.box_id.clone(), id).await {
        if found.attached {
            return;
        }
    }
}

/// A terminal that a client attaches to.
struct Terminal {
    context: Context,
    info: CommandInfo,
    pty: bool,
    /// Where the client begins to read.
    since: u64,
    /// The end of the output that the client has missed.
    end: u64,
}

/// A message of a client.
#[derive(Debug, Deserialize)]
struct ClientFrame {
    r#type: String,
    #[serde(default)]
    data: String,
    #[serde(default)]
    cols: u16,
    #[serde(default)]
    rows: u16,
    #[serde(default)]
    signal: String,
}

impl Terminal {
    /// Sends the output, and acts on the messages of the client, until one of them ends.
    async fn run(self, socket: Socket, output: Output) {
        let (sender, mut receiver) = socket.split();
        let key = CommandKey {
            box_id: self.info.box_id.clone(),
            command_id: self.info.command_id.clone(),
        };
        let (mut input, failures) = InputWriter::new(self.context.clone(), key);
        let closed = tokio::select! {
            closed = self.send_output(output, &sender) => closed,
            closed = self.listen(&mut receiver, &sender, &mut input) => closed,
            () = report(failures, &sender) => None,
        };
        if let Some((code, reason)) = closed {
            receiver.close(code, reason).await;
        }
    }

    /// Sends the output; returns the close status, or `None` if the client has left.
    async fn send_output(
        &self,
        mut output: Output,
        socket: &SocketSender,
    ) -> Option<(u16, &'static str)> {
        let mut connected = self.since >= self.end;
        if connected && !self.connect(socket).await {
            return None;
        }
        loop {
            match output.next().await {
                Step::Chunk(chunk) => {
                    let pos = self.forward(chunk, connected, socket).await?;
                    if !connected && pos >= self.end {
                        connected = true;
                        if !self.connect(socket).await {
                            return None;
                        }
                    }
                }
                Step::End(ended) => return Some(Self::ended(ended, socket).await),
                Step::Idle => {}
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
            let data = match receiver.receive().await {
                Incoming::Text(text) => self.control(&text, socket).await,
                Incoming::Binary(bytes) => {
                    (bytes.first() == Some(&STDIN)).then(|| bytes.slice(1..))
                }
                Incoming::Left => return None,
                Incoming::Stopping(code) => return Some((code, "the server is stopping")),
            };
            let Some(data) = data else { continue };
            if let Err(error) = input.write(Input::Data(data)).await {
                send_error(socket, INPUT_FAILED, error.message()).await;
            }
        }
    }

    async fn connect(&self, socket: &SocketSender) -> bool {
        let mode = if self.pty { "pty" } else { "pipe" };
        let id = self.info.command_id.as_str();
        let frame = json!({"type": "connected", "session_id": id, "mode": mode});
        socket.send_text(frame.to_string()).await
    }

    /// Sends output; returns the position after it, or `None` if the client has left.
    async fn forward(
        &self,
        chunk: CommandChunk,
        connected: bool,
        socket: &SocketSender,
    ) -> Option<u64> {
        let CommandChunk::Bytes(piece) = chunk else {
            return Some(self.since);
        };
        let mut frame = Vec::with_capacity(piece.data.len() + 9);
        if connected {
            frame.push(match piece.stream {
                StreamName::Stdout => STDOUT,
                StreamName::Stderr => STDERR,
            });
        } else {
            frame.push(REPLAY);
            frame.extend_from_slice(&piece.pos.to_be_bytes());
        }
        frame.extend_from_slice(&piece.data);
        let end = piece.pos + piece.data.len() as u64;
        socket.send_binary(frame).await.then_some(end)
    }

    /// Sends how the terminal ended; returns the close status.
    async fn ended(
        ended: Result<CommandAttachResult, BoxError>,
        socket: &SocketSender,
    ) -> (u16, &'static str) {
        match ended {
            Ok(ended) if ended.read.why == ReadWhy::Taken => (TAKEN_OVER, "TAKEN_OVER"),
            Ok(ended) => {
                let code = ended.info.exit.and_then(|exit| exit.code).unwrap_or(-1);
                let frame = json!({"type": "exit", "exit_code": code});
                socket.send_text(frame.to_string()).await;
                (NORMAL, "process exited")
            }
            Err(error) => {
                send_error(socket, "RUNTIME_ERROR", error.message()).await;
                (NORMAL, "ended")
            }
        }
    }

    /// Acts on a message; returns its input.
    async fn control(&self, text: &str, socket: &SocketSender) -> Option<Bytes> {
        let frame: ClientFrame = serde_json::from_str(text).ok()?;
        let runtime = self.context.runtime();
        match frame.r#type.as_str() {
            "stdin" => return Some(frame.data.into()),
            "resize" if frame.cols > 0 && frame.rows > 0 => {
                let size = TerminalSize {
                    cols: frame.cols,
                    rows: frame.rows,
                };
                let (box_id, id) = (self.info.box_id.clone(), self.info.command_id.clone());
                let params = CommandInputParams {
                    size: Some(size),
                    ..CommandInputParams::new(box_id, id)
                };
                // Pipes have no size.
                let _ = runtime.input_command(&self.context.caller, params).await;
            }
            "resize" => {}
            "signal" => {
                let name = frame.signal.trim_start_matches("SIG").to_owned();
                let (box_id, id) = (self.info.box_id.clone(), self.info.command_id.clone());
                let kill = CommandKillParams {
                    signal: name,
                    ..CommandKillParams::new(box_id, id)
                };
                if let Err(error) = runtime.kill_command(&self.context.caller, kill).await {
                    send_error(socket, "RUNTIME_ERROR", error.message()).await;
                }
            }
            "ping" => {
                socket.send_text(json!({"type": "pong"}).to_string()).await;
            }
            other => {
                let message = format!("unknown frame type {other:?}");
                send_error(socket, "INVALID_FRAME", &message).await;
            }
        }
        None
    }
}

/// Sends failed writes until the client has left.
async fn report(mut failures: mpsc::Receiver<BoxError>, socket: &SocketSender) {
    while let Some(error) = failures.recv().await {
        if !send_error(socket, INPUT_FAILED, error.message()).await {
            return;
        }
    }
}

/// Sends an error; returns whether the client is still there.
async fn send_error(socket: &SocketSender, code: &str, message: &str) -> bool {
    let frame = json!({"type": "error", "code": code, "error": message});
    socket.send_text(frame.to_string()).await
}
