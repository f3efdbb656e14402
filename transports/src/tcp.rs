//! TCP, with or without TLS: newline framing, no delay for small messages.

use std::time::Duration;

use box_rpc::{Connection, ConnectionError, Limits};
use rustix::net::sockopt;
use tokio::net::{
    TcpStream, ToSocketAddrs,
    tcp::{OwnedReadHalf, OwnedWriteHalf},
};

use crate::{line::Line, tls::ClientTls};

/// A connection over TCP.
pub type Tcp = Line<OwnedReadHalf, OwnedWriteHalf>;

/// Connects to `address`.
pub async fn connect(address: impl ToSocketAddrs, limits: &Limits) -> Result<Tcp, ConnectionError> {
    over(open(address).await?, limits)
}

/// Frames a connected stream.
pub fn over(stream: TcpStream, limits: &Limits) -> Result<Tcp, ConnectionError> {
    prepare(&stream)?;
    let (read, write) = stream.into_split();
    Ok(Line::new(read, write, limits))
}

/// Connects to `host` with TLS.
/// The server must prove to be `host`, unless `tls` names another.
pub async fn connect_tls(
    host: &str,
    port: u16,
    tls: &ClientTls,
    limits: &Limits,
) -> Result<Box<dyn Connection>, ConnectionError> {
    let stream = tls.connect(open((host, port)).await?, host).await?;
    let (read, write) = tokio::io::split(stream);
    Ok(Box::new(Line::new(read, write, limits)))
}

/// Returns a connected stream that sends small messages at once.
pub(crate) async fn open(address: impl ToSocketAddrs) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    prepare(&stream)?;
    Ok(stream)
}

/// Silence after which the kernel sends a keepalive probe.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(30);

/// Interval of further keepalive probes.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);

/// Unanswered keepalive probes after which the connection is broken.
const KEEPALIVE_TIMES: u32 = 3;

/// Maximum time that sent data may stay unacknowledged.
const UNACKNOWLEDGED: Duration = Duration::from_mins(1);

/// Enables `TCP_NODELAY` and the detection of a dead peer.
/// The kernel detects it whatever the protocol, and even on an idle connection.
pub fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_TIMES)?;
    let unacknowledged = u32::try_from(UNACKNOWLEDGED.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, unacknowledged)?;
    Ok(())
}
