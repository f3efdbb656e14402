//! Backend that creates boxes with this machine's kernel alone.
//!
//! # Reading order
//! 1. [`NativeConfig`]: every setting.
//! 2. `plan`: from a spec to the kernel objects of a box.
//! 3. This file: [`NativeBackend`], its boxes, their start and their end. `living`: the state of
//!    one box.
//! 4. `server`: the fork server. `diagnosis`: the features of this machine.
//! 5. `quota`: the size limit of a workspace. `artifacts`: mounts of content identified by a
//!    digest.
//! 6. `slots`: memory shared with the agent; `state`: the directory of a box on disk; `adopt`:
//!    adoption by a later process.
//! 7. `error`: conversion of kernel errors.
//!
//! # A box
//! The agent is the first process of a box, and the fork server forks it together with the box. The
//! agent inherits one end of a socket pair, which is its connection to the runtime. It also
//! inherits the output slots, a shared memory of fixed size.

mod adopt;
mod artifacts;
mod config;
mod diagnosis;
mod error;
mod living;
mod plan;
mod quota;
mod server;
mod slots;
mod state;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use box_protocol::actions::BoxStatsResult;
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxMountSpec, Network, NetworkPolicy, UnixMs};
use box_sys::{Cgroups, ForkServer, Primitives, Sandbox, SandboxPlan, Source};
use box_transports::unix;
use rustix::fs::MemfdFlags;
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;
use uuid::Uuid;

use self::artifacts::Copies;
pub use self::config::NativeConfig;
use self::error::{failed, in_words};
use self::living::{Living, Newborn, place_for};
use self::quota::{Quota, unwatched};
use self::server::Server;
use self::state::{Kept, State};
use crate::backend::{
    AdoptedBox, Availability, Backend, Capabilities, Diagnosis, Facts, Reach, Readable,
    StartRequest, StartedBox,
};
use crate::box_actor::carrier_limits;
use crate::egress::{Dialler, Egress, Names};

/// Limit of concurrent starts.
///
/// The fork server begins one box after the other, and each box then finishes by itself. Further
/// starts wait here, so a request to the server never blocks.
const MAKING: usize = 32;

/// Time limit of a pause. A process finishes its current disk read first.
const STANDSTILL: Duration = Duration::from_secs(2);

/// Backend that creates boxes with this machine's kernel alone.
///
/// Clones share state. Boxes end when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct NativeBackend(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: NativeConfig,
    server: Server,
    making: Semaphore,
    dialler: Arc<Dialler>,
    boxes: Mutex<HashMap<Uuid, Arc<Living>>>,
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
            for living in boxes.values() {
                living.clear();
            }
        }
    }
}

impl NativeBackend {
    /// Creates a backend. It starts no box before the first request.
    pub fn new(config: NativeConfig) -> Self {
        Self(Arc::new(Inner {
            server: Server::new(&config),
            dialler: Arc::new(Dialler::new(config.egress.clone())),
            config,
            making: Semaphore::new(MAKING),
            boxes: Mutex::default(),
            lock: OnceLock::new(),
            adopted: OnceLock::new(),
        }))
    }

