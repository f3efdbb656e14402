//! Quota of the writable host directories of a running box, in total.
//!
//! The quota covers the workspace and the other writable mounts, or a disk that is a directory. Where the file system supports it,
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

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

use box_protocol::BoxError;
use box_protocol::error::{Detail, Ended, Subject, disk_exceeded, quota_exceeded, with_end};
use box_sys::DirectoryQuota;
use box_sys::walk::Size;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use super::live_box::LiveBox;
use super::plan::HostMount;

/// Intervals between measurements, while a directory grows and otherwise.
const FAST_INTERVAL: Duration = Duration::from_millis(10);
const SLOW_INTERVAL: Duration = Duration::from_millis(100);

/// Bytes of quota per file, which limits the number of empty files.
const BYTES_PER_ENTRY: u64 = 512;

/// Limit of concurrent directory scans to set up a quota.
///
/// Each scan occupies a thread until it has visited all files.
static SCANS: Semaphore = Semaphore::const_new(4);

/// What a quota limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Limited {
    /// The writable mounts, by `workspace_quota_mb`.
    #[default]
    Workspace,
    /// The private files, by `disk_mb`, with this number of files.
    Disk(u64),
    /// A volume, by its `size_mb`, with this number of files.
    Volume(u64),
}

/// Writable directories of a box and their total limit.
#[derive(Debug)]
pub(super) struct Quota {
    limited: Limited,
    /// Name of the volume.
    name: Option<String>,
    directories: Vec<Directory>,
    bytes: u64,
}

#[derive(Debug)]
struct Directory {
    open: OwnedFd,
    id: DirectoryId,
    /// Present if the file system enforces the quota.
    kernel: Option<DirectoryQuota>,
}

/// Persistent form of a quota, for a later process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct QuotaRecord {
    #[serde(default)]
    limited: Limited,
    #[serde(default)]
    name: Option<String>,
    bytes: u64,
    directories: Vec<DirectoryId>,
}

impl QuotaRecord {
    pub(super) fn limited(&self) -> Limited {
        self.limited
    }
}

/// Identity of a directory and its path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct DirectoryId {
    path: String,
    device: u64,
    inode: u64,
}

impl DirectoryId {
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
    pub(super) async fn of(
        limited: Limited,
        bytes: u64,
        host_mounts: &[HostMount],
    ) -> io::Result<Option<Self>> {
        let mut found: Vec<(DirectoryId, OwnedFd)> = Vec::new();
        let writable: Vec<_> = host_mounts.iter().filter(|mount| mount.writable).collect();
        for mount in box_sys::walk::outermost(&writable) {
            let open = match box_sys::walk::open_in(&mount.source, c".") {
                // `RLIMIT_FSIZE` limits a single file to the whole quota.
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => continue,
                open => open?,
            };
            let id = DirectoryId::of(&mount.path, &open)?;
            let is_same = |(other, _): &(DirectoryId, _)| {
                (other.device, other.inode) == (id.device, id.inode)
            };
            if !found.iter().any(is_same) {
                found.push((id, open));
            }
        }
        if found.is_empty() {
            return Ok(None);
        }
        Self::over(limited, bytes, found).await.map(Some)
    }

    /// Restores the quota of an adopted box.
    ///
    /// A directory that is no longer at its path is an error.
    pub(super) async fn restore(record: &QuotaRecord) -> io::Result<Self> {
        let mut found = Vec::new();
        for id in &record.directories {
            let open = box_sys::walk::open(&id.path)?;
            if DirectoryId::of(&id.path, &open)? != *id {
                return Err(io::ErrorKind::NotFound.into());
            }
            found.push((id.clone(), open));
        }
        let restored = Self::over(record.limited, record.bytes, found).await?;
        Ok(Self {
            name: record.name.clone(),
            ..restored
        })
    }

    async fn over(
        limited: Limited,
        bytes: u64,
        found: Vec<(DirectoryId, OwnedFd)>,
    ) -> io::Result<Self> {
        let mut directories = Vec::new();
        let entries = limited.entries(bytes);
        for (id, open) in found {
            // The thread stops when the caller stops waiting.
            let waiting = Arc::new(());
            let target = (open.try_clone()?, Arc::downgrade(&waiting));
            let permit = SCANS.acquire().await;
            let set = move || {
                let ((directory, waiting), _permit) = (target, permit);
                let is_wanted = || waiting.strong_count() > 0;
                DirectoryQuota::set(directory.as_fd(), bytes, entries, is_wanted)
            };
            directories.push(Directory {
                open,
                id,
                kernel: tokio::task::spawn_blocking(set).await?.ok(),
            });
        }
        Ok(Self {
            limited,
            name: None,
            directories,
            bytes,
        })
    }

    /// Returns this quota with the name of its volume.
    pub(super) fn named(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }

