//! State of a live box in this process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use box_protocol::error::{Detail, Ended, Subject, with_end};
use box_protocol::{BoxError, BoxMountSpec};
use box_sys::Sandbox;
use rustix::event::EventfdFlags;

use super::artifacts::{self, ArtifactCopies, TemporaryDirectory};
use super::error::os_error;
use super::freeze::FreezeReasons;
use super::quota::{Limited, Quota};
use super::state::StateDir;
use crate::egress::Egress;

/// Box that is alive, as far as the backend knows.
#[derive(Debug)]
pub(super) struct LiveBox {
    pub(super) sandbox: Sandbox,
    /// State directory, until the end of the box.
    state: Mutex<Option<StateDir>>,
    /// Artifact directory of a box without a state directory.
    artifacts: Mutex<Option<TemporaryDirectory>>,
    /// Disk of a box without a state directory.
    temporary_disk: Mutex<Option<TemporaryDirectory>>,
    /// Quota of the writable host directories.
    pub(super) quota: OnceLock<Arc<Quota>>,
    /// Quota of a disk that is a directory.
    pub(super) disk_quota: OnceLock<Arc<Quota>>,
    /// Quotas of volumes that are directories.
    pub(super) volume_quotas: OnceLock<Vec<Arc<Quota>>>,
    /// Disk of an earlier box that this one uses.
    pub(super) earlier_disk: OnceLock<PathBuf>,
    /// Limit of the private files in bytes, if known.
    pub(super) private_limit: Option<u64>,
    /// Last measured sizes.
    measured: Mutex<Measured>,
    /// Outgoing network, if the box has one.
    pub(super) egress: OnceLock<Egress>,
    /// Reason why the backend ended the box.
    pub(super) kill_reason: OnceLock<BoxError>,
    /// Why the box is frozen, if it is.
    pub(super) freeze_reasons: Mutex<FreezeReasons>,
    /// Work on the changes of the workspace is one at a time.
    pub(super) workspace_turn: Arc<tokio::sync::Mutex<()>>,
    /// Present until the box has a record.
    record_flag: Mutex<Option<RecordFlag>>,
}

/// Sizes in bytes, as far as the runtime measures them.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Measured {
    /// Writable host directories.
    pub(super) workspace: Option<u64>,
    /// A disk that is a directory.
    pub(super) private: Option<u64>,
}

/// Event that signals whether the box has a record.
///
/// An agent checks it when it loses its runtime. Without a record no later process can find the
/// box, so the agent exits and the box ends.
#[derive(Debug)]
pub(super) struct RecordFlag(OwnedFd);

impl RecordFlag {
    pub(super) fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(rustix::event::eventfd(0, flags)?))
    }
}

impl AsFd for RecordFlag {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl LiveBox {
    /// Creates the state of a started or adopted box.
    pub(super) fn new(
        sandbox: Sandbox,
        state: Option<StateDir>,
        private_limit: Option<u64>,
        record_flag: Option<RecordFlag>,
    ) -> Arc<Self> {
        Arc::new(Self {
            sandbox,
            state: Mutex::new(state),
            artifacts: Mutex::default(),
            temporary_disk: Mutex::default(),
            quota: OnceLock::new(),
            disk_quota: OnceLock::new(),
            volume_quotas: OnceLock::new(),
            earlier_disk: OnceLock::new(),
            private_limit,
            measured: Mutex::default(),
            egress: OnceLock::new(),
            kill_reason: OnceLock::new(),
            freeze_reasons: Mutex::default(),
            workspace_turn: Arc::default(),
            record_flag: Mutex::new(record_flag),
        })
    }

    /// Signals the agent that the box has a record and may outlive this process.
    pub(super) fn mark_recorded(&self) -> io::Result<()> {
        let mut record_flag = self
            .record_flag
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(RecordFlag(event)) = &*record_flag {
            rustix::io::write(event, &1_u64.to_ne_bytes())?;
            *record_flag = None;
        }
        Ok(())
    }

