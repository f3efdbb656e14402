//! `execute/ws`: a command with its output, input and end over a websocket.
//!
//! The first message of the client starts a command or names one. The server answers `started`, then the output with
//! offsets that count the bytes of the text as sent, then `exit` or `error`, and closes.

use std::collections::VecDeque;
use std::time::Duration;

use axum::response::Response;
use box_protocol::actions::{CommandChunk, CommandKey, CommandKillParams};
use box_protocol::actions::{StreamName, View};
use box_protocol::{BoxId, CommandId, CommandInfo};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{End, Execute, Reading, Reconnect, Request, attaching, starting};
use crate::http::body::from_json;
use crate::http::context::{Context, InBox};
use crate::http::input::{Input, InputWriter, MAX_WAITING_BYTES};
use crate::http::socket::{Incoming, Socket, SocketReceiver, SocketSender, Upgrade};
use crate::http::stream::Step;

/// How long a client may take for its first message.
const FIRST_MESSAGE: Duration = Duration::from_secs(30);

/// How long the server reads for a message that ends the command, from a client that no longer receives, or whose input it
/// refuses.
const LAST_MESSAGES: Duration = Duration::from_secs(5);

/// The close status after the last message.
const NORMAL: u16 = 1000;
/// The close status of a server that restarts. All clients connect again.
pub(super) const RESTARTING: u16 = 1012;

/// The first message of a client.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum First {
    Execute(Box<Execute>),
    Reconnect(Reconnect),
}

/// Every later message of a client.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Later {
    Kill,
    Input {
        data: String,
    },
    CloseStdin,
    #[serde(other)]
    Unknown,
}

/// A message to the client, before the last one.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Message<'a> {
    Started {
        command_id: &'a str,
        pid: Option<u32>,
    },
    Stdout {
        data: &'a str,
        offset: u64,
    },
    Stderr {
        data: &'a str,
        offset: u64,
    },
}

impl Message<'_> {
    fn started(info: &CommandInfo) -> Message<'_> {
        Message::Started {
            command_id: info.command_id.as_str(),
            pid: info.pid,
        }
    }
}

/// `GET /execute/ws`.
pub(in super::super) async fn upgrade(
    context: Context,
    InBox(box_id): InBox,
    upgrade: Upgrade,
) -> Response {
    upgrade.serve(context.clone(), |socket| serve(socket, context, box_id))
}

async fn serve(socket: Socket, context: Context, box_id: BoxId) {
    let (sender, mut receiver) = socket.split();
    let first = match timeout(FIRST_MESSAGE, receiver.receive()).await {
        Ok(Incoming::Text(text)) => text.into_bytes(),
        Ok(Incoming::Binary(bytes)) => bytes.to_vec(),
        Ok(Incoming::Stopping(status)) => return stop(receiver, status).await,
        Ok(Incoming::Left) | Err(_) => return,
    };
    let end = match from_json::<First>(&first) {
        Ok(First::Execute(request)) => match request.into_params(box_id, View::Text) {
            Ok(params) => {
                let key = CommandKey {
                    box_id: params.box_id.clone(),
                    command_id: params.command_id.clone().unwrap_or_else(CommandId::fresh),
                };
                let reading = starting(&context, params);
                let reading = (Request::Execute, reading);
                attend(&context, key, reading, &sender, &mut receiver).await
            }
            Err(invalid) => Attended::End(End::error("CommandError", invalid.to_string())),
        },
        Ok(First::Reconnect(request)) => {
            reconnect(&context, box_id, &request, &sender, &mut receiver).await
        }
        Err(invalid) => Attended::End(End::error("ProtocolError", invalid.to_string())),
    };
    match end {
        Attended::End(End::Lost) | Attended::Left => {}
        Attended::Stopping(status) => stop(receiver, status).await,
        Attended::End(end) => {
            if send(&sender, &end).await {
                receiver.close(NORMAL, "").await;
            }
        }
    }
}

/// Attaches a client to a command that it has left.
async fn reconnect(
    context: &Context,
    box_id: BoxId,
    request: &Reconnect,
    sender: &SocketSender,
    receiver: &mut SocketReceiver,
) -> Attended {
    let (key, info) = match request.find(context, box_id).await {
        Ok(found) => found,
        Err(error) => return Attended::End(End::of_error(&error, Request::Reconnect)),
    };
    if !send(sender, &Message::started(&info)).await {
        return Attended::Left;
    }
    let reading = attaching(context, &key, request.offsets(), View::Text);
    let asked = Request::Reconnect;
    attend(context, key, (asked, reading), sender, receiver).await
}

/// Ends a connection of a server that stops.
///
/// If its boxes live on, the client connects again. If not, the connection breaks: a close message would tell the
/// client that the command has ended.
async fn stop(receiver: SocketReceiver, status: u16) {
    if status == RESTARTING {
        receiver.close(RESTARTING, "the server restarts").await;
    }
}

/// How the server attended a client.
enum Attended {
    /// With a last message.
    End(End),
    /// The client has left.
    Left,
    /// The server stops.
    Stopping(u16),
}

