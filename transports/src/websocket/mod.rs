//! Websockets: one RFC 6455 text message per message.
//!
//! The library tungstenite reads and writes heads and frames, masks, joins fragments and checks them. This module uses
//! its parts and not its stream, whose connections differ from those of the other transports in three ways. The stream
//! closes after an oversized message, where this module skips the message in constant memory. The stream cannot send
//! after the peer's close frame, where each direction ends separately here. The stream keeps the memory of its largest
//! messages, where an idle connection keeps almost none.
//!
//! It sends messages unfragmented and accepts up to 4096 fragments. It answers pings. A binary message, a text that is
//! not UTF-8 or a protocol violation closes the connection with the matching status. It never negotiates an extension.
//! Closing sends a close frame; messages that the peer sends before its own close frame still arrive.
//!
//! Reading order: this file, `sender`, `decoder`, `receiver`, `handshake`, `upgrade_policy`.

mod decoder;
mod handshake;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;
mod upgrade_policy;

use std::sync::{Arc, atomic::AtomicU16};

use box_rpc::{Connection, ConnectionError, Limits, ReceiveHalf, SendHalf};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

use self::{
    receiver::WebSocketReceive,
    sender::{WebSocketSend, Writer},
};
use crate::{
    bytes::{ReadBuffer, WriteBuffer},
    connection_limit::ConnectionPermit,
    endpoint::{ConnectOptions, Endpoint},
    tcp,
    tls::ClientTls,
};

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::handshake::read_response;
pub(crate) use self::sender::fill_random;
pub use self::{
    handshake::{UpgradeRefused, accept_key},
    upgrade_policy::{CheckUpgrade, UpgradePolicy, UpgradeRejection, UpgradeRequest, is_host},
};

/// The end of a websocket: the client requested the upgrade, the server accepted it.
pub use tungstenite::protocol::Role;

/// A connection that frames by websocket messages.
#[derive(Debug)]
pub struct WebSocket<R, W> {
    send: WebSocketSend<W>,
    receive: WebSocketReceive<R, W>,
}

impl<R, W> WebSocket<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    fn new(
        read_buffer: ReadBuffer<R>,
        write_buffer: WriteBuffer<W>,
        role: Role,
        limits: &Limits,
    ) -> Self {
        let writer = Arc::new(Writer::new(write_buffer, role));
        Self {
            send: WebSocketSend::new(Arc::clone(&writer)),
            receive: WebSocketReceive::new(read_buffer, role, limits.message_bytes, writer),
        }
    }

    /// Closes with the current value of `status` instead of 1000.
    /// A server that shuts down uses this to say so.
    pub fn closing_with(mut self, status: Arc<AtomicU16>) -> Self {
        self.send.status = Some(status);
        self
    }

    /// Serves the upgrade on a new stream, with a permit of a listener.
    pub(crate) async fn accept_with_permit(
        read: R,
        write: W,
        limits: &Limits,
        policy: &dyn CheckUpgrade,
        permit: &ConnectionPermit,
    ) -> Result<Self, ConnectionError> {
        let mut read_buffer = ReadBuffer::new(read, limits.frame, permit.clone());
        let mut write_buffer = WriteBuffer::new(write, limits.frame, permit.clone());
        handshake::serve(&mut read_buffer, &mut write_buffer, policy).await?;
        Ok(Self::new(read_buffer, write_buffer, Role::Server, limits))
    }

    /// Requests the upgrade on a new stream.
    pub(crate) async fn request(
        read: R,
        write: W,
        limits: &Limits,
        host: &str,
        path: &str,
        headers: &[(String, String)],
    ) -> Result<Self, ConnectionError> {
        let mut read_buffer = ReadBuffer::new(read, limits.frame, ConnectionPermit::default());
        let mut write_buffer = WriteBuffer::new(write, limits.frame, ConnectionPermit::default());
        handshake::request(&mut read_buffer, &mut write_buffer, host, path, headers).await?;
        Ok(Self::new(read_buffer, write_buffer, Role::Client, limits))
    }
}

impl<R, W> Connection for WebSocket<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    fn split(self: Box<Self>) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
        (Box::new(self.send), Box::new(self.receive))
    }
}

/// Serves the upgrade on an accepted TCP stream, if `policy` admits the request.
///
/// [`UpgradePolicy::new`] is the default policy: the paths `/rpc/ws` and `/`, no browser pages. The caller sets the
/// timeout; without one, a client may delay its request indefinitely.
pub async fn accept(
    stream: TcpStream,
    limits: &Limits,
    policy: &dyn CheckUpgrade,
) -> Result<WebSocket<OwnedReadHalf, OwnedWriteHalf>, ConnectionError> {
    tcp::prepare(&stream)?;
    let (read, write) = stream.into_split();
    WebSocket::accept_with_permit(read, write, limits, policy, &ConnectionPermit::default()).await
}

/// Wraps a stream on which an HTTP server or client has done the upgrade.
///
/// The HTTP side must have checked `Origin`, `Host` and `Authorization`, and passes every byte that came after the
/// request. [`accept_key`] gives the key for the response.
pub fn from_upgraded<S>(
    stream: S,
    role: Role,
    limits: &Limits,
) -> WebSocket<tokio::io::ReadHalf<S>, tokio::io::WriteHalf<S>>
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let (read, write) = tokio::io::split(stream);
    let read_buffer = ReadBuffer::new(read, limits.frame, ConnectionPermit::default());
    let write_buffer = WriteBuffer::new(write, limits.frame, ConnectionPermit::default());
    WebSocket::new(read_buffer, write_buffer, role, limits)
}

/// Connects to `ws://HOST:PORT/PATH` or `wss://HOST:PORT/PATH`.
/// Adds `headers` to the request.
pub async fn connect(
    url: &str,
    headers: &[(String, String)],
    tls: &ClientTls,
    limits: &Limits,
) -> Result<Box<dyn Connection>, ConnectionError> {
    let endpoint: Endpoint = url
        .parse()
        .map_err(|error| std::io::Error::new(std::io::ErrorKind::InvalidInput, error))?;
    if !matches!(endpoint, Endpoint::WebSocket { .. }) {
        let reason = "a websocket begins with ws:// or wss://";
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, reason).into());
    }
    let options = ConnectOptions {
        limits: limits.clone(),
        tls: tls.clone(),
        headers: headers.to_vec(),
        ..ConnectOptions::default()
    };
    endpoint.connect(&options).await
}
