//! Where a service's own connection to a runtime comes from, and how it ends.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use box_protocol::{BoxError, Code};
use box_rpc::{Caller, Limits, Options, Router, Session};
use box_transports::link::{Link, LinkOptions};
use box_transports::{ConnectOptions, Endpoint, queue};
use tokio::sync::watch;

use crate::client::RuntimeClient;

/// Messages each direction of an in-process connection holds.
const QUEUE_MESSAGES: usize = 1024;

/// Calls, and streams, at once over an in-process connection. It carries the calls of every door,
/// each of which has bounds of its own.
const IN_PROCESS_CALLS: usize = 16 * 1024;

/// Callers an in-process connector keeps connections for.
const MAX_CALLERS: usize = 1024;

/// Makes the connection of a [`BoxService`](crate::BoxService) that was not given one.
#[async_trait]
pub trait Connector: fmt::Debug + Send + Sync + 'static {
    /// A way to the runtime for the calls of one caller; [`Caller::Local`] is the service itself. A box belongs
    /// to whoever made it, so where the runtime can be told who calls, each caller gets a connection
    /// of its own.
    ///
    /// Called for a new caller, and again when its last client [is over](RuntimeClient::is_over); never
    /// twice at once. Bounds its own time.
    async fn connect(&self, caller: &Caller) -> Result<RuntimeClient, BoxError>;

    /// Ends what [`connect`](Self::connect) started, also one that is under way, without waiting.
    /// Later calls of `connect` fail.
    fn dispose(&self);

    /// Whether the runtime learns who calls. Where it does not, the service serves nobody but itself:
    /// to the runtime everyone would be the same, and see everyone's boxes.
    fn tells_callers_apart(&self) -> bool {
        false
    }

    /// Whether the runtime ends with the service: then it is told so before
    /// [`dispose`](Self::dispose).
    fn owns_runtime(&self) -> bool;
}

fn disposed() -> BoxError {
    BoxError::unavailable("the connector is disposed")
}

/// What a connector has.
#[derive(Debug)]
enum Held<T> {
    Nothing,
    Connection(T),
    Disposed,
}

fn lock<T>(held: &Mutex<Held<T>>) -> MutexGuard<'_, Held<T>> {
    // Only assignments run under the lock.
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects to a runtime that lives in this process, by a joined pair of queues for each caller.
#[derive(Debug)]
pub struct InProcess {
    router: Router,
    owns_runtime: bool,
    calls_per_caller: usize,
    held: Mutex<Held<HashMap<Caller, Pair>>>,
}

/// Both ends of a connection.
#[derive(Debug)]
struct Pair {
    near: Session,
    #[allow(dead_code, reason = "held, not read")]
    far: Session,
}

impl InProcess {
    /// Connects to whoever serves `router`.
    pub fn new(router: Router) -> Self {
        Self {
            router,
            owns_runtime: false,
            calls_per_caller: IN_PROCESS_CALLS,
            held: Mutex::new(Held::Nothing),
        }
    }

    /// Lets a caller, over however many connections it comes, have so many calls at once, and as many streams. Beyond:
    /// `overloaded`. [`Caller::Local`] has no such limit.
    pub fn calls_per_caller(mut self, calls: usize) -> Self {
        self.calls_per_caller = calls.clamp(1, IN_PROCESS_CALLS);
        self
    }

    /// Shuts the runtime down with the service.
    pub fn owning_runtime(mut self) -> Self {
        self.owns_runtime = true;
        self
    }
}

