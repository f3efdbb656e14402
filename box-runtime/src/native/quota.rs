//! Quota of the writable host directories of a running box, in total.
//!
//! The quota covers the workspace and the other writable mounts. Where the file system supports it,
//! the kernel enforces the quota of each directory exactly and refuses further writes
//! ([`DirectoryQuota`]).
//!
//! Elsewhere the runtime measures the directories: every 10 ms while they grow, every 100 ms
//! otherwise, and not while the box uses no CPU time. It measures the total in both cases. The
//! runtime kills a box that exceeds its quota.
//!
//! A box can exceed its quota by the amount it writes between two measurements: its write rate,
//! times 10 to 100 ms plus the duration of a measurement. The kernel limits a single file to the
//! whole quota (`RLIMIT_FSIZE`), and seccomp blocks calls that allocate without writing.

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

/// Intervals between measurements, while a directory grows and otherwise.
const OFTEN: Duration = Duration::from_millis(10);
const SELDOM: Duration = Duration::from_millis(100);

/// Bytes of quota per file, which limits the number of empty files.
const ENTRY: u64 = 512;

/// Limit of concurrent directory scans to set up a quota.
///
/// Each scan occupies a thread until it has visited all files.
static GOING_THROUGH: Semaphore = Semaphore::const_new(4);

/// Writable directories of a box and their total limit.
#[derive(Debug)]
pub(super) struct Quota {
    directories: Vec<Directory>,
    bytes: u64,
}

#[derive(Debug)]
struct Directory {
    open: OwnedFd,
    known_as: KnownAs,
    /// Present if the file system enforces the quota.
    kernel: Option<DirectoryQuota>,
}

/// Persistent form of a quota, for a later process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct QuotaRecord {
    bytes: u64,
    directories: Vec<KnownAs>,
}

/// Identity of a directory and its path.
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
    /// Creates the quota of a box; in force at once where the file system supports it.
    ///
    /// Returns `None` if the box has no writable host directory.
    pub(super) async fn of(bytes: u64, given: &[Given]) -> io::Result<Option<Self>> {
        let mut found: Vec<(KnownAs, OwnedFd)> = Vec::new();
        let writable: Vec<&Given> = given.iter().filter(|one| one.writable).collect();
        for one in box_sys::walk::outermost(&writable) {
            let open = match box_sys::walk::open_in(&one.source, c".") {
                // `RLIMIT_FSIZE` limits a single file to the whole quota.
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

    /// Restores the quota of an adopted box.
    ///
    /// A directory that is no longer at its path is an error.
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
            // The thread stops when the caller stops waiting.
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

    /// Returns the record for [`again`](Self::again).
    pub(super) fn record(&self) -> QuotaRecord {
        let known_as = |directory: &Directory| directory.known_as.clone();
        QuotaRecord {
            bytes: self.bytes,
            directories: self.directories.iter().map(known_as).collect(),
        }
    }

    /// Sets whether the file system's quota stays in force after a drop.
    ///
    /// It stays if the box outlives this process.
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

    /// Measures the directories, and stops early once the quota is exceeded.
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

    /// Measures until the box is gone or exceeds its quota.
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
            // This check also applies to kernel quotas, because a box with a parent of this
            // directory may have removed the limit.
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

/// Returns the error of a box with a quota that cannot be measured any more.
pub(super) fn unwatched() -> BoxError {
    let message =
        "workspace_quota_mb: the workspace cannot be measured any more; the box was ended";
    let error = BoxError::unavailable(message).with_detail(&Detail::about(Subject::Disk));
    with_end(error, Ended::Quota)
}
