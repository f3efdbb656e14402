//! Unix sockets: newline framing, and a socket file that only its owner can use.
//!
//! The file has mode 0600 from its first moment, whatever the umask, and on top of that every peer
//! must be root, or of our own user in our own user namespace: a guest of a box may have our user's
//! id, and reach the file in a directory that its box was given. The file of a server that died is
//! replaced; that of one that lives is not.

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

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// A connection over a Unix socket.
pub type Unix = Line<OwnedReadHalf, OwnedWriteHalf>;

/// Connects to the socket at `path`.
pub async fn connect(path: impl AsRef<Path>, limits: &Limits) -> Result<Unix, ConnectionError> {
    Ok(over(UnixStream::connect(path).await?, limits))
}

/// Frames a stream that is connected already, such as one end of a socket pair.
pub fn over(stream: UnixStream, limits: &Limits) -> Unix {
    let (read, write) = stream.into_split();
    Line::new(read, write, limits).probed_by(Probe::EmptyWrite)
}

/// The listening socket and its file, which goes with it.
#[derive(Debug)]
pub(crate) struct UnixListener {
    socket: tokio::net::UnixListener,
    path: PathBuf,
    /// Device and number of the file, to remove no other one.
    file: (u64, u64),
}

impl UnixListener {
    /// Makes the socket file and listens.
    pub(crate) fn bind(path: &Path) -> Result<Self, ListenError> {
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        // The name it is first bound to may be short enough for the system where this one is not.
        SocketAddrUnix::new(path).map_err(io::Error::from)?;
        let _lock = lock(directory);
        make_way(path)?;
        let mut random = [0; 8];
        fill_random(&mut random)?;
        let unfinished = directory.join(format!(".{:016x}", u64::from_ne_bytes(random)));
        let bound = bind_at(&unfinished).and_then(|socket| {
            fs::rename(&unfinished, path)?;
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
                let _ = fs::remove_file(&unfinished);
                Err(error.into())
            }
        }
    }

    /// The next connection and its user, if that is root, or us outside of every box. May be dropped
    /// while it waits.
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

/// Keeps two servers that start at once from taking the same file for stale. Where a directory
/// cannot be locked, that is the only thing lost.
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

/// Makes sure that nothing of value is at `path`.
fn make_way(path: &Path) -> Result<(), ListenError> {
    match fs::symlink_metadata(path) {
        Ok(file) if !file.file_type().is_socket() => Err(ListenError::NotASocket),
        Ok(_) if is_alive(path)? => Err(ListenError::InUse),
        // A stale one is replaced by the rename, at no moment missing.
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether somebody listens at `path`. A full backlog is a sign of life, and not waited for.
fn is_alive(path: &Path) -> io::Result<bool> {
    let socket = new_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(false),
        Ok(()) | Err(_) => Ok(true),
    }
}

/// A socket at `path` that nobody could connect to before its mode was set.
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
