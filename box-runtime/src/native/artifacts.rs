//! Mounts of content identified by a digest.
//!
//! The box gets a verified copy of the files in the manifest instead of the source directory. The
//! copy matches the digest and does not change.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxMountSpec};
use rustix::fs::{FlockOperation, Mode, OFlags, ResolveFlags};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

/// Limits for one artifact and for all artifacts of a box.
const MAX_FILES: usize = 2_048;
const BYTES: u64 = 256 << 20;
const MANIFEST_BYTES: u64 = 4 << 20;
const MAX_ARTIFACTS: usize = 256;

/// Supported manifest algorithm.
const ALGORITHM: &str = "sha256-tree-v1";

/// Name prefix of artifact directories for boxes without a state directory.
const SCRATCH: &str = "boxd-artifacts-";

/// File list of a tree.
///
/// Its digest is the digest of its compact JSON text with the fields in this order.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    algorithm: String,
    files: Vec<Entry>,
    total_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    executable: bool,
    path: String,
    sha256: String,
    size: u64,
}

/// Copied directories by mount path.
pub(super) type ArtifactCopies = HashMap<String, OwnedFd>;

/// Copies all mounts with a digest into `dir`, which is created if needed.
pub(super) async fn copy_artifacts(
    mounts: &[BoxMountSpec],
    dir: &Path,
) -> Result<ArtifactCopies, BoxError> {
    let artifacts = mounts.iter().filter(|mount| mount.is_content_addressed());
    let (artifacts, dir): (Vec<_>, _) = (artifacts.cloned().collect(), dir.to_owned());
    if artifacts.is_empty() {
        return Ok(ArtifactCopies::new());
    }
    let copying = move || {
        let copied = artifacts.into_iter().map(|mount| {
            let source = super::plan::open("extra_mounts", &mount.host_path)?;
            let copy = copy(&mount, source.as_fd(), &dir).map_err(unusable)?;
            Ok((mount.mount_path, copy))
        });
        copied.collect()
    };
    let copied = tokio::task::spawn_blocking(copying).await;
    copied.map_err(|_| BoxError::internal("artifact copy task failed"))?
}

fn unusable(why: impl AsRef<str>) -> BoxError {
    let detail = Detail::of_field("content_digest").of(Subject::File);
    BoxError::validation(format!("content_digest: {}", why.as_ref())).with_detail(&detail)
}

type Reason = String;

fn copy(mount: &BoxMountSpec, source: BorrowedFd<'_>, dir: &Path) -> Result<OwnedFd, Reason> {
    let digest = mount.content_digest.as_deref().unwrap_or_default();
    let path = mount.manifest_path.as_deref().unwrap_or_default();
    let manifest = Manifest::load(path)?;
    if manifest.digest()? != digest {
        return Err("the manifest does not match content_digest".to_owned());
    }
    let failed = |error: io::Error| format!("the content cannot be copied: {}", error.kind());
    let target = dir.join(digest.trim_start_matches("sha256:"));
    if !target.is_dir() {
        make_dir(dir, 0o700).map_err(failed)?;
        let (artifacts, bytes) = usage(dir).map_err(failed)?;
        if artifacts >= MAX_ARTIFACTS || bytes.saturating_add(manifest.total_bytes) > BYTES {
            return Err(
                "the box holds the maximum of mounted content; create a new box".to_owned(),
            );
        }
        // A copy gets its final name only when it is complete.
        let staging = Staging(dir.join(Uuid::now_v7().simple().to_string()));
        manifest.copy_to(source, &staging.0)?;
        std::fs::rename(&staging.0, &target).map_err(failed)?;
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(&target, flags, Mode::empty()).map_err(|error| failed(error.into()))
}

impl Manifest {
    fn load(path: &str) -> Result<Self, Reason> {
        let unreadable = |_| "the manifest cannot be read".to_owned();
        // Non-blocking, so that a FIFO at this path cannot block the runtime.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let links = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let file = rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), links);
        let file = File::from(file.map_err(io::Error::from).map_err(unreadable)?);
        if !file.metadata().map_err(unreadable)?.is_file() {
            return Err("the manifest is not a regular file".to_owned());
        }
        let mut text = Vec::new();
        let mut most = file.take(MANIFEST_BYTES + 1);
        most.read_to_end(&mut text).map_err(unreadable)?;
        if text.len() as u64 > MANIFEST_BYTES {
            return Err("the manifest is too large".to_owned());
        }
        let manifest: Self = serde_json::from_slice(&text).map_err(|error| {
            let what = if error.is_data() {
                "has an invalid shape"
            } else {
                "is invalid JSON"
            };
            format!("the manifest {what}")
        })?;
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), Reason> {
        let wrong = |what: &str| Err(format!("the manifest {what}"));
        if self.algorithm != ALGORITHM {
            return wrong("uses an unsupported algorithm");
        }
        if self.files.len() > MAX_FILES {
            return wrong("contains too many files");
        }
        let mut paths = BTreeSet::new();
        let mut total = 0_u64;
        for file in &self.files {
            if !is_inside(&file.path) || !paths.insert(file.path.as_str()) {
                return wrong("contains an unsafe path");
            }
            let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            if file.sha256.len() != 64 || !file.sha256.bytes().all(hex) {
                return wrong("contains an invalid file digest");
            }
            total = total.saturating_add(file.size);
        }
        if total != self.total_bytes || total > BYTES {
            return wrong("contains an invalid total size");
        }
        Ok(())
    }

    fn digest(&self) -> Result<String, Reason> {
        let text = serde_json::to_vec(self).map_err(|error| error.to_string())?;
        Ok(format!("sha256:{}", hex(&Sha256::digest(text))))
    }

    fn copy_to(&self, source: BorrowedFd<'_>, target: &Path) -> Result<(), Reason> {
        let failed = |error: io::Error| format!("the content cannot be copied: {}", error.kind());
        make_dir(target, 0o755).map_err(failed)?;
        let paths = self.files.iter().map(|file| Path::new(&file.path));
        let parents: BTreeSet<_> = paths.flat_map(|path| path.ancestors().skip(1)).collect();
        for directory in parents {
            make_dir(&target.join(directory), 0o755).map_err(failed)?;
        }
        for file in &self.files {
            if !file
                .copy(source, &target.join(&file.path))
                .map_err(failed)?
            {
                return Err(format!("the source changed: {}", file.path));
            }
        }
        Ok(())
    }
}

impl Entry {
    /// Copies the file; returns whether it matches the manifest.
    fn copy(&self, source: BorrowedFd<'_>, target: &Path) -> io::Result<bool> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let links = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let Ok(from) = rustix::fs::openat2(source, &self.path, flags, Mode::empty(), links) else {
            return Ok(false);
        };
        let from = File::from(from);
        if !from.metadata()?.is_file() {
            return Ok(false);
        }
        let mut options = File::options();
        let mut to = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(target)?;
        let (mut digest, mut copied) = (Sha256::new(), 0_u64);
        let mut from = from.take(self.size.saturating_add(1));
        let mut piece = vec![0; 256 * 1024];
        loop {
            let length = from.read(&mut piece)?;
            if length == 0 {
                break;
            }
            digest.update(&piece[..length]);
            to.write_all(&piece[..length])?;
            copied += length as u64;
        }
        let mode = if self.executable { 0o555 } else { 0o444 };
        to.set_permissions(Permissions::from_mode(mode))?;
        Ok(copied == self.size && hex(&digest.finalize()) == self.sha256)
    }
}

