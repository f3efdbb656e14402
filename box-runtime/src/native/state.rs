//! State directory of a box on disk, named after its unique id.
//!
//! It holds the socket of the agent, the logs of the commands, and the record for a later process.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use box_sys::SandboxRecord;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::quota::QuotaRecord;
use crate::backend::LayerFiles;

/// Name of the decision to stop the box.
const STOP: &str = "stop.json";

/// Name of the log file.
const LOGS: &str = "logs";

/// Persistent data of a box: its kernel objects and the runtime's record.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoredBox {
    pub(super) sandbox: SandboxRecord,
    pub(super) quota: Option<QuotaRecord>,
    /// Limit of a disk that is a directory.
    #[serde(default)]
    pub(super) disk: Option<QuotaRecord>,
    /// Limits of volumes that are directories.
    #[serde(default)]
    pub(super) volumes: Vec<QuotaRecord>,
    /// Limit of the private files in bytes. `None` in records of older versions.
    #[serde(default)]
    pub(super) private_limit: Option<u64>,
    /// Disk of an earlier box that this one uses.
    #[serde(default)]
    pub(super) earlier_disk: Option<PathBuf>,
    pub(super) record: String,
}

/// Decision to stop a box and to keep its private files.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StopRecord {
    /// Disk of the box, or the complete copy of its files.
    pub(super) from: PathBuf,
    /// Path of the layer.
    pub(super) into: PathBuf,
    pub(super) files: LayerFiles,
}

/// State directory of a box.
///
/// The backend removes it only once the box is known to be gone, because it is the only way to
/// reach a live box.
#[derive(Debug)]
pub(super) struct StateDir(PathBuf);

impl StateDir {
    /// Creates the directory and a bound socket for the agent.
    ///
    /// The agent itself calls `listen`, so that the kernel reports the agent as the peer of a
    /// connection.
    pub(super) fn new(root: &Path, id: Uuid) -> io::Result<(Self, OwnedFd)> {
        let state = Self::of(root, id);
        DirBuilder::new().mode(0o700).create(&state.0)?;
        let (_directory, path) = state.socket()?;
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path)?)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        Ok((state, socket))
    }

    /// Returns the directory of a box, which may not exist.
    pub(super) fn of(root: &Path, id: Uuid) -> Self {
        Self(root.join(id.simple().to_string()))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the path of the agent's socket relative to a directory descriptor.
    ///
    /// A socket path has at most 107 bytes, and the state directory may have a longer path.
    fn socket(&self) -> io::Result<(OwnedFd, PathBuf)> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(&self.0, flags, Mode::empty())?;
        let path = format!("/proc/self/fd/{}/agent.sock", directory.as_raw_fd());
        Ok((directory, path.into()))
    }

    /// Connects to the agent without waiting; the agent may accept later.
    pub(super) fn connect(&self) -> io::Result<UnixStream> {
        let (_directory, path) = self.socket()?;
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, kind, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(&path)?)?;
        Ok(UnixStream::from(socket))
    }

    /// Returns whether all processes of the box are gone.
    ///
    /// Every process of the box inherits the lock of the log file, so a free lock means that none
    /// is alive.
    pub(super) fn is_dead(&self) -> io::Result<bool> {
        let logs = match File::open(self.0.join(LOGS)) {
            // The log file is created before the box.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            logs => logs?,
        };
        match rustix::fs::flock(&logs, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Ok(false),
            locked => Ok(locked.map(|()| true)?),
        }
    }

    /// Replaces the record atomically, so that a reader always finds a complete one.
    pub(super) fn store(&self, stored: &StoredBox) -> io::Result<()> {
        let (temporary, target) = (self.0.join("box.json.new"), self.0.join("box.json"));
        write_json(&temporary, stored)?;
        std::fs::rename(temporary, target)
    }

    /// Stores the decision to stop the box, so that every later process completes it.
    pub(super) fn store_stop(&self, record: &StopRecord) -> io::Result<()> {
        let (temporary, target) = (self.0.join("stop.json.new"), self.0.join(STOP));
        write_json(&temporary, record)?.sync_all()?;
        std::fs::rename(temporary, target)?;
        File::open(&self.0)?.sync_all()
    }

    /// Removes that decision.
    pub(super) fn forget_stop(&self) {
        let _ = std::fs::remove_file(self.0.join(STOP));
    }

    /// Reads that decision, if it was stored.
    pub(super) fn stop_record(&self) -> io::Result<Option<StopRecord>> {
        match std::fs::read(self.0.join(STOP)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes the record, so that no process adopts the box.
    pub(super) fn forget(&self) {
        let _ = std::fs::remove_file(self.0.join("box.json"));
    }

    /// Returns whether a record exists or may exist.
    pub(super) fn has_record(&self) -> bool {
        self.0.join("box.json").try_exists().unwrap_or(true)
    }

    /// Reads the record.
    pub(super) fn load(&self) -> io::Result<StoredBox> {
        Ok(serde_json::from_slice(&std::fs::read(
            self.0.join("box.json"),
        )?)?)
    }

    /// Returns the directory of the artifact copies.
    pub(super) fn artifacts(&self) -> PathBuf {
        self.0.join("artifacts")
    }

    /// Opens the file of the names with synthetic addresses.
    pub(super) fn names(&self) -> io::Result<File> {
        let mut options = std::fs::OpenOptions::new();
        let options = options.read(true).append(true).create(true).mode(0o600);
        options.open(self.0.join("names"))
    }

    /// Creates the log file of the box's commands, which only the agent reads.
    ///
    /// The file is locked while any process has it open.
    pub(super) fn logs(&self) -> io::Result<OwnedFd> {
        let mut options = std::fs::OpenOptions::new();
        let options = options.read(true).write(true).create_new(true).mode(0o600);
        let logs = options.open(self.0.join(LOGS))?;
        rustix::fs::flock(&logs, FlockOperation::NonBlockingLockExclusive)?;
        Ok(logs.into())
    }

    /// Removes the directory. The next process removes anything left.
    pub(super) fn remove(&self) {
        let _ = box_sys::walk::remove_all(&self.0);
    }
}

/// Writes a new file in one call: a record has several hundred tokens.
fn write_json(path: &Path, value: &impl Serialize) -> io::Result<File> {
    let json = serde_json::to_vec(value)?;
    let mut options = std::fs::OpenOptions::new();
    let options = options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(path)?;
    file.write_all(&json)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_with_a_long_path_can_be_connected() {
        let root = tempfile::tempdir().unwrap();
        let deep = root.path().join("long/".repeat(40));
        std::fs::create_dir_all(&deep).unwrap();
        let (state, socket) = StateDir::new(&deep, Uuid::now_v7()).unwrap();
        rustix::net::listen(&socket, 1).unwrap();
        assert!(state.connect().is_ok());
        assert!(state.0.join("agent.sock").exists());
    }

    #[test]
    fn a_box_is_dead_once_no_process_has_its_log_file() {
        let root = tempfile::tempdir().unwrap();
        let (state, _socket) = StateDir::new(root.path(), Uuid::now_v7()).unwrap();
        assert!(state.is_dead().unwrap(), "no box was started");
        let logs = state.logs().unwrap();
        let of_the_box = logs.try_clone().unwrap();
        drop(logs);
        assert!(!state.is_dead().unwrap(), "the box has them");
        drop(of_the_box);
        assert!(state.is_dead().unwrap());
    }
}
