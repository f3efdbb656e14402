//! What a box has on disk: a directory named after its own id, with the socket on which its agent can be reached again.

use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use uuid::Uuid;

/// The directory of a box. Goes with it.
#[derive(Debug)]
pub(super) struct State(PathBuf);

impl State {
    /// Makes the directory, and in it a socket that is bound and on which nobody listens yet: the agent does, so that whoever
    /// connects learns from the kernel who the agent is.
    pub(super) fn new(root: &Path, id: Uuid) -> io::Result<(Self, OwnedFd)> {
        let state = Self(root.join(id.simple().to_string()));
        DirBuilder::new().mode(0o700).create(&state.0)?;
        let path = state.0.join("agent.sock");
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path)?)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        Ok((state, socket))
    }

    /// A file for the logs of the box's commands, which its agent is handed and nobody else reads.
    pub(super) fn logs(&self) -> io::Result<OwnedFd> {
        let mut options = std::fs::OpenOptions::new();
        let options = options.read(true).write(true).create_new(true).mode(0o600);
        Ok(options.open(self.0.join("logs"))?.into())
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // Whatever cannot be removed is swept by the next runtime.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
