//! A client and a server connected by any transport, in any dialect.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use box_gateways::langbot::{ALL_CODECS, ChunkedConnection, Frames};
use box_rpc::{
    Auth, Caller, Codecs, Connection, Hello, HelloParams, Limits, Options, Peer, Router, Session,
    Tokens,
};
use box_service::connector::EndpointLink;
use box_transports::reconnecting::ReconnectOptions;
use box_transports::server::Server;
use box_transports::tls::{ClientTls, Identity, Pem, ServerTls};
use box_transports::{ConnectOptions, Endpoint, ListenOptions, queue};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::actions::Server as TestServer;
use crate::raw::Raw;

/// The token of every test server that requires one.
pub const TOKEN: &str = "a-token-for-tests-of-32-bytes-or-more";

/// The transport of the messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Transport {
    Queue,
    Stdio,
    Tcp,
    Tls,
    Unix,
    WebSocket,
}

impl Transport {
    /// Whether the first message must be a hello with a token.
    pub fn needs_hello(self) -> bool {
        matches!(self, Self::Tcp | Self::Tls)
    }
}

/// The format of the messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dialect {
    /// JSON-RPC 2.0.
    JsonRpc,
    /// LangBot's action frames.
    LangBot,
}

impl Dialect {
    /// The codecs of this dialect.
    pub fn codecs(self) -> Codecs {
        match self {
            Self::JsonRpc => Codecs::JSON_RPC,
            Self::LangBot => Codecs::Only(&Frames),
        }
    }

    /// Frames the connection as this dialect does over standard streams.
    pub fn over_stdio(
        self,
        connection: Box<dyn Connection>,
        limits: &Limits,
    ) -> Box<dyn Connection> {
        match self {
            Self::JsonRpc => connection,
            Self::LangBot => Box::new(ChunkedConnection::new(connection, limits)),
        }
    }
}

/// Limits that differ from the default, in a form that another process can read.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct TestLimits {
    pub message_bytes: Option<usize>,
    pub hello_bytes: Option<usize>,
    pub in_flight: Option<usize>,
    pub open_streams: Option<usize>,
    pub queue_slots: Option<usize>,
    pub control_queue: Option<usize>,
    pub unread_bytes: Option<usize>,
    pub depth: Option<usize>,
    pub first_message_ms: Option<u64>,
    pub frame_ms: Option<u64>,
    pub heartbeat_ms: Option<u64>,
    pub drain_ms: Option<u64>,
}

impl TestLimits {
    /// The full limits, with defaults for unset ones.
    pub fn limits(&self) -> Limits {
        let mut limits = Limits::default();
        let set = |to: &mut usize, from: Option<usize>| *to = from.unwrap_or(*to);
        set(&mut limits.message_bytes, self.message_bytes);
        set(&mut limits.hello_bytes, self.hello_bytes);
        set(&mut limits.in_flight, self.in_flight);
        set(&mut limits.open_streams, self.open_streams);
        set(&mut limits.queue_slots, self.queue_slots);
        set(&mut limits.control_queue, self.control_queue);
        set(&mut limits.unread_bytes, self.unread_bytes);
        set(&mut limits.depth, self.depth);
        limits.first_message = self.first_message_ms.map(Duration::from_millis);
        limits.frame = self.frame_ms.map_or(limits.frame, Duration::from_millis);
        limits.heartbeat = self.heartbeat_ms.map(Duration::from_millis);
        limits.drain = self.drain_ms.map_or(limits.drain, Duration::from_millis);
        limits
    }
}

/// The actions of a test server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Serves {
    /// The actions of [`crate::actions`].
    Actions,
    /// A runtime with a scripted backend, and the actions of [`crate::boxes`] to inspect it.
    Boxes,
    /// The policy layer in front of such a runtime.
    Service,
    /// A runtime with real boxes.
    RealBoxes,
    /// The policy layer in front of such a runtime.
    RealService,
}

