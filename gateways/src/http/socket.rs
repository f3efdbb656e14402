//! Websockets of protocols: text and binary messages, pings, and a close status with a reason.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::FromRequestParts;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use axum::http::request::Parts;
use axum::response::Response;
use box_rpc::Limits;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use tokio::sync::Mutex;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

use super::context::{Context, closing};
use super::refusal::{Refusal, RefusalReason};

/// The interval between pings to a silent client.
const PING_INTERVAL: Duration = Duration::from_secs(20);

/// How long the client may take to receive a message.
const SEND_TIMEOUT: Duration = Duration::from_mins(1);

/// How long the client may take to receive the close message.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The number of pings that a client may leave unanswered.
const MAX_SILENT_PINGS: u32 = 3;

/// The sending half, which the receiving half shares for its pings.
type Sink = Arc<Mutex<SplitSink<WebSocket, Message>>>;

/// An open websocket, which the context keeps counted.
#[derive(Debug)]
pub struct Socket {
    sender: SocketSender,
    receiver: SocketReceiver,
}

/// The sending half of a websocket.
#[derive(Debug, Clone)]
pub struct SocketSender(Sink);

/// The receiving half of a websocket. It also sends pings.
#[derive(Debug)]
pub struct SocketReceiver {
    inner: SplitStream<WebSocket>,
    sink: Sink,
    context: Context,
    pings: tokio::time::Interval,
    /// The pings since the last message of the client.
    unanswered: u32,
}

/// What a client sends.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A text message.
    Text(String),
    /// A binary message.
    Binary(Bytes),
    /// The client has left, or does not answer pings.
    Left,
    /// The server stops: close with this status.
    Stopping(u16),
}

/// A request for a websocket; other requests are refused.
#[derive(Debug)]
pub struct Upgrade {
    request: WebSocketUpgrade,
    max_message_bytes: usize,
}

impl<S: Send + Sync> FromRequestParts<S> for Upgrade {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let upgrade = WebSocketUpgrade::from_request_parts(parts, state).await;
        let message = "this path serves websockets only";
        let refusal = |_| Refusal::new(RefusalReason::NoUpgrade, message);
        let upgrade = upgrade.map(|request| Self {
            request,
            max_message_bytes: Limits::network().message_bytes,
        });
        upgrade.map_err(refusal)
    }
}

impl Upgrade {
    /// Sets the maximum length of a message of the client.
    #[must_use]
    pub fn max_message_bytes(mut self, bytes: usize) -> Self {
        self.max_message_bytes = bytes;
        self
    }

    /// Accepts the websocket, and serves it once it is open.
    pub fn serve<F, Serving>(self, context: Context, serve: F) -> Response
    where
        F: FnOnce(Socket) -> Serving + Send + 'static,
        Serving: Future<Output = ()> + Send + 'static,
    {
        /// A longer message grows the buffer.
        const READ_BUFFER_BYTES: usize = 16 * 1024;
        let bytes = self.max_message_bytes;
        self.request
            .max_message_size(bytes)
            .max_frame_size(bytes)
            .read_buffer_size(READ_BUFFER_BYTES)
            .on_upgrade(|socket| serve(Socket::new(socket, context)))
    }
}

impl Socket {
    fn new(socket: WebSocket, context: Context) -> Self {
        let mut pings = interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (sink, inner) = socket.split();
        let sink = Arc::new(Mutex::new(sink));
        Self {
            sender: SocketSender(Arc::clone(&sink)),
            receiver: SocketReceiver {
                inner,
                sink,
                context,
                pings,
                unanswered: 0,
            },
        }
    }

    /// Separates the halves, for a protocol that receives while a message waits for its client.
    pub fn split(self) -> (SocketSender, SocketReceiver) {
        (self.sender, self.receiver)
    }

    /// Waits for the next message. It can be cancelled without loss.
    pub async fn receive(&mut self) -> Incoming {
        self.receiver.receive().await
    }

    /// Sends a text message; returns whether the client is still there.
    pub async fn send_text(&mut self, text: String) -> bool {
        self.sender.send_text(text).await
    }

    /// Sends a binary message; returns whether the client is still there.
    pub async fn send_binary(&mut self, bytes: impl Into<Bytes>) -> bool {
        self.sender.send_binary(bytes).await
    }

    /// Closes the socket with a status and a reason of at most 123 bytes.
    pub async fn close(self, code: u16, reason: &str) {
        self.receiver.close(code, reason).await;
    }
}

impl SocketSender {
    /// Sends a text message; returns whether the client is still there.
    pub async fn send_text(&self, text: String) -> bool {
        self.send(Message::Text(text.into())).await
    }

    /// Sends a binary message; returns whether the client is still there.
    pub async fn send_binary(&self, bytes: impl Into<Bytes>) -> bool {
        self.send(Message::Binary(bytes.into())).await
    }

    async fn send(&self, message: Message) -> bool {
        let sending = async { self.0.lock().await.send(message).await };
        matches!(timeout(SEND_TIMEOUT, sending).await, Ok(Ok(())))
    }
}

impl SocketReceiver {
    /// Waits for the next message. It can be cancelled without loss.
    pub async fn receive(&mut self) -> Incoming {
        let stopping = closing(self.context.server.closing.clone());
        tokio::pin!(stopping);
        loop {
            tokio::select! {
                message = self.inner.next() => {
                    self.unanswered = 0;
                    match message {
                        Some(Ok(Message::Text(text))) => return Incoming::Text(text.to_string()),
                        Some(Ok(Message::Binary(bytes))) => return Incoming::Binary(bytes),
                        // The library answers pings.
                        Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                        Some(Ok(Message::Close(_)) | Err(_)) | None => return Incoming::Left,
                    }
                }
                _ = self.pings.tick() => {
                    // A message that is being sent has its own time limit.
                    let Ok(mut sink) = self.sink.try_lock() else { continue };
                    self.unanswered += 1;
                    let ping = sink.send(Message::Ping(Bytes::new()));
                    let sent = timeout(SEND_TIMEOUT, ping).await;
                    if self.unanswered > MAX_SILENT_PINGS || !matches!(sent, Ok(Ok(()))) {
                        return Incoming::Left;
                    }
                }
                status = &mut stopping => return Incoming::Stopping(status),
            }
        }
    }

    /// Closes the socket with a status and a reason of at most 123 bytes.
    pub async fn close(mut self, code: u16, reason: &str) {
        let reason = reason[..reason.floor_char_boundary(123)].into();
        let close = Message::Close(Some(CloseFrame { code, reason }));
        let closing = async {
            if self.sink.lock().await.send(close).await.is_ok() {
                // The client confirms the close.
                while let Some(Ok(_)) = self.inner.next().await {}
            }
        };
        let _ = timeout(CLOSE_TIMEOUT, closing).await;
    }
}