/// Sends the output of a command, and acts on the messages of its client, until one of them ends.
async fn attend(
    context: &Context,
    key: CommandKey,
    reading: (Request, Reading),
    sender: &SocketSender,
    receiver: &mut SocketReceiver,
) -> Attended {
    let mut client = Client::new(context, key);
    let listening = client.listen(receiver);
    tokio::pin!(listening);
    let sent = {
        let sending = send_output(context, reading, sender);
        tokio::pin!(sending);
        tokio::select! {
            // A message that ends the command counts even if the client no longer receives.
            biased;
            left = &mut listening => return left,
            sent = &mut sending => sent,
        }
    };
    match sent {
        Some(end) => Attended::End(end),
        None => match timeout(LAST_MESSAGES, listening).await {
            Ok(left) => left,
            Err(_) => Attended::Left,
        },
    }
}

/// Sends output; returns the last message, or `None` if the client no longer receives.
async fn send_output(
    context: &Context,
    (request, mut reading): (Request, Reading),
    sender: &SocketSender,
) -> Option<End> {
    loop {
        let is_received = match reading.next().await {
            Step::Chunk(CommandChunk::Started(info)) => {
                send(sender, &Message::started(&info)).await
            }
            Step::Chunk(CommandChunk::Text(piece)) => {
                let (data, offset) = (piece.data.as_str(), piece.offset);
                let message = match piece.stream {
                    StreamName::Stdout => Message::Stdout { data, offset },
                    StreamName::Stderr => Message::Stderr { data, offset },
                };
                send(sender, &message).await
            }
            // After a gap, the offset of the next output tells the client.
            Step::Chunk(_) | Step::Idle => true,
            Step::End(ended) => return Some(End::of(ended, context, request)),
        };
        if !is_received {
            return None;
        }
    }
}

async fn send(sender: &SocketSender, message: &impl Serialize) -> bool {
    match serde_json::to_string(message) {
        Ok(text) => sender.send_text(text).await,
        Err(_) => false,
    }
}

/// A client of a command.
struct Client {
    input: InputWriter,
    messages: Messages,
}

impl Client {
    fn new(context: &Context, key: CommandKey) -> Self {
        // A write fails if the command has ended, or closed its input. Its client learns the end anyway.
        let (input, _) = InputWriter::new(context.clone(), key.clone());
        let messages = Messages {
            context: context.clone(),
            key,
            kill: None,
        };
        Self { input, messages }
    }

    /// Acts on messages until the client leaves or the server stops.
    async fn listen(&mut self, receiver: &mut SocketReceiver) -> Attended {
        // The input behind one that waits for room. It is read because a kill behind it must not wait.
        let (mut ahead, mut ahead_bytes) = (VecDeque::<Input>::new(), 0);
        let mut has_left = false;
        loop {
            let input = match ahead.pop_front() {
                Some(input) => {
                    ahead_bytes -= input.room();
                    input
                }
                None if has_left => return Attended::Left,
                None => match self.messages.next_input(receiver).await {
                    Ok(input) => input,
                    Err(end) => return end,
                },
            };
            let written = {
                let writing = self.input.write(input);
                tokio::pin!(writing);
                loop {
                    let reads = !has_left && ahead_bytes < MAX_WAITING_BYTES;
                    tokio::select! {
                        biased;
                        written = &mut writing => break written,
                        next = self.messages.next_input(receiver), if reads => match next {
                            Ok(next) => {
                                ahead_bytes += next.room();
                                ahead.push_back(next);
                            }
                            // The command still gets what the client sent before.
                            Err(Attended::Left) => has_left = true,
                            Err(end) => return end,
                        },
                    }
                }
            };
            if let Err(error) = written {
                if !has_left {
                    let discarding =
                        async { while self.messages.next_input(receiver).await.is_ok() {} };
                    let _ = timeout(LAST_MESSAGES, discarding).await;
                }
                return Attended::End(End::error("InputError", error.message()));
            }
        }
    }
}

/// The messages of a client of a command.
struct Messages {
    context: Context,
    key: CommandKey,
    /// The last kill, which runs on if the client leaves.
    kill: Option<JoinHandle<()>>,
}

impl Messages {
    /// Returns the next input, and kills the command if a message before it says so. It can be cancelled without loss.
    async fn next_input(&mut self, receiver: &mut SocketReceiver) -> Result<Input, Attended> {
        loop {
            let message = match receiver.receive().await {
                Incoming::Text(text) => from_json::<Later>(text.as_bytes()),
                Incoming::Binary(bytes) => from_json::<Later>(&bytes),
                Incoming::Left => return Err(Attended::Left),
                Incoming::Stopping(status) => return Err(Attended::Stopping(status)),
            };
            match message {
                Ok(Later::Input { data }) => return Ok(Input::Data(data.into())),
                Ok(Later::CloseStdin) => return Ok(Input::Close),
                Ok(Later::Kill) => self.kill(),
                Ok(Later::Unknown) => {}
                Err(invalid) => {
                    let end = End::error("ProtocolError", invalid.to_string());
                    return Err(Attended::End(end));
                }
            }
        }
    }

    /// Kills the command, also if the client leaves meanwhile.
    fn kill(&mut self) {
        // A repeated kill has no other effect.
        if self.kill.as_ref().is_some_and(|kill| !kill.is_finished()) {
            return;
        }
        let (context, key) = (self.context.clone(), self.key.clone());
        self.kill = Some(tokio::spawn(async move {
            let params = CommandKillParams::new(key.box_id, key.command_id);
            let killed = context.runtime().kill_command(&context.caller, params);
            if let Err(error) = killed.await {
                tracing::debug!(%error, "cannot kill the command of a client");
            }
        }));
    }
}
