//! A client and a server joined by any transport, in any dialect.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use box_gateways::langbot::{BOTH, Frames, InPieces};
use box_rpc::{
    Codecs, Connection, Gate, Hello, HelloParams, Limits, Options, Peer, Router, Session, Tokens,
};
use box_service::connector::EndpointLink;
use box_transports::link::LinkOptions;
use box_transports::server::Server;
use box_transports::tls::{ClientTls, Identity, Pem, ServerTls};
use box_transports::{ConnectOptions, Endpoint, ListenOptions, queue};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::actions::Server as TestServer;
use crate::raw::Raw;

/// The token of every test server that needs one.
pub const TOKEN: &str = "a-token-for-tests-of-32-bytes-or-more";

/// What carries the strings.
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

/// How messages are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dialect {
    /// JSON-RPC 2.0.
    JsonRpc,
    /// LangBot's action frames.
    LangBot,
}

impl Dialect {
    /// The codec that writes it.
    pub fn codecs(self) -> Codecs {
        match self {
            Self::JsonRpc => Codecs::JSON_RPC,
            Self::LangBot => Codecs::Only(&Frames),
        }
    }

    /// The connection as this dialect frames it over standard streams.
    pub fn over_stdio(
        self,
        connection: Box<dyn Connection>,
        limits: &Limits,
    ) -> Box<dyn Connection> {
        match self {
            Self::JsonRpc => connection,
            Self::LangBot => Box::new(InPieces::over(connection, limits)),
        }
    }
}

/// Limits that differ from the default, in a form that can be handed to another process.
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
    /// These limits, the default ones where nothing is said.
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

/// What a test server serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Serves {
    /// The actions of [`crate::actions`].
    Actions,
    /// A runtime with a scripted backend, and [`crate::boxes`] to look at it.
    Boxes,
    /// The policy layer in front of such a runtime.
    Service,
    /// A runtime with real boxes.
    RealBoxes,
    /// The policy layer in front of such a runtime.
    RealService,
}

