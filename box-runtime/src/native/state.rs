//! What a box has on disk: a directory named after its own id, with the socket on which its agent can be reached again, the logs
//! of its commands, and what a later process needs to know of it.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
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

/// The file of the logs.
const LOGS: &str = "logs";

/// What is kept of a box: what the kernel knows it by, and the runtime's own words.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    pub(super) sandbox: SandboxRecord,
    pub(super) quota: Option<QuotaRecord>,
    pub(super) record: String,
}

/// The directory of a box. It is removed once the box is known to be gone, and never for want of interest: what is in it is the
/// only way to a box that lives.
#[derive(Debug)]
pub(super) struct State(PathBuf);

impl State {
    /// Makes the directory, and in it a socket that is bound and on which nobody listens yet: the agent does, so that whoever
    /// connects learns from the kernel who the agent is.
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

    /// The directory that a box has, if anybody has made it.
    pub(super) fn of(root: &Path, id: Uuid) -> Self {
        Self(root.join(id.simple().to_string()))
    }

    /// The socket of its agent, by a descriptor of the directory that it is in: the name of a socket has 107 bytes, and the
    /// path of a state directory may have more.
    fn socket(&self) -> io::Result<(OwnedFd, PathBuf)> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(&self.0, flags, Mode::empty())?;
        let path = format!("/proc/self/fd/{}/agent.sock", directory.as_raw_fd());
        Ok((directory, path.into()))
    }

    /// Connects to its agent, without waiting: the agent may take the connection later.
    pub(super) fn connect(&self) -> io::Result<UnixStream> {
        let (_directory, path) = self.socket()?;
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, kind, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(&path)?)?;
        Ok(UnixStream::from(socket))
    }

    /// Whether nothing of the box can be alive: nobody holds the file of its logs, whose lock every process of it inherits
    /// from the moment it is asked for.
    pub(super) fn is_dead(&self) -> io::Result<bool> {
        let logs = match File::open(self.0.join(LOGS)) {
            // It comes before the box is asked for.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            logs => logs?,
        };
        match rustix::fs::flock(&logs, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Ok(false),
            locked => Ok(locked.map(|()| true)?),
        }
    }

    /// Keeps a record, in place of the one before: whoever reads it finds one of the two, whole.
    pub(super) fn keep(&self, kept: &Kept) -> io::Result<()> {
        let (fresh, place) = (self.0.join("box.json.new"), self.0.join("box.json"));
        let mut options = std::fs::OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        serde_json::to_writer(options.open(&fresh)?, kept)?;
        std::fs::rename(fresh, place)
    }

    /// Removes the record: nobody takes over a box without one.
    pub(super) fn forget(&self) {
        let _ = std::fs::remove_file(self.0.join("box.json"));
    }

    /// Whether there is a record, or may be one.
    pub(super) fn is_kept(&self) -> bool {
        self.0.join("box.json").try_exists().unwrap_or(true)
    }

    /// What was last kept.
    pub(super) fn kept(&self) -> io::Result<Kept> {
        Ok(serde_json::from_slice(&std::fs::read(
            self.0.join("box.json"),
        )?)?)
    }

    /// Where the copies are of content that it has by its digest.
    pub(super) fn artifacts(&self) -> PathBuf {
        self.0.join("artifacts")
    }

    /// The file of the names that the box was told addresses for.
    pub(super) fn names(&self) -> io::Result<File> {
        let mut options = std::fs::OpenOptions::new();
        let options = options.read(true).append(true).create(true).mode(0o600);
        options.open(self.0.join("names"))
    }

    /// A file for the logs of the box's commands, which its agent is handed and nobody else reads. It is locked as long as
    /// anybody has it open.
    pub(super) fn logs(&self) -> io::Result<OwnedFd> {
        let mut options = std::fs::OpenOptions::new();
        let options = options.read(true).write(true).create_new(true).mode(0o600);
        let logs = options.open(self.0.join(LOGS))?;
        rustix::fs::flock(&logs, FlockOperation::NonBlockingLockExclusive)?;
        Ok(logs.into())
    }

    /// Removes it all. Whatever cannot be removed is swept by the next process.
    pub(super) fn remove(&self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_reached_however_long_the_path_to_it_is() {
        let root = tempfile::tempdir().unwrap();
        let deep = root.path().join("long/".repeat(40));
        std::fs::create_dir_all(&deep).unwrap();
        let (state, socket) = State::new(&deep, Uuid::now_v7()).unwrap();
        rustix::net::listen(&socket, 1).unwrap();
        assert!(state.connect().is_ok());
        assert!(state.0.join("agent.sock").exists());
    }

    #[test]
    fn a_box_is_dead_once_nobody_has_its_logs() {
        let root = tempfile::tempdir().unwrap();
        let (state, _socket) = State::new(root.path(), Uuid::now_v7()).unwrap();
        assert!(state.is_dead().unwrap(), "nothing was asked for yet");
        let logs = state.logs().unwrap();
        let of_the_box = logs.try_clone().unwrap();
        drop(logs);
        assert!(!state.is_dead().unwrap(), "the box has them");
        drop(of_the_box);
        assert!(state.is_dead().unwrap());
    }
}
