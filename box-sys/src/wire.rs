//! Messages with descriptors over `SOCK_SEQPACKET`, and the fork server's protocol.
//!
//! The first descriptor of every request is a socket for the reply. Many threads can therefore
//! share the connection without a table of pending requests. A box's first process replies
//! directly, without the server in between.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use crate::cgroup::DiskLimits;
use crate::changes::{Applied, ApplyOptions, ChangePage, Comparison, Selection};
use crate::error::{At, Error, Result};
use crate::network::EgressCookies;
use crate::plan::{Layer, Mount, SandboxPlan};
use crate::probe::Primitives;
use crate::server::disks::DiskKind;
use crate::snapshot::{SnapshotLimits, SnapshotSize};

/// Longest message.
///
/// It is below the kernel's default send buffer, so the kernel takes a message whole or not at all.
pub(crate) const MESSAGE_MAX: usize = 64 << 10;
/// Largest number of descriptors in a message.
pub(crate) const FDS_MAX: usize = 64;

/// Configuration of the server, sent in the first message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerConfig {
    /// Host id for id 0 of every box, if root runs the server.
    ///
    /// No user of the host may own one of the 65,536 ids from there.
    pub id_base: u32,
    /// Parent directory of the boxes' cgroups, in each hierarchy.
    pub cgroup_parent: String,
    /// Number of namespaces of each type and cgroups that the server prepares.
    pub pool: usize,
    /// Number of spare boxes, prepared with the shape of the last plan.
    pub spares: usize,
    /// Disk bandwidth of each box.
    pub disk: DiskLimits,
    /// Private directory for the files of [`Scratch::FileSystem`](crate::Scratch::FileSystem).
    #[serde(default)]
    pub disks: Option<PathBuf>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            id_base: 1_000_000,
            cgroup_parent: "box".into(),
            pool: 4,
            spares: 2,
            disk: DiskLimits::default(),
            disks: None,
        }
    }
}

/// Request to the server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The first message, sent once.
    Configure(ServerConfig),
    /// Create a box.
    ///
    /// The first `sources` of the further descriptors are for mounts, the others for init.
    Create {
        plan: Box<SandboxPlan>,
        sources: usize,
    },
    /// Mount into a running box. The second descriptor is its mount namespace.
    AddMount { mount: Mount, guest: (u32, u32) },
    /// The client has dropped its handle of the box with this cgroup. Has no reply.
    Release { cgroup: String },
    /// Reply when the server has cleaned up every ended box.
    Settle,
    /// Reply with the kind of disk that boxes can have.
    DiskKind,
    /// Copy the private files of a box.
    ///
    /// Further descriptors: the directory of the private files, and an empty directory.
    Snapshot { limits: SnapshotLimits },
    /// Write the files of layers, the topmost first, to one directory.
    ///
    /// Further descriptor: an empty directory.
    Merge {
        layers: Vec<Layer>,
        limits: SnapshotLimits,
    },
    /// Keep the disk of the box with this first process after its end.
    KeepDisk { pid: i32 },
    /// Compare the files of a box with those it began with.
    ///
    /// Further descriptors: for each layer that needs one, the private files or the directory of
    /// the workspace; for a discard, the mount namespace of the box.
    Changes {
        comparison: Box<Comparison>,
        selection: Selection,
        task: Box<ChangesTask>,
    },
}

/// What to do with the differences of a comparison.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ChangesTask {
    /// List them.
    List { after: Option<String>, limit: usize },
    /// Write them to the directory of the host.
    Apply {
        options: ApplyOptions,
        fallback_time: i64,
    },
    /// Undo them in the box.
    Discard {
        /// Device of the workspace in the box.
        device: u64,
        guest: (u32, u32),
        temporary: String,
    },
}

