//! Boxes of an earlier process: found by their directories, known by their records, reached through their agents.
//!
//! A box is given up only when it is known to be dead. Whatever else keeps this process from reaching one (no descriptors, no
//! memory, a stopped agent) may pass, so the box and its directory stay.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use box_sys::{Cgroups, Sandbox};
use box_transports::unix;
use rustix::fs::{FileType, FlockOperation};
use rustix::process::Signal;
use tokio::io::Interest;
use tokio::net::UnixStream;
use uuid::Uuid;

use super::quota::QuotaRecord;
use super::state::{Kept, State};
use super::{Inner, readable};
use crate::backend::{AdoptedBox, Readable, StartedBox};
use crate::box_actor::carrier_limits;

/// What an agent says first, with its box's mount namespace, its slots and the sockets at its exits.
const GREETING: &[u8] = b"box1";

/// How long to wait before something is tried again that may pass.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

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

/// The boxes there may be: those with a record, and those without one.
pub(super) struct Listed {
    pub(super) known: Vec<AdoptedBox>,
    pub(super) unknown: Vec<Uuid>,
}

/// Reads all records, one after the other, so that it takes one descriptor. What cannot be looked into stays as it is, for another
/// process, and so does a box whose record is not `is_readable`.
pub(super) fn list(root: &Path, is_readable: Readable) -> io::Result<Listed> {
    let (mut known, mut unknown) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(root)? {
        let name = entry?.file_name();
        let id = name.to_str().and_then(|name| Uuid::try_parse(name).ok());
        let Some(id) = id.filter(|id| *name == *id.simple().to_string()) else {
            continue;
        };
        match State::of(root, id).kept() {
            Ok(Kept { record, .. }) if is_readable(&record) => {
                known.push(AdoptedBox { id, record });
            }
            Ok(_) => left(id, io::ErrorKind::InvalidData),
            Err(error) if error.kind() == io::ErrorKind::NotFound => unknown.push(id),
            Err(error) => left(id, error.kind()),
        }
    }
    known.sort_by_key(|found| found.id);
    Ok(Listed { known, unknown })
}

fn left(box_id: Uuid, kind: io::ErrorKind) {
    tracing::warn!(%box_id, %kind, "a box of an earlier process cannot be taken over");
}

/// A box that was reached.
pub(super) struct Reached {
    pub(super) sandbox: Sandbox,
    pub(super) quota: Option<QuotaRecord>,
    pub(super) started: StartedBox,
}

/// Connects to the agent of a box, and waits until it has said who it is, however long that takes. `None` if the box is dead; its
/// groups are removed then.
pub(super) async fn reach(
    id: Uuid,
    state: &State,
    cgroups: &Arc<Cgroups>,
) -> io::Result<Option<Reached>> {
    let Kept { sandbox, quota, .. } = state.kept()?;
    if let Some(group) = &sandbox.cgroup {
        // A paused agent greets nobody. Where nothing can be paused, nothing is.
        let _ = cgroups.thaw(group);
    }
    let stream = match state.connect() {
        // An agent listens as long as its box lives, if it is sound.
        Err(error) if nobody_listens(&error) => {
            if !state.is_dead()? || sandbox.init()?.is_some() {
                return Err(error);
            }
            if let Some(group) = sandbox.cgroup {
                let cgroups = Arc::clone(cgroups);
                let removing = move || cgroups.remove_last(&group);
                let _ = tokio::task::spawn_blocking(removing).await;
            }
            return Ok(None);
        }
        stream => UnixStream::from_std(stream?)?,
    };
    let pidfd = sandbox.init_at(stream.as_fd())?;
    let Handed {
        mounts,
        slots,
        exits,
    } = greeting(&stream).await?;
    if !sandbox.is_mount_namespace(&mounts)? {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let backend_id = id.simple().to_string();
    let connection = unix::over(stream, &carrier_limits());
    let mut started = StartedBox::new(backend_id, connection);
    started.spool = slots.and_then(super::slots::handed);
    let sandbox = Sandbox::adopt(pidfd, mounts, exits, sandbox, Arc::clone(cgroups));
    Ok(Some(Reached {
        sandbox,
        quota,
        started,
    }))
}

fn nobody_listens(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
    )
}

/// What an agent hands over.
struct Handed {
    mounts: OwnedFd,
    slots: Option<OwnedFd>,
    exits: Vec<OwnedFd>,
}

async fn greeting(stream: &UnixStream) -> io::Result<Handed> {
    let mut word = [0; GREETING.len()];
    let receive = || box_sys::receive(stream.as_fd(), &mut word);
    let received = stream.async_io(Interest::READABLE, receive).await?;
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

/// Ends a box that was not reached, waits for the end of all its processes, however long that takes, and removes what it had on disk.
/// An error if it is not known which process it is.
pub(super) async fn end(state: State, cgroups: Arc<Cgroups>) -> io::Result<()> {
    let Kept { sandbox, .. } = state.kept()?;
    let pidfd = match sandbox.init()? {
        Some(pidfd) => Some(pidfd),
        None => match state.connect() {
            Ok(stream) => Some(sandbox.init_at(stream.as_fd())?),
            Err(error) if nobody_listens(&error) && state.is_dead()? => None,
            Err(error) => return Err(error),
        },
    };
    if let Some(pidfd) = pidfd {
        kill(&pidfd)?;
        if let Some(group) = &sandbox.cgroup {
            let _ = cgroups.thaw(group);
        }
        // The first process of a box ends after all others of it.
        readable(pidfd.as_fd()).await?;
    }
    let remove = move || {
        if let Some(group) = &sandbox.cgroup {
            cgroups.remove_last(group);
        }
        state.remove();
    };
    tokio::task::spawn_blocking(remove).await?;
    Ok(())
}

fn kill(pidfd: &OwnedFd) -> io::Result<()> {
    match rustix::process::pidfd_send_signal(pidfd, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Clears away a box without a record: it was being made or ended when its process did, and ends by itself. Its directory stays
/// until nothing of it lives.
pub(super) async fn clear(of: Weak<Inner>, state: State) {
    let mut pause = FIRST_PAUSE;
    while of.strong_count() > 0 && !cleared(&state) {
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Whether nothing is left of a box without a record. One whose agent serves all the same is ended, if the kernel says by a
/// descriptor which process that is: there is no record that could tell it from another.
pub(super) fn cleared(state: &State) -> bool {
    let dead = match state.connect() {
        Ok(stream) => {
            let _ = box_sys::peer_pidfd(stream.as_fd()).and_then(|pidfd| kill(&pidfd));
            false
        }
        Err(error) => nobody_listens(&error) && matches!(state.is_dead(), Ok(true)),
    };
    if dead {
        state.remove();
    }
    dead
}
