//! What is kept of a box as long as it lives.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use box_protocol::error::{Detail, Ended, Subject, with_end};
use box_protocol::{BoxError, BoxMountSpec};
use box_sys::Sandbox;
use rustix::event::EventfdFlags;

use super::artifacts::{self, Copies, Scratch};
use super::error::failed;
use super::quota::Quota;
use super::state::State;
use crate::egress::Egress;

/// A box that lives, as far as anybody has heard.
#[derive(Debug)]
pub(super) struct Living {
    pub(super) sandbox: Sandbox,
    /// What it has on disk, until its end.
    state: Mutex<Option<State>>,
    /// Where its artifacts are, if it has nothing else on disk.
    scratch: Mutex<Option<Scratch>>,
    /// How much may be in what it can write to.
    pub(super) quota: OnceLock<Arc<Quota>>,
    /// What was last found there.
    disk: Mutex<Option<u64>>,
    /// The way out, if it has a network.
    pub(super) egress: OnceLock<Egress>,
    /// Why it was ended from here.
    pub(super) ended_for: OnceLock<BoxError>,
    /// Until it has a record.
    newborn: Mutex<Option<Newborn>>,
}

/// What the agent of a box looks at when it loses the process that made it: whether the box has a record by which a later
/// process can find it. An agent without one ends, and its box with it.
#[derive(Debug)]
pub(super) struct Newborn(OwnedFd);

impl Newborn {
    pub(super) fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(rustix::event::eventfd(0, flags)?))
    }
}

impl AsFd for Newborn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Living {
    /// A box that was just made, or found.
    pub(super) fn new(
        sandbox: Sandbox,
        state: Option<State>,
        scratch: Option<Scratch>,
        newborn: Option<Newborn>,
    ) -> Arc<Self> {
        Arc::new(Self {
            sandbox,
            state: Mutex::new(state),
            scratch: Mutex::new(scratch),
            quota: OnceLock::new(),
            disk: Mutex::default(),
            egress: OnceLock::new(),
            ended_for: OnceLock::new(),
            newborn: Mutex::new(newborn),
        })
    }

    /// It has a record: its agent may lose this process.
    pub(super) fn is_kept(&self) -> io::Result<()> {
        let mut newborn = self.newborn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Newborn(event)) = &*newborn {
            rustix::io::write(event, &1_u64.to_ne_bytes())?;
            *newborn = None;
        }
        Ok(())
    }

    pub(super) fn state(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies the artifacts among these mounts to where this box has them.
    pub(super) async fn copies(
        &self,
        mounts: &[BoxMountSpec],
        owner: Option<(u32, u32)>,
    ) -> Result<Copies, BoxError> {
        let place = {
            let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
            place_for(mounts, self.state().as_ref(), &mut scratch, owner)?
        };
        match place {
            Some(place) => artifacts::copy_all(mounts, &place).await,
            None => Ok(Copies::new()),
        }
    }

    pub(super) fn disk(&self) -> MutexGuard<'_, Option<u64>> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps this quota from now on, as long as the box lives.
    pub(super) fn watch(self: &Arc<Self>, quota: Quota, outlives: bool) {
        quota.outlives(outlives);
        let quota = self.quota.get_or_init(|| Arc::new(quota));
        tokio::spawn(Arc::clone(quota).watch(Arc::downgrade(self)));
    }

    /// Removes what it had on disk. Only for one that is gone.
    pub(super) fn clear(&self) {
        if let Some(quota) = self.quota.get() {
            quota.outlives(false);
        }
        if let Some(state) = self.state().take() {
            state.remove();
        }
    }

    /// Why it is gone, as far as that is known: it was ended from here, or the kernel found no memory for it.
    pub(super) fn why_gone(&self) -> Option<BoxError> {
        if let Some(why) = self.ended_for.get() {
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

    /// Ends it, for a reason that its callers get as an error.
    pub(super) fn end_for(&self, why: BoxError) {
        let _ = self.ended_for.set(why);
        // What is gone needs no end.
        let _ = self.sandbox.kill();
    }
}

/// Where the artifacts of a box are copied to, if these mounts have any.
pub(super) fn place_for(
    mounts: &[BoxMountSpec],
    state: Option<&State>,
    scratch: &mut Option<Scratch>,
    owner: Option<(u32, u32)>,
) -> Result<Option<PathBuf>, BoxError> {
    if !mounts.iter().any(BoxMountSpec::is_content_addressed) {
        return Ok(None);
    }
    if let Some(state) = state {
        return Ok(Some(state.artifacts()));
    }
    let scratch = match scratch {
        Some(scratch) => scratch,
        None => scratch.insert(Scratch::new(owner).map_err(failed)?),
    };
    Ok(Some(scratch.path().to_owned()))
}
