//! Fork server of the backend, started on first use and restarted if it dies.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::Arc;

use box_protocol::BoxError;
use box_sys::{Error, ForkServer, ServerConfig};
use tokio::sync::Mutex;

use super::NativeConfig;
use super::error::sandbox_error;
use crate::backend::Availability;

#[derive(Debug)]
pub(super) struct Server {
    config: NativeConfig,
    running: Arc<Mutex<Option<Arc<ForkServer>>>>,
}

impl Server {
    pub(super) fn new(config: &NativeConfig) -> Self {
        Self {
            config: config.clone(),
            running: Arc::default(),
        }
    }

    /// Returns the fork server, and starts it if needed.
    pub(super) async fn running(&self) -> Result<Arc<ForkServer>, BoxError> {
        self.get_or_start()
            .await
            .map_err(|error| sandbox_error(&error))
    }

    async fn get_or_start(&self) -> Result<Arc<ForkServer>, Error> {
        if let Some(server) = &*self.running.lock().await
            && is_alive(server)
        {
            return Ok(Arc::clone(server));
        }
        // A separate task completes the start even if the caller stops waiting.
        let starting = tokio::spawn(running_or_new(
            Arc::clone(&self.running),
            self.config.clone(),
        ));
        starting.await.map_err(|_| Error::ServerGone)?
    }

    /// Returns the features of this machine, which a started server reports.
    pub(super) async fn availability(&self) -> Availability {
        match self.get_or_start().await {
            Ok(server) => Availability::Available {
                degraded: Vec::new(),
                missing: server.primitives().missing(),
            },
            Err(Error::Unavailable(what)) => Availability::Unavailable {
                reason: "this machine lacks features that boxes require".into(),
                missing: what.split(", ").map(str::to_owned).collect(),
            },
            Err(error) => Availability::unavailable(sandbox_error(&error).message()),
        }
    }
}

/// Returns the running server, or starts one.
async fn running_or_new(
    running: Arc<Mutex<Option<Arc<ForkServer>>>>,
    config: NativeConfig,
) -> Result<Arc<ForkServer>, Error> {
    let mut running = running.lock().await;
    if let Some(server) = &*running
        && is_alive(server)
    {
        return Ok(Arc::clone(server));
    }
    let starting = tokio::task::spawn_blocking(move || start(&config)).await;
    let server = Arc::new(starting.map_err(|_| Error::ServerGone)??);
    *running = Some(Arc::clone(&server));
    Ok(server)
}

fn start(config: &NativeConfig) -> Result<ForkServer, Error> {
    let settings = ServerConfig {
        cgroup_parent: config.cgroup_parent.clone(),
        spares: config.spares,
        disk: config.disk,
        ..ServerConfig::default()
    };
    let mut command = Command::new(&config.program);
    // Every box sees the server's name as its first process, so the name must not contain a host
    // path.
    command.arg0("box");
    if let Some((user, group)) = config.run_as {
        command.uid(user).gid(group);
    }
    ForkServer::start_command(command, &settings)
}

fn is_alive(server: &ForkServer) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/stat", server.pid()));
    // The state follows the name, which is in parentheses. A zombie is not alive.
    status.is_ok_and(|status| {
        let state = status
            .rsplit_once(") ")
            .map(|(_, rest)| rest.starts_with(['Z', 'X']));
        state == Some(false)
    })
}
