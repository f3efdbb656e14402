//! LangBot's Box runtime: frames, actions and the relay of managed processes.
//!
//! LangBot applies its own policy, so its calls go to the runtime directly. This module still refuses what LangBot's
//! own runtime would refuse: blocked host paths and exceeded limits. Other clients that send LangBot's frames are
//! subject to the operator's policy.
//!
//! # Reading order
//! 1. This file: [`LangBot`], all installations behind one server, and [`Installation`], one of them.
//! 2. `codec`: encodes and decodes the frames. `chunked` and `chunks`: split long frames into lines for pipes.
//! 3. `actions`: the table of actions and their requirements. `controls`: requests about other requests. `files`:
//!    requests that carry a file. `context`: the caller's workspace and its box names. `fence`: serves only the newest
//!    placement of a workspace.
//! 4. `exec`, `sessions`, `processes`, `storage`: the actions. `mounts`: which host paths they may name.
//! 5. `relay`: a managed process on a websocket, framed by line.
//! 6. `config`: the configuration from `box_init`. `admission`, `readiness`: installations that require grants.
//! 7. `view`: boxes as LangBot reads them. `errors`: error texts. `audit`: the audit log.

mod actions;
mod admission;
mod audit;
mod chunked;
mod chunks;
mod codec;
mod config;
mod context;
mod controls;
mod errors;
mod exec;
mod fence;
mod files;
mod mounts;
mod processes;
mod readiness;
mod relay;
mod sessions;
mod storage;
mod view;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use box_protocol::BoxError;
use box_rpc::{Codec, ControlPolicy, JsonRpc, Router};
use box_runtime::{BoxRuntime, Caller};
use box_service::BoxService;
use serde_json::{Map, Value};
use subtle::ConstantTimeEq as _;

use self::admission::Admission;
use self::config::Config;
use self::fence::Fence;
use self::mounts::MountPolicy;
use self::processes::Processes;
use self::readiness::Readiness;

pub use self::chunked::ChunkedConnection;
pub use self::codec::Frames;
pub use self::context::{Placement, is_instance};
pub use self::relay::{Relay, RelayRefused};

/// Codecs of an endpoint for all clients: JSON-RPC and LangBot's frames.
pub const ALL_CODECS: &[&dyn Codec] = &[&JsonRpc, &Frames];

/// The environment variable with the secret that LangBot and its runtime share.
pub const TOKEN_VARIABLE: &str = "LANGBOT_BOX_CONTROL_TOKEN";
/// The environment variable that names the only instance to serve.
pub const INSTANCE_VARIABLE: &str = "LANGBOT_BOX_TRUSTED_INSTANCE_UUID";
/// The environment variable with the initial configuration (see `box_init`).
pub const CONFIG_VARIABLE: &str = "LANGBOT_BOX_CONFIG";
/// The environment variable that allows grants without disk quotas.
pub const SOFT_STORAGE_VARIABLE: &str = "LANGBOT_BOX_ALLOW_UNSAFE_SOFT_STORAGE_LIMITS";
/// The header that names the instance.
pub const INSTANCE_HEADER: &str = "x-langbot-instance-id";
/// The header that names the workspace of a relay.
pub const WORKSPACE_HEADER: &str = "x-langbot-workspace-id";
/// The header with the generation of a relay's placement.
pub const GENERATION_HEADER: &str = "x-langbot-placement-generation";
/// The minimum length of the shared secret, in characters.
pub const TOKEN_CHARS: usize = 32;
/// LangBot's default port.
pub const PORT: u16 = 5410;

/// The operator's settings for LangBot.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// The only instance to serve.
    ///
    /// If unset, the gateway serves the first instance that connects with each token.
    pub instance: Option<String>,
    /// The initial configuration, in the format of `box_init`.
    pub config: Map<String, Value>,
    /// The caller that is LangBot itself, identified by its token or its pipes.
    ///
    /// The gateway accepts host paths and limits from this caller. All other callers are subject to the policy.
    pub trusted_caller: Option<Caller>,
    /// Host directories that the operator allows to be mounted.
    ///
    /// LangBot itself may mount them even where a path is blocked by default; other callers may mount nothing else.
    pub allowed_roots: Vec<PathBuf>,
    /// Resolved paths of the server's private files, which no box may mount.
    pub private: Vec<PathBuf>,
    /// Whether grants may be enforced without disk quotas.
    pub soft_storage: bool,
}

/// All LangBot installations behind one server, one per token.
#[derive(Debug)]
pub struct LangBot {
    runtime: BoxRuntime,
    service: BoxService,
    settings: Settings,
    installations: Mutex<HashMap<Caller, Arc<Installation>>>,
}