impl Serves {
    /// A router with new state. `server_program` is the fork server of real boxes.
    pub fn router(self, server_program: &Path) -> Router {
        match self {
            Self::Actions => Arc::new(TestServer::default()).router(),
            Self::Boxes => crate::boxes::router(),
            Self::Service => crate::boxes::service_router(),
            Self::RealBoxes => crate::boxes::real_router(server_program),
            Self::RealService => crate::boxes::real_service_router(server_program),
        }
    }
}

/// The authentication of a test server: a hello with [`TOKEN`], or none.
pub fn auth(requires_token: bool) -> Auth {
    if requires_token {
        Auth::Tokens(Tokens::new([("tester".to_owned(), TOKEN.to_owned())]))
    } else {
        Auth::Caller(Caller::Local)
    }
}

/// The settings of a fixture.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Setup {
    pub transport: Transport,
    pub dialect: Dialect,
    serves: Serves,
    requires_token: bool,
    server_program: PathBuf,
    server: TestLimits,
    client: TestLimits,
}

impl Setup {
    /// A transport, a dialect, and the program that serves over stdio.
    pub fn new(transport: Transport, dialect: Dialect, server_program: &str) -> Self {
        Self {
            transport,
            dialect,
            serves: Serves::Actions,
            requires_token: transport.needs_hello(),
            server_program: server_program.into(),
            server: TestLimits::default(),
            client: TestLimits::default(),
        }
    }

    /// Connected queues, for behaviour that does not depend on the transport.
    pub fn in_process(dialect: Dialect) -> Self {
        Self::new(Transport::Queue, dialect, "")
    }

    /// Serves boxes instead of test actions.
    pub fn boxes(mut self) -> Self {
        self.serves = Serves::Boxes;
        self
    }

    /// Serves the policy layer in front of boxes.
    pub fn service(mut self) -> Self {
        self.serves = Serves::Service;
        self
    }

    /// Serves real boxes.
    pub fn real_boxes(mut self) -> Self {
        self.serves = Serves::RealBoxes;
        self
    }

    /// Serves the policy layer in front of real boxes.
    pub fn real_service(mut self) -> Self {
        self.serves = Serves::RealService;
        self
    }

    /// Requires a token on every transport.
    pub fn requires_token(mut self) -> Self {
        self.requires_token = true;
        self
    }

    /// Changes the server's limits.
    pub fn server(mut self, change: impl FnOnce(&mut TestLimits)) -> Self {
        change(&mut self.server);
        self
    }

    /// Changes the client's limits.
    pub fn client(mut self, change: impl FnOnce(&mut TestLimits)) -> Self {
        change(&mut self.client);
        self
    }

    async fn listen(&self) -> RunningServer {
        let directory = tempfile::tempdir().expect("a directory");
        if self.transport == Transport::Stdio {
            let argument = (self.serves, self.requires_token, &self.server, self.dialect);
            let argument = serde_json::to_string(&argument).expect("an argument");
            let command = vec![self.server_program.display().to_string(), argument];
            let connect = ConnectOptions {
                limits: self.client.limits(),
                ..ConnectOptions::default()
            };
            return RunningServer {
                endpoint: Endpoint::Stdio { command },
                connect,
                server: None,
                _directory: directory,
            };
        }
        let mut connect = ConnectOptions {
            limits: self.client.limits(),
            ..ConnectOptions::default()
        };
        let limits = self.server.limits();
        let mut listen = ListenOptions {
            limits: limits.clone(),
            ..ListenOptions::default()
        };
        let text = match self.transport {
            Transport::Queue => format!("queue:{}", directory.path().display()),
            Transport::Tcp => "tcp://127.0.0.1:0".to_owned(),
            Transport::Tls => "tls://127.0.0.1:0".to_owned(),
            Transport::Unix => format!("unix:{}", directory.path().join("socket").display()),
            Transport::WebSocket | Transport::Stdio => "ws://127.0.0.1:0/rpc/ws".to_owned(),
        };
        if self.transport == Transport::Tls {
            let (server, client) = certificates();
            listen.tls = Some(server);
            connect.tls = client;
        }
        let endpoint: Endpoint = text.parse().expect("an endpoint");
        let listener = endpoint.listen(&listen).await.expect("a listener");
        let router = self.serves.router(&self.server_program);
        let options = Options {
            limits,
            codecs: Codecs::FirstOf(ALL_CODECS),
            ..Options::new(auth(self.requires_token))
        };
        let server = Server::start(listener, router, move |_| options.clone());
        RunningServer {
            endpoint: server.endpoint().clone(),
            connect,
            server: Some(server),
            _directory: directory,
        }
    }

