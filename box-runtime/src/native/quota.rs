//! The size of a workspace while its box runs.
//!
//! Where the file system can, it keeps the quota itself, to the byte: what is over it is not written ([`DirectoryQuota`]).
//!
//! Elsewhere a host directory has no size of its own, so it is measured again and again: every 10 ms while it grows, every 100 ms
//! otherwise, and not at all while the box uses no processor time. A box whose workspace is too large is killed. What it can
//! write beyond its quota is what it writes between two looks: its rate, times 10 to 100 ms and the time one look takes. One
//! file cannot be larger than the whole quota, which the kernel sees to (`RLIMIT_FSIZE`), and no call that allocates without
//! writing gets through.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

use box_protocol::BoxSpec;
use box_sys::DirectoryQuota;
use box_tree::Size;

use super::Living;

/// Looks while the workspace grows, and while it does not.
const OFTEN: Duration = Duration::from_millis(10);
const SELDOM: Duration = Duration::from_millis(100);

/// A quota is also one of files, of this many bytes each: what holds nothing would never be too large.
const ENTRY: u64 = 512;

/// A workspace with a quota.
#[derive(Debug)]
pub(super) struct Quota {
    directory: OwnedFd,
    bytes: u64,
    /// Set where the file system keeps it.
    kernel: Option<DirectoryQuota>,
}

impl Quota {
    /// The quota of a box, if it has one, in force from now on if the file system keeps it. `workspace` is the descriptor it is
    /// mounted from; `outlives` if the box may outlive this process.
    pub(super) async fn of(
        spec: &BoxSpec,
        workspace: Option<&OwnedFd>,
        outlives: bool,
    ) -> io::Result<Option<Self>> {
        match (spec.file_bytes(), workspace) {
            (Some(bytes), Some(workspace)) => {
                Self::again(workspace, bytes, outlives).await.map(Some)
            }
            _ => Ok(None),
        }
    }

    /// That of a box that has one.
    pub(super) async fn again(workspace: &OwnedFd, bytes: u64, outlives: bool) -> io::Result<Self> {
        let directory = box_tree::open_in(workspace, c".")?;
        let limited = directory.try_clone()?;
        // Looks at every file there is.
        let set = move || DirectoryQuota::set(limited.as_fd(), bytes, bytes / ENTRY);
        let mut kernel = tokio::task::spawn_blocking(set).await?.ok();
        if let Some(kernel) = &mut kernel {
            kernel.keep(outlives);
        }
        Ok(Self {
            directory,
            bytes,
            kernel,
        })
    }

    fn allows(&self, size: &Size) -> bool {
        size.bytes.max(size.entries.saturating_mul(ENTRY)) <= self.bytes
    }

    /// What is there, or as much of it as is already too much.
    fn measure(&self) -> io::Result<Size> {
        let mut size = Size::default();
        size.add(&self.directory, |size| self.allows(size))?;
        Ok(size)
    }

    /// Watches until the box is gone, or over its quota.
    pub(super) async fn watch(mut self, living: Weak<Living>) {
        if let Some(mut kernel) = self.kernel.take() {
            while let Some(living) = living.upgrade() {
                *living.disk() = kernel.used().ok();
                drop(living);
                tokio::time::sleep(SELDOM).await;
            }
            return kernel.keep(false);
        }
        let this = Arc::new(self);
        let (mut last, mut cpu) = (Size::default(), None);
        let mut rest = OFTEN;
        loop {
            tokio::time::sleep(rest).await;
            let Some(living) = living.upgrade() else {
                return;
            };
            rest = SELDOM;
            let used = living.sandbox.usage().cpu;
            if used.is_some() && used == cpu {
                continue;
            }
            cpu = used;
            let quota = Arc::clone(&this);
            let Ok(measured) = tokio::task::spawn_blocking(move || quota.measure()).await else {
                return;
            };
            let Ok(size) = measured else {
                living.end_for("the workspace cannot be measured, and has a workspace_quota_mb");
                return;
            };
            *living.disk() = Some(size.bytes);
            if !this.allows(&size) {
                living.end_for("the workspace has outgrown workspace_quota_mb");
                return;
            }
            if size != last {
                rest = OFTEN;
            }
            last = size;
        }
    }
}
