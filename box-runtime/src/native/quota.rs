//! How much is in the directories of the host that a box can write to, while it runs: its workspace and its other mounts, in all.
//!
//! Where the file system can, it keeps the quota of each by itself, to the byte: what is over it is not written
//! ([`DirectoryQuota`]).
//!
//! Elsewhere a host directory has no size of its own, so it is measured again and again: every 10 ms while it grows, every 100 ms
//! otherwise, and not at all while the box uses no processor time. So is the sum, everywhere. A box that has too much is killed.
//! What it can write beyond its quota is what it writes between two looks: its rate, times 10 to 100 ms and the time one look
//! takes. One file cannot be larger than the whole quota, which the kernel sees to (`RLIMIT_FSIZE`), and no call that allocates
//! without writing gets through.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

use box_protocol::BoxError;
use box_protocol::error::{Detail, Ended, Subject, quota_exceeded, with_end};
use box_sys::DirectoryQuota;
use box_sys::walk::Size;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use super::living::Living;
use super::plan::Given;

/// Looks while a directory grows, and while it does not.
const OFTEN: Duration = Duration::from_millis(10);
const SELDOM: Duration = Duration::from_millis(100);

/// A quota is also one of files, of this many bytes each: what holds nothing would never be too large.
const ENTRY: u64 = 512;

/// Directories that are gone through at once to put them under a quota. It takes a thread each, for as long as there are files.
static GOING_THROUGH: Semaphore = Semaphore::const_new(4);

/// What a box can write to, and how much may be there.
#[derive(Debug)]
pub(super) struct Quota {
    directories: Vec<Directory>,
    bytes: u64,
}

#[derive(Debug)]
struct Directory {
    open: OwnedFd,
    known_as: KnownAs,
    /// Set where the file system keeps the quota.
    kernel: Option<DirectoryQuota>,
}

/// What a later process needs, to go on watching.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct QuotaRecord {
    bytes: u64,
    directories: Vec<KnownAs>,
}

/// A directory, and the path at which it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct KnownAs {
    path: String,
    device: u64,
    inode: u64,
}

impl KnownAs {
    fn of(path: &str, open: &OwnedFd) -> io::Result<Self> {
        let stat = rustix::fs::fstat(open)?;
        Ok(Self {
            path: path.to_owned(),
            device: stat.st_dev,
            inode: stat.st_ino,
        })
    }
}

impl Quota {
    /// The quota of a box that may have this many bytes in what it was given, in force from now on where the file system keeps
    /// it. `None` if it was given nothing to write to.
    pub(super) async fn of(bytes: u64, given: &[Given]) -> io::Result<Option<Self>> {
        let mut found: Vec<(KnownAs, OwnedFd)> = Vec::new();
        let writable: Vec<&Given> = given.iter().filter(|one| one.writable).collect();
        for one in box_sys::walk::outermost(&writable) {
            let open = match box_sys::walk::open_in(&one.source, c".") {
                // A file is no larger than the whole quota, and that is seen to.
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => continue,
                open => open?,
            };
            let known_as = KnownAs::of(&one.path, &open)?;
            let is_same = |(other, _): &(KnownAs, _)| {
                (other.device, other.inode) == (known_as.device, known_as.inode)
            };
            if !found.iter().any(is_same) {
                found.push((known_as, open));
            }
        }
        if found.is_empty() {
            return Ok(None);
        }
        Self::over(bytes, found).await.map(Some)
    }

    /// That of a box that another process has watched. An error if a directory is not where it was.
    pub(super) async fn again(record: &QuotaRecord) -> io::Result<Self> {
        let mut found = Vec::new();
        for known_as in &record.directories {
            let open = box_sys::walk::open(&known_as.path)?;
            if KnownAs::of(&known_as.path, &open)? != *known_as {
                return Err(io::ErrorKind::NotFound.into());
            }
            found.push((known_as.clone(), open));
        }
        Self::over(record.bytes, found).await
    }

    async fn over(bytes: u64, found: Vec<(KnownAs, OwnedFd)>) -> io::Result<Self> {
        let mut directories = Vec::new();
        for (known_as, open) in found {
            // Whoever gives up waiting ends what the thread does.
            let waiting = Arc::new(());
            let limited = (open.try_clone()?, Arc::downgrade(&waiting));
            let place = GOING_THROUGH.acquire().await;
            let set = move || {
                let ((directory, wanted), _place) = (limited, place);
                let wanted = || wanted.strong_count() > 0;
                DirectoryQuota::set(directory.as_fd(), bytes, bytes / ENTRY, wanted)
            };
            directories.push(Directory {
                open,
                known_as,
                kernel: tokio::task::spawn_blocking(set).await?.ok(),
            });
        }
        Ok(Self { directories, bytes })
    }

    /// What to keep for [`again`](Self::again).
    pub(super) fn record(&self) -> QuotaRecord {
        let known_as = |directory: &Directory| directory.known_as.clone();
        QuotaRecord {
            bytes: self.bytes,
            directories: self.directories.iter().map(known_as).collect(),
        }
    }

    /// Leaves in force what the file system keeps (`true`) when this is dropped, because the box goes on, or not.
    pub(super) fn outlives(&self, outlives: bool) {
        for directory in &self.directories {
            if let Some(kernel) = &directory.kernel {
                kernel.set_persistent(outlives);
            }
        }
    }

    fn exceeded(&self, size: &Size) -> BoxError {
        let more = if size.bytes > self.bytes {
            "; the box was ended".to_owned()
        } else {
            let files = self.bytes / ENTRY;
            format!(" hold at most {files} files; the box was ended")
        };
        with_end(quota_exceeded(self.bytes >> 20, &more), Ended::Quota)
    }

    fn allows(&self, size: &Size) -> bool {
        size.bytes.max(size.entries.saturating_mul(ENTRY)) <= self.bytes
    }

    /// What is there, or as much of it as is already too much.
    fn measure(&self) -> io::Result<Size> {
        let mut size = Size::default();
        for directory in &self.directories {
            match directory.kernel.as_ref().map(DirectoryQuota::used) {
                Some(Ok((bytes, entries))) => {
                    size.bytes = size.bytes.saturating_add(bytes);
                    size.entries = size.entries.saturating_add(entries);
                }
                _ => size.add(&directory.open, |size| self.allows(size))?,
            }
        }
        Ok(size)
    }

    /// Watches until the box is gone, or over its quota.
    pub(super) async fn watch(self: Arc<Self>, living: Weak<Living>) {
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
            let quota = Arc::clone(&self);
            let Ok(measured) = tokio::task::spawn_blocking(move || quota.measure()).await else {
                return;
            };
            let Ok(size) = measured else {
                living.end_for(unwatched());
                return;
            };
            *living.disk() = Some(size.bytes);
            // Also where the kernel refuses writes beyond it: a box of a directory around this one may have taken that limit away.
            if !self.allows(&size) {
                living.end_for(self.exceeded(&size));
                return;
            }
            if size != last {
                rest = OFTEN;
            }
            last = size;
        }
    }
}

/// The error of a box whose quota nobody can watch any more.
pub(super) fn unwatched() -> BoxError {
    let message =
        "workspace_quota_mb: the workspace cannot be measured any more; the box was ended";
    let error = BoxError::unavailable(message).with_detail(&Detail::about(Subject::Disk));
    with_end(error, Ended::Quota)
}
