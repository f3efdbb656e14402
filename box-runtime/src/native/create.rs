//! Creation of a box: from a spec to a connected agent.
//!
//! # Steps
//! 1. The backend creates the state directory of the box, with the socket of its agent, and copies the artifacts
//!    among its mounts.
//! 2. `plan` converts the spec to a [`SandboxPlan`] and opens every host path without following a link. The policy
//!    layer has resolved the links before.
//! 3. The backend opens the volumes of the box (`volumes`). It creates the quota, a socket pair to the agent, the shared memory and the log file.
//! 4. The fork server (`box_sys::server`) forks a child with prepared namespaces and cgroups. The child builds its
//!    root from the passed descriptors and enters a user namespace without rights over its mounts.
//! 5. The child becomes the agent (`box-agent`). It holds one end of the socket pair; the other end is the
//!    connection of the runtime.
//! 6. If this machine has no network for boxes and the spec lists it as best effort, the backend repeats step 4
//!    without a network.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use box_protocol::error::Detail;
use box_protocol::{BoxError, Network};
use box_sys::{ForkServer, Sandbox, SandboxPlan};
use box_transports::unix;
use rustix::fs::MemfdFlags;

use super::artifacts::{self, ArtifactCopies};
use super::changes;
use super::disk::{self, Disk, Storage};
use super::error::{os_error, sandbox_error};
use super::live_box::{LiveBox, RecordFlag, artifact_dir};
use super::plan::BoxPlan;
use super::quota::{Limited, Quota};
use super::state::StateDir;
use super::{NativeBackend, plan, readable, shm, volumes};
use crate::backend::{Facts, StartRequest, StartedBox};
use crate::box_actor::carrier_limits;

impl NativeBackend {
    /// Creates a box and connects to its agent.
    pub(super) async fn create(&self, request: StartRequest<'_>) -> Result<StartedBox, BoxError> {
        let root = self.0.config.state_dir.as_deref();
        let state = root.map(|root| StateDir::new(root, request.id)).transpose();
        let (state, listener) = state.map_err(os_error)?.unzip();
        let (mounts, mut artifacts) = (&request.spec.extra_mounts, None);
        let mut copies =
            match artifact_dir(mounts, state.as_ref(), &mut artifacts, self.0.config.run_as)? {
                Some(dir) => artifacts::copy_artifacts(mounts, &dir).await?,
                None => ArtifactCopies::new(),
            };
        let storage = Storage::of(request.spec);
        let mut disk = match request.disk {
            Some(path) => Disk::of_earlier(path, storage).await.map_err(os_error)?,
            None => self.disk(storage, state.as_ref()).await?,
        };
        let BoxPlan {
            sandbox: mut plan,
            host_mounts,
            rootfs,
            image_user,
        } = plan::build(&request, &self.0.config, &mut copies, disk.scratch.clone())?;
        let quota = match request.spec.file_bytes() {
            Some(bytes) => Quota::of(Limited::Workspace, bytes, &host_mounts)
                .await
                .map_err(os_error)?,
            None => None,
        };
        let mut volumes = self
            .plan_volumes(request.volumes, host_mounts.len())
            .await?;
        plan::add_volumes(&mut plan, std::mem::take(&mut volumes.mounts))?;
        let (near, far) = UnixStream::pair().map_err(os_error)?;
        near.set_nonblocking(true).map_err(os_error)?;
        let (shm, shm_fd) = shm::create().map_err(os_error)?;
        let logs = state.as_ref().map_or_else(memory_logs, StateDir::logs);
        let logs = logs.map_err(os_error)?;
        let record_flag = state.as_ref().filter(|_| self.0.config.outlive);
        let record_flag = record_flag
            .map(|_| RecordFlag::new())
            .transpose()
            .map_err(os_error)?;
        let server = self.0.server.running().await?;
        let permit = self.0.starts.acquire().await;
        let of_host = host_mounts.iter().map(|mount| &mount.source);
        let sources: Vec<_> = of_host.chain(&volumes.sources).map(AsFd::as_fd).collect();
        let mut fds = vec![far.as_fd()];
        fds.extend(listener.as_ref().map(AsFd::as_fd));
        fds.push(shm_fd.as_fd());
        fds.push(logs.as_fd());
        fds.extend(record_flag.as_ref().map(AsFd::as_fd));
        let mut forked = fork(&server, &plan, &fds, &sources).await;
        if lacks_network(&forked) && request.is_best_effort("network") {
            plan.network = box_sys::Network::Loopback;
            forked = fork(&server, &plan, &fds, &sources).await;
        }
        // With the other ends closed, the runtime notices the death of the box.
        drop((far, listener, shm_fd, logs));
        let sandbox = forked.map_err(|error| create_error(&error))?;
        drop(permit);
        let mut missing = sandbox.missing().to_vec();
        if !disk.is_enforced() {
            missing.push(disk::LIMIT.to_owned());
        }
        if !volumes.enforced {
            missing.push(volumes::LIMIT.to_owned());
        }
        let live_box = LiveBox::new(sandbox, state, Some(storage.bytes()), record_flag);
        *live_box.artifacts() = artifacts;
        // The workspace is the first mount.
        let overlay = plan.mounts.iter().any(|mount| mount.overlay);
        let source = host_mounts.first().filter(|_| overlay);
        let workspace = source.map(|mount| changes::identity(&mount.source));
        let workspace = workspace.transpose().map_err(os_error)?;
        *live_box.temporary_disk() = disk.temporary.take();
        if let Some(path) = request.disk {
            let _ = live_box.earlier_disk.set(path.to_owned());
        }
        self.boxes().insert(request.id, Arc::clone(&live_box));
        let quotas = quota.into_iter().chain(disk.quota).chain(volumes.quotas);
        live_box.watch(quotas, self.0.config.outlive);
        let stream = tokio::net::UnixStream::from_std(near).map_err(os_error)?;
        let connection = unix::over(stream, &carrier_limits());
        let wants_network = request.spec.network == Network::On;
        let has_network = plan.network == box_sys::Network::Egress;
        let degraded = (wants_network && !has_network).then(|| "network".to_owned());
        let facts = Facts {
            image_resolved: request.image.and_then(|image| image.digest.clone()),
            rootfs: Some(rootfs.into()),
            missing,
            degraded: degraded.into_iter().collect(),
            image_user,
            workspace,
        };
        let started = StartedBox::new(request.id.simple().to_string(), connection);
        Ok(started.with_facts(facts).with_shm(shm))
    }
}

