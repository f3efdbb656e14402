//! `BoxService`: the handle of the policy layer.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use box_protocol::actions::{
    BoxDelete, BoxDeleteParams, BoxList, BoxListParams, RecentError, SystemHealth, SystemShutdown,
    SystemShutdownParams, SystemStatus, SystemStatusResult,
};
use box_protocol::{BoxError, BoxId, BoxInfo, BoxProfile, GatewayName};
use box_rpc::{Caller, Empty, Turns};

use crate::audit::{self, Origin};
use crate::client::RuntimeClient;
use crate::config::ServiceConfig;
use crate::connector::Connector;
use crate::errors::ErrorRing;
use crate::gateway::Calls;
use crate::paths;
use crate::policy::Policy;
use crate::session_id::SessionIdTemplate;
use crate::status::ServiceStatus;

/// Timeout of the runtime's shutdown after [`BoxService::dispose`].
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout for a runtime to report its status.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);

/// The policy layer. Cheap to clone; all clones are one service.
#[derive(Clone)]
pub struct BoxService(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    rules: RwLock<Arc<Rules>>,
    runtime: Runtime,
    errors: ErrorRing,
    disposed: AtomicBool,
    pub(crate) calls: Calls,
    /// Keeps the calls of one caller in order while the service forwards them.
    pub(crate) turns: Turns<Caller>,
}

/// Configuration of the operator, with the values derived from it.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) config: ServiceConfig,
    pub(crate) policy: Policy,
    /// Policies of callers that have a separate one.
    policies: BTreeMap<String, Policy>,
    /// Profiles of gateways that have a separate one.
    gateways: BTreeMap<String, BoxProfile>,
    pub(crate) template: SessionIdTemplate,
}

impl Rules {
    fn new(config: ServiceConfig) -> Result<Arc<Self>, BoxError> {
        let policy = config.policy()?;
        Ok(Arc::new(Self {
            policies: config.policies(&policy)?,
            gateways: config.gateway_profiles()?,
            policy,
            template: SessionIdTemplate::parse(&config.session_id_template)?,
            config,
        }))
    }

    /// Returns the policy for this caller's requests.
    pub(crate) fn policy_for(&self, caller: &Caller) -> &Policy {
        self.policy_of(&caller.name())
    }

    /// Returns the policy for the boxes of this owner.
    pub(crate) fn policy_of(&self, owner: &str) -> &Policy {
        self.policies.get(owner).unwrap_or(&self.policy)
    }

    /// Returns the policy for this caller's requests through a gateway.
    ///
    /// The gateway itself must say which one it is. A caller could choose any value of `spec.gateway`.
    pub(crate) fn policy_through(&self, caller: &Caller, gateway: &GatewayName) -> Cow<'_, Policy> {
        let policy = self.policy_for(caller);
        match self.gateways.get(gateway.as_str()) {
            None => Cow::Borrowed(policy),
            Some(profile) => Cow::Owned(Policy {
                profile: profile.clone(),
                ..policy.clone()
            }),
        }
    }

    /// Creates the default workspaces of all callers, unless boxes are off.
    async fn create_workspaces(&self) -> Result<(), BoxError> {
        let policies = self.policies.values().chain([&self.policy]);
        let policies = policies.filter(|policy| self.config.enabled && policy.shared_filesystem);
        for policy in policies {
            let Some(workspace) = policy.default_host_workspace.clone() else {
                continue;
            };
            let (roots, private) = (
                policy.allowed_host_mount_roots.clone(),
                policy.private.clone(),
            );
            blocking(move || paths::create_workspace(&workspace, &roots, &private)).await?;
        }
        Ok(())
    }
}

/// How the service reaches its runtime.
enum Runtime {
    /// Over a connection that the host program owns.
    Injected(RuntimeClient),
    /// Over one connection per caller, which the service makes.
    Connector {
        connector: Arc<dyn Connector>,
        clients: Mutex<HashMap<Caller, RuntimeClient>>,
        /// Held while connecting, so that concurrent first calls connect once.
        connecting: tokio::sync::Mutex<()>,
    },
}

impl fmt::Debug for BoxService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoxService")
            .field("rules", &self.rules())
            .finish_non_exhaustive()
    }
}

impl BoxService {
    /// Creates a service over an existing connection, which the caller owns and ends.
    /// The runtime attributes all calls to the caller of that connection.
    pub fn with_client(
        config: ServiceConfig,
        client: impl Into<RuntimeClient>,
    ) -> Result<Self, BoxError> {
        Self::new(config, Runtime::Injected(client.into()), usize::MAX)
    }

