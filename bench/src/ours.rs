//! Box's engine as a contestant, over the connections of its transports.
//!
//! The benchmark raises limits that a load would reach, as for the other contestants, and disables nothing else.

use std::sync::Arc;

use anyhow::{Result, bail};
use box_rpc::{
    Action, Call, Caller, Connection, Handle, Limits, Never, Options, Peer, Router, RpcError,
    Session,
};
use box_transports::{ConnectOptions, Endpoint, ListenOptions, queue, server::Server};

use crate::{contestant::Client, payload::Payload, process};

/// The transport of our messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    Tcp,
    WebSocket,
    Unix,
    Queue,
}

impl Carrier {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "ours-tcp",
            Self::WebSocket => "ours-ws",
            Self::Unix => "ours-unix",
            Self::Queue => "ours-queue",
        }
    }

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Tcp => "**Box, tcp**",
            Self::WebSocket => "**Box, ws**",
            Self::Unix => "**Box, unix**",
            Self::Queue => "**Box, in-process queue**",
        }
    }

    pub(crate) fn is_in_process(self) -> bool {
        self == Self::Queue
    }
}

pub(crate) struct Echo;

impl Action for Echo {
    const NAME: &'static str = "echo";
    type Params = Payload;
    type Result = Payload;
    type Chunk = Never;
}

pub(crate) struct Echoer;

impl Handle<Echo> for Echoer {
    async fn handle(&self, payload: Payload, _: Call<Echo>) -> Result<Payload, RpcError> {
        Ok(payload)
    }
}

pub(crate) fn router() -> Router {
    Router::builder(Arc::new(Echoer)).on::<Echo>().build()
}

pub(crate) fn options() -> Options {
    let mut limits = Limits::network();
    limits.in_flight = 4096;
    Options {
        limits,
        ..Options::new(Caller::Local)
    }
}

/// Listens, announces the address, and serves until the process ends.
pub(crate) async fn serve(carrier: Carrier) -> Result<()> {
    let endpoint = match carrier {
        Carrier::Tcp => "tcp://127.0.0.1:0".to_owned(),
        Carrier::WebSocket => "ws://127.0.0.1:0/".to_owned(),
        // One name for all runs, so that the next server replaces the socket of a killed one.
        Carrier::Unix => format!("unix:{}/box-bench.sock", std::env::temp_dir().display()),
        Carrier::Queue => bail!("{} has no server", carrier.name()),
    };
    let endpoint: Endpoint = endpoint.parse()?;
    let listen = ListenOptions {
        limits: options().limits,
        max_connections: 100_000,
        ..ListenOptions::default()
    };
    let mut server = Server::start(endpoint.listen(&listen).await?, router(), |_| options());
    process::announce(server.endpoint())?;
    server.finished().await;
    Ok(())
}

/// Opens another connection to our server.
pub(crate) async fn connect(carrier: Carrier, address: &str) -> Result<OurClient> {
    let options = options();
    let connection: Box<dyn Connection> = if carrier.is_in_process() {
        let (near, far) = queue::pair(4096);
        let server = Session::start(far, router(), options.clone());
        tokio::spawn(async move { server.closed().await });
        Box::new(near)
    } else {
        let endpoint: Endpoint = address.parse()?;
        let connect = ConnectOptions {
            limits: options.limits.clone(),
            ..ConnectOptions::default()
        };
        endpoint.connect(&connect).await?
    };
    let session = Session::start_boxed(connection, Router::empty(), options);
    Ok(OurClient {
        peer: session.peer(),
        _session: Arc::new(session),
    })
}

/// The calling end; the session ends with its last clone.
#[derive(Clone, Debug)]
pub(crate) struct OurClient {
    peer: Peer,
    _session: Arc<Session>,
}

impl Client for OurClient {
    async fn echo(&self, payload: Payload) -> Result<Payload> {
        Ok(self.peer.call::<Echo>(&payload).await?)
    }
}
