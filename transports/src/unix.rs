//! Unix sockets: newline framing, and a socket file that only its owner can use.
//!
//! The file has mode 0600 from its creation, whatever the umask. In addition, every peer must be root, or have the
//! same user in the same user namespace as this process. A guest may have the same user id and reach the file in a
//! directory mounted into its box.
//!
//! The listener replaces the file of a dead server, but not that of a live one.

use std::{
    fs,
    io::{self, ErrorKind},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use box_rpc::{ConnectionError, Limits};
use box_sys::peer_is_in_our_user_namespace;
use rustix::{
    fs::FlockOperation,
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use tokio::net::{
    UnixStream,
    unix::{OwnedReadHalf, OwnedWriteHalf},
};

use crate::{bytes::Probe, endpoint::ListenError, line::Line, websocket::fill_random};

/// Maximum number of connections that wait for `accept`.
const BACKLOG: i32 = 1024;

/// A connection over a Unix socket.
pub type Unix = Line<OwnedReadHalf, OwnedWriteHalf>;

/// Connects to the socket at `path`.
pub async fn connect(path: impl AsRef<Path>, limits: &Limits) -> Result<Unix, ConnectionError> {
    Ok(over(UnixStream::connect(path).await?, limits))
}

/// Frames a connected stream, such as one end of a socket pair.
pub fn over(stream: UnixStream, limits: &Limits) -> Unix {
    let (read, write) = stream.into_split();
    Line::new(read, write, limits).probed_by(Probe::EmptyWrite)
}

/// The listening socket and its file, which is removed with it.
#[derive(Debug)]
pub(crate) struct UnixListener {
    socket: tokio::net::UnixListener,
    path: PathBuf,
    /// Device and inode of the file, so that the listener removes no other file.
    file: (u64, u64),
}

impl UnixListener {
    /// Creates the socket file and listens.
    pub(crate) fn bind(path: &Path) -> Result<Self, ListenError> {
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        // The temporary name may fit into a socket address where `path` does not.
        SocketAddrUnix::new(path).map_err(io::Error::from)?;
        let _lock = lock(directory);
        check_path_free(path)?;
        let mut random = [0; 8];
        fill_random(&mut random)?;
        let temporary = directory.join(format!(".{:016x}", u64::from_ne_bytes(random)));
        let bound = bind_at(&temporary).and_then(|socket| {
            fs::rename(&temporary, path)?;
            let socket = tokio::net::UnixListener::from_std(socket.into())?;
            Ok((socket, fs::symlink_metadata(path)?))
        });
        match bound {
            Ok((socket, file)) => Ok(Self {
                socket,
                path: path.to_owned(),
                file: (file.dev(), file.ino()),
            }),
            Err(error) => {
                let _ = fs::remove_file(&temporary);
                Err(error.into())
            }
        }
    }

    /// Returns the next connection and its user id. Cancel safe.
    /// Accepts root, and the own user outside of every box.
    pub(crate) async fn accept(&self) -> io::Result<(UnixStream, u32)> {
        let (stream, _) = self.socket.accept().await?;
        let uid = stream.peer_cred()?.uid();
        let is_us = uid == rustix::process::geteuid().as_raw();
        if uid != 0 && !(is_us && peer_is_in_our_user_namespace(stream.as_fd())) {
            return Err(ErrorKind::PermissionDenied.into());
        }
        Ok((stream, uid))
    }
}

impl Drop for UnixListener {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|file| (file.dev(), file.ino()) == self.file);
        if ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Locks the directory against a second server that starts at the same time.
///
/// Without the lock, both could treat the same file as stale. If the directory cannot be locked, only this protection
/// is lost.
fn lock(directory: &Path) -> Option<fs::File> {
    let directory = fs::File::open(directory).ok()?;
    for _ in 0..50 {
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(directory),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(std::time::Duration::from_millis(2)),
            Err(_) => return None,
        }
    }
    None
}

/// Checks that `path` is free or holds a stale socket.
fn check_path_free(path: &Path) -> Result<(), ListenError> {
    match fs::symlink_metadata(path) {
        Ok(file) if !file.file_type().is_socket() => Err(ListenError::NotASocket),
        Ok(_) if is_alive(path)? => Err(ListenError::InUse),
        // The later rename replaces a stale socket atomically.
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether a server listens at `path`.
/// A full backlog also counts as alive, and this function does not wait for it.
fn is_alive(path: &Path) -> io::Result<bool> {
    let socket = new_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(false),
        Ok(()) | Err(_) => Ok(true),
    }
}

/// Creates a socket at `path` that no peer can reach before its mode is set.
fn bind_at(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn new_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}