    /// Creates a service that connects itself.
    /// It connects on [`initialize`](Self::initialize) or on the first call.
    pub fn with_connector(
        config: ServiceConfig,
        connector: impl Connector,
    ) -> Result<Self, BoxError> {
        let calls = connector.max_calls_per_caller();
        let runtime = Runtime::Connector {
            connector: Arc::new(connector),
            clients: Mutex::default(),
            connecting: tokio::sync::Mutex::new(()),
        };
        Self::new(config, runtime, calls)
    }

    fn new(config: ServiceConfig, runtime: Runtime, calls: usize) -> Result<Self, BoxError> {
        Ok(Self(Arc::new(Inner {
            rules: RwLock::new(Rules::new(config)?),
            runtime,
            errors: ErrorRing::default(),
            disposed: AtomicBool::new(false),
            calls: Calls::new(calls),
            turns: Turns::default(),
        })))
    }

    /// Replaces the rules and creates their default workspaces.
    /// Running calls continue under the old rules. If the new rules are refused, the old ones stay in force.
    pub async fn reload(&self, config: ServiceConfig) -> Result<(), BoxError> {
        let rules = Rules::new(config)?;
        rules.create_workspaces().await?;
        *self.0.rules.write().unwrap_or_else(PoisonError::into_inner) = rules;
        self.decide_pools().await;
        Ok(())
    }

    /// Returns the current rules. A call takes them once.
    pub(crate) fn rules(&self) -> Arc<Rules> {
        let rules = self.0.rules.read();
        Arc::clone(&rules.unwrap_or_else(PoisonError::into_inner))
    }

    /// Creates the default workspace and connects to the runtime.
    ///
    /// Fails for errors that only an operator can fix: a workspace outside the allowed roots, or one that cannot be
    /// created. If the runtime is unreachable, [`status`](Self::status) reports it and each call tries to connect
    /// again.
    pub async fn initialize(&self) -> Result<(), BoxError> {
        let rules = self.rules();
        if !rules.config.enabled {
            return Ok(());
        }
        rules.create_workspaces().await?;
        match self.check_runtime().await {
            Ok(()) => self.decide_pools().await,
            Err(error) => tracing::warn!(%error, "runtime unreachable"),
        }
        Ok(())
    }

    async fn check_runtime(&self) -> Result<(), BoxError> {
        let client = self.client().await?;
        if let Runtime::Injected(_) = self.0.runtime {
            client
                .call_within::<SystemHealth>(&Empty {}, STATUS_TIMEOUT)
                .await?;
        }
        Ok(())
    }

    /// Returns the client of the runtime.
    /// A service with a connector connects first.
    pub async fn client(&self) -> Result<RuntimeClient, BoxError> {
        self.client_for(&Caller::Local).await
    }

    /// Returns the client of the runtime for the calls of this caller.
    pub(crate) async fn client_for(&self, caller: &Caller) -> Result<RuntimeClient, BoxError> {
        if !self.rules().config.enabled {
            return Err(BoxError::unavailable(
                "policy.enabled: boxes are disabled; set it to true",
            ));
        }
        self.check_not_disposed()?;
        let has_identity = match &self.0.runtime {
            Runtime::Injected(_) => false,
            Runtime::Connector { connector, .. } => connector.has_caller_identity(),
        };
        if *caller != Caller::Local && !has_identity {
            return Err(BoxError::denied(
                "the remote runtime does not support per-caller identity; only local calls are allowed",
            ));
        }
        match &self.0.runtime {
            Runtime::Injected(client) => Ok(client.clone()),
            Runtime::Connector {
                connector,
                clients,
                connecting,
            } => {
                let current = || {
                    let client = lock(clients).get(caller).cloned();
                    client.filter(|client| !client.is_closed())
                };
                if let Some(client) = current() {
                    return Ok(client);
                }
                let _turn = connecting.lock().await;
                if let Some(client) = current() {
                    return Ok(client);
                }
                let connected = connector.connect(caller).await?;
                let mut clients = lock(clients);
                clients.retain(|_, client| !client.is_closed());
                clients.insert(caller.clone(), connected.clone());
                drop(clients);
                self.check_not_disposed()?;
                Ok(connected)
            }
        }
    }

    fn check_not_disposed(&self) -> Result<(), BoxError> {
        if self.0.disposed.load(Ordering::Acquire) {
            return Err(BoxError::unavailable("the service is disposed"));
        }
        Ok(())
    }

    /// Returns the status of the runtime and of the service; never fails.
    pub async fn status(&self) -> ServiceStatus {
        self.status_for(&Caller::Local).await
    }

