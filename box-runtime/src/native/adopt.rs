//! Adoption of boxes of an earlier process by their directories and agents.
//!
//! # Steps
//! 1. The backend locks the state directory, so that no other process uses it.
//! 2. [`list`] reads the record of each box. A box without a record was being started or stopped
//!    when its process died; the backend ends it. A box with a record of another version stays for
//!    that version.
//! 3. [`reach`] thaws the box, connects to the agent's socket and learns the agent's identity from
//!    the kernel. The agent sends a greeting with the descriptors of its box.
//! 4. The backend verifies the descriptors and restores the quota of the workspace.
//!
//! The backend abandons a box only when it is known to be dead. Other obstacles (no descriptors, no
//! memory, a stopped agent) may be temporary, so the box and its directory stay.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use box_sys::{Cgroups, Sandbox};
use box_transports::unix;
use rustix::fs::{FileType, FlockOperation};
use rustix::io::Errno;
use rustix::process::Signal;
use tokio::io::Interest;
use tokio::net::UnixStream;
use uuid::Uuid;

use super::quota::QuotaRecord;
use super::state::{StateDir, StoredBox};
use super::{Inner, readable};
use crate::backend::{AdoptedBox, FoundBoxes, Readable, StartedBox};
use crate::box_actor::carrier_limits;

/// Greeting of an agent.
///
/// It carries descriptors of the mount namespace, the private files, the shared memory and the egress
/// sockets. An agent of an earlier version sends no descriptor of the private files.
const GREETING: &[u8] = b"box1";

/// First and longest delay between retries after a temporary failure.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How long the processes of a box whose init process has ended may take to end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// How long the lock of a killed process may outlive it.
///
/// A child that it was starting holds the lock from `fork` to `exec`.
const LOCK_LIMIT: Duration = Duration::from_secs(2);

