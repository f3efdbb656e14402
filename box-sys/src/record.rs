//! The record of a box, from which a later program finds the box again.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};
use serde::{Deserialize, Serialize};

use crate::cgroup::read_start_time;
use crate::network::EgressCookies;
use crate::peer::peer_pidfd;

/// Data, besides descriptors, from which a later program adopts a box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxRecord {
    /// Pid of init. The kernel can reuse it after init has ended; see [`Self::init`].
    pub pid: i32,
    /// Start time of init in ticks since boot.
    ///
    /// `None` in records of older versions, and if procfs does not show it.
    #[serde(default)]
    pub started: Option<u64>,
    /// Inode of the mount namespace. `None` in records of older versions.
    #[serde(default)]
    pub mounts: Option<u64>,
    /// Name of the box's cgroups.
    pub cgroup: Option<String>,
    /// Names of the primitives that the box lacks.
    pub missing: Vec<String>,
    /// User id of the guest.
    pub guest: u32,
    /// Group id of the guest. `None` in records of older versions: the user id.
    #[serde(default)]
    pub group: Option<u32>,
    /// Device and inode of the directory of the private files. `None` in records of older versions.
    #[serde(default)]
    pub upper: Option<(u64, u64)>,
    /// Device of the overlay of a mount, if the box has one.
    #[serde(default)]
    pub workspace: Option<u64>,
    /// CPU time that the cgroup had counted before this box used it.
    pub cpu_before: Duration,
    /// Cookies of the egress sockets.
    #[serde(default, rename = "exits")]
    pub egress: EgressCookies,
}

impl SandboxRecord {
    /// Pidfd of the box's init.
    ///
    /// `None` if init has ended, or if the record cannot distinguish it from a later process with
    /// the same pid.
    pub fn init(&self) -> io::Result<Option<OwnedFd>> {
        let (Some(pid), Some(started)) = (Pid::from_raw(self.pid), self.started) else {
            return Ok(None);
        };
        let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Err(Errno::SRCH) => return Ok(None),
            pidfd => pidfd?,
        };
        // Read after the pidfd is open. If the time matches now, the pidfd is init.
        let now = read_start_time(self.pid.unsigned_abs())?;
        let is_it = now == Some(started) && !has_ended(&pidfd)?;
        Ok(is_it.then_some(pidfd))
    }

    /// Pidfd of the process that listens at the other end, if it is the box's init.
    ///
    /// A record of an older version has no start time. The kernel must then identify the peer by a
    /// descriptor, which requires 6.5, because the kernel may have reused the pid.
    pub fn init_at(&self, stream: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let peer = rustix::net::sockopt::socket_peercred(stream)?.pid;
        let pidfd = match self.started {
            Some(_) => self.init()?.ok_or(io::ErrorKind::NotFound)?,
            None => peer_pidfd(stream)?,
        };
        if peer.as_raw_pid() != self.pid || pid_of(&pidfd) != Some(self.pid) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(pidfd)
    }

    /// Whether this is the mount namespace of the box.
    pub fn is_mount_namespace(&self, fd: &OwnedFd) -> io::Result<bool> {
        let found = namespace(fd)?;
        Ok(self.mounts.is_none_or(|mounts| mounts == found))
    }
}

/// Device and inode of a file, which are unique while it exists.
pub(crate) fn identity(fd: impl AsFd) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Inode of a namespace, which is unique while the namespace exists.
pub(crate) fn namespace(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_ino)
}

/// Pid of a running process.
pub(crate) fn pid_of(pidfd: impl AsFd) -> Option<i32> {
    let number = pidfd.as_fd().as_raw_fd();
    let mut info = String::new();
    let mut file = File::open(format!("/proc/self/fdinfo/{number}")).ok()?;
    io::Read::read_to_string(&mut file, &mut info).ok()?;
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    pid.trim().parse().ok().filter(|pid| *pid > 0)
}

/// Whether the process has ended.
pub(crate) fn has_ended(pidfd: &OwnedFd) -> io::Result<bool> {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&now)))?;
    Ok(ready > 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::{Child, Command, Stdio};

    use super::*;
    use crate::cgroup::start_time;

    fn record(pid: u32, started: Option<u64>) -> SandboxRecord {
        SandboxRecord {
            pid: pid.try_into().unwrap(),
            started,
            mounts: None,
            cgroup: None,
            missing: Vec::new(),
            guest: 1000,
            group: None,
            upper: None,
            workspace: None,
            cpu_before: Duration::ZERO,
            egress: EgressCookies::default(),
        }
    }

    fn sleeper() -> Child {
        let mut command = Command::new("sleep");
        command.arg("86400").stdin(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn a_reused_pid_is_not_init() {
        let mut process = sleeper();
        let started = start_time(process.id());
        assert!(started.is_some());
        let of_init = record(process.id(), started);
        // Control: pid and start time match.
        let pidfd = of_init.init().unwrap().unwrap();
        assert_eq!(pid_of(&pidfd), Some(of_init.pid));
        // An earlier process had this pid.
        let earlier = record(process.id(), started.map(|started| started - 1));
        assert!(earlier.init().unwrap().is_none());
        assert!(record(process.id(), None).init().unwrap().is_none());
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(of_init.init().unwrap().is_none(), "it has ended");
    }

    #[test]
    fn only_init_is_accepted_as_peer() {
        let directory = std::env::temp_dir().join(format!("box-record-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let stream = UnixStream::connect(&path).unwrap();
        // This process listens.
        let this = std::process::id();
        let peer = record(this, start_time(this)).init_at(stream.as_fd());
        assert_eq!(pid_of(peer.unwrap()), i32::try_from(this).ok());
        // The record names another running process, which is not the peer.
        let mut other = sleeper();
        let bystander = record(other.id(), start_time(other.id()));
        let refused = bystander.init_at(stream.as_fd()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        // The same with a record of an older version.
        assert!(record(other.id(), None).init_at(stream.as_fd()).is_err());
        other.kill().unwrap();
        other.wait().unwrap();
        drop(listener);
        std::fs::remove_dir_all(directory).unwrap();
    }
}