#[async_trait]
impl Connector for InProcess {
    async fn connect(&self, caller: &Caller) -> Result<RuntimeClient, BoxError> {
        let mut held = lock(&self.held);
        if let Held::Nothing = *held {
            *held = Held::Connection(HashMap::new());
        }
        let Held::Connection(pairs) = &mut *held else {
            return Err(disposed());
        };
        pairs.retain(|_, pair| !pair.near.peer().is_closed());
        if pairs.len() >= MAX_CALLERS {
            let what = "a further caller";
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

    fn tells_callers_apart(&self) -> bool {
        true
    }

    fn dispose(&self) {
        *lock(&self.held) = Held::Disposed;
    }

    fn owns_runtime(&self) -> bool {
        self.owns_runtime
    }
}

/// Connects to an endpoint and comes back when the connection is lost. A `stdio:` endpoint is a
/// child process: it is started, started again when it dies, and ends with the service.
///
/// The other end sees one caller, whoever calls here: it knows the token of the connection only.
pub struct EndpointLink {
    endpoint: Endpoint,
    connect: ConnectOptions,
    options: LinkOptions,
    first_connection: Duration,
    held: Mutex<Held<Arc<Link>>>,
    over: watch::Sender<bool>,
}

impl fmt::Debug for EndpointLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointLink")
            .field("endpoint", &self.endpoint)
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

impl EndpointLink {
    /// Connects to this endpoint.
    pub fn new(endpoint: Endpoint, connect: ConnectOptions, options: LinkOptions) -> Self {
        Self {
            endpoint,
            connect,
            options,
            first_connection: Duration::from_secs(30),
            held: Mutex::new(Held::Nothing),
            over: watch::Sender::new(false),
        }
    }

    /// Waits at most this long for the first connection; 30 seconds unless said otherwise. It is
    /// tried for in the background after that.
    pub fn first_connection(mut self, within: Duration) -> Self {
        self.first_connection = within;
        self
    }

    /// The link, and whether it is new.
    fn link(&self) -> Result<(Arc<Link>, bool), BoxError> {
        let mut held = lock(&self.held);
        match &*held {
            Held::Disposed => Err(disposed()),
            Held::Connection(link) => Ok((Arc::clone(link), false)),
            Held::Nothing => {
                let link = Arc::new(Link::to(
                    self.endpoint.clone(),
                    self.connect.clone(),
                    self.options.clone(),
                ));
                *held = Held::Connection(Arc::clone(&link));
                Ok((link, true))
            }
        }
    }
}

#[async_trait]
impl Connector for EndpointLink {
    async fn connect(&self, _caller: &Caller) -> Result<RuntimeClient, BoxError> {
        let mut over = self.over.subscribe();
        let (link, new) = self.link()?;
        if new {
            tokio::select! {
                // In this order: disposing ends the link as well, and is the reason to report.
                biased;
                _ = over.wait_for(|over| *over) => return Err(disposed()),
                connected = link.connected_within(self.first_connection) => { connected?; }
            }
        }
        Ok(RuntimeClient::from(&link))
    }

    fn dispose(&self) {
        self.over.send_replace(true);
        if let Held::Connection(link) = std::mem::replace(&mut *lock(&self.held), Held::Disposed) {
            link.close();
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
            let link =
                EndpointLink::new(endpoint, ConnectOptions::default(), LinkOptions::default());
            assert_eq!(link.owns_runtime(), started, "{link:?}");
        }
        assert!(!InProcess::new(Router::empty()).owns_runtime());
        assert!(
            InProcess::new(Router::empty())
                .owning_runtime()
                .owns_runtime()
        );
    }

    #[tokio::test]
    async fn nothing_is_connected_after_dispose() {
        let connector = InProcess::new(Router::empty());
        let client = connector.connect(&Caller::Local).await.unwrap();
        assert!(!client.is_over());
        connector.dispose();
        assert!(connector.connect(&Caller::Local).await.is_err());
        let waited = async {
            while !client.is_over() {
                tokio::task::yield_now().await;
            }
        };
        let ended = tokio::time::timeout(Duration::from_secs(10), waited).await;
        assert!(ended.is_ok(), "the connection outlives its connector");
    }

    /// Never answers.
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
    async fn a_caller_has_a_limit_of_its_own_and_local_has_none() {
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
    async fn dispose_ends_a_connection_that_is_under_way() {
        let endpoint = "queue:nobody-listens-here".parse().unwrap();
        let options = LinkOptions::default();
        let link = Arc::new(EndpointLink::new(
            endpoint,
            ConnectOptions::default(),
            options,
        ));
        let connecting = tokio::spawn({
            let link = Arc::clone(&link);
            async move { link.connect(&Caller::Local).await }
        });
        tokio::task::yield_now().await;
        let before = tokio::time::Instant::now();
        link.dispose();
        let error = connecting.await.unwrap().unwrap_err();
        assert_eq!(error.message(), "the connector is disposed");
        assert_eq!(before.elapsed(), Duration::ZERO);
    }
}