    /// Returns an error if the quota is exceeded already.
    pub(super) fn check(&self) -> Result<(), BoxError> {
        let size = self.measure();
        let size = size.map_err(|_| unmeasurable(self.limited))?;
        if self.allows(&size) {
            return Ok(());
        }
        Err(self.exceeded_with(&size, "; mount it with ro, or enlarge it"))
    }

    pub(super) fn limited(&self) -> Limited {
        self.limited
    }

    /// Whether the file systems of all directories enforce the quota.
    pub(super) fn is_enforced(&self) -> bool {
        let is_enforced = |directory: &Directory| directory.kernel.is_some();
        self.directories.iter().all(is_enforced)
    }

    /// Returns the record for [`restore`](Self::restore).
    pub(super) fn record(&self) -> QuotaRecord {
        let id = |directory: &Directory| directory.id.clone();
        QuotaRecord {
            limited: self.limited,
            name: self.name.clone(),
            bytes: self.bytes,
            directories: self.directories.iter().map(id).collect(),
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
        with_end(
            self.exceeded_with(size, "; the runtime killed the box"),
            Ended::Quota,
        )
    }

    fn exceeded_with(&self, size: &Size, end: &str) -> BoxError {
        let more = if size.bytes > self.bytes {
            end.to_owned()
        } else {
            let files = self.limited.entries(self.bytes);
            format!(", which hold at most {files} files{end}")
        };
        let megabytes = self.bytes >> 20;
        match self.limited {
            Limited::Workspace => quota_exceeded(megabytes, &more),
            Limited::Disk(_) => disk_exceeded(megabytes, &more),
            Limited::Volume(_) => {
                let name = self.name.as_deref().unwrap_or_default();
                let message =
                    format!("size_mb: the files of volume {name} exceed {megabytes} MiB{more}");
                BoxError::capacity(message).with_detail(&Detail {
                    field: Some("size_mb".to_owned()),
                    limit: Some("size_mb".to_owned()),
                    max: Some(megabytes),
                    ..Detail::about(Subject::Volume)
                })
            }
        }
    }

    fn allows(&self, size: &Size) -> bool {
        size.bytes <= self.bytes && size.entries <= self.limited.entries(self.bytes)
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
                _ => size.add(&directory.open, self.limited.skipped(), |size| {
                    self.allows(size)
                })?,
            }
        }
        Ok(size)
    }

    /// Measures until the box is gone or exceeds its quota.
    pub(super) async fn watch(self: Arc<Self>, live_box: Weak<LiveBox>) {
        let (mut last, mut cpu) = (Size::default(), None);
        let mut interval = FAST_INTERVAL;
        loop {
            tokio::time::sleep(interval).await;
            let Some(live_box) = live_box.upgrade() else {
                return;
            };
            interval = SLOW_INTERVAL;
            let used = live_box.sandbox.usage().cpu;
            if used.is_some() && used == cpu {
                continue;
            }
            cpu = used;
            let quota = Arc::clone(&self);
            let Ok(measured) = tokio::task::spawn_blocking(move || quota.measure()).await else {
                return;
            };
            let Ok(size) = measured else {
                live_box.kill_with(unmeasurable(self.limited));
                return;
            };
            match self.limited {
                Limited::Workspace => live_box.measured().workspace = Some(size.bytes),
                Limited::Disk(_) => live_box.measured().private = Some(size.bytes),
                Limited::Volume(_) => {}
            }
            // This check also applies to kernel quotas, because a box with a parent of this
            // directory may have removed the limit.
            if !self.allows(&size) {
                live_box.kill_with(self.exceeded(&size));
                return;
            }
            if size != last {
                interval = FAST_INTERVAL;
            }
            last = size;
        }
    }
}

impl Limited {
    /// Most files within a quota of this many bytes.
    fn entries(self, bytes: u64) -> u64 {
        match self {
            Self::Workspace => bytes / BYTES_PER_ENTRY,
            Self::Disk(inodes) | Self::Volume(inodes) => inodes,
        }
    }

    /// Names of entries that are not measured.
    ///
    /// The kernel locks the working directories of overlays. They only hold files that are being
    /// copied, and no guest can create these names.
    fn skipped(self) -> &'static [&'static CStr] {
        match self {
            Self::Workspace | Self::Volume(_) => &[],
            Self::Disk(_) => &[c"work", c"workspace-work"],
        }
    }
}

/// Returns the error of a box with a quota that cannot be measured any more.
pub(super) fn unmeasurable(limited: Limited) -> BoxError {
    let message = match limited {
        Limited::Workspace => {
            "workspace_quota_mb: the workspace can no longer be measured; the runtime killed the box"
        }
        Limited::Disk(_) => {
            "disk_mb: the disk can no longer be measured; the runtime killed the box"
        }
        Limited::Volume(_) => {
            "size_mb: a volume can no longer be measured; the runtime killed the box"
        }
    };
    let error = BoxError::unavailable(message).with_detail(&Detail::about(Subject::Disk));
    with_end(error, Ended::Quota)
}
