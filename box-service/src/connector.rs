//! Connectors make and end the connections of a service to its runtime.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use box_protocol::{BoxError, Code};
use box_rpc::{Caller, Limits, Options, Router, Session};
use box_transports::reconnecting::{ReconnectOptions, Reconnecting};
use box_transports::{ConnectOptions, Endpoint, queue};
use tokio::sync::watch;

use crate::client::RuntimeClient;

/// Capacity in messages of each direction of an in-process connection.
const QUEUE_MESSAGES: usize = 1024;

/// Limit of concurrent calls, and of streams, over an in-process connection.
/// It carries the calls of all gateways, and each gateway has limits of its own.
const IN_PROCESS_CALLS: usize = 16 * 1024;

/// Maximum number of callers with an open in-process connection.
const MAX_CALLERS: usize = 1024;

/// Makes the connection of a [`BoxService`](crate::BoxService) created without one.
#[async_trait]
pub trait Connector: fmt::Debug + Send + Sync + 'static {
    /// Connects to the runtime for one caller.
    ///
    /// [`Caller::Local`] is the service itself. A box belongs to the caller that created it, so each caller gets a
    /// separate connection if the runtime supports caller identity.
    ///
    /// The service calls this for a new caller, and again when its last client [is closed](RuntimeClient::is_closed). It
    /// never calls it concurrently. The implementation limits its own duration.
    async fn connect(&self, caller: &Caller) -> Result<RuntimeClient, BoxError>;

    /// Ends every connection that [`connect`](Self::connect) made or is making.
    /// Does not wait. Later calls of `connect` fail.
    fn dispose(&self);

    /// Whether the runtime learns the identity of each caller.
    ///
    /// If it does not, the service accepts only its own calls. The runtime would otherwise treat all callers as one
    /// and show each of them all boxes.
    fn has_caller_identity(&self) -> bool {
        false
    }

    /// Maximum number of concurrent calls of one caller. [`Caller::Local`] has no limit.
    fn max_calls_per_caller(&self) -> usize {
        usize::MAX
    }

    /// Whether the runtime ends with the service.
    ///
    /// If so, the service asks the runtime to shut down before it calls [`dispose`](Self::dispose).
    fn owns_runtime(&self) -> bool;
}

fn disposed() -> BoxError {
    BoxError::unavailable("the connector is disposed")
}

/// State of a connector.
#[derive(Debug)]
enum ConnectorState<T> {
    Idle,
    Connected(T),
    Disposed,
}

fn lock<T>(state: &Mutex<ConnectorState<T>>) -> MutexGuard<'_, ConnectorState<T>> {
    // Only assignments run under the lock.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects to a runtime in this process, with one pair of queues per caller.
#[derive(Debug)]
pub struct InProcess {
    router: Router,
    owns_runtime: bool,
    calls_per_caller: usize,
    state: Mutex<ConnectorState<HashMap<Caller, Pair>>>,
}

/// Both ends of an in-process connection.
#[derive(Debug)]
struct Pair {
    near: Session,
    #[allow(dead_code, reason = "keeps the runtime's end open")]
    far: Session,
}

impl InProcess {
    /// Creates a connector to the runtime behind `router`.
    pub fn new(router: Router) -> Self {
        Self {
            router,
            owns_runtime: false,
            calls_per_caller: IN_PROCESS_CALLS,
            state: Mutex::new(ConnectorState::Idle),
        }
    }

    /// Limits the concurrent calls, and the streams, of a caller over all connections.
    /// Calls above the limit fail with `overloaded`. [`Caller::Local`] has no limit.
    pub fn calls_per_caller(mut self, calls: usize) -> Self {
        self.calls_per_caller = calls.clamp(1, IN_PROCESS_CALLS);
        self
    }

    /// Shuts the runtime down when the service is disposed.
    pub fn owning_runtime(mut self) -> Self {
        self.owns_runtime = true;
        self
    }
}

