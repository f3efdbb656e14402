//! A runtime and its policy layer in this process, for `run`, `image`, `stdio` and `serve`.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use box_catalog::Catalog;
use box_client::{BoxClient, ClientOptions, Endpoint};
use box_protocol::BoxError;
use box_rpc::{Caller, Options};
use box_runtime::{Backend, BoxRuntime, RuntimeConfig};
use box_service::connector::InProcess;
use box_service::{BoxService, ServiceConfig};
use box_transports::ListenOptions;
use box_transports::server::Server;

use crate::backend;
use crate::config::{self, Config, Values};

/// The in-process endpoint of the service.
const ENDPOINT: &str = "queue:boxd";

/// A runtime, its service and its backend.
pub(crate) struct EmbeddedServer {
    pub(crate) runtime: BoxRuntime,
    pub(crate) service: BoxService,
    backend: Arc<dyn Backend>,
}

impl fmt::Debug for EmbeddedServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Boxes")
            .field("runtime", &self.runtime)
            .field("service", &self.service)
            .field("backend", &self.backend.name())
            .finish()
    }
}

impl EmbeddedServer {
    /// Starts a runtime. With a state directory, its boxes outlive this process.
    pub(crate) fn start(
        config: &Config,
        state: Option<&Path>,
        policy: ServiceConfig,
    ) -> Result<Self> {
        let section = &config.runtime;
        let backend = backend::from_config(config, state)?;
        let mut runtime = RuntimeConfig::new(vec![Arc::clone(&backend)]);
        runtime.idle_ttl = Duration::from_secs(section.idle_ttl_sec);
        runtime.command_retention = Duration::from_secs(section.command_retention_sec);
        runtime.max_boxes = section.max_boxes;
        runtime.max_boxes_per_caller = section.max_boxes_per_token;
        runtime.queued_calls = section.queued_calls;
        runtime.start_timeout = Duration::from_secs(section.start_timeout_sec);
        runtime.stop_timeout = Duration::from_secs(section.stop_timeout_sec);
        runtime.ends_file = state.map(|state| state.join("ends"));
        let limits = box_catalog::Limits {
            max_volume_mb: section.max_volume_mb,
            max_volumes_mb_per_owner: section.max_volumes_mb_per_owner,
            max_snapshots_mb_per_owner: section.max_snapshots_mb_per_owner,
            ..box_catalog::Limits::default()
        };
        let catalog = state.map(|state| open_catalog(state, limits));
        runtime.catalog = catalog.transpose()?;
        runtime.decided_pools = true;
        runtime.state_dir = state.map(Path::to_owned);
        let store = state.map(std::path::Path::to_owned);
        // Without a home directory, boxes without an image still work.
        let store = store.or_else(|| config.state_dir().ok());
        let images = store.map(|store| config.images(&store));
        runtime.images = images.transpose()?;
        Self::assemble(config, runtime, backend, policy)
    }

    /// Starts a runtime without boxes, for the images of the state directory.
    pub(crate) fn for_images(config: &Config) -> Result<Self> {
        let state = config.state_dir()?;
        // The backend finds the boxes that a server has left, which may use images.
        let backend = backend::from_config(config, Some(&state))?;
        let mut runtime = RuntimeConfig::new(vec![Arc::clone(&backend)]);
        runtime.images = Some(config.images(&state)?);
        Self::assemble(config, runtime, backend, config.policy.clone())
    }

    fn assemble(
        config: &Config,
        runtime: RuntimeConfig,
        backend: Arc<dyn Backend>,
        policy: ServiceConfig,
    ) -> Result<Self> {
        let runtime = BoxRuntime::start(runtime);
        let calls = config.server.calls_per_token;
        let connector = InProcess::new(runtime.router()).calls_per_caller(calls);
        let service = BoxService::with_connector(policy, connector)
            .map_err(|error| config::policy_error(&error, &Values::new()))?;
        Ok(Self {
            runtime,
            service,
            backend,
        })
    }

    /// Applies the parts of a configuration that can change while boxes run.
    pub(crate) async fn reload(&self, config: Config) -> Result<()> {
        self.service.reload(config.policy).await?;
        self.backend.set_egress_policy(&config.network.policy())?;
        Ok(())
    }

    /// A client in this process. The caller must keep the returned server.
    pub(crate) async fn client(&self) -> Result<(BoxClient, Server)> {
        let endpoint: Endpoint = ENDPOINT.parse()?;
        let listener = endpoint.listen(&ListenOptions::default()).await?;
        let server = Server::start(listener, self.service.router(), |_| {
            Options::new(Caller::Local)
        });
        let client = BoxClient::connect(endpoint, ClientOptions::default()).await?;
        Ok((client, server))
    }
}

/// Opens the catalog of a state directory.
fn open_catalog(state: &Path, limits: box_catalog::Limits) -> Result<Arc<Catalog>> {
    let opened = Catalog::open(&state.join("catalog"), limits);
    let catalog = opened.map_err(BoxError::from).with_context(|| {
        let state = state.display();
        format!("state directory {state} (--state-dir)")
    })?;
    Ok(Arc::new(catalog))
}
