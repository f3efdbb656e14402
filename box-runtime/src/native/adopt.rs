//! Boxes of an earlier process: found by their directories, known by their agents.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use box_rpc::Limits;
use box_sys::{Cgroups, Sandbox};
use box_transports::unix;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FileType, FlockOperation};
use rustix::process::{PidfdFlags, Signal};
use uuid::Uuid;

use super::quota::QuotaRecord;
use super::state::{Kept, State};
use crate::backend::{AdoptedBox, StartedBox};

/// What an agent says first, with its box's mount namespace, its slots and the sockets at its exits.
const GREETING: &[u8] = b"box1";

/// How long an agent may take to say that.
const PATIENCE: Duration = Duration::from_secs(5);

/// A box that was found alive.
pub(super) struct Found {
    pub(super) id: Uuid,
    pub(super) sandbox: Sandbox,
    pub(super) state: State,
    pub(super) quota: Option<QuotaRecord>,
    pub(super) adopted: AdoptedBox,
}

/// Takes the directory for this process, as long as the file is held.
pub(super) fn lock(root: &Path) -> io::Result<File> {
    let mut options = File::options();
    let file = options
        .write(true)
        .create(true)
        .truncate(false)
        .open(root.join("lock"))?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

/// Every box that can be taken over. What is left of those that are gone is removed, and one that nobody can know is ended. What
/// cannot be looked into stays as it is, for a later process.
pub(super) fn find(root: &Path, cgroups: &Arc<Cgroups>) -> io::Result<Vec<Found>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(root)? {
        let name = entry?.file_name();
        let id = name.to_str().and_then(|name| Uuid::try_parse(name).ok());
        let Some(id) = id.filter(|id| *name == *id.simple().to_string()) else {
            continue;
        };
        match take_over(id, State::of(root, id), cgroups) {
            Ok(found) => all.push(found),
            Err(error) => {
                tracing::warn!(box_id = %id, kind = %error.kind(), "a box of an earlier process cannot be taken over");
            }
        }
    }
    Ok(all)
}

fn take_over(id: Uuid, state: State, cgroups: &Arc<Cgroups>) -> io::Result<Found> {
    let kept = state.kept();
    if let Ok(Some(group)) = kept.as_ref().map(|kept| kept.sandbox.cgroup.as_ref()) {
        // A paused agent greets nobody. Where nothing can be paused, nothing is.
        let _ = cgroups.thaw(group);
    }
    let stream = state.connect().inspect_err(|error| {
        // An agent listens as long as its box lives.
        if matches!(
            error.kind(),
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
        ) {
            state.remove();
        }
    })?;
    stream.set_read_timeout(Some(PATIENCE))?;
    // Whoever listens there is the first process of the box; it lives, or nobody would answer.
    let agent = rustix::net::sockopt::socket_peercred(&stream)?.pid;
    let pidfd = rustix::process::pidfd_open(agent, PidfdFlags::empty())?;
    let known = greeting(&stream).and_then(|fds| Ok((fds, kept?)));
    let (handed, kept) = match known {
        Ok(known) => known,
        Err(error) => {
            // It was being made or ended when its process did: nobody knows what it is.
            if end(&pidfd) {
                state.remove();
            }
            return Err(error);
        }
    };
    stream.set_read_timeout(None)?;
    stream.set_nonblocking(true)?;
    let stream = tokio::net::UnixStream::from_std(stream)?;
    let mut started = StartedBox::new(
        id.simple().to_string(),
        unix::over(stream, &Limits::in_process()),
    );
    started.spool = handed.slots.and_then(super::slots::handed);
    let Kept {
        sandbox,
        quota,
        record,
    } = kept;
    let Handed { mounts, exits, .. } = handed;
    let sandbox = Sandbox::adopt(pidfd, mounts, exits, sandbox, Arc::clone(cgroups));
    let adopted = AdoptedBox {
        id,
        record,
        started,
    };
    Ok(Found {
        id,
        sandbox,
        state,
        quota,
        adopted,
    })
}

/// Ends a box. Whether it is gone by now.
fn end(pidfd: &OwnedFd) -> bool {
    let _ = rustix::process::pidfd_send_signal(pidfd, Signal::KILL);
    let mut ended = [PollFd::new(pidfd, PollFlags::IN)];
    let patience = Timespec::try_from(PATIENCE).ok();
    matches!(rustix::event::poll(&mut ended, patience.as_ref()), Ok(1))
}

/// What an agent hands over.
struct Handed {
    mounts: OwnedFd,
    slots: Option<OwnedFd>,
    exits: Vec<OwnedFd>,
}

fn greeting(stream: &UnixStream) -> io::Result<Handed> {
    let mut word = [0; GREETING.len()];
    let received = box_sys::receive(stream.as_fd(), &mut word)?;
    let (length, fds) = received.ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut fds = fds.into_iter();
    let (Some(mounts), true) = (fds.next(), word.get(..length) == Some(GREETING)) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let is_socket = |fd: &OwnedFd| {
        let stat = rustix::fs::fstat(fd);
        stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
    };
    let (exits, mut others): (Vec<_>, Vec<_>) = fds.partition(is_socket);
    Ok(Handed {
        mounts,
        slots: others.pop(),
        exits,
    })
}