impl NativeBackend {
    /// Prepares the storage of a box's private files.
    async fn disk(&self, storage: Storage, state: Option<&StateDir>) -> Result<Disk, BoxError> {
        let (caps, shm) = match storage {
            Storage::Memory(caps) => return Ok(Disk::in_memory(caps)),
            Storage::Disk { caps, shm } => (caps, shm),
        };
        let kind = self.0.server.disk_kind().await?;
        let disk = Disk::new(kind, (caps, shm), state, self.0.config.run_as).await;
        disk.map_err(os_error)
    }
}

/// Requests a box from the fork server and waits for it.
async fn fork(
    server: &ForkServer,
    plan: &SandboxPlan,
    fds: &[BorrowedFd<'_>],
    sources: &[BorrowedFd<'_>],
) -> box_sys::Result<Sandbox> {
    let creation = server.start_create(plan, fds, sources)?;
    let ready = readable(creation.as_fd()).await;
    ready.map_err(|source| box_sys::Error::Step {
        step: "wait for the box".into(),
        source,
    })?;
    creation.finish()
}

/// Converts a failure to create a box.
fn create_error(error: &box_sys::Error) -> BoxError {
    match error {
        box_sys::Error::Unavailable(what) if what == box_sys::WORKSPACE_OVERLAY => {
            BoxError::unsupported(
                "host_path_mode: this machine has no overlay.workspace; use ro or rw",
            )
            .with_detail(&Detail::of_field("host_path_mode"))
        }
        error => sandbox_error(error),
    }
}

fn lacks_network(forked: &box_sys::Result<Sandbox>) -> bool {
    matches!(forked, Err(box_sys::Error::Unavailable(what)) if what == "network")
}

/// Creates the log file of a box that does not outlive this process.
///
/// The file is in memory, which the kernel accounts to the box.
fn memory_logs() -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create("box-logs", MemfdFlags::CLOEXEC)?)
}
