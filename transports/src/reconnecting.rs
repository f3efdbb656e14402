//! A connection that reconnects after it is lost.
//!
//! It connects, sends the hello and repeats both after a loss, with growing and randomised pauses. Calls made in
//! between fail with `unavailable`.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::time::Duration;

use box_rpc::{
    Action, CallError, CloseReason, Codecs, Connection, ConnectionError, Hello, HelloParams,
    HelloResult, Options, Peer, Router, Session,
};
use futures::future::BoxFuture;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::endpoint::{ConnectOptions, Endpoint};

/// Makes one connection; called again whenever the last one is lost.
pub type Connector =
    Box<dyn Fn() -> BoxFuture<'static, Result<Box<dyn Connection>, ConnectionError>> + Send + Sync>;

/// Options of a reconnecting connection.
#[derive(Debug, Clone)]
pub struct ReconnectOptions {
    /// Options of each connection. The codec is JSON-RPC unless another is fixed.
    pub session: Options,
    /// Hello to send first on each connection; `None` sends none.
    pub hello: Option<HelloParams>,
    /// Actions that the other end may call here.
    pub router: Router,
    /// Pause after the first failure; doubles after each further one.
    pub first_wait: Duration,
    /// Maximum pause.
    pub longest_wait: Duration,
    /// Timeout for the response to the hello.
    pub hello_timeout: Duration,
}

impl Default for ReconnectOptions {
    fn default() -> Self {
        Self {
            session: Options {
                codecs: Codecs::JSON_RPC,
                ..Options::client()
            },
            hello: Some(HelloParams::default()),
            router: Router::empty(),
            first_wait: Duration::from_millis(100),
            longest_wait: Duration::from_secs(10),
            hello_timeout: Duration::from_secs(10),
        }
    }
}

/// Reason for a missing connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Disconnected {
    /// No attempt was made yet.
    #[error("not connected yet")]
    NotYet,
    /// Connecting failed.
    #[error("{0}")]
    Connection(ConnectionError),
    /// The hello was refused or lost.
    #[error("hello: {0}")]
    Hello(CallError),
    /// The hello got no response in time.
    #[error("hello: no response in time")]
    HelloTimeout,
    /// The connection has ended.
    #[error("{0}")]
    Lost(CloseReason),
}

/// State of the connection.
#[derive(Debug, Clone)]
enum State {
    Down {
        why: Arc<Disconnected>,
        /// Failed attempts since the start.
        failed: u64,
    },
    Up(Peer, Option<Arc<HelloResult>>),
}

impl State {
    /// Returns the peer of an open connection.
    /// An ended connection stays `Up` until the task has noticed.
    fn open(&self) -> Option<&Peer> {
        match self {
            Self::Up(peer, _) if !peer.is_closed() => Some(peer),
            _ => None,
        }
    }
}

/// A connection that reconnects.
/// Dropping it cuts the current connection and stops further attempts.
pub struct Reconnecting {
    state: watch::Receiver<State>,
    retry: Arc<Notify>,
    task: JoinHandle<()>,
}

impl fmt::Debug for Reconnecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reconnecting")
            .field(&self.state.borrow())
            .finish()
    }
}

impl Drop for Reconnecting {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Reconnecting {
    /// Connects to an endpoint.
    pub fn to(endpoint: Endpoint, connect: ConnectOptions, options: ReconnectOptions) -> Self {
        Self::with_connector(
            Box::new(move || {
                let (endpoint, connect) = (endpoint.clone(), connect.clone());
                Box::pin(async move { endpoint.connect(&connect).await })
            }),
            options,
        )
    }

    /// Connects by calling `connector`.
    pub fn with_connector(connector: Connector, options: ReconnectOptions) -> Self {
        let (sender, state) = watch::channel(State::Down {
            why: Arc::new(Disconnected::NotYet),
            failed: 0,
        });
        let retry = Arc::new(Notify::new());
        let task = tokio::spawn(run(connector, options, sender, Arc::clone(&retry)));
        Self { state, retry, task }
    }

    /// Returns the other end, if connected.
    pub fn peer(&self) -> Result<Peer, CallError> {
        if self.is_closed() {
            return Err(ended());
        }
        match &*self.state.borrow() {
            State::Up(peer, _) if peer.is_closed() => Err(CallError::NotSent(
                "the connection was just lost".to_owned(),
            )),
            State::Up(peer, _) => Ok(peer.clone()),
            State::Down { why, .. } => Err(CallError::NotSent(why.to_string())),
        }
    }