    async fn connect(&self, running: &RunningServer) -> Box<dyn Connection> {
        let connection = running.endpoint.connect(&running.connect).await;
        let connection = connection.expect("a connection");
        if self.transport == Transport::Stdio {
            return self.dialect.over_stdio(connection, &running.connect.limits);
        }
        connection
    }

    /// Connects a session and says hello where the transport requires it.
    async fn client_session(&self, running: &RunningServer) -> Session {
        let connection = self.connect(running).await;
        let router = Arc::new(TestServer::default()).router();
        let options = Options {
            limits: self.client.limits(),
            codecs: self.dialect.codecs(),
            ..Options::new(Caller::Local)
        };
        let session = Session::start_boxed(connection, router, options);
        if self.requires_token {
            let hello = HelloParams {
                token: Some(TOKEN.to_owned()),
                ..HelloParams::default()
            };
            session.peer().call::<Hello>(&hello).await.expect("a hello");
        }
        session
    }

    /// Starts a server and connects a client.
    pub async fn start(self) -> Fixture {
        let running = self.listen().await;
        let client = self.client_session(&running).await;
        Fixture {
            peer: client.peer(),
            client,
            running,
        }
    }

    /// Starts a server and returns a service's own connector to it. Over stdio, the connector
    /// starts the server later.
    pub async fn connector(&self) -> (EndpointLink, RunningServer) {
        let running = self.listen().await;
        let options = ReconnectOptions {
            session: Options {
                limits: self.client.limits(),
                codecs: self.dialect.codecs(),
                ..Options::new(Caller::Local)
            },
            hello: Some(HelloParams {
                token: Some(TOKEN.to_owned()),
                ..HelloParams::default()
            }),
            ..ReconnectOptions::default()
        };
        let (endpoint, connect) = (running.endpoint.clone(), running.connect.clone());
        (EndpointLink::new(endpoint, connect, options), running)
    }

    /// Connects a further client. Not over stdio, where a server has one client.
    pub async fn another_client(&self, running: &RunningServer) -> Session {
        assert_ne!(self.transport, Transport::Stdio, "one client a server");
        self.client_session(running).await
    }

    /// Connects two clients to one server. Not over stdio, where a server has one client.
    pub async fn start_twice(self) -> (Fixture, Fixture) {
        assert_ne!(self.transport, Transport::Stdio, "one client a server");
        let running = self.listen().await;
        let (first, second) = (
            self.client_session(&running).await,
            self.client_session(&running).await,
        );
        let (endpoint, connect) = (running.endpoint.clone(), running.connect.clone());
        let without = RunningServer {
            endpoint,
            connect,
            server: None,
            _directory: tempfile::tempdir().expect("a directory"),
        };
        (
            Fixture {
                peer: first.peer(),
                client: first,
                running: without,
            },
            Fixture {
                peer: second.peer(),
                client: second,
                running,
            },
        )
    }

