//! Disks: private files of a box that do not fit into its memory.
//!
//! The fork server makes a file system in a file where the machine can do that. Elsewhere a disk is
//! a directory. The file system of the machine limits it ([`box_sys::DirectoryQuota`]), or the
//! runtime measures it and ends a box that exceeds its limit.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use box_protocol::BoxSpec;
use box_sys::{Caps, DISK_BYTES_PER_INODE, DirectoryQuota, DiskKind, Scratch};

use super::artifacts::TemporaryDirectory;
use super::error::disk_error;
use super::plan::HostMount;
use super::quota::{Limited, Quota};
use super::state::StateDir;

/// Name of the disk in the state directory of its box.
pub(super) const NAME: &str = "disk";

/// Name that a box lists as missing if the kernel does not enforce the limit of its disk.
pub(super) const LIMIT: &str = "disk.limit";

/// Directory of disks without a state directory. `/tmp` is often in memory.
const TEMPORARY: &str = "/var/tmp";

/// Name prefix of such directories.
const PREFIX: &str = "boxd-disk-";

/// Storage that a spec asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Storage {
    /// Memory of the box.
    Memory(Caps),
    /// A disk. `shm` limits the files that stay in memory.
    Disk { caps: Caps, shm: Caps },
}

impl Storage {
    /// Private files that fit into memory stay there, where they are fastest.
    pub(super) fn of(spec: &BoxSpec) -> Self {
        let in_memory = in_memory(spec.memory_mb.saturating_mul(1 << 20));
        let bytes = spec.disk_mb.saturating_mul(1 << 20);
        match bytes {
            0 => Self::Memory(in_memory),
            _ if bytes <= in_memory.bytes => Self::Memory(Caps { bytes, ..in_memory }),
            _ => Self::Disk {
                caps: Caps {
                    bytes,
                    inodes: bytes / DISK_BYTES_PER_INODE,
                },
                shm: in_memory,
            },
        }
    }

    /// Limit of the private files in bytes.
    pub(super) fn bytes(self) -> u64 {
        let (Self::Memory(caps) | Self::Disk { caps, .. }) = self;
        caps.bytes
    }
}

/// Limits the private files of a box, which occupy its memory.
///
/// The limit is below the memory limit, so a write fails before the kernel kills a process. If
/// nothing else ran, that process would be the agent.
fn in_memory(memory: u64) -> Caps {
    let caps = Caps::default();
    Caps {
        bytes: caps.bytes.min(memory / 4 * 3),
        ..caps
    }
}

/// Storage of a box's private files before its start.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) scratch: Scratch,
    /// Limit of a directory.
    pub(super) quota: Option<Quota>,
    /// Directory of a box without a state directory.
    pub(super) temporary: Option<TemporaryDirectory>,
}

impl Disk {
    /// Storage in memory.
    pub(super) fn in_memory(caps: Caps) -> Self {
        Self {
            scratch: Scratch::Memory(caps),
            quota: None,
            temporary: None,
        }
    }

    /// Prepares a disk of this kind.
    pub(super) async fn new(
        kind: DiskKind,
        (caps, shm): (Caps, Caps),
        state: Option<&StateDir>,
        owner: Option<(u32, u32)>,
    ) -> io::Result<Self> {
        if kind == DiskKind::FileSystem {
            let name = state.and_then(|state| state.path().file_name());
            let name = name.map(|id| Path::new(id).join(NAME));
            return Ok(Self {
                scratch: Scratch::FileSystem { caps, shm, name },
                quota: None,
                temporary: None,
            });
        }
        let (path, temporary) = if let Some(state) = state {
            (in_state(state, owner)?, None)
        } else {
            let made = TemporaryDirectory::new(Path::new(TEMPORARY), PREFIX, owner)?;
            (made.path().canonicalize()?, Some(made))
        };
        let quota = of_directory(&path, caps).await?;
        Ok(Self {
            scratch: Scratch::Directory { path, shm },
            quota: Some(quota),
            temporary,
        })
    }

