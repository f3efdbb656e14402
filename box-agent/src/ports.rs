//! `port.*`: connections to listeners in the box, opened from inside.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_protocol::actions::{
    PortChunk, PortOpen, PortOpenParams, PortOpenResult, PortSend, PortSendParams,
};
use box_protocol::{BoxError, Code, ConnId, MAX_CHUNK_BYTES};
use box_rpc::{Call, Empty, Handle, Router};
use rustix::net::Shutdown;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Maximum number of connections.
///
/// A third of the calls that a runtime sends into a box: all connections can be written at once, with room for other
/// calls.
const CONNECTIONS_MAX: usize = 64;

/// How long a connection attempt may take.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// The router of `port.*`.
pub(crate) fn router(ports: &Arc<Ports>) -> Router {
    Router::builder(Arc::clone(ports))
        .on::<PortOpen>()
        .on::<PortSend>()
        .build()
}

/// The open connections.
#[derive(Debug, Default)]
pub(crate) struct Ports(Mutex<HashMap<ConnId, Arc<Connection>>>);

/// One open connection.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    /// Locked by the call that sends.
    ///
    /// The value says whether the sending side is closed.
    closed: tokio::sync::Mutex<bool>,
    sent: AtomicU64,
}

/// An open connection while its stream is read.
///
/// Dropping it closes the connection for senders as well.
struct ConnectionGuard<'a> {
    ports: &'a Ports,
    id: ConnId,
    connection: Arc<Connection>,
}

impl Ports {
    fn open(&self) -> MutexGuard<'_, HashMap<ConnId, Arc<Connection>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, stream: TcpStream) -> Result<ConnectionGuard<'_>, BoxError> {
        let mut open = self.open();
        if open.len() >= CONNECTIONS_MAX {
            return Err(BoxError::limit(
                Code::Capacity,
                "the number of connections into the box",
                "connections",
                CONNECTIONS_MAX,
            ));
        }
        let (id, connection) = (ConnId::fresh(), Arc::new(Connection::new(stream)));
        open.insert(id.clone(), Arc::clone(&connection));
        Ok(ConnectionGuard {
            ports: self,
            id,
            connection,
        })
    }
}

impl Drop for ConnectionGuard<'_> {
    fn drop(&mut self) {
        self.ports.open().remove(&self.id);
        // A waiting sender holds the connection, too. An error means that it is already closed.
        let _ = rustix::net::shutdown(&self.connection.stream, Shutdown::Both);
    }
}

impl Connection {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            closed: tokio::sync::Mutex::default(),
            sent: AtomicU64::new(0),
        }
    }

    /// Reads the next bytes; 0 at the end.
    async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.stream.readable().await?;
            match self.stream.try_read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }

    async fn write(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            self.stream.writable().await?;
            match self.stream.try_write(data) {
                Ok(written) => {
                    data = &data[written..];
                    self.sent.fetch_add(written as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Connects to the port over IPv4 or IPv6 loopback.
async fn dial(port: u16) -> Result<TcpStream, BoxError> {
    for address in [
        IpAddr::from(Ipv4Addr::LOCALHOST),
        IpAddr::from(Ipv6Addr::LOCALHOST),
    ] {
        let dialled = timeout(DIAL_TIMEOUT, TcpStream::connect((address, port))).await;
        // Without a listener, a connection can meet itself if the kernel gives it the same port.
        if let Ok(Ok(stream)) = dialled
            && stream.local_addr().ok() != stream.peer_addr().ok()
        {
            // Small writes of a client must not wait for more.
            let _ = stream.set_nodelay(true);
            return Ok(stream);
        }
    }
    let message = format!("port: no listener on port {port} of the box; start a server there");
    Err(BoxError::unavailable(message))
}

impl Handle<PortOpen> for Ports {
    async fn handle(
        &self,
        params: PortOpenParams,
        mut call: Call<PortOpen>,
    ) -> Result<PortOpenResult, BoxError> {
        let Some(sink) = call.chunks() else {
            return Err(BoxError::validation(
                "credit: this action streams its reply; set credit, for example \"_meta\":{\"credit\":16}",
            ));
        };
        let open = self.add(dial(params.port.get()).await?)?;
        sink.send(&PortChunk::ConnId(open.id.clone())).await?;
        let mut buffer = vec![0; MAX_CHUNK_BYTES];
        let mut received = 0;
        loop {
            let read = open.connection.read(&mut buffer).await;
            let read = read.map_err(|_| BoxError::unavailable("port: the connection was lost"))?;
            if read == 0 {
                let sent = open.connection.sent.load(Ordering::Relaxed);
                return Ok(PortOpenResult { sent, received });
            }
            received += read as u64;
            let data = buffer[..read].to_vec().into();
            sink.send(&PortChunk::Data(data)).await?;
        }
    }
}

impl Handle<PortSend> for Ports {
    async fn handle(&self, params: PortSendParams, _: Call<PortSend>) -> Result<Empty, BoxError> {
        let connection = self.open().get(&params.conn_id).cloned();
        let connection = connection.ok_or_else(|| {
            let id = &params.conn_id;
            BoxError::not_found(format!("conn_id: {id} not found; open the port again"))
        })?;
        let mut closed = connection.closed.lock().await;
        let closed_error =
            |_| BoxError::conflict("conn_id: the sending side of the connection is closed");
        if *closed {
            return Err(closed_error(io::ErrorKind::BrokenPipe.into()));
        }
        if let Some(data) = &params.data {
            connection.write(data).await.map_err(closed_error)?;
        }
        if params.close {
            *closed = true;
            let shut = rustix::net::shutdown(&connection.stream, Shutdown::Write);
            shut.map_err(|error| closed_error(error.into()))?;
        }
        Ok(Empty {})
    }
}
