//! `port.*`: connections to whoever listens inside the box, dialled from inside.

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

/// Connections at once. A third of the calls that a runtime lets into a box: all can be sent on at once, with room for others.
const CONNECTIONS: usize = 64;

/// How long somebody who listens may take to be reached.
const DIAL: Duration = Duration::from_secs(5);

/// What the agent serves of `port.*`.
pub(crate) fn router(ports: &Arc<Ports>) -> Router {
    Router::builder(Arc::clone(ports))
        .on::<PortOpen>()
        .on::<PortSend>()
        .build()
}

/// The open connections.
#[derive(Debug, Default)]
pub(crate) struct Ports(Mutex<HashMap<ConnId, Arc<Relay>>>);

/// One of them.
#[derive(Debug)]
struct Relay {
    stream: TcpStream,
    /// Held by whoever sends; whether nobody may any more.
    closed: tokio::sync::Mutex<bool>,
    sent: AtomicU64,
}

/// A connection as long as somebody reads it. Dropped, it is closed, and whoever still sends learns that.
struct Open<'a> {
    ports: &'a Ports,
    id: ConnId,
    relay: Arc<Relay>,
}

impl Ports {
    fn open(&self) -> MutexGuard<'_, HashMap<ConnId, Arc<Relay>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, stream: TcpStream) -> Result<Open<'_>, BoxError> {
        let mut open = self.open();
        if open.len() >= CONNECTIONS {
            return Err(BoxError::limit(
                Code::Capacity,
                "connections into one box at once",
                "connections",
                CONNECTIONS,
            ));
        }
        let (id, relay) = (ConnId::fresh(), Arc::new(Relay::new(stream)));
        open.insert(id.clone(), Arc::clone(&relay));
        Ok(Open {
            ports: self,
            id,
            relay,
        })
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.ports.open().remove(&self.id);
        // Whoever waits to write holds it, too. What is closed already is fine.
        let _ = rustix::net::shutdown(&self.relay.stream, Shutdown::Both);
    }
}

impl Relay {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            closed: tokio::sync::Mutex::default(),
            sent: AtomicU64::new(0),
        }
    }

    /// What comes next; 0 bytes at the end.
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

/// Whoever listens is on one of the two.
async fn dial(port: u16) -> Result<TcpStream, BoxError> {
    for address in [
        IpAddr::from(Ipv4Addr::LOCALHOST),
        IpAddr::from(Ipv6Addr::LOCALHOST),
    ] {
        let dialled = timeout(DIAL, TcpStream::connect((address, port))).await;
        if let Ok(Ok(stream)) = dialled {
            // What a caller sends at once shall go at once.
            let _ = stream.set_nodelay(true);
            return Ok(stream);
        }
    }
    let nobody = format!("nobody listens on port {port} of the box");
    Err(BoxError::unavailable(nobody))
}

impl Handle<PortOpen> for Ports {
    async fn handle(
        &self,
        params: PortOpenParams,
        mut call: Call<PortOpen>,
    ) -> Result<PortOpenResult, BoxError> {
        let Some(sink) = call.chunks() else {
            return Err(BoxError::validation(
                "credit: this action answers in chunks; ask for some, as in \"_meta\":{\"credit\":16}",
            ));
        };
        let open = self.add(dial(params.port.get()).await?)?;
        sink.send(&PortChunk::ConnId(open.id.clone())).await?;
        let mut buffer = vec![0; MAX_CHUNK_BYTES];
        let mut received = 0;
        loop {
            let read = open.relay.read(&mut buffer).await;
            let read = read.map_err(|_| BoxError::unavailable("the connection broke off"))?;
            if read == 0 {
                let sent = open.relay.sent.load(Ordering::Relaxed);
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
        let relay = self.open().get(&params.conn_id).cloned();
        let relay = relay.ok_or_else(|| BoxError::not_found("no such connection"))?;
        let mut closed = relay.closed.lock().await;
        let over = |_| BoxError::conflict("the connection takes no more");
        if *closed {
            return Err(over(io::ErrorKind::BrokenPipe.into()));
        }
        if let Some(data) = &params.data {
            relay.write(data).await.map_err(over)?;
        }
        if params.close {
            *closed = true;
            let shut = rustix::net::shutdown(&relay.stream, Shutdown::Write);
            shut.map_err(|error| over(error.into()))?;
        }
        Ok(Empty {})
    }
}