    /// The disk of an earlier box.
    ///
    /// A file has its limit, and a directory gets the limit of the spec.
    pub(super) async fn of_earlier(path: &Path, storage: Storage) -> io::Result<Self> {
        let (caps, shm) = match storage {
            Storage::Memory(caps) => (caps, caps),
            Storage::Disk { caps, shm } => (caps, shm),
        };
        let path = path.to_owned();
        if std::fs::symlink_metadata(&path)?.is_dir() {
            let quota = of_directory(&path, caps).await?;
            return Ok(Self {
                scratch: Scratch::Directory { path, shm },
                quota: Some(quota),
                temporary: None,
            });
        }
        let file = path.clone();
        // The machine may have failed while a box used the disk.
        let repaired = tokio::task::spawn_blocking(move || box_sys::repair_disk(&file)).await;
        repaired?.map_err(disk_error)?;
        Ok(Self {
            scratch: Scratch::File { path, shm },
            quota: None,
            temporary: None,
        })
    }

    /// Whether the kernel enforces the limit.
    pub(super) fn is_enforced(&self) -> bool {
        self.quota.as_ref().is_none_or(Quota::is_enforced)
    }
}

/// Creates the directory in the state directory of a box.
fn in_state(state: &StateDir, owner: Option<(u32, u32)>) -> io::Result<PathBuf> {
    let path = state.path().join(NAME);
    DirBuilder::new().mode(0o700).create(&path)?;
    if let Some((user, group)) = owner {
        // The fork server of another user opens the directory by its path.
        for path in [&path, state.path()] {
            std::os::unix::fs::chown(path, Some(user), Some(group))?;
        }
    }
    path.canonicalize()
}

async fn of_directory(path: &Path, caps: Caps) -> io::Result<Quota> {
    let text = path.to_str().ok_or(io::ErrorKind::InvalidFilename)?;
    let mount = HostMount {
        path: text.to_owned(),
        source: File::open(path)?.into(),
        writable: true,
    };
    let limited = Limited::Disk(caps.inodes);
    let quota = Quota::of(limited, caps.bytes, &[mount]).await?;
    quota.ok_or_else(|| io::ErrorKind::NotADirectory.into())
}

/// The directory of disks that the fork server uses.
pub(super) fn directory(state_dir: Option<&Path>) -> PathBuf {
    state_dir.unwrap_or(Path::new(TEMPORARY)).to_owned()
}

/// The kind of disk on this machine, for an operator.
#[derive(Debug, Clone, Copy)]
pub(super) struct DiskReport {
    pub(super) kind: &'static str,
    /// Whether the kernel enforces the limit.
    pub(super) enforced: bool,
}

impl DiskReport {
    /// The report for the kind of the fork server.
    pub(super) fn new(server: DiskKind, directory: &Path) -> Self {
        let (kind, enforced) = match server {
            DiskKind::FileSystem => ("a file system in a file, through a loop device", true),
            DiskKind::Directory if has_quotas(directory) => {
                ("a directory with a project quota", true)
            }
            DiskKind::Directory => ("a directory that the runtime measures", false),
        };
        Self { kind, enforced }
    }
}

/// Whether the file system of a directory enforces limits of directories.
fn has_quotas(directory: &Path) -> bool {
    let limited = TemporaryDirectory::new(directory, PREFIX, None).and_then(|made| {
        let open = File::open(made.path())?;
        DirectoryQuota::set(open.as_fd(), 1 << 20, 64, || true).map(drop)
    });
    limited.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn storage(disk_mb: u64, memory_mb: u64) -> Storage {
        let spec = json!({"box_id": "s", "disk_mb": disk_mb, "memory_mb": memory_mb});
        Storage::of(&BoxSpec::from_value(spec).unwrap())
    }

    #[test]
    fn private_files_are_in_memory_as_long_as_they_fit() {
        let memory = |bytes| {
            Storage::Memory(Caps {
                bytes,
                ..Caps::default()
            })
        };
        assert_eq!(storage(0, 512), memory(384 << 20));
        assert_eq!(storage(0, 4096), memory(512 << 20));
        assert_eq!(storage(100, 512), memory(100 << 20));
        assert_eq!(storage(384, 512), memory(384 << 20));
        let Storage::Disk { caps, shm } = storage(385, 512) else {
            panic!("385 MiB do not fit");
        };
        assert_eq!((caps.bytes, shm.bytes), (385 << 20, 384 << 20));
        assert_eq!(caps.inodes, (385 << 20) / 8192);
        assert_eq!(storage(10 << 10, 512).bytes(), 10 << 30);
    }
}
