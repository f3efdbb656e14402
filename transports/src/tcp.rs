//! TCP, with or without TLS: newline framing, no delay for small messages.

use box_rpc::{Connection, ConnectionError, Limits};
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

/// Frames a stream that is connected already.
pub fn over(stream: TcpStream, limits: &Limits) -> Result<Tcp, ConnectionError> {
    stream.set_nodelay(true)?;
    let (read, write) = stream.into_split();
    Ok(Line::new(read, write, limits))
}

/// Connects to `host` with TLS. The server must prove to be `host`, unless `tls` names another.
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

/// A connected stream that sends small messages at once.
pub(crate) async fn open(address: impl ToSocketAddrs) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
