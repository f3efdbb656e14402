//! `/rpc/ws`: websocket connections for the RPC, in any supported dialect.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CONNECTION, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY};
use axum::http::header::{SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION, UPGRADE};
use axum::http::{Method, StatusCode, Version};
use axum::response::Response;
use box_gateways::http::proxy::is_upgrade;
use box_gateways::http::refusal::{Refusal, RefusalReason};
use box_gateways::langbot::{ALL_CODECS, Frames};
use box_rpc::{Caller, Codecs, Limits, Options, Session};
use box_transports::server::close_all;
use box_transports::websocket::{Role, accept_key, from_upgraded};
use hyper_util::rt::TokioIo;
use tokio::sync::watch;

use super::auth::protocols;
use super::langbot;
use super::layers::Client;
use super::state::HttpState;

/// How long the client may take to receive the response to its upgrade.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The close status of a server that shuts down.
const GOING_AWAY: u16 = 1001;
/// The close status of a server that restarts.
const RESTARTING: u16 = 1012;
/// The close status of a connection that ends normally.
const NORMAL: u16 = 1000;

/// The sub-protocol that the server selects if a client offers it. A browser closes a websocket without a selection.
const PROTOCOL: &str = "box";

/// The open websockets.
#[derive(Debug)]
pub(super) struct Sockets {
    open: Mutex<OpenSockets>,
    /// The status that they are closed with.
    status: Arc<AtomicU16>,
    /// Signals websockets without RPC calls to end now, with a status.
    closing_sender: watch::Sender<Option<u16>>,
}

#[derive(Debug, Default)]
struct OpenSockets {
    sessions: HashMap<u64, Arc<Session>>,
    next: u64,
    /// Whether the server accepts no more websockets.
    closing: bool,
}

impl Default for Sockets {
    fn default() -> Self {
        Self {
            open: Mutex::default(),
            status: Arc::new(AtomicU16::new(NORMAL)),
            closing_sender: watch::Sender::new(None),
        }
    }
}

impl Sockets {
    /// Locks the state; no code leaves it inconsistent under the lock.
    fn open(&self) -> MutexGuard<'_, OpenSockets> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of open websockets.
    pub(super) fn count(&self) -> usize {
        self.open().sessions.len()
    }

    /// Holds a connection until it ends, unless the server is closing.
    async fn keep(&self, session: Session) {
        let session = Arc::new(session);
        let number = {
            let mut open = self.open();
            if open.closing {
                return;
            }
            open.next += 1;
            let number = open.next;
            open.sessions.insert(number, Arc::clone(&session));
            number
        };
        session.closed().await;
        self.open().sessions.remove(&number);
    }

    /// Returns once the server is closing.
    pub(super) async fn closing(&self) {
        // `self` owns the sender, so the channel cannot be closed.
        let _ = self
            .closing_sender
            .subscribe()
            .wait_for(Option::is_some)
            .await;
    }

    /// Returns the close status, once the server is closing.
    pub(super) fn close_status(&self) -> watch::Receiver<Option<u16>> {
        self.closing_sender.subscribe()
    }

    /// Closes all websockets within this time, and sends whether the server restarts.
    pub(super) async fn close(&self, within: Duration, restart: bool) {
        let status = if restart { RESTARTING } else { GOING_AWAY };
        self.status.store(status, Ordering::Relaxed);
        self.closing_sender.send_replace(Some(status));
        let sessions: Vec<_> = {
            let mut open = self.open();
            open.closing = true;
            open.sessions.values().cloned().collect()
        };
        close_all(&sessions, within, restart).await;
    }
}

/// Answers with the upgrade, and then serves the RPC to this caller.
///
/// A client that names its LangBot instance sends LangBot's frames only.
pub(super) async fn upgrade(
    State(state): State<Arc<HttpState>>,
    Extension(caller): Extension<Caller>,
    Extension(Client { permit, .. }): Extension<Client>,
    request: Request,
) -> Result<Response, Refusal> {
    let key = key(&request)?;
    let has_protocol = protocols(request.headers()).any(|offered| offered == PROTOCOL);
    let served = langbot::serve(&state, request.headers(), &caller)?;
    let (router, codecs, control_policy) = match served {
        Some((router, policy)) => (router, Codecs::Only(&Frames), Some(policy)),
        None => (state.router.clone(), Codecs::FirstOf(ALL_CODECS), None),
    };
    let options = Options {
        limits: Limits::network(),
        codecs,
        control_policy,
        ..Options::new(caller)
    };
    let upgraded = hyper::upgrade::on(request);
    tokio::spawn(async move {
        let Ok(Ok(upgraded)) = tokio::time::timeout(HANDSHAKE, upgraded).await else {
            return;
        };
        let stream = TokioIo::new(upgraded);
        let connection = from_upgraded(stream, Role::Server, &options.limits)
            .closing_with(Arc::clone(&state.sockets.status));
        let session = Session::start(connection, router, options);
        state.sockets.keep(session).await;
        drop(permit);
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(SEC_WEBSOCKET_ACCEPT, key);
    if has_protocol {
        headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(PROTOCOL));
    }
    Ok(response)
}

/// Returns the accept key if this is a websocket request.
fn key(request: &Request) -> Result<HeaderValue, Refusal> {
    let headers = request.headers();
    let version = headers.get(SEC_WEBSOCKET_VERSION);
    let upgrades = request.method() == Method::GET
        && request.version() == Version::HTTP_11
        && is_upgrade(headers)
        && version.is_some_and(|version| version == "13");
    if !upgrades {
        return Err(no_upgrade());
    }
    headers
        .get(SEC_WEBSOCKET_KEY)
        .and_then(|key| key.to_str().ok())
        .and_then(accept_key)
        .and_then(|key| HeaderValue::try_from(key).ok())
        .ok_or_else(|| {
            Refusal::new(
                RefusalReason::Malformed,
                "missing or invalid Sec-WebSocket-Key",
            )
        })
}

/// Returns the refusal of a request that asks for no websocket.
pub(super) fn no_upgrade() -> Refusal {
    Refusal::new(
        RefusalReason::NoUpgrade,
        "this path requires a websocket upgrade, version 13",
    )
}