    /// Returns the reason for a missing connection, if it is missing.
    pub fn disconnect_reason(&self) -> Option<Arc<Disconnected>> {
        match &*self.state.borrow() {
            State::Up(..) => None,
            State::Down { why, .. } => Some(Arc::clone(why)),
        }
    }

    /// Returns the response to the hello on the current connection.
    pub fn hello(&self) -> Option<Arc<HelloResult>> {
        match &*self.state.borrow() {
            State::Up(_, hello) => hello.clone(),
            State::Down { .. } => None,
        }
    }

    /// Calls over the current connection.
    /// Without one it fails at once with `unavailable`.
    pub async fn call<A: Action>(&self, params: &A::Params) -> Result<A::Result, CallError> {
        self.peer()?.call::<A>(params).await
    }

    /// Waits for a connection and starts the next attempt at once.
    pub async fn connected(&self) -> Result<Peer, CallError> {
        self.retry_now();
        let mut state = self.state.clone();
        let up = state.wait_for(|state| state.open().is_some()).await;
        up.as_deref()
            .ok()
            .and_then(State::open)
            .cloned()
            .ok_or_else(ended)
    }

    /// Like [`connected`](Self::connected), with a timeout.
    /// The error then contains the reason for the missing connection. The task continues to try.
    pub async fn connected_within(&self, limit: Duration) -> Result<Peer, CallError> {
        match timeout(limit, self.connected()).await {
            Ok(connected) => connected,
            Err(_) => self.peer(),
        }
    }

    /// Returns the current connection, or the result of one immediate attempt.
    /// Suits callers that pause between attempts themselves.
    pub async fn try_now(&self) -> Result<Peer, CallError> {
        let mut state = self.state.clone();
        let before = match &*state.borrow_and_update() {
            State::Up(peer, _) if !peer.is_closed() => return Ok(peer.clone()),
            State::Up(..) => None,
            State::Down { failed, .. } => Some(*failed),
        };
        let before = match before {
            Some(failed) => failed,
            // Lost just now: the next state contains the number of failed attempts.
            None => match state.wait_for(|state| !is_lost(state)).await.as_deref() {
                Ok(State::Up(peer, _)) => return Ok(peer.clone()),
                Ok(State::Down { failed, .. }) => *failed,
                Err(_) => return Err(ended()),
            },
        };
        self.retry_now();
        let tried = |state: &State| match state {
            State::Up(peer, _) => !peer.is_closed(),
            State::Down { failed, .. } => *failed > before,
        };
        match state.wait_for(tried).await.as_deref() {
            Ok(State::Up(peer, _)) => Ok(peer.clone()),
            Ok(State::Down { why, .. }) => Err(CallError::NotSent(why.to_string())),
            Err(_) => Err(ended()),
        }
    }

    /// Waits until the current connection is lost; returns at once without one.
    pub async fn disconnected(&self) {
        let mut state = self.state.clone();
        let _ = state
            .wait_for(|state| matches!(state, State::Down { .. }))
            .await;
    }

    /// Ends it: cuts the current connection and makes no other.
    /// Dropping the last [`Arc`] does the same.
    pub fn close(&self) {
        self.task.abort();
    }

    /// Whether it was closed, so that no later call can succeed.
    pub fn is_closed(&self) -> bool {
        self.task.is_finished()
    }

    /// Tries at once instead of waiting for the end of the current pause.
    pub fn retry_now(&self) {
        self.retry.notify_one();
    }
}

/// Server of a client, over one connection or a reconnecting one.
#[derive(Debug, Clone)]
pub enum Remote {
    /// One connection. The owner of its [`Session`] ends it.
    Peer(Peer),
    /// A connection that reconnects.
    Reconnecting(Arc<Reconnecting>),
}

impl Remote {
    /// Returns the server, if connected.
    pub fn peer(&self) -> Result<Peer, CallError> {
        match self {
            Self::Peer(peer) => Ok(peer.clone()),
            Self::Reconnecting(connection) => connection.peer(),
        }
    }

