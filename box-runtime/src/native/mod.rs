//! Backend that creates boxes with this machine's kernel alone.
//!
//! # Reading order
//! 1. [`NativeConfig`]: every setting.
//! 2. This file: [`NativeBackend`] and its boxes. `live_box`: the state of one box.
//! 3. `create`: from a spec to a box with a connected agent. `plan`: the kernel objects of a box.
//!    `image_user`: the user of an image.
//! 4. `server`: the fork server. `diagnosis`: the features of this machine.
//! 5. `quota`: the size limit of a workspace. `disk`: the storage of private files. `artifacts`:
//!    mounts of content identified by a digest. `volumes`: directories that outlive boxes.
//! 6. `freeze`: pauses; `snapshot`: copies of private files; `stop`: the files of a stopped box;
//!    `changes`: the differences of files.
//! 7. `shm`: memory shared with the agent; `state`: the directory of a box on disk; `adopt`:
//!    adoption by a later process.
//! 8. `error`: errors of the backend.
//!
//! # End of a box
//! 1. `stop` kills the agent, which is the first process of the box. The kernel then kills all
//!    other processes of its pid namespace.
//! 2. A separate task removes the record, so that no later process adopts the box. It waits for the
//!    end of all processes without a timeout, even if the caller stops waiting.
//! 3. The task then removes the state directory and drops the mounts.

mod adopt;
mod artifacts;
mod changes;
mod config;
mod create;
mod diagnosis;
mod disk;
mod error;
mod freeze;
mod image_user;
mod live_box;
mod plan;
mod quota;
mod server;
mod shm;
mod snapshot;
mod state;
mod stop;
mod volumes;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use box_protocol::actions::{BoxApplyParams, BoxApplyResult, BoxStatsResult};
use box_protocol::{BoxError, BoxMountSpec, NetworkPolicy, UnixMs};
use box_sys::{Cgroups, Primitives, Source};
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;
use uuid::Uuid;

pub use self::config::NativeConfig;
use self::disk::DiskReport;
use self::error::{box_gone, os_error, record_error, sandbox_error};
use self::live_box::LiveBox;
use self::quota::{Limited, Quota, unmeasurable};
use self::server::Server;
use self::state::{StateDir, StoredBox};
use crate::backend::{
    Availability, Backend, Capabilities, ChangeList, ChangesRequest, Diagnosis, FoundBoxes, Layer,
    LayerFiles, Reach, Readable, Snapshot, SnapshotRequest, StartRequest, StartedBox,
};
use crate::egress::{Dialer, Egress, FakeIps};
use crate::volumes::Volumes;

/// Limit of concurrent starts.
///
/// The fork server begins one box after the other, and each box then finishes by itself. Further
/// starts wait here, so a request to the server never blocks.
const CONCURRENT_STARTS: usize = 32;

/// Limit of concurrent snapshots, which are bound by the disk.
const CONCURRENT_SNAPSHOTS: usize = 2;

/// Backend that creates boxes with this machine's kernel alone.
///
/// Clones share state. Boxes end when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct NativeBackend(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: NativeConfig,
    server: Server,
    starts: Semaphore,
    snapshots: Semaphore,
    /// Applies of stopped boxes are one at a time.
    stopped_turn: Arc<tokio::sync::Mutex<()>>,
    stop_turns: stop::StopTurns,
    dialer: Arc<Dialer>,
    boxes: Mutex<HashMap<Uuid, Arc<LiveBox>>>,
    /// Lock on the state directory.
    lock: OnceLock<File>,
    /// Cgroups of adopted boxes.
    adopted: OnceLock<Arc<Cgroups>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Boxes that do not outlive this process end with their server. The state directories of
        // the others stay for the next process.
        if !self.config.outlive {
            let boxes = self.boxes.get_mut().unwrap_or_else(PoisonError::into_inner);
            for live_box in boxes.values() {
                live_box.remove_state();
            }
        }
    }
}

impl NativeBackend {
    /// Creates a backend. It starts no box before the first request.
    pub fn new(config: NativeConfig) -> Self {
        Self(Arc::new(Inner {
            server: Server::new(&config),
            dialer: Arc::new(Dialer::new(config.egress.clone())),
            config,
            starts: Semaphore::new(CONCURRENT_STARTS),
            snapshots: Semaphore::new(CONCURRENT_SNAPSHOTS),
            stopped_turn: Arc::default(),
            stop_turns: stop::StopTurns::default(),
            boxes: Mutex::default(),
            lock: OnceLock::new(),
            adopted: OnceLock::new(),
        }))
    }

