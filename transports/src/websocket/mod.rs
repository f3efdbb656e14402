//! Websockets: one text message of RFC 6455 for each message.
//!
//! The frames are our own and not a library's for three reasons: a message beyond the limit is
//! skipped in constant memory and the connection lives on, which the libraries end; a whole batch
//! goes out in one write; and a message costs one allocation.
//!
//! Messages are sent unfragmented and received in up to 4096 fragments. Pings are answered. A
//! binary message, a text that is not UTF-8 and every breach of the protocol close the connection
//! with the fitting status. No extension is ever agreed on. Closing sends a close frame; what the
//! peer sends before its own still arrives, so both directions can end on their own as they do on
//! every other transport.
//!
//! Reading order: this file, `frame`, `sender`, `receiver`, `handshake`, `gate`.

mod frame;
mod gate;
mod handshake;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;

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
    bytes::{Intake, Outbox},
    endpoint::{ConnectOptions, Endpoint},
    places::Place,
    tcp,
    tls::ClientTls,
};

pub(crate) use self::frame::fill_random;
pub use self::{
    gate::{Admit, Gate, Refusal, UpgradeRequest, is_host},
    handshake::{UpgradeRefused, accept_key},
    sender::Pinger,
};

/// Which end of a websocket this is. The two are framed differently: a client masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The end that asked for the upgrade.
    Client,
    /// The end that granted it.
    Server,
}

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
    fn new(intake: Intake<R>, outbox: Outbox<W>, role: Role, limits: &Limits) -> Self {
        let writer = Arc::new(Writer::new(outbox, role));
        Self {
            send: WebSocketSend::new(Arc::clone(&writer)),
            receive: WebSocketReceive::new(intake, role, limits.message_bytes, writer),
        }
    }

    /// Closes with the status that stands there when it is closed, instead of 1000: a server that goes away says so.
    pub fn closing_with(mut self, status: Arc<AtomicU16>) -> Self {
        self.send.status = Some(status);
        self
    }

    /// What asks this connection's peer for signs of life.
    pub fn pinger(&self) -> Pinger<W> {
        Pinger {
            writer: Arc::clone(&self.send.writer),
        }
    }

    /// Serves the upgrade on a fresh stream, holding a place among a listener's connections.
    pub(crate) async fn accept_in_place(
        read: R,
        write: W,
        limits: &Limits,
        gate: &dyn Admit,
        place: &Place,
    ) -> Result<Self, ConnectionError> {
        let mut intake = Intake::new(read, limits.frame, place.clone());
        let mut outbox = Outbox::new(write, limits.frame, place.clone());
        handshake::serve(&mut intake, &mut outbox, gate).await?;
        Ok(Self::new(intake, outbox, Role::Server, limits))
    }

    /// Asks for the upgrade on a fresh stream.
    pub(crate) async fn ask(
        read: R,
        write: W,
        limits: &Limits,
        host: &str,
        path: &str,
        headers: &[(String, String)],
    ) -> Result<Self, ConnectionError> {
        let mut intake = Intake::new(read, limits.frame, Place::default());
        let mut outbox = Outbox::new(write, limits.frame, Place::default());
        handshake::ask(&mut intake, &mut outbox, host, path, headers).await?;
        Ok(Self::new(intake, outbox, Role::Client, limits))
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

/// Serves the upgrade on an accepted TCP stream, if `gate` admits the request.
///
/// [`Gate::new`] is the gate to begin with: the paths `/rpc/ws` and `/`, no browser pages. The
/// caller bounds the time; a client may take as long as it likes to ask.
pub async fn accept(
    stream: TcpStream,
    limits: &Limits,
    gate: &dyn Admit,
) -> Result<WebSocket<OwnedReadHalf, OwnedWriteHalf>, ConnectionError> {
    tcp::prepare(&stream)?;
    let (read, write) = stream.into_split();
    WebSocket::accept_in_place(read, write, limits, gate, &Place::default()).await
}

/// Takes over a stream on which an HTTP server, or client, has done the upgrade.
///
/// Whoever did it has checked `Origin`, `Host` and `Authorization` ([`accept_key`] gives the key to
/// answer with), and hands over every byte that came after the request.
pub fn from_upgraded<S>(
    stream: S,
    role: Role,
    limits: &Limits,
) -> WebSocket<tokio::io::ReadHalf<S>, tokio::io::WriteHalf<S>>
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let (read, write) = tokio::io::split(stream);
    let intake = Intake::new(read, limits.frame, Place::default());
    let outbox = Outbox::new(write, limits.frame, Place::default());
    WebSocket::new(intake, outbox, role, limits)
}

/// Connects to `ws://HOST:PORT/PATH` or `wss://HOST:PORT/PATH` with these extra headers.
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
