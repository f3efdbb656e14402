//! Whole messages with descriptors over a `SOCK_SEQPACKET` pair, and the messages of the fork server.
//!
//! Every request carries, as its first descriptor, a socket on which it wants its answer. So many threads share the way to
//! the server without a table of who waits for what, and a box's first process answers by itself: one hop less.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use crate::cgroup::DiskLimits;
use crate::error::{At, Error, Result};
use crate::network::EgressCookies;
use crate::plan::{Mount, SandboxPlan};
use crate::probe::Primitives;

/// Longest message. Below the kernel's default send buffer, so a message is taken whole or not at all.
pub(crate) const MESSAGE_MAX: usize = 64 << 10;
/// Most descriptors in a message.
pub(crate) const FDS_MAX: usize = 64;

/// How the server shall work; the first message it gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerConfig {
    /// When started by root: the host's user and group id that id 0 of every box is mapped to. The 65,536 ids from there on
    /// must belong to nobody.
    pub id_base: u32,
    /// The directory in each cgroup hierarchy under which boxes get theirs.
    pub cgroup_parent: String,
    /// How many network namespaces, user namespaces and cgroups are kept ready.
    pub pool: usize,
    /// How many boxes of the shape last asked for are begun before there is a plan for them.
    pub spares: usize,
    /// What each box may read and write per second.
    pub disk: DiskLimits,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            id_base: 1_000_000,
            cgroup_parent: "box".into(),
            pool: 4,
            spares: 2,
            disk: DiskLimits::default(),
        }
    }
}

/// What is asked of the server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Sent once, first.
    Configure(ServerConfig),
    /// Make a box. Of the further descriptors the first `sources` are for mounts, the others for its init.
    Create {
        plan: Box<SandboxPlan>,
        sources: usize,
    },
    /// Mount into a live box, whose mount namespace is the second descriptor.
    AddMount { mount: Mount, guest: u32 },
    /// Nobody holds a handle on the box with this cgroup any more. Wants no answer.
    Release { cgroup: String },
    /// Answer when every box that has ended is also cleared away.
    Settle,
}

/// What comes back.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The server works, on a machine that has this.
    Hello(Box<Primitives>),
    /// The box's init is about to run. Descriptors: its pidfd, its mount namespace, the sockets at its exits.
    Ready {
        cgroup: Option<String>,
        missing: Vec<String>,
        cpu_before: Duration,
        egress: EgressCookies,
    },
    /// Done.
    Done,
    /// A step failed. Error numbers travel as numbers.
    Failed { step: String, errno: i32 },
    /// The plan was refused.
    Invalid(String),
    /// The machine lacks something.
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
            Error::Unavailable(what) => Self::Unavailable(what.clone()),
            Error::ServerGone | Error::Protocol(_) => Self::Failed {
                step: error.to_string(),
                errno: libc::EPROTO,
            },
        }
    }

    /// An answer that says no, as the error it is.
    pub(crate) fn into_result(self) -> Result<Self> {
        match self {
            Self::Failed { step, errno } => Err(Error::Step {
                step,
                source: io::Error::from_raw_os_error(errno),
            }),
            Self::Invalid(why) => Err(Error::Invalid(why)),
            Self::Unavailable(what) => Err(Error::Unavailable(what)),
            other => Ok(other),
        }
    }
}

/// A joined pair of sockets that keep messages whole.
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
    // Without NOSIGNAL a peer that has gone would end this process.
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

/// Receives one message into `buffer`. `None` is the end: the peer has gone.
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
    // A cut message or lost descriptors: whoever sent that does not speak this protocol, or there was no room for them here.
    let cut = rustix::net::ReturnFlags::TRUNC | rustix::net::ReturnFlags::CTRUNC;
    if message.flags.intersects(cut) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(Some((message.bytes, fds)))
}

/// Waits for a message and gives its length, without taking it. 0 when the peer has gone.
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
            "a plan of more than {MESSAGE_MAX} bytes"
        )));
    }
    send(socket, &bytes, fds).at("send to the fork server")
}

/// Receives a request or a reply; `None` when the peer has gone.
pub(crate) fn receive_message<T: for<'a> Deserialize<'a>>(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> Result<Option<(T, Vec<OwnedFd>)>> {
    let received = match receive(socket.as_fd(), buffer) {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return Err(Error::Protocol("a message that was cut".into()));
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