    /// Returns the server, over the current connection or an immediate new one.
    pub async fn try_now(&self) -> Result<Peer, CallError> {
        match self {
            Self::Reconnecting(connection) => connection.try_now().await,
            Self::Peer(peer) if peer.is_closed() => Err(CallError::NotSent(
                "connection closed; reconnection is disabled".to_owned(),
            )),
            Self::Peer(peer) => Ok(peer.clone()),
        }
    }

    /// Calls over the current connection.
    /// Without one it fails at once with `unavailable`.
    pub async fn call<A: Action>(&self, params: &A::Params) -> Result<A::Result, CallError> {
        self.peer()?.call::<A>(params).await
    }

    /// Whether no later call can succeed.
    pub fn is_closed(&self) -> bool {
        match self {
            Self::Peer(peer) => peer.is_closed(),
            Self::Reconnecting(connection) => connection.is_closed(),
        }
    }
}

fn ended() -> CallError {
    CallError::NotSent("connection closed; no further attempt is made".to_owned())
}

/// Whether the connection is over and its task has not noticed yet.
fn is_lost(state: &State) -> bool {
    matches!(state, State::Up(peer, _) if peer.is_closed())
}

async fn run(
    connector: Connector,
    options: ReconnectOptions,
    state: watch::Sender<State>,
    retry: Arc<Notify>,
) {
    let (mut failures, mut failed) = (0, 0);
    loop {
        match connect(&connector, &options).await {
            Ok((session, hello)) => {
                failures = 0;
                state.send_replace(State::Up(session.peer(), hello));
                let reason = session.closed().await;
                tracing::info!(%reason, "connection lost");
                let restarts = matches!(reason, CloseReason::Bye { restart: true, .. });
                let why = Arc::new(Disconnected::Lost(reason));
                state.send_replace(State::Down { why, failed });
                if restarts {
                    continue;
                }
            }
            Err(why) => {
                failed += 1;
                let why = Arc::new(why);
                state.send_replace(State::Down { why, failed });
            }
        }
        let _ = timeout(pause(failures, &options), retry.notified()).await;
        failures += 1;
    }
}

async fn connect(
    connector: &Connector,
    options: &ReconnectOptions,
) -> Result<(Session, Option<Arc<HelloResult>>), Disconnected> {
    let connection = connector().await.map_err(Disconnected::Connection)?;
    let mut session_options = options.session.clone();
    if let Codecs::FirstOf(_) = session_options.codecs {
        // This side sends first.
        session_options.codecs = Codecs::JSON_RPC;
    }
    let session = Session::start_boxed(connection, options.router.clone(), session_options);
    let Some(hello) = &options.hello else {
        return Ok((session, None));
    };
    let peer = session.peer();
    let answer = timeout(options.hello_timeout, peer.call::<Hello>(hello)).await;
    match answer {
        Ok(Ok(answer)) => Ok((session, Some(Arc::new(answer)))),
        Ok(Err(error)) => Err(Disconnected::Hello(error)),
        Err(_) => Err(Disconnected::HelloTimeout),
    }
}

/// Returns a pause that doubles with each failure, up to `longest`.
pub fn backoff_delay(first: Duration, longest: Duration, failures: u32) -> Duration {
    let times = 1_u32.checked_shl(failures).unwrap_or(u32::MAX);
    first.saturating_mul(times).min(longest)
}

/// Returns a random pause between half and all of the delay.
/// Many clients of one server therefore do not reconnect at the same time.
fn pause(failures: u32, options: &ReconnectOptions) -> Duration {
    let half = backoff_delay(options.first_wait, options.longest_wait, failures) / 2;
    let random = RandomState::new().hash_one(failures) % 1024;
    half + half * u32::try_from(random).unwrap_or(0) / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_vary() {
        let options = ReconnectOptions::default();
        let bounds = |failures| {
            let pauses: Vec<_> = (0..100).map(|_| pause(failures, &options)).collect();
            (*pauses.iter().min().unwrap(), *pauses.iter().max().unwrap())
        };
        let (low, high) = bounds(0);
        assert!(
            low >= Duration::from_millis(50) && high <= Duration::from_millis(100) && low < high
        );
        let (low, high) = bounds(40);
        assert!(low >= Duration::from_secs(5) && high <= Duration::from_secs(10));
    }
}
