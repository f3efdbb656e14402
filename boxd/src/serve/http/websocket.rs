//! `/rpc/ws`: websocket connections for the RPC, in any supported dialect.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_gateways::langbot::{ALL_CODECS, Frames};
use box_rpc::{Caller, Codecs, Limits, Options, Session};
use box_transports::connection_limit::ConnectionPermit;
use box_transports::server::close_all;
use box_transports::websocket::{Role, accept_key, from_upgraded};
use http_body_util::{BodyExt as _, Empty};
use hyper::header::{CONNECTION, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT};
use hyper::header::{SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE};
use hyper::{HeaderMap, Method, Response, StatusCode, Version};
use hyper_util::rt::TokioIo;
use tokio::sync::watch;

use super::body::IncomingRequest;
use super::langbot;
use super::response::{HttpResponse, Refusal, RefusalReason};
use super::state::HttpState;

/// How long the client may take to receive the response to its upgrade.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(10);

/// The close status of a server that shuts down.
const GOING_AWAY: u16 = 1001;
/// The close status of a server that restarts.
const RESTARTING: u16 = 1012;
/// The close status of a connection that ends normally.
const NORMAL: u16 = 1000;

/// The open websockets.
#[derive(Debug)]
pub(super) struct Sockets {
    open: Mutex<OpenSockets>,
    /// The status that they are closed with.
    status: Arc<AtomicU16>,
    /// Signals websockets without RPC calls to end now.
    closing_sender: watch::Sender<bool>,
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
            closing_sender: watch::Sender::new(false),
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
            .wait_for(|closing| *closing)
            .await;
    }

    /// Closes all websockets within this time, and sends whether the server restarts.
    pub(super) async fn close(&self, within: Duration, restart: bool) {
        let status = if restart { RESTARTING } else { GOING_AWAY };
        self.status.store(status, Ordering::Relaxed);
        self.closing_sender.send_replace(true);
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
pub(super) fn upgrade(
    state: &Arc<HttpState>,
    request: &mut IncomingRequest,
    caller: Caller,
    permit: ConnectionPermit,
) -> Result<HttpResponse, Refusal> {
    let key = key(request)?;
    let (router, codecs, control_policy) = match langbot::serve(state, request.headers(), &caller)?
    {
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
    let state = Arc::clone(state);
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
    Ok(switching(key))
}

/// Creates the response that upgrades the connection to a websocket.
pub(super) fn switching(key: HeaderValue) -> HttpResponse {
    let empty = Empty::new().map_err(|never| match never {});
    let mut response = Response::new(empty.boxed_unsync());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(SEC_WEBSOCKET_ACCEPT, key);
    response
}

/// Returns the accept key if this is a websocket request.
pub(super) fn key(request: &IncomingRequest) -> Result<HeaderValue, Refusal> {
    let headers = request.headers();
    let upgrades = request.method() == Method::GET
        && request.version() == Version::HTTP_11
        && lists(headers, &CONNECTION, "upgrade")
        && lists(headers, &UPGRADE, "websocket")
        && lists(headers, &SEC_WEBSOCKET_VERSION, "13");
    if !upgrades {
        return Err(Refusal::new(
            RefusalReason::NoUpgrade,
            "this path requires a websocket upgrade, version 13",
        ));
    }
    headers
        .get(SEC_WEBSOCKET_KEY)
        .and_then(|key| key.to_str().ok())
        .filter(|key| is_key(key))
        .and_then(|key| HeaderValue::try_from(accept_key(key)).ok())
        .ok_or_else(|| {
            Refusal::new(
                RefusalReason::Malformed,
                "missing or invalid Sec-WebSocket-Key",
            )
        })
}

/// Returns whether the text is sixteen bytes in base64.
fn is_key(key: &str) -> bool {
    let bytes = key.strip_suffix("==").unwrap_or_default();
    bytes.len() == 22
        && bytes
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"+/".contains(&byte))
}

/// Returns whether a header lists a word, ignoring case.
pub(super) fn lists(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|part| part.trim().eq_ignore_ascii_case(word))
}