/// Reply of the server, or of a box's first process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The server runs on a host with these primitives.
    Hello(Box<Primitives>),
    /// The box's init is about to run.
    ///
    /// Descriptors: its pidfd, its mount namespace, the directory of its private files, its egress
    /// sockets.
    Ready {
        cgroup: Option<String>,
        missing: Vec<String>,
        cpu_before: Duration,
        egress: EgressCookies,
        /// Device of the overlay of a mount.
        workspace: Option<u64>,
    },
    /// Success.
    Done,
    /// Boxes can have this kind of disk.
    Disk(DiskKind),
    /// The private files of a box, or the files of layers, are copied.
    Snapshot(SnapshotSize),
    /// Differences of a comparison.
    Changes(ChangePage),
    /// Differences are written to the directory of the host.
    Applied(Applied),
    /// So many differences are undone.
    Discarded(u64),
    /// A step failed with this error number.
    Failed { step: String, errno: i32 },
    /// The plan is invalid.
    Invalid(String),
    /// This selected path does not exist.
    Missing(String),
    /// The host lacks a primitive.
    Unavailable(String),
}

impl Reply {
    pub(crate) fn from_error(error: &Error) -> Self {
        match error {
            Error::Step { step, source } => Self::Failed {
                step: step.clone(),
                errno: source.raw_os_error().unwrap_or(libc::EIO),
            },
            Error::Invalid(why) => Self::Invalid(why.clone()),
            Error::Missing(path) => Self::Missing(path.clone()),
            Error::Unavailable(what) => Self::Unavailable(what.clone()),
            Error::ServerGone | Error::Protocol(_) => Self::Failed {
                step: error.to_string(),
                errno: libc::EPROTO,
            },
        }
    }

    /// Converts an error reply to an error.
    pub(crate) fn into_result(self) -> Result<Self> {
        match self {
            Self::Failed { step, errno } => Err(Error::Step {
                step,
                source: io::Error::from_raw_os_error(errno),
            }),
            Self::Invalid(why) => Err(Error::Invalid(why)),
            Self::Missing(path) => Err(Error::Missing(path)),
            Self::Unavailable(what) => Err(Error::Unavailable(what)),
            other => Ok(other),
        }
    }
}

/// A connected pair of sockets that preserve message boundaries.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Sends one message with descriptors.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // Without NOSIGNAL, a closed peer would end this process with SIGPIPE.
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(
            socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
    })?;
    Ok(())
}

/// Receives one message into `buffer`. `None` means that the peer has closed.
pub fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(buffer)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
    })?;
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    if message.bytes == 0 && fds.is_empty() {
        return Ok(None);
    }
    // A truncated message or lost descriptors: the peer violates the protocol, or this process
    // cannot open more descriptors.
    let cut = rustix::net::ReturnFlags::TRUNC | rustix::net::ReturnFlags::CTRUNC;
    if message.flags.intersects(cut) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(Some((message.bytes, fds)))
}

/// Waits for a message and returns its length, or 0 if the peer has closed.
pub(crate) fn next_length(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let flags = RecvFlags::PEEK | RecvFlags::TRUNC;
    let (_, length) = rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut [0], flags))?;
    Ok(length.min(MESSAGE_MAX))
}

/// Sends a request or a reply.
pub(crate) fn send_message<T: Serialize>(
    socket: BorrowedFd<'_>,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> Result<()> {
    let bytes = serde_json::to_vec(message).map_err(|error| Error::Protocol(error.to_string()))?;
    if bytes.len() > MESSAGE_MAX {
        return Err(Error::Invalid(format!(
            "message of {} bytes; the limit is {MESSAGE_MAX}",
            bytes.len()
        )));
    }
    send(socket, &bytes, fds).at("send to the fork server")
}

/// Receives a request or a reply. `None` if the peer has closed.
pub(crate) fn receive_message<T: for<'a> Deserialize<'a>>(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> Result<Option<(T, Vec<OwnedFd>)>> {
    let received = match receive(socket.as_fd(), buffer) {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return Err(Error::Protocol("truncated message".into()));
        }
        received => received.at("receive")?,
    };
    let Some((length, fds)) = received else {
        return Ok(None);
    };
    let message = serde_json::from_slice(&buffer[..length])
        .map_err(|error| Error::Protocol(error.to_string()))?;
    Ok(Some((message, fds)))
}