/// Pause between two attempts to lock the state directory.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Locks the state directory for this process, until the file is closed.
pub(super) async fn lock(root: &Path) -> io::Result<File> {
    let mut options = File::options();
    let file = options
        .write(true)
        .create(true)
        .truncate(false)
        .open(root.join("lock"))?;
    let begun = tokio::time::Instant::now();
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if begun.elapsed() < LOCK_LIMIT => {
                tokio::time::sleep(LOCK_PAUSE).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Boxes in the state directory, with and without a record.
pub(super) struct Listing {
    pub(super) found: FoundBoxes,
    pub(super) unrecorded: Vec<Uuid>,
}

/// Reads all records, one after the other, so that it needs one descriptor.
///
/// A box with an unreadable directory stays for another process, and so does a box with a record
/// that is not `is_readable`.
pub(super) fn list(root: &Path, is_readable: Readable) -> io::Result<Listing> {
    let (mut found, mut unrecorded) = (FoundBoxes::default(), Vec::new());
    let mut skip = |box_id: Uuid, kind: io::ErrorKind| {
        tracing::warn!(%box_id, %kind, "cannot adopt a box of an earlier process");
        found.skipped.push(box_id);
    };
    for entry in std::fs::read_dir(root)? {
        let name = entry?.file_name();
        let id = name.to_str().and_then(|name| Uuid::try_parse(name).ok());
        let Some(id) = id.filter(|id| *name == *id.simple().to_string()) else {
            continue;
        };
        match StateDir::of(root, id).load() {
            Ok(StoredBox { record, .. }) if is_readable(&record) => {
                found.boxes.push(AdoptedBox { id, record });
            }
            Ok(_) => skip(id, io::ErrorKind::InvalidData),
            Err(error) if error.kind() == io::ErrorKind::NotFound => unrecorded.push(id),
            Err(error) => skip(id, error.kind()),
        }
    }
    found.boxes.sort_by_key(|found| found.id);
    Ok(Listing { found, unrecorded })
}

/// Adopted box with a connected agent.
pub(super) struct Reached {
    pub(super) sandbox: Sandbox,
    pub(super) quota: Option<QuotaRecord>,
    pub(super) disk: Option<QuotaRecord>,
    pub(super) volumes: Vec<QuotaRecord>,
    pub(super) private_limit: Option<u64>,
    pub(super) earlier_disk: Option<PathBuf>,
    pub(super) started: StartedBox,
}

/// Connects to the agent of a box and waits for its greeting, without a timeout.
///
/// Returns `None` if the box is dead; its cgroups are then removed.
pub(super) async fn reach(
    id: Uuid,
    state: &StateDir,
    cgroups: &Arc<Cgroups>,
) -> io::Result<Option<Reached>> {
    let StoredBox {
        sandbox,
        quota,
        disk,
        volumes,
        private_limit,
        earlier_disk,
        ..
    } = state.load()?;
    if let Some(group) = &sandbox.cgroup {
        // A paused agent cannot send a greeting. An error means that this machine cannot pause
        // boxes.
        let _ = cgroups.thaw(group);
    }
    let stream = match state.connect() {
        // A healthy agent listens for the lifetime of its box.
        Err(error) if is_refused(&error) => {
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
    let Greeting {
        mounts,
        upper,
        shm,
        egress,
    } = receive_greeting(&stream).await?;
    if !sandbox.is_mount_namespace(&mounts)? {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let backend_id = id.simple().to_string();
    let connection = unix::over(stream, &carrier_limits());
    let mut started = StartedBox::new(backend_id, connection);
    started.shm = shm.and_then(super::shm::verify);
    let sandbox = Sandbox::adopt(pidfd, mounts, upper, egress, sandbox, Arc::clone(cgroups));
    Ok(Some(Reached {
        sandbox,
        quota,
        disk,
        volumes,
        private_limit,
        earlier_disk,
        started,
    }))
}

fn is_refused(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
    )
}

/// Descriptors from an agent's greeting.
struct Greeting {
    mounts: OwnedFd,
    upper: Option<OwnedFd>,
    shm: Option<OwnedFd>,
    egress: Vec<OwnedFd>,
}

async fn receive_greeting(stream: &UnixStream) -> io::Result<Greeting> {
    let mut text = [0; GREETING.len()];
    let receive = || box_sys::receive(stream.as_fd(), &mut text);
    let received = stream.async_io(Interest::READABLE, receive).await?;
    let (length, fds) = received.ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut fds = fds.into_iter();
    let (Some(mounts), true) = (fds.next(), text.get(..length) == Some(GREETING)) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let is = |fd: &OwnedFd, kind: FileType| {
        let stat = rustix::fs::fstat(fd);
        stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == kind)
    };
    let (egress, others): (Vec<_>, Vec<_>) = fds.partition(|fd| is(fd, FileType::Socket));
    let (mut directories, mut others): (Vec<_>, Vec<_>) = others
        .into_iter()
        .partition(|fd| is(fd, FileType::Directory));
    Ok(Greeting {
        mounts,
        upper: directories.pop(),
        shm: others.pop(),
        egress,
    })
}

/// Kills an unreached box, waits for all its processes and removes its directory.
///
/// The wait has no timeout. An error means that the process of the box cannot be identified.
pub(super) async fn end(state: StateDir, cgroups: Arc<Cgroups>) -> io::Result<()> {
    end_processes(&state, cgroups).await?;
    tokio::task::spawn_blocking(move || state.remove()).await?;
    Ok(())
}

/// Kills an unreached box and waits for all its processes, as [`end`].
pub(super) async fn end_processes(state: &StateDir, cgroups: Arc<Cgroups>) -> io::Result<()> {
    let StoredBox { sandbox, .. } = state.load()?;
    let begun = tokio::time::Instant::now();
    let pidfd = loop {
        if let Some(pidfd) = sandbox.init()? {
            break Some(pidfd);
        }
        let error = match state.connect() {
            Ok(stream) => match sandbox.init_at(stream.as_fd()) {
                Ok(pidfd) => break Some(pidfd),
                Err(error) => error,
            },
            Err(error) if is_refused(&error) && state.is_dead()? => break None,
            Err(error) => error,
        };
        // The init process has ended. Others that hold its socket end soon after it.
        let is_ending = is_refused(&error) || error.kind() == io::ErrorKind::NotFound;
        if !is_ending || begun.elapsed() > END_LIMIT {
            return Err(error);
        }
        tokio::time::sleep(FIRST_PAUSE).await;
    };
    if let Some(pidfd) = pidfd {
        kill(&pidfd)?;
        if let Some(group) = &sandbox.cgroup {
            let _ = cgroups.thaw(group);
        }
        // The init process of a box exits after all its other processes.
        readable(pidfd.as_fd()).await?;
    }
    if let Some(group) = sandbox.cgroup {
        tokio::task::spawn_blocking(move || cgroups.remove_last(&group)).await?;
    }
    Ok(())
}

fn kill(pidfd: &OwnedFd) -> io::Result<()> {
    match rustix::process::pidfd_send_signal(pidfd, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes a box without a record.
///
/// Its runtime died during the start or stop of the box, so the box ends by itself. Its directory
/// stays until all its processes are gone.
pub(super) async fn remove_when_dead(of: Weak<Inner>, state: StateDir) {
    let mut pause = FIRST_PAUSE;
    while of.strong_count() > 0 && !remove_if_dead(&state) {
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Returns whether a box without a record is gone.
///
/// An agent that still listens is killed if the kernel identifies it by a pidfd. Without a record,
/// a process id alone could belong to another process.
pub(super) fn remove_if_dead(state: &StateDir) -> bool {
    let dead = match state.connect() {
        Ok(stream) => {
            let _ = box_sys::peer_pidfd(stream.as_fd()).and_then(|pidfd| kill(&pidfd));
            false
        }
        Err(error) => is_refused(&error) && matches!(state.is_dead(), Ok(true)),
    };
    if dead {
        state.remove();
    }
    dead
}
