//! Fork server of the backend, started on first use and restarted if it dies.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use box_protocol::BoxError;
use box_sys::{DiskKind, Error, ForkServer, ServerConfig};
use tokio::sync::Mutex;

use super::error::sandbox_error;
use super::{NativeConfig, disk};
use crate::backend::Availability;

#[derive(Debug)]
pub(super) struct Server {
    config: NativeConfig,
    running: Arc<Mutex<Option<Arc<ForkServer>>>>,
    /// Kind of disk of this machine, after the first request.
    disk: OnceLock<DiskKind>,
}

impl Server {
    pub(super) fn new(config: &NativeConfig) -> Self {
        Self {
            config: config.clone(),
            running: Arc::default(),
            disk: OnceLock::new(),
        }
    }

    /// Returns the kind of disk that boxes can have.
    pub(super) async fn disk_kind(&self) -> Result<DiskKind, BoxError> {
        if let Some(kind) = self.disk.get() {
            return Ok(*kind);
        }
        let server = self.running().await?;
        let asked = tokio::task::spawn_blocking(move || server.disk_kind()).await;
        let kind = asked.map_err(|_| Error::ServerGone).and_then(|kind| kind);
        let kind = kind.map_err(|error| sandbox_error(&error))?;
        Ok(*self.disk.get_or_init(|| kind))
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
        // A path of other bytes cannot be sent, and the machine then has directories only.
        disks: Some(disk::directory(config.state_dir.as_deref()))
            .filter(|path| path.to_str().is_some()),
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