impl Serves {
    /// A router with a state of its own. `server_program` can be the fork server of real boxes.
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

/// Who may use the connections of a test server: whoever says hello with [`TOKEN`], or everybody.
pub fn gate(guarded: bool) -> Gate {
    if guarded {
        Gate::Tokens(Tokens::new([("tester".to_owned(), TOKEN.to_owned())]))
    } else {
        Gate::Open
    }
}

/// A fixture about to be made.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Setup {
    pub transport: Transport,
    pub dialect: Dialect,
    serves: Serves,
    guarded: bool,
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
            guarded: transport.needs_hello(),
            server_program: server_program.into(),
            server: TestLimits::default(),
            client: TestLimits::default(),
        }
    }

    /// Joined queues, for what does not depend on the transport.
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

    /// Serves boxes of this machine.
    pub fn real_boxes(mut self) -> Self {
        self.serves = Serves::RealBoxes;
        self
    }

    /// Serves the policy layer in front of boxes of this machine.
    pub fn real_service(mut self) -> Self {
        self.serves = Serves::RealService;
        self
    }

    /// Asks for a token whatever the transport.
    pub fn guarded(mut self) -> Self {
        self.guarded = true;
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

    async fn listen(&self) -> Place {
        let directory = tempfile::tempdir().expect("a directory");
        if self.transport == Transport::Stdio {
            let argument = (self.serves, self.guarded, &self.server, self.dialect);
            let argument = serde_json::to_string(&argument).expect("an argument");
            let command = vec![self.server_program.display().to_string(), argument];
            let connect = ConnectOptions {
                limits: self.client.limits(),
                ..ConnectOptions::default()
            };
            return Place {
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
            codecs: Codecs::FirstOf(BOTH),
            gate: gate(self.guarded),
            ..Options::default()
        };
        let server = Server::start(listener, router, move |_| options.clone());
        Place {
            endpoint: server.endpoint().clone(),
            connect,
            server: Some(server),
            _directory: directory,
        }
    }

    async fn connect(&self, place: &Place) -> Box<dyn Connection> {
        let connection = place.endpoint.connect(&place.connect).await;
        let connection = connection.expect("a connection");
        if self.transport == Transport::Stdio {
            return self.dialect.over_stdio(connection, &place.connect.limits);
        }
        connection
    }

    /// Connects a session that has said hello where that is needed.
    async fn client_session(&self, place: &Place) -> Session {
        let connection = self.connect(place).await;
        let router = Arc::new(TestServer::default()).router();
        let options = Options {
            limits: self.client.limits(),
            codecs: self.dialect.codecs(),
            ..Options::default()
        };
        let session = Session::start_boxed(connection, router, options);
        if self.guarded {
            let hello = HelloParams {
                token: Some(TOKEN.to_owned()),
                ..HelloParams::default()
            };
            session.peer().call::<Hello>(&hello).await.expect("a hello");
        }
        session
    }

    /// A client and a server.
    pub async fn start(self) -> Fixture {
        let place = self.listen().await;
        let client = self.client_session(&place).await;
        Fixture {
            peer: client.peer(),
            client,
            place,
        }
    }

    /// A server, and a service's own connector to it, which over stdio has yet to start the server.
    pub async fn connector(&self) -> (EndpointLink, Place) {
        let place = self.listen().await;
        let options = LinkOptions {
            session: Options {
                limits: self.client.limits(),
                codecs: self.dialect.codecs(),
                ..Options::default()
            },
            hello: Some(HelloParams {
                token: Some(TOKEN.to_owned()),
                ..HelloParams::default()
            }),
            ..LinkOptions::default()
        };
        let (endpoint, connect) = (place.endpoint.clone(), place.connect.clone());
        (EndpointLink::new(endpoint, connect, options), place)
    }

    /// A further client of a server; not over stdio, where a server has one client.
    pub async fn another_client(&self, place: &Place) -> Session {
        assert_ne!(self.transport, Transport::Stdio, "one client a server");
        self.client_session(place).await
    }

    /// Two clients of one server; not over stdio, where a server has one client.
    pub async fn start_twice(self) -> (Fixture, Fixture) {
        assert_ne!(self.transport, Transport::Stdio, "one client a server");
        let place = self.listen().await;
        let (first, second) = (
            self.client_session(&place).await,
            self.client_session(&place).await,
        );
        let (endpoint, connect) = (place.endpoint.clone(), place.connect.clone());
        let without = Place {
            endpoint,
            connect,
            server: None,
            _directory: tempfile::tempdir().expect("a directory"),
        };
        (
            Fixture {
                peer: first.peer(),
                client: first,
                place: without,
            },
            Fixture {
                peer: second.peer(),
                client: second,
                place,
            },
        )
    }

    /// A raw client of a server; has said hello where that is needed.
    pub async fn raw(self) -> Raw {
        let guarded = self.guarded;
        let mut raw = self.raw_silent().await;
        if guarded {
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

    /// A raw client that has said nothing yet.
    pub async fn raw_silent(self) -> Raw {
        let place = self.listen().await;
        let connection = self.connect(&place).await;
        Raw::over(connection, self.dialect, Some(place))
    }

    /// Where a TCP server listens, and what keeps it there.
    pub async fn address(self) -> (String, impl Debug) {
        let place = self.listen().await;
        let Endpoint::Tcp { address, .. } = &place.endpoint else {
            panic!("not TCP")
        };
        (address.to_string(), place)
    }

    #[allow(clippy::unused_async, reason = "a session needs a runtime")]
    /// The server's own session, and a raw client of it, joined by queues.
    pub async fn server_session(self) -> (Session, Raw) {
        self.server_session_holding(64).await
    }

    #[allow(clippy::unused_async, reason = "a session needs a runtime")]
    /// The same, with room for so many messages between the two.
    pub async fn server_session_holding(self, messages: usize) -> (Session, Raw) {
        let (ours, theirs) = queue::pair(messages);
        let router = Arc::new(TestServer::default()).router();
        let options = Options {
            limits: self.server.limits(),
            codecs: Codecs::FirstOf(BOTH),
            ..Options::default()
        };
        (
            Session::start(ours, router, options),
            Raw::over(Box::new(theirs), self.dialect, None),
        )
    }
}

/// A server, and how to reach it.
#[derive(Debug)]
pub struct Place {
    endpoint: Endpoint,
    connect: ConnectOptions,
    server: Option<Server>,
    _directory: tempfile::TempDir,
}

impl Place {
    /// Connections that the server has; none over stdio, where it is nobody's to ask.
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
    place: Place,
}

impl Fixture {
    /// Ends the server as rudely as the transport allows.
    pub async fn kill_server(&self) {
        if let Endpoint::Stdio { .. } = self.place.endpoint {
            let exit = self
                .peer
                .call::<crate::actions::Exit>(&box_rpc::Empty {})
                .await;
            assert!(exit.is_err(), "a server that exits does not answer");
        } else if let Some(server) = &self.place.server {
            server.cut();
        }
    }
}

/// A session of ours against a peer that the test plays by hand.
pub async fn against_a_script(dialect: Dialect) -> (Session, Raw) {
    against_a_script_with(dialect, |_| {}).await
}

/// As [`against_a_script`], with other limits.
#[allow(clippy::unused_async)] // a session needs a runtime
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
        ..Options::default()
    };
    (
        Session::start(ours, Router::empty(), options),
        Raw::over(Box::new(theirs), dialect, None),
    )
}