    fn boxes(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Living>>> {
        self.0.boxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state_of(&self, id: Uuid) -> Option<State> {
        let root = self.0.config.state_dir.as_deref()?;
        Some(State::of(root, id))
    }

    fn living(&self, id: Uuid) -> Option<Arc<Living>> {
        self.boxes().get(&id).cloned()
    }

    /// Opens the outgoing network of a box, if it has exits that are not open yet.
    fn open_way_out(
        &self,
        id: Uuid,
        living: &Living,
        policy: NetworkPolicy,
    ) -> Result<(), BoxError> {
        let Some(exits) = living.sandbox.take_egress_sockets() else {
            return Ok(());
        };
        let names = match living.state().as_ref() {
            Some(state) => state.names().and_then(Names::kept_in).map_err(failed)?,
            None => Names::default(),
        };
        let dialler = Arc::clone(&self.0.dialler);
        let egress = Egress::open(id, exits, dialler, names, policy).map_err(failed)?;
        let _ = living.egress.set(egress);
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
        let found = tokio::task::spawn_blocking(Primitives::probe).await;
        found.map_or_else(|_| Diagnosis::default(), |found| diagnosis::of(&found))
    }

    fn set_egress_policy(&self, policy: &NetworkPolicy) -> Result<(), BoxError> {
        self.0.dialler.set_policy(policy.clone());
        for living in self.boxes().values() {
            if let Some(egress) = living.egress.get() {
                egress.look_again();
            }
        }
        Ok(())
    }

    async fn start(&self, request: StartRequest<'_>) -> Result<StartedBox, BoxError> {
        let root = self.0.config.state_dir.as_deref();
        let state = root.map(|root| State::new(root, request.id)).transpose();
        let (state, listener) = state.map_err(failed)?.unzip();
        let (mounts, mut scratch) = (&request.spec.extra_mounts, None);
        let mut copies =
            match place_for(mounts, state.as_ref(), &mut scratch, self.0.config.run_as)? {
                Some(place) => artifacts::copy_all(mounts, &place).await?,
                None => Copies::new(),
            };
        let (mut plan, given, rootfs) = plan::of(&request, &self.0.config, &mut copies)?;
        let quota = match request.spec.file_bytes() {
            Some(bytes) => Quota::of(bytes, &given).await.map_err(failed)?,
            None => None,
        };
        let (near, far) = UnixStream::pair().map_err(failed)?;
        near.set_nonblocking(true).map_err(failed)?;
        let (spool, slots) = slots::make().map_err(failed)?;
        let logs = state.as_ref().map_or_else(unnamed_logs, State::logs);
        let logs = logs.map_err(failed)?;
        let newborn = state.as_ref().filter(|_| self.0.config.outlive);
        let newborn = newborn
            .map(|_| Newborn::new())
            .transpose()
            .map_err(failed)?;
        let server = self.0.server.running().await?;
        let place = self.0.making.acquire().await;
        let sources: Vec<_> = given.iter().map(|one| one.source.as_fd()).collect();
        let mut fds = vec![far.as_fd()];
        fds.extend(listener.as_ref().map(AsFd::as_fd));
        fds.push(slots.as_fd());
        fds.push(logs.as_fd());
        fds.extend(newborn.as_ref().map(AsFd::as_fd));
        let mut made = make(&server, &plan, &fds, &sources).await;
        if lacks_network(&made) && request.does_without("network") {
            plan.network = box_sys::Network::Loopback;
            made = make(&server, &plan, &fds, &sources).await;
        }
        // With the other ends closed, the runtime notices the death of the box.
        drop((far, listener, slots, logs));
        let sandbox = made.map_err(|error| in_words(&error))?;
        drop(place);
        let missing = sandbox.missing().to_vec();
        let living = Living::new(sandbox, state, scratch, newborn);
        self.boxes().insert(request.id, Arc::clone(&living));
        if let Some(quota) = quota {
            living.watch(quota, self.0.config.outlive);
        }
        let stream = tokio::net::UnixStream::from_std(near).map_err(failed)?;
        let connection = unix::over(stream, &carrier_limits());
        let wanted = request.spec.network == Network::On;
        let no_network =
            (wanted && plan.network != box_sys::Network::Egress).then(|| "network".to_owned());
        let facts = Facts {
            rootfs: Some(rootfs.into()),
            missing,
            degraded: no_network.into_iter().collect(),
            ..Facts::default()
        };
        let started = StartedBox::new(request.id.simple().to_string(), connection);
        Ok(started.with_facts(facts).with_spool(spool))
    }

    async fn alive(&self, id: Uuid) -> bool {
        let living = self.living(id);
        living.is_some_and(|living| matches!(living.sandbox.wait(Some(Duration::ZERO)), Ok(false)))
    }

    fn why_gone(&self, id: Uuid) -> Option<BoxError> {
        self.living(id)?.why_gone()
    }

    fn usage(&self, id: Uuid) -> Result<BoxStatsResult, BoxError> {
        let living = self.living(id).ok_or_else(gone)?;
        let usage = living.sandbox.usage();
        let cpu = usage.cpu.map(|cpu| cpu.as_micros());
        let traffic = living.egress.get().map(Egress::traffic);
        Ok(BoxStatsResult {
            at: UnixMs::now(),
            cpu_us: cpu.and_then(|cpu| u64::try_from(cpu).ok()),
            memory_bytes: usage.memory,
            memory_limit_bytes: usage.memory_limit,
            pids: usage.pids,
            disk_bytes: *living.disk(),
            network_sent_bytes: traffic.map(|traffic| traffic.sent),
            network_received_bytes: traffic.map(|traffic| traffic.received),
            network_connections: traffic.map(|traffic| traffic.open),
            network_refused: traffic.map(|traffic| traffic.refused),
            network_refused_to: living.egress.get().map(Egress::refused).unwrap_or_default(),
        })
    }

    fn set_network_policy(&self, id: Uuid, policy: &NetworkPolicy) -> Result<(), BoxError> {
        let living = self.living(id).ok_or_else(gone)?;
        match living.egress.get() {
            Some(egress) => {
                egress.set_policy(policy.clone());
                Ok(())
            }
            None => self.open_way_out(id, &living, policy.clone()),
        }
    }

    async fn freeze(&self, id: Uuid, frozen: bool) -> Result<(), BoxError> {
        let living = self.living(id).ok_or_else(gone)?;
        if !frozen {
            return living.sandbox.thaw().map_err(unpausable);
        }
        living.sandbox.freeze().map_err(unpausable)?;
        let begun = Instant::now();
        while !living.sandbox.is_frozen() {
            if begun.elapsed() > STANDSTILL {
                let _ = living.sandbox.thaw();
                let why = "the box did not come to a stop within two seconds, and goes on";
                return Err(BoxError::unavailable(why));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    async fn add_mounts(&self, id: Uuid, mounts: &[BoxMountSpec]) -> Result<(), BoxError> {
        let living = self.living(id).ok_or_else(gone)?;
        let server = self.0.server.running().await?;
        let mut copies = living.copies(mounts, self.0.config.run_as).await?;
        for mount in mounts {
            let Some((mount, source)) = plan::mount(mount, 0, &mut copies)? else {
                continue;
            };
            debug_assert_eq!(mount.source, Source::Fd(0));
            let (server, living) = (Arc::clone(&server), Arc::clone(&living));
            let adding = move || server.add_mount(&living.sandbox, &mount, Some(source.as_fd()));
            let added = tokio::task::spawn_blocking(adding).await;
            let added = added.map_err(|_| BoxError::internal("a mount failed unexpectedly"))?;
            added.map_err(|error| in_words(&error))?;
        }
        Ok(())
    }

    fn keep(&self, id: Uuid, record: &str) -> Result<(), BoxError> {
        let Some(living) = self.living(id) else {
            return Ok(());
        };
        let kept = Kept {
            sandbox: living.sandbox.record(),
            quota: living.quota.get().map(|quota| quota.record()),
            record: record.to_owned(),
        };
        if let Some(state) = &*living.state() {
            state.keep(&kept).map_err(unkept)?;
            living.is_kept().map_err(failed)?;
        }
        Ok(())
    }

    async fn adopt(&self, readable: Readable) -> Result<Vec<AdoptedBox>, BoxError> {
        let Some(root) = self
            .0
            .config
            .state_dir
            .clone()
            .filter(|_| self.0.config.outlive)
        else {
            return Ok(Vec::new());
        };
        let lock = adopt::lock(&root).map_err(|error| match error.kind() {
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
        let listed = listed.map_err(|_| BoxError::internal("boxes could not be looked for"))?;
        let (adopt::Listed { known, unknown }, cgroups, root) = listed.map_err(failed)?;
        let _ = self.0.adopted.set(cgroups);
        for id in unknown {
            let state = State::of(&root, id);
            if !adopt::cleared(&state) {
                tokio::spawn(adopt::clear(Arc::downgrade(&self.0), state));
            }
        }
        Ok(known)
    }

    async fn reach(&self, id: Uuid) -> Result<Reach, BoxError> {
        let state = self.state_of(id).ok_or_else(gone)?;
        let cgroups = self.0.adopted.get().ok_or_else(gone)?;
        let reached = adopt::reach(id, &state, cgroups).await.map_err(failed)?;
        let Some(reached) = reached else {
            // An earlier attempt may have reached the box without an answer from its agent.
            let earlier = self.boxes().remove(&id);
            let removing = move || {
                if let Some(earlier) = earlier {
                    earlier.clear();
                }
                state.remove();
            };
            let _ = tokio::task::spawn_blocking(removing).await;
            return Ok(Reach::Gone("it ended while no server ran"));
        };
        let quota = match &reached.quota {
            Some(record) => Quota::again(record).await.map(Some),
            None => Ok(None),
        };
        let lost = quota.as_ref().err().map(io::Error::kind);
        if lost.is_some_and(|kind| {
            !matches!(kind, io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        }) {
            return Err(quota.map_or_else(failed, |_| gone()));
        }
        let living = Living::new(reached.sandbox, Some(state), None, None);
        self.boxes().insert(id, Arc::clone(&living));
        let Ok(quota) = quota else {
            living.end_for(unwatched());
            let backend = self.clone();
            tokio::spawn(async move { backend.stop(id).await });
            return Ok(Reach::Gone("the workspace with workspace_quota_mb is gone"));
        };
        if let Some(quota) = quota {
            living.watch(quota, true);
        }
        Ok(Reach::Here(reached.started))
    }

    async fn stop(&self, id: Uuid) -> Result<(), BoxError> {
        let Some(living) = self.living(id) else {
            let Some(state) = self.state_of(id) else {
                return Ok(());
            };
            if let (Some(cgroups), true) = (self.0.adopted.get(), state.is_kept()) {
                let cgroups = Arc::clone(cgroups);
                // A separate task completes the removal even if the caller stops waiting.
                let ending = tokio::spawn(async move { adopt::end(state, cgroups).await });
                let ended = ending
                    .await
                    .unwrap_or_else(|error| Err(io::Error::other(error)));
                return ended.map_err(failed);
            }
            // The aborted start has already ended the processes of the box.
            let _ = tokio::task::spawn_blocking(move || state.remove()).await;
            return Ok(());
        };
        living.sandbox.kill().map_err(|error| in_words(&error))?;
        // A separate task completes the removal even if the caller stops waiting.
        let _ = tokio::spawn(bury(Arc::downgrade(&self.0), id, living)).await;
        Ok(())
    }
}

/// Waits for the end of a killed box, without a timeout, and removes its state.
async fn bury(of: Weak<Inner>, id: Uuid, living: Arc<Living>) {
    let state = living.state().take();
    // Without a record, a later process ends the box instead of adopting it.
    let forget = move || state.inspect(State::forget);
    let state = tokio::task::spawn_blocking(forget).await.ok().flatten();
    // Without a pidfd to wait on, the task polls.
    while readable(living.sandbox.pidfd()).await.is_err()
        && !matches!(living.sandbox.wait(Some(Duration::ZERO)), Ok(true))
    {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let ended = of.upgrade().and_then(|inner| {
        let mut boxes = inner.boxes.lock().unwrap_or_else(PoisonError::into_inner);
        boxes.remove(&id)
    });
    living.clear();
    let remove = move || state.iter().for_each(State::remove);
    let _ = tokio::task::spawn_blocking(remove).await;
    // This drops the last reference to the mounts. Unmounting is slow, so no caller waits for it.
    tokio::task::spawn_blocking(|| drop((ended, living)));
}

/// Requests a box from the fork server and waits for it.
async fn make(
    server: &ForkServer,
    plan: &SandboxPlan,
    fds: &[BorrowedFd<'_>],
    sources: &[BorrowedFd<'_>],
) -> box_sys::Result<Sandbox> {
    let making = server.start_create(plan, fds, sources)?;
    let made = readable(making.as_fd()).await;
    made.map_err(|source| box_sys::Error::Step {
        step: "wait for the box".into(),
        source,
    })?;
    making.finish()
}

fn lacks_network(made: &box_sys::Result<Sandbox>) -> bool {
    matches!(made, Err(box_sys::Error::Unavailable(what)) if what == "network")
}

/// Converts the error of a failed pause or resume.
fn unpausable(error: box_sys::Error) -> BoxError {
    match error {
        box_sys::Error::Unavailable(what) => {
            BoxError::unsupported(format!("this machine cannot pause a box ({what})"))
        }
        error => in_words(&error),
    }
}

/// Converts the error of a failed write of a record.
fn unkept(error: io::Error) -> BoxError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            BoxError::capacity("there is no room on the server's disk for the record of the box")
                .with_detail(&Detail::about(Subject::Disk))
        }
        _ => failed(error),
    }
}

fn gone() -> BoxError {
    BoxError::unavailable("the box is gone")
}

/// Creates the log file of a box that does not outlive this process.
///
/// The file is in memory, which the kernel accounts to the box.
fn unnamed_logs() -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create("box-logs", MemfdFlags::CLOEXEC)?)
}

/// Waits until a descriptor is readable.
#[expect(
    deprecated,
    reason = "sound for an OwnedFd, which stays the same; the new way is `unsafe` for the sake of others"
)]
async fn readable(fd: BorrowedFd<'_>) -> io::Result<()> {
    let watched = AsyncFd::with_interest(fd.try_clone_to_owned()?, tokio::io::Interest::READABLE)?;
    watched.readable().await?.retain_ready();
    Ok(())
}