/// Returns whether a relative path is normalized and stays inside its directory.
fn is_inside(path: &str) -> bool {
    let part = |part: &str| !matches!(part, "" | "." | "..");
    !path.contains(['\0', '\\']) && path.split('/').all(part)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Creates a directory with exactly this mode, independent of the umask.
///
/// An existing directory is not an error.
fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
        Ok(()) => std::fs::set_permissions(path, Permissions::from_mode(mode)),
    }
}

/// Returns the number of artifacts in a directory and their total size.
fn usage(dir: &Path) -> io::Result<(usize, u64)> {
    let (mut artifacts, mut bytes) = (0, 0);
    let mut directories = vec![dir.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory)? {
            let entry = entry?;
            artifacts += usize::from(directory == dir);
            let metadata = entry.metadata()?;
            if metadata.is_dir() {
                directories.push(entry.path());
            } else {
                bytes += metadata.len();
            }
        }
    }
    Ok((artifacts, bytes))
}

/// Incomplete copy, removed on drop.
struct Staging(PathBuf);

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Directory of a box without a state directory, removed on drop.
///
/// If this process is killed, the next process that creates such a directory removes it.
#[derive(Debug)]
pub(super) struct TemporaryDirectory {
    path: PathBuf,
    _lock: File,
}

impl TemporaryDirectory {
    /// Creates a directory for artifacts.
    pub(super) fn for_artifacts(owner: Option<(u32, u32)>) -> io::Result<Self> {
        Self::new(&std::env::temp_dir(), SCRATCH, owner)
    }

    /// Creates a directory below `root` that `owner`, which opens it by name, can read.
    pub(super) fn new(root: &Path, prefix: &str, owner: Option<(u32, u32)>) -> io::Result<Self> {
        sweep(root, prefix);
        loop {
            let path = root.join(format!("{prefix}{}", Uuid::now_v7().simple()));
            DirBuilder::new().mode(0o700).create(&path)?;
            if let Some(lock) = claim(&path, owner)? {
                return Ok(Self { path, _lock: lock });
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        let _ = box_sys::walk::remove_all(&self.path);
    }
}

/// Locks a new directory. Returns `None` if another process has taken it for one of a dead process.
fn claim(path: &Path, owner: Option<(u32, u32)>) -> io::Result<Option<File>> {
    let locking = || -> io::Result<File> {
        let lock = File::open(path)?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        if let Some((user, group)) = owner {
            std::os::unix::fs::chown(path, Some(user), Some(group))?;
        }
        Ok(lock)
    };
    match locking() {
        Ok(lock) => Ok(path.exists().then_some(lock)),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::WouldBlock => Ok(None),
            _ => Err(error),
        },
    }
}

/// Removes the directories of dead processes.
fn sweep(root: &Path, prefix: &str) {
    let ours = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if !name.to_string_lossy().starts_with(prefix) {
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(directory) = rustix::fs::open(entry.path(), flags, Mode::empty()) else {
            continue;
        };
        let directory = File::from(directory);
        let mine = directory
            .metadata()
            .is_ok_and(|metadata| ours == 0 || metadata.uid() == ours);
        if mine && rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = box_sys::walk::remove_all(&entry.path());
        }
    }
}

#[cfg(test)]
mod tests;