    /// A raw client, which has said hello where the transport requires it.
    pub async fn raw(self) -> Raw {
        let requires_token = self.requires_token;
        let mut raw = self.raw_silent().await;
        if requires_token {
            raw.call(
                1_000_000,
                "hello",
                &json!({"client": "raw", "token": TOKEN}),
            )
            .await;
            raw.answer().await.result();
        }
        raw
    }

    /// A raw client that has sent nothing yet.
    pub async fn raw_silent(self) -> Raw {
        let running = self.listen().await;
        let connection = self.connect(&running).await;
        Raw::over(connection, self.dialect, Some(running))
    }

    /// The address of a TCP server, and a guard that keeps the server running.
    pub async fn address(self) -> (String, impl Debug) {
        let running = self.listen().await;
        let Endpoint::Tcp { address, .. } = &running.endpoint else {
            panic!("not TCP")
        };
        (address.to_string(), running)
    }

    #[allow(clippy::unused_async, reason = "a session needs a runtime")]
    /// The server's session and a raw client, connected by queues.
    pub async fn server_session(self) -> (Session, Raw) {
        self.server_session_holding(64).await
    }

    #[allow(clippy::unused_async, reason = "a session needs a runtime")]
    /// As [`Self::server_session`], with room for `messages` messages between the two.
    pub async fn server_session_holding(self, messages: usize) -> (Session, Raw) {
        let (ours, theirs) = queue::pair(messages);
        let router = Arc::new(TestServer::default()).router();
        let options = Options {
            limits: self.server.limits(),
            codecs: Codecs::FirstOf(ALL_CODECS),
            ..Options::new(Caller::Local)
        };
        (
            Session::start(ours, router, options),
            Raw::over(Box::new(theirs), self.dialect, None),
        )
    }
}

/// A running server and its address.
#[derive(Debug)]
pub struct RunningServer {
    endpoint: Endpoint,
    connect: ConnectOptions,
    server: Option<Server>,
    _directory: tempfile::TempDir,
}

impl RunningServer {
    /// The connections of the server; 0 over stdio, where the server is another process.
    pub fn connections(&self) -> usize {
        self.server.as_ref().map_or(0, Server::connections)
    }
}

fn certificates() -> (ServerTls, ClientTls) {
    let certified =
        rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).expect("a certificate");
    let pem = Pem::Bytes(certified.cert.pem().into_bytes());
    let key = Pem::Bytes(certified.signing_key.serialize_pem().into_bytes());
    let server = ServerTls {
        identity: Identity {
            certificates: pem.clone(),
            key,
        },
        client_ca: None,
    };
    (
        server,
        ClientTls {
            ca: Some(pem),
            ..ClientTls::default()
        },
    )
}

/// A client and a server.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Fixture {
    pub peer: Peer,
    pub client: Session,
    running: RunningServer,
}

impl Fixture {
    /// Kills the server as abruptly as the transport allows.
    pub async fn kill_server(&self) {
        if let Endpoint::Stdio { .. } = self.running.endpoint {
            let exit = self
                .peer
                .call::<crate::actions::Exit>(&box_rpc::Empty {})
                .await;
            assert!(exit.is_err(), "a server that exits does not answer");
        } else if let Some(server) = &self.running.server {
            server.cut();
        }
    }
}

/// A session against a peer that the test plays by hand.
pub async fn against_a_script(dialect: Dialect) -> (Session, Raw) {
    against_a_script_with(dialect, |_| {}).await
}

/// As [`against_a_script`], with other limits.
#[allow(clippy::unused_async)] // a session needs an executor
pub async fn against_a_script_with(
    dialect: Dialect,
    change: impl FnOnce(&mut Limits),
) -> (Session, Raw) {
    let (ours, theirs) = queue::pair(64);
    let mut limits = Limits::in_process();
    change(&mut limits);
    let options = Options {
        limits,
        codecs: dialect.codecs(),
        ..Options::client()
    };
    (
        Session::start(ours, Router::empty(), options),
        Raw::over(Box::new(theirs), dialect, None),
    )
}