#[async_trait]
impl Connector for InProcess {
    fn max_calls_per_caller(&self) -> usize {
        self.calls_per_caller
    }

    async fn connect(&self, caller: &Caller) -> Result<RuntimeClient, BoxError> {
        let mut state = lock(&self.state);
        if let ConnectorState::Idle = *state {
            *state = ConnectorState::Connected(HashMap::new());
        }
        let ConnectorState::Connected(pairs) = &mut *state else {
            return Err(disposed());
        };
        pairs.retain(|_, pair| !pair.near.peer().is_closed());
        if pairs.len() >= MAX_CALLERS {
            let what = "the number of callers";
            return Err(BoxError::limit(
                Code::Capacity,
                what,
                "max_callers",
                MAX_CALLERS,
            ));
        }
        let mut limits = Limits::in_process();
        let calls = if *caller == Caller::Local {
            IN_PROCESS_CALLS
        } else {
            self.calls_per_caller
        };
        limits.in_flight = calls;
        limits.open_streams = calls;
        let options = |caller| Options {
            limits: limits.clone(),
            ..Options::new(caller)
        };
        let (near, far) = queue::pair(QUEUE_MESSAGES);
        let far = Session::start(far, self.router.clone(), options(caller.clone()));
        let near = Session::start(near, Router::empty(), options(Caller::Anonymous));
        let client = near.peer().into();
        pairs.insert(caller.clone(), Pair { near, far });
        Ok(client)
    }

    fn has_caller_identity(&self) -> bool {
        true
    }

    fn dispose(&self) {
        *lock(&self.state) = ConnectorState::Disposed;
    }

    fn owns_runtime(&self) -> bool {
        self.owns_runtime
    }
}

/// Connects to an endpoint and reconnects after the connection is lost.
///
/// A `stdio:` endpoint is a child process. The connector starts it, restarts it when it dies and ends it with the
/// service.
///
/// The remote runtime sees one caller for all calls, because it knows only the token of the connection.
pub struct EndpointConnector {
    endpoint: Endpoint,
    connect: ConnectOptions,
    options: ReconnectOptions,
    first_connection: Duration,
    state: Mutex<ConnectorState<Arc<Reconnecting>>>,
    disposed: watch::Sender<bool>,
}

impl fmt::Debug for EndpointConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointConnector")
            .field("endpoint", &self.endpoint)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl EndpointConnector {
    /// Creates a connector to this endpoint.
    pub fn new(endpoint: Endpoint, connect: ConnectOptions, options: ReconnectOptions) -> Self {
        Self {
            endpoint,
            connect,
            options,
            first_connection: Duration::from_secs(30),
            state: Mutex::new(ConnectorState::Idle),
            disposed: watch::Sender::new(false),
        }
    }

    /// Sets the timeout of the first connection; the default is 30 seconds.
    /// After the timeout, the connector keeps trying in the background.
    pub fn first_connection(mut self, within: Duration) -> Self {
        self.first_connection = within;
        self
    }

    /// Returns the connection, and whether this call created it.
    fn connection(&self) -> Result<(Arc<Reconnecting>, bool), BoxError> {
        let mut state = lock(&self.state);
        match &*state {
            ConnectorState::Disposed => Err(disposed()),
            ConnectorState::Connected(connection) => Ok((Arc::clone(connection), false)),
            ConnectorState::Idle => {
                let connection = Arc::new(Reconnecting::to(
                    self.endpoint.clone(),
                    self.connect.clone(),
                    self.options.clone(),
                ));
                *state = ConnectorState::Connected(Arc::clone(&connection));
                Ok((connection, true))
            }
        }
    }
}

