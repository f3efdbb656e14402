//! Volumes: directories that outlive boxes, with a maximum size.
//!
//! A volume is a file system in a file where the machine can do that, as a disk is ([`disk`]).
//! Elsewhere it is a directory. The file system of the machine limits it, or the runtime measures it
//! and ends a box that exceeds the size.
//!
//! ```text
//! STATE/volumes/ID/disk    the file of a volume with its own file system
//! STATE/volumes/ID/data    the directory of any other volume
//! ```
//! A directory without an item is left of a crash, and the next start removes it.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, ItemId};
use box_sys::walk::Size;
use box_sys::{DISK_BYTES_PER_INODE, DiskKind, Mount, ServerConfig, Source};

use super::disk::{self, DiskReport};
use super::error::{os_error, sandbox_error};
use super::plan::{GUEST, HostMount};
use super::quota::{Limited, Quota};
use super::{NativeBackend, NativeConfig};
use crate::volumes::{MountedVolume, Volumes};

/// Name that a box lists as missing if the kernel does not enforce the size of its volumes.
pub(super) const LIMIT: &str = "volume.limit";

/// Directory of the volumes in the state directory.
const FOLDER: &str = "volumes";

/// Names of the data of a volume.
const FILE: &str = "disk";
const DIRECTORY: &str = "data";

/// The directory of one volume.
#[derive(Debug, Clone)]
struct VolumeDir(PathBuf);

/// The volumes of a box before its start.
#[derive(Debug, Default)]
pub(super) struct VolumePlan {
    pub(super) mounts: Vec<Mount>,
    /// Descriptors of the mounts, which follow those of the host paths.
    pub(super) sources: Vec<OwnedFd>,
    /// Limits of the volumes that are directories.
    pub(super) quotas: Vec<Quota>,
    /// Whether the kernel enforces every size.
    pub(super) enforced: bool,
}

#[async_trait]
impl Volumes for NativeBackend {
    async fn create(&self, id: &ItemId, bytes: u64) -> Result<bool, BoxError> {
        let volume = self.volume(id)?;
        let kind = self.0.server.disk_kind().await?;
        let owner = owner(&self.0.config);
        let state = self.0.config.state_dir.clone();
        blocking(move || {
            volume.make(owner)?;
            match kind {
                DiskKind::FileSystem => {
                    let (user, group) = owner.unwrap_or_default();
                    let file = volume.0.join(FILE);
                    let made = box_sys::create_volume(&file, bytes, (user, group));
                    made.map_err(|error| volume_error(&error))?;
                }
                DiskKind::Directory => volume.make_directory(owner)?,
            }
            volume.sync()?;
            let directory = disk::directory(state.as_deref());
            Ok(DiskReport::new(kind, &directory).enforced)
        })
        .await
    }

    async fn resize(&self, id: &ItemId, bytes: u64) -> Result<(), BoxError> {
        let volume = self.volume(id)?;
        blocking(move || {
            let file = volume.0.join(FILE);
            let Ok(before) = file.metadata() else {
                return Ok(());
            };
            if bytes != before.len() {
                let resized = box_sys::resize_volume(&file, bytes);
                resized.map_err(|error| volume_error(&error))?;
            }
            Ok(())
        })
        .await
    }

    async fn used_bytes(&self, id: &ItemId) -> Result<u64, BoxError> {
        let volume = self.volume(id)?;
        blocking(move || {
            let file = volume.0.join(FILE);
            if file.exists() {
                return Ok(box_sys::volume_used(&file).map_err(|error| volume_error(&error))?);
            }
            let mut size = Size::default();
            let directory = File::open(volume.0.join(DIRECTORY))?;
            size.add(directory, &[], |_| true)?;
            Ok(size.bytes)
        })
        .await
    }

    async fn remove(&self, id: &ItemId) -> Result<(), BoxError> {
        let volume = self.volume(id)?;
        blocking(move || Ok(volume.remove()?)).await
    }

    async fn retain(&self, known: &BTreeSet<ItemId>) -> Result<(), BoxError> {
        let Some(state) = &self.0.config.state_dir else {
            return Ok(());
        };
        let (folder, known) = (state.join(FOLDER), known.clone());
        blocking(move || {
            let entries = match std::fs::read_dir(&folder) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                entries => entries?,
            };
            for entry in entries {
                let entry = entry?;
                let name = entry.file_name();
                let volume = VolumeDir(entry.path());
                if name.to_str().is_some_and(|name| known.contains(name)) {
                    volume.remove_copy()?;
                } else {
                    volume.remove()?;
                }
            }
            Ok(())
        })
        .await
    }
}

impl NativeBackend {
    fn volume(&self, id: &ItemId) -> Result<VolumeDir, BoxError> {
        let state = self.0.config.state_dir.as_deref();
        let state = state.ok_or_else(|| {
            BoxError::unsupported("volumes: this runtime has no state directory; use a server")
        })?;
        Ok(VolumeDir(state.join(FOLDER).join(id.as_str())))
    }

