//! LangBot's Box runtime: its frames, its actions over them, and its relay of managed processes.
//!
//! LangBot brings its own policy, so for LangBot itself this speaks to the runtime directly; what stays here is what
//! LangBot's own runtime would refuse, too: places of the host that are never mounted, and its limits. Whoever else
//! speaks its dialect is under the operator's policy, as at every other door.
//!
//! # Reading order
//! 1. This file: [`LangBot`], all installations behind one server, and [`Host`], one of them.
//! 2. `codec`: its frames, as the engine writes and reads them; `stdio` and `pieces`: how long ones travel over pipes.
//! 3. `actions`: the table of actions, and what each asks of its caller; `controls`: what requests about those ask, `files`: those that carry a file. `context`: who asks, for which workspace,
//!    and the names of its boxes. `fence`: only the newest placement of a workspace is served.
//! 4. `exec`, `sessions`, `processes`, `storage`: the actions. `mounts`: which host paths they may name.
//! 5. `relay`: a managed process on a websocket, framed by line.
//! 6. `config`: what `box_init` says. `admission`, `readiness`: where only those with a grant are served.
//! 7. `view`: what LangBot reads of a box; `errors`: the texts; `trail`: the log.

mod actions;
mod admission;
mod codec;
mod config;
mod context;
mod controls;
mod errors;
mod exec;
mod fence;
mod files;
mod mounts;
mod pieces;
mod processes;
mod readiness;
mod relay;
mod sessions;
mod stdio;
mod storage;
mod trail;
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
use self::mounts::Places;
use self::processes::Processes;
use self::readiness::Readiness;

pub use self::codec::Frames;
pub use self::context::{Placement, is_instance};
pub use self::relay::{Relay, RelayRefused};
pub use self::stdio::InPieces;

/// What an endpoint offers that serves others beside LangBot: JSON-RPC and LangBot's frames.
pub const BOTH: &[&dyn Codec] = &[&JsonRpc, &Frames];

/// The variable with the secret that LangBot and its runtime share.
pub const TOKEN_VARIABLE: &str = "LANGBOT_BOX_CONTROL_TOKEN";
/// The variable with the one instance that is served.
pub const INSTANCE_VARIABLE: &str = "LANGBOT_BOX_TRUSTED_INSTANCE_UUID";
/// The variable with a configuration to begin with, as `box_init` carries it.
pub const CONFIG_VARIABLE: &str = "LANGBOT_BOX_CONFIG";
/// The variable that lets grants be enforced without quotas on disk.
pub const SOFT_STORAGE_VARIABLE: &str = "LANGBOT_BOX_ALLOW_UNSAFE_SOFT_STORAGE_LIMITS";
/// The header that names the instance.
pub const INSTANCE_HEADER: &str = "x-langbot-instance-id";
/// The header that names the workspace of a relay.
pub const WORKSPACE_HEADER: &str = "x-langbot-workspace-id";
/// The header with the generation of a relay's placement.
pub const GENERATION_HEADER: &str = "x-langbot-placement-generation";
/// The shortest secret.
pub const TOKEN_CHARS: usize = 32;
/// LangBot's port.
pub const PORT: u16 = 5410;

/// What an operator says about LangBot.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// The one instance that is served; without it, the first that comes with each token.
    pub instance: Option<String>,
    /// A configuration to begin with, as `box_init` carries it.
    pub config: Map<String, Value>,
    /// The caller that is LangBot itself, by its own token or its pipes: what that says about host paths and limits
    /// is taken. Everybody else is under the policy.
    pub decides: Option<Caller>,
    /// What the operator lets be mounted: for LangBot itself also where that is usually blocked, for others nothing
    /// else.
    pub opened_roots: Vec<PathBuf>,
    /// Real paths of the server's own, which no box may see.
    pub private: Vec<PathBuf>,
    /// Grants may be enforced without quotas on disk.
    pub soft_storage: bool,
}

/// Every LangBot installation behind one server: each token has its own.
#[derive(Debug)]
pub struct LangBot {
    runtime: BoxRuntime,
    service: BoxService,
    settings: Settings,
    hosts: Mutex<HashMap<Caller, Arc<Host>>>,
}