    fn boxes(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<LiveBox>>> {
        self.0.boxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state_of(&self, id: Uuid) -> Option<StateDir> {
        let root = self.0.config.state_dir.as_deref()?;
        Some(StateDir::of(root, id))
    }

    fn live_box(&self, id: Uuid) -> Option<Arc<LiveBox>> {
        self.boxes().get(&id).cloned()
    }

    /// Opens the outgoing network of a box, if it has egress sockets that are not in use.
    fn open_egress(
        &self,
        id: Uuid,
        live_box: &LiveBox,
        policy: NetworkPolicy,
    ) -> Result<(), BoxError> {
        let Some(sockets) = live_box.sandbox.take_egress_sockets() else {
            return Ok(());
        };
        let names = match live_box.state().as_ref() {
            Some(state) => state.names().and_then(FakeIps::load).map_err(os_error)?,
            None => FakeIps::default(),
        };
        let dialer = Arc::clone(&self.0.dialer);
        let egress = Egress::open(id, sockets, dialer, names, policy).map_err(os_error)?;
        let _ = live_box.egress.set(egress);
        Ok(())
    }
}

#[async_trait]
impl Backend for NativeBackend {
    fn name(&self) -> &'static str {
        "native"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
            .with_added_mounts()
            .with_network()
            .with_outliving(self.0.config.outlive)
    }

    async fn availability(&self) -> Availability {
        self.0.server.availability().await
    }

    async fn diagnose(&self) -> Diagnosis {
        let directory = disk::directory(self.0.config.state_dir.as_deref());
        let kind = self.0.server.disk_kind().await;
        let probe = move || {
            let disk = kind.map(|kind| DiskReport::new(kind, &directory)).ok();
            (Primitives::probe(), disk)
        };
        let found = tokio::task::spawn_blocking(probe).await;
        found.map_or_else(
            |_| Diagnosis::default(),
            |(found, disk)| diagnosis::of(&found, disk),
        )
    }

    fn set_egress_policy(&self, policy: &NetworkPolicy) -> Result<(), BoxError> {
        self.0.dialer.set_policy(policy.clone());
        for live_box in self.boxes().values() {
            if let Some(egress) = live_box.egress.get() {
                egress.recheck_policy();
            }
        }
        Ok(())
    }

    async fn start(&self, request: StartRequest<'_>) -> Result<StartedBox, BoxError> {
        self.create(request).await
    }

    async fn alive(&self, id: Uuid) -> bool {
        let live_box = self.live_box(id);
        live_box.is_some_and(|live_box| {
            matches!(live_box.sandbox.wait(Some(Duration::ZERO)), Ok(false))
        })
    }

    fn end_reason(&self, id: Uuid) -> Option<BoxError> {
        self.live_box(id)?.end_reason()
    }

    fn usage(&self, id: Uuid) -> Result<BoxStatsResult, BoxError> {
        let live_box = self.live_box(id).ok_or_else(box_gone)?;
        let usage = live_box.sandbox.usage();
        let measured = *live_box.measured();
        let cpu = usage.cpu.map(|cpu| cpu.as_micros());
        let traffic = live_box.egress.get().map(Egress::traffic);
        Ok(BoxStatsResult {
            at: UnixMs::now(),
            cpu_us: cpu.and_then(|cpu| u64::try_from(cpu).ok()),
            memory_bytes: usage.memory,
            memory_cache_bytes: usage.memory_cache,
            memory_limit_bytes: usage.memory_limit,
            pids: usage.pids,
            disk_bytes: measured.workspace,
            private_bytes: measured.private,
            private_limit_bytes: live_box.private_limit,
            network_sent_bytes: traffic.map(|traffic| traffic.sent),
            network_received_bytes: traffic.map(|traffic| traffic.received),
            network_connections: traffic.map(|traffic| traffic.open),
            network_refused: traffic.map(|traffic| traffic.refused),
            network_refused_to: live_box
                .egress
                .get()
                .map(Egress::refused)
                .unwrap_or_default(),
            ..BoxStatsResult::default()
        })
    }

    fn set_network_policy(&self, id: Uuid, policy: &NetworkPolicy) -> Result<(), BoxError> {
        let live_box = self.live_box(id).ok_or_else(box_gone)?;
        match live_box.egress.get() {
            Some(egress) => {
                egress.set_policy(policy.clone());
                Ok(())
            }
            None => self.open_egress(id, &live_box, policy.clone()),
        }
    }

    async fn freeze(&self, id: Uuid, frozen: bool) -> Result<(), BoxError> {
        let live_box = self.live_box(id).ok_or_else(box_gone)?;
        live_box.pause(frozen).await
    }

    async fn snapshot(&self, id: Uuid, request: SnapshotRequest<'_>) -> Result<Snapshot, BoxError> {
        self.copy_private_files(id, request).await
    }

    async fn stop_into_layer(
        &self,
        id: Uuid,
        request: SnapshotRequest<'_>,
    ) -> Result<LayerFiles, BoxError> {
        self.stop_keeping_files(id, request).await
    }

    async fn merge_layers(
        &self,
        layers: &[Layer],
        request: SnapshotRequest<'_>,
    ) -> Result<LayerFiles, BoxError> {
        self.merge(layers, request).await
    }

    async fn diff(
        &self,
        id: Option<Uuid>,
        request: ChangesRequest<'_>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<ChangeList, BoxError> {
        self.list_changes(id, request, after, limit).await
    }

    async fn apply(
        &self,
        id: Option<Uuid>,
        request: ChangesRequest<'_>,
        params: &BoxApplyParams,
    ) -> Result<BoxApplyResult, BoxError> {
        self.apply_changes(id, request, params).await
    }

    async fn discard(&self, id: Uuid, request: ChangesRequest<'_>) -> Result<u64, BoxError> {
        self.discard_changes(id, request).await
    }

    async fn add_mounts(&self, id: Uuid, mounts: &[BoxMountSpec]) -> Result<(), BoxError> {
        let live_box = self.live_box(id).ok_or_else(box_gone)?;
        let server = self.0.server.running().await?;
        let mut copies = live_box.copies(mounts, self.0.config.run_as).await?;
        for mount in mounts {
            let Some((mount, source)) = plan::mount(mount, 0, &mut copies)? else {
                continue;
            };
            debug_assert_eq!(mount.source, Source::Fd(0));
            let (server, live_box) = (Arc::clone(&server), Arc::clone(&live_box));
            let adding = move || server.add_mount(&live_box.sandbox, &mount, Some(source.as_fd()));
            let added = tokio::task::spawn_blocking(adding).await;
            let added = added.map_err(|_| BoxError::internal("mount task failed"))?;
            added.map_err(|error| sandbox_error(&error))?;
        }
        Ok(())
    }

    fn volumes(&self) -> Option<&dyn Volumes> {
        self.0.config.state_dir.is_some().then_some(self as _)
    }

    fn persist(&self, id: Uuid, record: &str) -> Result<(), BoxError> {
        let Some(live_box) = self.live_box(id) else {
            return Ok(());
        };
        let volumes = live_box.volume_quotas.get().into_iter().flatten();
        let stored = StoredBox {
            sandbox: live_box.sandbox.record(),
            quota: live_box.quota.get().map(|quota| quota.record()),
            disk: live_box.disk_quota.get().map(|quota| quota.record()),
            volumes: volumes.map(|quota| quota.record()).collect(),
            private_limit: live_box.private_limit,
            earlier_disk: live_box.earlier_disk.get().cloned(),
            record: record.to_owned(),
        };
        if let Some(state) = &*live_box.state() {
            state.store(&stored).map_err(record_error)?;
            live_box.mark_recorded().map_err(os_error)?;
        }
        Ok(())
    }

    async fn adopt(&self, readable: Readable) -> Result<FoundBoxes, BoxError> {
        let Some(root) = self
            .0
            .config
            .state_dir
            .clone()
            .filter(|_| self.0.config.outlive)
        else {
            return Ok(FoundBoxes::default());
        };
        let lock = adopt::lock(&root)
            .await
            .map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => BoxError::conflict(
                    "another server uses it; stop that one, or use another state directory",
                ),
                kind => BoxError::unavailable(format!("it cannot be used: {kind}")),
            })?;
        let _ = self.0.lock.set(lock);
        let parent = self.0.config.cgroup_parent.clone();
        let listing = move || {
            let cgroups = Arc::new(Cgroups::open(&parent));
            adopt::list(&root, readable).map(|listed| (listed, cgroups, root))
        };
        let listed = tokio::task::spawn_blocking(listing).await;
        let listed = listed.map_err(|_| BoxError::internal("state directory task failed"))?;
        let (listing, cgroups, root) = listed.map_err(os_error)?;
        let _ = self.0.adopted.set(cgroups);
        for id in listing.unrecorded {
            let state = StateDir::of(&root, id);
            if !adopt::remove_if_dead(&state) {
                tokio::spawn(adopt::remove_when_dead(Arc::downgrade(&self.0), state));
            }
        }
        Ok(listing.found)
    }

    fn records(&self, readable: Readable) -> Result<FoundBoxes, BoxError> {
        match self
            .0
            .config
            .state_dir
            .as_deref()
            .map(|root| adopt::list(root, readable))
        {
            None => Ok(FoundBoxes::default()),
            Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                Ok(FoundBoxes::default())
            }
            Some(listing) => Ok(listing.map_err(os_error)?.found),
        }
    }

    async fn reach(&self, id: Uuid) -> Result<Reach, BoxError> {
        let state = self.state_of(id).ok_or_else(box_gone)?;
        let cgroups = self.0.adopted.get().ok_or_else(box_gone)?;
        if state.stop_record().map_err(os_error)?.is_some() {
            return stop::complete_after_crash(id, state, Arc::clone(cgroups)).await;
        }
        let reached = adopt::reach(id, &state, cgroups).await.map_err(os_error)?;
        let Some(reached) = reached else {
            // An earlier attempt may have reached the box without an answer from its agent.
            let earlier = self.boxes().remove(&id);
            let removing = move || {
                if let Some(earlier) = earlier {
                    earlier.remove_state();
                }
                state.remove();
            };
            let _ = tokio::task::spawn_blocking(removing).await;
            return Ok(Reach::Dead("it ended while no server was running"));
        };
        let (mut quotas, mut lost) = (Vec::new(), None);
        let records = reached.quota.iter().chain(&reached.disk);
        for record in records.chain(&reached.volumes) {
            match Quota::restore(record).await {
                Ok(restored) => quotas.push(restored),
                Err(error) => match error.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                        lost = Some(record.limited());
                    }
                    _ => return Err(os_error(error)),
                },
            }
        }
        let live_box = LiveBox::new(reached.sandbox, Some(state), reached.private_limit, None);
        if let Some(disk) = reached.earlier_disk {
            let _ = live_box.earlier_disk.set(disk);
        }
        self.boxes().insert(id, Arc::clone(&live_box));
        if let Some(lost) = lost {
            live_box.kill_with(unmeasurable(lost));
            let backend = self.clone();
            tokio::spawn(async move { backend.stop(id).await });
            return Ok(Reach::Dead(match lost {
                Limited::Workspace => "the workspace with workspace_quota_mb no longer exists",
                Limited::Disk(_) => "the disk with disk_mb no longer exists",
                Limited::Volume(_) => "a volume of the box no longer exists",
            }));
        }
        live_box.watch(quotas, true);
        Ok(Reach::Alive(reached.started))
    }

    async fn stop(&self, id: Uuid) -> Result<(), BoxError> {
        let Some(live_box) = self.live_box(id) else {
            let Some(state) = self.state_of(id) else {
                return Ok(());
            };
            let is_stopped = matches!(state.stop_record(), Ok(Some(_)));
            let has_ended = is_stopped && matches!(state.is_dead(), Ok(true));
            let adopted = self.0.adopted.get();
            if let (Some(cgroups), true, false) = (adopted, state.has_record(), has_ended) {
                let cgroups = Arc::clone(cgroups);
                // A separate task completes the removal even if the caller stops waiting.
                let ending = tokio::spawn(async move { adopt::end(state, cgroups).await });
                let ended = ending
                    .await
                    .unwrap_or_else(|error| Err(io::Error::other(error)));
                return ended.map_err(os_error);
            }
            // The aborted start or the stop has already ended the processes of the box. The cgroups
            // above them belong to this server.
            let _ = tokio::task::spawn_blocking(move || state.remove()).await;
            return Ok(());
        };
        live_box
            .sandbox
            .kill()
            .map_err(|error| sandbox_error(&error))?;
        // A separate task completes the removal even if the caller stops waiting.
        let _ = tokio::spawn(finish_stop(Arc::downgrade(&self.0), id, live_box)).await;
        Ok(())
    }
}