    /// Prepares the mounts of a box's volumes. `first` is the number of its other descriptors.
    pub(super) async fn plan_volumes(
        &self,
        volumes: &[MountedVolume],
        first: usize,
    ) -> Result<VolumePlan, BoxError> {
        let mut plan = VolumePlan {
            enforced: true,
            ..VolumePlan::default()
        };
        for mounted in volumes {
            let volume = self.volume(&mounted.id)?;
            let sub_path = mounted.mount.sub_path.as_ref().map(PathBuf::from);
            let writable = !mounted.mount.ro;
            let name = mounted.mount.volume.as_str();
            let file = volume.0.join(FILE);
            let source = if file.exists() {
                if self.0.server.disk_kind().await? != DiskKind::FileSystem {
                    let message = format!(
                        "volumes: {name} has its own file system, which only a server of root can mount"
                    );
                    return Err(BoxError::unavailable(message).with_detail(&Detail::lasting()));
                }
                let file = file.canonicalize().map_err(os_error)?;
                Source::Volume { file, sub_path }
            } else {
                let directory = volume.0.join(DIRECTORY);
                let path = directory.canonicalize().map_err(|_| data_missing(name))?;
                let root = File::open(&path).map_err(|_| data_missing(name))?;
                let sub_path = sub_path.unwrap_or_default();
                let opened = box_sys::open_volume_directory(&root, &sub_path, writable);
                let opened = opened
                    .map_err(|error| sandbox_error(&box_sys::sub_path_error(&sub_path, &error)))?;
                if writable {
                    let quota = quota(&path, root, mounted).await?;
                    plan.enforced &= quota.is_enforced();
                    plan.quotas.push(quota);
                }
                plan.sources.push(opened);
                Source::Fd(first + plan.sources.len() - 1)
            };
            plan.mounts.push(Mount {
                source,
                target: PathBuf::from(&mounted.mount.mount_path),
                writable,
                overlay: false,
            });
        }
        Ok(plan)
    }
}

/// Limits a volume that is a directory; an error if it is full already.
async fn quota(path: &Path, root: File, mounted: &MountedVolume) -> Result<Quota, BoxError> {
    let text = path.to_str().ok_or(io::ErrorKind::InvalidFilename);
    let mount = HostMount {
        path: text.map_err(os_error)?.to_owned(),
        source: root.into(),
        writable: true,
    };
    let name = mounted.mount.volume.as_str();
    let limited = Limited::Volume(mounted.bytes / DISK_BYTES_PER_INODE);
    let quota = Quota::of(limited, mounted.bytes, &[mount]).await;
    let quota = quota.map_err(os_error)?;
    let quota = quota.ok_or_else(|| data_missing(name))?.named(name);
    let checked = tokio::task::spawn_blocking(move || quota.check().map(|()| quota)).await;
    checked.map_err(|_| BoxError::internal("volume task failed"))?
}

fn data_missing(name: &str) -> BoxError {
    let message = format!("volumes: the data of {name} cannot be opened");
    BoxError::unavailable(message).with_detail(&Detail::lasting().of(Subject::Volume))
}

/// The user and group of the host that own the files of volumes.
fn owner(config: &NativeConfig) -> Option<(u32, u32)> {
    // A guest of root's boxes has this id. No user of the host has it.
    let id = ServerConfig::default().id_base + GUEST;
    let of_guest = || rustix::process::geteuid().is_root().then_some((id, id));
    config.run_as.or_else(of_guest)
}

impl VolumeDir {
    /// Creates the directory and its parent.
    fn make(&self, owner: Option<(u32, u32)>) -> io::Result<()> {
        let folder = self.0.parent().ok_or(io::ErrorKind::InvalidInput)?;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)?;
        DirBuilder::new().mode(0o700).create(&self.0)?;
        if let Some((user, group)) = owner {
            // The fork server of another user opens the directory by its path.
            for path in [folder, &self.0] {
                std::os::unix::fs::chown(path, Some(user), Some(group))?;
            }
        }
        Ok(())
    }

    fn make_directory(&self, owner: Option<(u32, u32)>) -> io::Result<()> {
        let path = self.0.join(DIRECTORY);
        DirBuilder::new().mode(0o755).create(&path)?;
        if let Some((user, group)) = owner {
            std::os::unix::fs::chown(&path, Some(user), Some(group))?;
        }
        Ok(())
    }

    /// Syncs the names of the volume and of its data.
    fn sync(&self) -> io::Result<()> {
        let folder = self.0.parent().ok_or(io::ErrorKind::InvalidInput)?;
        for path in [&self.0, folder] {
            File::open(path)?.sync_all()?;
        }
        Ok(())
    }

    /// Removes a copy that was being resized.
    fn remove_copy(&self) -> io::Result<()> {
        let copy = self.0.join(FILE).with_extension(box_sys::VOLUME_COPY);
        match std::fs::remove_file(copy) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes the volume, which may be gone or partly created.
    fn remove(&self) -> io::Result<()> {
        match box_sys::walk::remove_all(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

fn volume_error(error: &box_sys::Error) -> BoxError {
    match error {
        box_sys::Error::Step { step, source } => match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                BoxError::capacity("volume: the server's disk has no room for it")
                    .with_detail(&Detail::about(Subject::Disk))
            }
            kind => BoxError::unavailable(format!("volume: {step}: {kind}")),
        },
        error => sandbox_error(error),
    }
}

/// A failure of the disk, or an error for the caller.
struct Failed(BoxError);

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self(match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                BoxError::capacity("volume: the server's disk has no room for it")
                    .with_detail(&Detail::about(Subject::Disk))
            }
            kind => BoxError::unavailable(format!("volume: its data cannot be changed: {kind}")),
        })
    }
}

impl From<BoxError> for Failed {
    fn from(error: BoxError) -> Self {
        Self(error)
    }
}

/// Runs disk access on a thread for blocking work.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failed> + Send + 'static,
) -> Result<T, BoxError> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.map_err(|_| BoxError::internal("volume task failed"))?;
    done.map_err(|Failed(error)| error)
}