impl LangBot {
    /// Serves LangBot from this runtime, and others by this policy.
    pub fn new(
        runtime: BoxRuntime,
        service: BoxService,
        settings: Settings,
    ) -> Result<Self, BoxError> {
        // Refused now rather than at the first connection.
        let config = Config::default().merged(settings.config.clone())?;
        let places = Places {
            opened: settings.opened_roots.clone(),
            others: true,
            private: settings.private.clone(),
        };
        config.make_workspace(&places)?;
        Ok(Self {
            runtime,
            service,
            settings,
            hosts: Mutex::default(),
        })
    }

    /// The installation that this caller's connection belongs to. The first instance that comes is the caller's
    /// for as long as the server lives, unless the operator has named one.
    pub fn host(&self, caller: &Caller, instance: &str) -> Option<Arc<Host>> {
        if !is_instance(instance) {
            return None;
        }
        let mut hosts = self.hosts();
        if let Some(host) = hosts.get(caller) {
            return same(&host.instance, instance).then(|| Arc::clone(host));
        }
        if let Some(named) = &self.settings.instance
            && !same(named, instance)
        {
            return None;
        }
        let host = Host::new(self, caller.clone(), instance);
        let host = Arc::new(host);
        hosts.insert(caller.clone(), Arc::clone(&host));
        drop(hosts);
        host.look_for_processes();
        admission::end_with_their_grants(Arc::downgrade(&host));
        Some(host)
    }

    /// The installation of a caller that has connected before.
    pub fn known_host(&self, caller: &Caller, instance: &str) -> Option<Arc<Host>> {
        let host = self.hosts().get(caller).cloned()?;
        same(&host.instance, instance).then_some(host)
    }

    /// Every installation that has connected.
    pub fn all(&self) -> Vec<Arc<Host>> {
        self.hosts().values().cloned().collect()
    }

    fn hosts(&self) -> MutexGuard<'_, HashMap<Caller, Arc<Host>>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn same(one: &str, other: &str) -> bool {
    one.as_bytes().ct_eq(other.as_bytes()).into()
}

/// One LangBot installation: its configuration, its workspaces and its boxes.
#[derive(Debug)]
pub struct Host {
    runtime: BoxRuntime,
    /// The owner of its boxes.
    owner: Caller,
    instance: String,
    places: Places,
    /// Who decides about its boxes, if it does not do so itself.
    policy: Option<BoxService>,
    config: RwLock<Arc<Config>>,
    fence: Fence,
    admission: Admission,
    readiness: Readiness,
    processes: Arc<Processes>,
    /// Shutdowns under way.
    closing: AtomicUsize,
}

impl Host {
    fn new(langbot: &LangBot, owner: Caller, instance: &str) -> Self {
        let settings = &langbot.settings;
        let decides = settings.decides.as_ref() == Some(&owner);
        let config = Config::default().merged(settings.config.clone());
        let config = config.unwrap_or_default();
        let admission = Admission::new();
        admission.configure(&config);
        Self {
            runtime: langbot.runtime.clone(),
            owner,
            instance: instance.to_owned(),
            places: Places {
                opened: settings.opened_roots.clone(),
                others: decides,
                private: settings.private.clone(),
            },
            policy: (!decides).then(|| langbot.service.clone()),
            config: RwLock::new(Arc::new(config)),
            fence: Fence::default(),
            admission,
            readiness: Readiness::new(settings.soft_storage),
            processes: Arc::default(),
            closing: AtomicUsize::new(0),
        }
    }

    /// LangBot's actions, for one connection of this installation, and who may send control requests on it. Only LangBot
    /// can open a `guarded` one: over pipes, or with a token.
    pub fn serve(self: &Arc<Self>, guarded: bool) -> (Router, Arc<dyn ControlPolicy>) {
        actions::serve(self, guarded)
    }

    fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whom the runtime is asked as.
    fn caller(&self) -> Caller {
        self.owner.clone()
    }

    /// The runtime, for calls that may make a box: within LangBot's own limit.
    fn making(&self) -> BoxRuntime {
        let most = self.config().limits.max_sessions;
        self.runtime.with_max_boxes(most)
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire) > 0
    }
}