/// Waits for the end of a killed box, without a timeout, and removes its state.
async fn finish_stop(of: Weak<Inner>, id: Uuid, live_box: Arc<LiveBox>) {
    let state = live_box.state().take();
    // Without a record, a later process ends the box instead of adopting it.
    let forget = move || state.inspect(StateDir::forget);
    let state = tokio::task::spawn_blocking(forget).await.ok().flatten();
    wait_for_end(&live_box).await;
    let ended = of.upgrade().and_then(|inner| {
        let mut boxes = inner.boxes.lock().unwrap_or_else(PoisonError::into_inner);
        boxes.remove(&id)
    });
    live_box.remove_state();
    let remove = move || state.iter().for_each(StateDir::remove);
    let _ = tokio::task::spawn_blocking(remove).await;
    // This drops the last reference to the mounts. Unmounting is slow, so no caller waits for it.
    tokio::task::spawn_blocking(|| drop((ended, live_box)));
}

/// Waits for the end of all processes of a box.
async fn wait_for_end(live_box: &LiveBox) {
    // Without a pidfd to wait on, the task polls.
    while readable(live_box.sandbox.pidfd()).await.is_err()
        && !matches!(live_box.sandbox.wait(Some(Duration::ZERO)), Ok(true))
    {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until a descriptor is readable.
#[expect(
    deprecated,
    reason = "sound for an OwnedFd, which keeps its descriptor; the replacement is `unsafe`"
)]
async fn readable(fd: BorrowedFd<'_>) -> io::Result<()> {
    let watched = AsyncFd::with_interest(fd.try_clone_to_owned()?, tokio::io::Interest::READABLE)?;
    watched.readable().await?.retain_ready();
    Ok(())
}