#[async_trait]
impl Connector for EndpointConnector {
    async fn connect(&self, _caller: &Caller) -> Result<RuntimeClient, BoxError> {
        let mut end = self.disposed.subscribe();
        let (connection, new) = self.connection()?;
        if new {
            tokio::select! {
                // The order matters: `dispose` also ends the connection, and the caller must see that reason.
                biased;
                _ = end.wait_for(|disposed| *disposed) => return Err(disposed()),
                connected = connection.connected_within(self.first_connection) => { connected?; }
            }
        }
        Ok(RuntimeClient::from(&connection))
    }

    fn dispose(&self) {
        self.disposed.send_replace(true);
        if let ConnectorState::Connected(connection) =
            std::mem::replace(&mut *lock(&self.state), ConnectorState::Disposed)
        {
            connection.close();
        }
    }

    fn owns_runtime(&self) -> bool {
        matches!(self.endpoint, Endpoint::Stdio { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_ends_with_the_service_that_started_it() {
        for (endpoint, started) in [
            ("stdio:boxd stdio", true),
            ("unix:/run/box.sock", false),
            ("tcp://127.0.0.1:1", false),
            ("queue:box", false),
        ] {
            let endpoint = endpoint.parse().unwrap();
            let connection = EndpointConnector::new(
                endpoint,
                ConnectOptions::default(),
                ReconnectOptions::default(),
            );
            assert_eq!(connection.owns_runtime(), started, "{connection:?}");
        }
        assert!(!InProcess::new(Router::empty()).owns_runtime());
        assert!(
            InProcess::new(Router::empty())
                .owning_runtime()
                .owns_runtime()
        );
    }

    #[tokio::test]
    async fn a_disposed_connector_refuses_to_connect() {
        let connector = InProcess::new(Router::empty());
        let client = connector.connect(&Caller::Local).await.unwrap();
        assert!(!client.is_closed());
        connector.dispose();
        assert!(connector.connect(&Caller::Local).await.is_err());
        let waited = async {
            while !client.is_closed() {
                tokio::task::yield_now().await;
            }
        };
        let ended = tokio::time::timeout(Duration::from_secs(10), waited).await;
        assert!(ended.is_ok(), "the connection outlives its connector");
    }

    /// Handler that never answers.
    struct Silent;

    impl box_rpc::Handle<box_protocol::actions::SystemHealth> for Silent {
        async fn handle(
            &self,
            _: box_rpc::Empty,
            _: box_rpc::Call<box_protocol::actions::SystemHealth>,
        ) -> Result<box_protocol::actions::BackendInfo, BoxError> {
            std::future::pending().await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_caller_has_a_call_limit_except_local() {
        use box_protocol::actions::SystemHealth;
        let router = Router::builder(Arc::new(Silent))
            .on::<SystemHealth>()
            .build();
        let connector = InProcess::new(router).calls_per_caller(2);
        let outcome = async |caller: Caller| {
            let client = connector.connect(&caller).await.unwrap();
            let call =
                || client.call_within::<SystemHealth>(&box_rpc::Empty {}, Duration::from_secs(1));
            let (_, _, third) = tokio::join!(call(), call(), call());
            third.unwrap_err().code()
        };
        assert_eq!(outcome(Caller::token("ann")).await, Code::Overloaded);
        assert_eq!(outcome(Caller::Local).await, Code::Timeout);
    }

    #[tokio::test(start_paused = true)]
    async fn dispose_cancels_a_pending_connection() {
        let endpoint = "queue:box-service-no-listener".parse().unwrap();
        let options = ReconnectOptions::default();
        let connection = Arc::new(EndpointConnector::new(
            endpoint,
            ConnectOptions::default(),
            options,
        ));
        let connecting = tokio::spawn({
            let connection = Arc::clone(&connection);
            async move { connection.connect(&Caller::Local).await }
        });
        tokio::task::yield_now().await;
        let before = tokio::time::Instant::now();
        connection.dispose();
        let error = connecting.await.unwrap().unwrap_err();
        assert_eq!(error.message(), "the connector is disposed");
        assert_eq!(before.elapsed(), Duration::ZERO);
    }
}
