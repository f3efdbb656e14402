//! Boxes of an earlier process: found by their directories, known by their agents.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use box_rpc::Limits;
use box_sys::{Cgroups, Sandbox};
use box_transports::unix;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FileType, FlockOperation};
use rustix::process::{PidfdFlags, Signal};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::quota::QuotaRecord;
use super::state::{Kept, State};
use crate::adoption::AGENT_PATIENCE;
use crate::backend::{AdoptedBox, Readable, StartedBox};

/// What an agent says first, with its box's mount namespace, its slots and the sockets at its exits.
const GREETING: &[u8] = b"box1";

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
/// cannot be looked into stays as it is, for another process, and so does a box whose record is not `readable`.
pub(super) async fn find(
    root: &Path,
    cgroups: &Arc<Cgroups>,
    readable: Readable,
) -> io::Result<Vec<Found>> {
    let mut looking = JoinSet::new();
    for entry in std::fs::read_dir(root)? {
        let name = entry?.file_name();
        let id = name.to_str().and_then(|name| Uuid::try_parse(name).ok());
        let Some(id) = id.filter(|id| *name == *id.simple().to_string()) else {
            continue;
        };
        let (state, cgroups) = (State::of(root, id), Arc::clone(cgroups));
        // All at once: each may have to be waited for.
        looking.spawn_blocking(move || {
            take_over(id, state, &cgroups, readable)
                .inspect_err(|error| {
                    tracing::warn!(box_id = %id, kind = %error.kind(), "a box of an earlier process cannot be taken over");
                })
                .ok()
        });
    }
    let mut all = Vec::new();
    while let Some(looked) = looking.join_next().await {
        all.extend(looked.ok().flatten());
    }
    all.sort_by_key(|found| found.id);
    Ok(all)
}

fn take_over(
    id: Uuid,
    state: State,
    cgroups: &Arc<Cgroups>,
    readable: Readable,
) -> io::Result<Found> {
    let kept = match state.kept() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        kept => Some(kept?),
    };
    if let Some(kept) = &kept {
        if !readable(&kept.record) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if let Some(group) = &kept.sandbox.cgroup {
            // A paused agent greets nobody. Where nothing can be paused, nothing is.
            let _ = cgroups.thaw(group);
        }
    }
    let stream = state.connect(AGENT_PATIENCE).inspect_err(|error| {
        // An agent listens as long as its box lives.
        if matches!(
            error.kind(),
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
        ) {
            state.remove();
        }
    })?;
    // Whoever listens there is the first process of the box; it lives, or nobody would answer.
    let agent = rustix::net::sockopt::socket_peercred(&stream)?.pid;
    let pidfd = rustix::process::pidfd_open(agent, PidfdFlags::empty())?;
    let kept = kept.ok_or_else(|| io::ErrorKind::NotFound.into());
    let known = kept.and_then(|kept| Ok((greeting(&stream)?, kept)));
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
    let patience = Timespec::try_from(AGENT_PATIENCE).ok();
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