impl LangBot {
    /// Serves LangBot from this runtime, and other callers under this policy.
    pub fn new(
        runtime: BoxRuntime,
        service: BoxService,
        settings: Settings,
    ) -> Result<Self, BoxError> {
        // Reject an invalid configuration at startup, not at the first connection.
        let config = Config::default().merged(settings.config.clone())?;
        let mount_policy = MountPolicy {
            allowed: settings.allowed_roots.clone(),
            allow_unlisted: true,
            private: settings.private.clone(),
        };
        config.make_workspace(&mount_policy)?;
        Ok(Self {
            runtime,
            service,
            settings,
            installations: Mutex::default(),
        })
    }

    /// Returns the installation that this caller's connection belongs to.
    ///
    /// The first instance that connects belongs to the caller until the server exits, unless the operator has named
    /// one.
    pub fn installation(&self, caller: &Caller, instance: &str) -> Option<Arc<Installation>> {
        if !is_instance(instance) {
            return None;
        }
        let mut installations = self.installations();
        if let Some(installation) = installations.get(caller) {
            return is_same(&installation.instance, instance).then(|| Arc::clone(installation));
        }
        if let Some(expected) = &self.settings.instance
            && !is_same(expected, instance)
        {
            return None;
        }
        let installation = Installation::new(self, caller.clone(), instance);
        let installation = Arc::new(installation);
        installations.insert(caller.clone(), Arc::clone(&installation));
        drop(installations);
        installation.register_existing_processes();
        admission::end_with_expired_grants(Arc::downgrade(&installation));
        Some(installation)
    }

    /// Returns the installation of a caller that has connected before.
    pub fn known_installation(&self, caller: &Caller, instance: &str) -> Option<Arc<Installation>> {
        let installation = self.installations().get(caller).cloned()?;
        is_same(&installation.instance, instance).then_some(installation)
    }

    /// Returns every installation that has connected.
    pub fn all(&self) -> Vec<Arc<Installation>> {
        self.installations().values().cloned().collect()
    }

    fn installations(&self) -> MutexGuard<'_, HashMap<Caller, Arc<Installation>>> {
        self.installations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_same(one: &str, other: &str) -> bool {
    one.as_bytes().ct_eq(other.as_bytes()).into()
}

/// One LangBot installation: its configuration, its workspaces and its boxes.
#[derive(Debug)]
pub struct Installation {
    runtime: BoxRuntime,
    /// The owner of its boxes.
    owner: Caller,
    instance: String,
    mount_policy: MountPolicy,
    /// The policy for its boxes; `None` if the installation applies its own.
    policy: Option<BoxService>,
    config: RwLock<Arc<Config>>,
    fence: Fence,
    admission: Admission,
    readiness: Readiness,
    processes: Arc<Processes>,
    /// The number of shutdowns in progress.
    closing: AtomicUsize,
}

impl Installation {
    fn new(langbot: &LangBot, owner: Caller, instance: &str) -> Self {
        let settings = &langbot.settings;
        let is_trusted = settings.trusted_caller.as_ref() == Some(&owner);
        let config = Config::default().merged(settings.config.clone());
        let config = config.unwrap_or_default();
        let admission = Admission::new();
        admission.configure(&config);
        Self {
            runtime: langbot.runtime.clone(),
            owner,
            instance: instance.to_owned(),
            mount_policy: MountPolicy {
                allowed: settings.allowed_roots.clone(),
                allow_unlisted: is_trusted,
                private: settings.private.clone(),
            },
            policy: (!is_trusted).then(|| langbot.service.clone()),
            config: RwLock::new(Arc::new(config)),
            fence: Fence::default(),
            admission,
            readiness: Readiness::new(settings.soft_storage),
            processes: Arc::default(),
            closing: AtomicUsize::new(0),
        }
    }

    /// Returns LangBot's actions and the control policy for one connection.
    ///
    /// Only LangBot can open a `guarded` connection: over pipes, or with a token.
    pub fn serve(self: &Arc<Self>, guarded: bool) -> (Router, Arc<dyn ControlPolicy>) {
        actions::serve(self, guarded)
    }

    fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The caller identity for requests to the runtime.
    fn caller(&self) -> Caller {
        self.owner.clone()
    }

    /// The runtime for calls that may create a box, with LangBot's limit applied.
    fn runtime_for_create(&self) -> BoxRuntime {
        let limit = self.config().limits.max_sessions;
        self.runtime.with_max_boxes(limit)
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire) > 0
    }
}