    /// Returns the status as this caller may see it.
    pub(crate) async fn status_for(&self, caller: &Caller) -> ServiceStatus {
        let request = async {
            let client = self.client_for(caller).await?;
            client
                .call_within::<SystemStatus>(&Empty {}, STATUS_TIMEOUT)
                .await
        };
        let (mut runtime, connector_error) = match request.await {
            Ok(status) => (status, None),
            Err(error) => (
                SystemStatusResult::default(),
                Some(error.message().to_owned()),
            ),
        };
        runtime.profile = Some(self.profile().name.as_str().to_owned());
        runtime.recent_errors = self.0.errors.visible_to(caller);
        runtime.recent_error_count = runtime.recent_errors.len() as u64;
        ServiceStatus {
            available: runtime.backend.available,
            enabled: self.rules().config.enabled,
            connector_error,
            runtime,
        }
    }

    /// Returns the last errors of executions, oldest first.
    /// The service keeps at most [`RECENT_ERRORS`](crate::RECENT_ERRORS).
    pub fn recent_errors(&self) -> Vec<RecentError> {
        self.0.errors.visible_to(&Caller::Local)
    }

    /// Lists the boxes of the runtime.
    pub async fn sessions(&self) -> Result<Vec<BoxInfo>, BoxError> {
        let mut sessions = Vec::new();
        let mut params = BoxListParams::default();
        let client = self.client().await?;
        loop {
            let page = client.call::<BoxList>(&params).await?;
            let more = !page.items.is_empty();
            sessions.extend(page.items);
            match page.next {
                Some(next) if more => params.after = Some(next),
                _ => return Ok(sessions),
            }
        }
    }

    /// Deletes a box, after a running execution in it has ended.
    pub async fn delete_session(&self, session_id: BoxId) -> Result<(), BoxError> {
        let params = BoxDeleteParams {
            box_id: session_id,
            force: false,
        };
        let client = self.client().await?;
        client.call::<BoxDelete>(&params).await.map(drop)
    }

    /// Ends every box of the runtime. The runtime keeps serving.
    pub async fn shutdown(&self) -> Result<(), BoxError> {
        shut_down(&self.client().await?).await
    }

    /// Ends everything this service started, without waiting.
    ///
    /// This covers the connections of its connector and the boxes of a runtime that it owns. It does not touch a
    /// client passed to it. Calls fail from now on.
    pub fn dispose(&self) {
        if self.0.disposed.swap(true, Ordering::AcqRel) {
            return;
        }
        let Runtime::Connector {
            connector, clients, ..
        } = &self.0.runtime
        else {
            return;
        };
        let mut clients = std::mem::take(&mut *lock(clients));
        let has_runtime = !clients.is_empty() && connector.owns_runtime();
        match tokio::runtime::Handle::try_current() {
            Ok(tasks) if has_runtime => {
                let connector = Arc::clone(connector);
                tasks.spawn(async move {
                    let end = async {
                        let client = match clients.remove(&Caller::Local) {
                            Some(client) => client,
                            None => connector.connect(&Caller::Local).await?,
                        };
                        shut_down(&client).await
                    };
                    let ended = tokio::time::timeout(SHUTDOWN_TIMEOUT, end).await;
                    if !matches!(ended, Ok(Ok(()))) {
                        tracing::warn!("runtime shutdown not confirmed");
                    }
                    connector.dispose();
                });
            }
            _ => connector.dispose(),
        }
    }

    /// Returns the active profile.
    pub fn profile(&self) -> BoxProfile {
        self.rules().policy.profile.clone()
    }

    /// Returns the resolved root of all directories shared with boxes.
    pub fn shared_host_root(&self) -> Option<PathBuf> {
        self.rules().policy.shared_host_root.clone()
    }

    /// Returns the resolved workspace of a box that names none.
    pub fn default_host_workspace(&self) -> Option<PathBuf> {
        self.rules().policy.default_host_workspace.clone()
    }

    /// Returns the resolved roots from which host paths may be mounted.
    pub fn allowed_host_mount_roots(&self) -> Vec<PathBuf> {
        self.rules().policy.allowed_host_mount_roots.clone()
    }

    /// Records a failure in the recent errors and the audit log; returns the outcome.
    pub(crate) fn record_outcome<T>(
        &self,
        action: &str,
        origin: &Origin,
        outcome: Result<T, BoxError>,
    ) -> Result<T, BoxError> {
        if let Err(error) = &outcome {
            self.0.errors.record(error, origin);
            audit::failed(action, origin, error);
        }
        outcome
    }
}

/// Only assignments and copies run under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn shut_down(client: &RuntimeClient) -> Result<(), BoxError> {
    let params = SystemShutdownParams {
        exit: false,
        within_ms: u64::try_from(SHUTDOWN_TIMEOUT.as_millis()).ok(),
    };
    client.call::<SystemShutdown>(&params).await.map(drop)
}

/// Runs blocking file system work on a thread for blocking work.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BoxError> + Send + 'static,
) -> Result<T, BoxError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(BoxError::internal("file system task failed")))
}