    pub(super) fn state(&self) -> MutexGuard<'_, Option<StateDir>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies the artifacts among these mounts into the box's artifact directory.
    pub(super) async fn copies(
        &self,
        mounts: &[BoxMountSpec],
        owner: Option<(u32, u32)>,
    ) -> Result<ArtifactCopies, BoxError> {
        let dir = {
            let mut artifacts = self.artifacts();
            artifact_dir(mounts, self.state().as_ref(), &mut artifacts, owner)?
        };
        match dir {
            Some(dir) => artifacts::copy_artifacts(mounts, &dir).await,
            None => Ok(ArtifactCopies::new()),
        }
    }

    pub(super) fn artifacts(&self) -> MutexGuard<'_, Option<TemporaryDirectory>> {
        let artifacts = self.artifacts.lock();
        artifacts.unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn temporary_disk(&self) -> MutexGuard<'_, Option<TemporaryDirectory>> {
        let disk = self.temporary_disk.lock();
        disk.unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn measured(&self) -> MutexGuard<'_, Measured> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enforces these quotas for the lifetime of the box.
    pub(super) fn watch(self: &Arc<Self>, quotas: impl IntoIterator<Item = Quota>, outlives: bool) {
        let mut volumes = Vec::new();
        for quota in quotas {
            quota.outlives(outlives);
            let quota = Arc::new(quota);
            tokio::spawn(Arc::clone(&quota).watch(Arc::downgrade(self)));
            match quota.limited() {
                Limited::Workspace => drop(self.quota.set(quota)),
                Limited::Disk(_) => drop(self.disk_quota.set(quota)),
                Limited::Volume(_) => volumes.push(quota),
            }
        }
        let _ = self.volume_quotas.set(volumes);
    }

    /// Removes the state directory of a box that is gone.
    pub(super) fn remove_state(&self) {
        self.release_quotas();
        if let Some(state) = self.state().take() {
            state.remove();
        }
    }

    /// Ends the quotas of a box that is gone.
    pub(super) fn release_quotas(&self) {
        let volumes = self.volume_quotas.get().into_iter().flatten();
        let others = [&self.quota, &self.disk_quota];
        for quota in others.into_iter().filter_map(OnceLock::get).chain(volumes) {
            quota.outlives(false);
        }
    }

    /// Returns why the box is gone, if known.
    ///
    /// The backend ended it, or it exceeded its memory limit.
    pub(super) fn end_reason(&self) -> Option<BoxError> {
        if let Some(why) = self.kill_reason.get() {
            return Some(why.clone());
        }
        let usage = self.sandbox.usage();
        let limit = usage.memory_limit.filter(|_| usage.oom_kills > Some(0))?;
        let megabytes = limit >> 20;
        let message = format!("memory exceeded: {megabytes} MiB; the kernel ended the box");
        let error = BoxError::capacity(message).with_detail(&Detail {
            limit: Some("memory_mb".to_owned()),
            max: Some(megabytes),
            ..Detail::about(Subject::Box)
        });
        Some(with_end(error, Ended::Memory))
    }

    /// Kills the box and records the error that its callers receive.
    pub(super) fn kill_with(&self, why: BoxError) {
        let _ = self.kill_reason.set(why);
        // The box may be gone already.
        let _ = self.sandbox.kill();
    }
}

/// Returns the artifact directory, if one of these mounts is an artifact.
pub(super) fn artifact_dir(
    mounts: &[BoxMountSpec],
    state: Option<&StateDir>,
    artifacts: &mut Option<TemporaryDirectory>,
    owner: Option<(u32, u32)>,
) -> Result<Option<PathBuf>, BoxError> {
    if !mounts.iter().any(BoxMountSpec::is_content_addressed) {
        return Ok(None);
    }
    if let Some(state) = state {
        return Ok(Some(state.artifacts()));
    }
    let artifacts = match artifacts {
        Some(artifacts) => artifacts,
        None => artifacts.insert(TemporaryDirectory::for_artifacts(owner).map_err(os_error)?),
    };
    Ok(Some(artifacts.path().to_owned()))
}
