//! The handle of a running box.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::request;
use crate::cgroup::{Cgroups, Usage, start_time};
use crate::error::{At, Error, Result};
use crate::network::{EgressCookies, EgressSockets};
use crate::record::{SandboxRecord, has_ended, identity, namespace, pid_of};
use crate::wire::{Request, send_message};

/// A running box. Dropping the handle does not end the box.
#[derive(Debug)]
pub struct Sandbox {
    pub(super) pidfd: OwnedFd,
    pub(super) mounts: OwnedFd,
    /// Directory of the private files. `None` for a box of an older version.
    pub(super) upper: Option<OwnedFd>,
    /// Read on first use.
    pub(super) pid: OnceLock<i32>,
    pub(super) started: OnceLock<Option<u64>>,
    pub(super) cgroup: Option<String>,
    pub(super) missing: Vec<String>,
    /// User and group id of the guest.
    pub(super) guest: (u32, u32),
    /// Device of the overlay of a mount, if the box has one.
    pub(super) workspace: Option<u64>,
    pub(super) cpu_before: Duration,
    /// Whether the box may be frozen.
    ///
    /// With cgroup version 1, a frozen process survives a kill.
    pub(super) frozen: AtomicBool,
    pub(super) cookies: EgressCookies,
    /// `None` after the caller has taken them.
    pub(super) egress: Mutex<Option<EgressSockets>>,
    pub(super) cgroups: Arc<Cgroups>,
    /// Connection to release the cgroup for reuse. An adopted box has no server.
    pub(super) server: Option<Arc<OwnedFd>>,
}

impl Sandbox {
    /// The record to store for [`Sandbox::adopt`].
    pub fn record(&self) -> SandboxRecord {
        let pid = self.pid();
        SandboxRecord {
            pid,
            started: self.started(pid),
            mounts: namespace(&self.mounts).ok(),
            cgroup: self.cgroup.clone(),
            missing: self.missing.clone(),
            guest: self.guest.0,
            group: Some(self.guest.1),
            upper: self.upper.as_ref().and_then(|upper| identity(upper).ok()),
            workspace: self.workspace,
            cpu_before: self.cpu_before,
            egress: self.cookies.clone(),
        }
    }

    /// Takes the egress sockets. `None` if the box has none or they are already taken.
    pub fn take_egress_sockets(&self) -> Option<EgressSockets> {
        let mut egress = self.egress.lock().unwrap_or_else(PoisonError::into_inner);
        egress.take()
    }

    /// Creates a handle for a box after its server has ended.
    ///
    /// The box's init sent `pidfd`, the mount namespace `mounts`, the directory `upper` of the private
    /// files and the egress sockets over a socket. The record must know that directory. `cgroups` has the parent of the old server. If the box has ended, dropping the
    /// handle removes its cgroups.
    pub fn adopt(
        pidfd: OwnedFd,
        mounts: OwnedFd,
        upper: Option<OwnedFd>,
        egress: Vec<OwnedFd>,
        record: SandboxRecord,
        cgroups: Arc<Cgroups>,
    ) -> Self {
        let SandboxRecord {
            pid,
            started,
            mounts: _,
            cgroup,
            missing,
            guest,
            group,
            upper: known_upper,
            workspace,
            cpu_before,
            egress: cookies,
        } = record;
        let egress = cookies.find(egress);
        // Another directory would be read with the rights of the server.
        let is_known = |upper: &OwnedFd| identity(upper).ok() == known_upper;
        let upper = upper.filter(|upper| known_upper.is_some() && is_known(upper));
        Self {
            pidfd,
            mounts,
            upper,
            pid: OnceLock::from(pid),
            started: OnceLock::from(started),
            cgroup,
            missing,
            guest: (guest, group.unwrap_or(guest)),
            workspace,
            cpu_before,
            frozen: AtomicBool::new(true),
            cookies,
            egress: Mutex::new(egress),
            cgroups,
            server: None,
        }
    }

    /// Mount namespace of the box. A program that adopts the box later needs it.
    pub fn mount_namespace(&self) -> BorrowedFd<'_> {
        self.mounts.as_fd()
    }

    /// Directory of the private files. `None` for a box of an older version.
    pub fn private_files(&self) -> Option<BorrowedFd<'_>> {
        self.upper.as_ref().map(AsFd::as_fd)
    }

    /// Readable when the box has ended. For event loops.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Host pid of init. Not positive if init had already ended at the first call.
    pub fn pid(&self) -> i32 {
        *self.pid.get_or_init(|| pid_of(&self.pidfd).unwrap_or(-1))
    }

    /// Start time of init, if procfs shows it.
    fn started(&self, pid: i32) -> Option<u64> {
        *self.started.get_or_init(|| {
            let started = start_time(pid.try_into().ok()?);
            // The process still runs, so the pid was not reused before the time was read.
            started.filter(|_| matches!(has_ended(&self.pidfd), Ok(false)))
        })
    }

    /// Name of the box's cgroups, below the server's parent.
    pub fn cgroup(&self) -> Option<&str> {
        self.cgroup.as_deref()
    }

    /// Names of the primitives that this box lacks.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Kills all processes of the box.
    ///
    /// The kernel ends a pid namespace together with its first process. Forked, detached and
    /// signal-ignoring processes end as well.
    pub fn kill(&self) -> Result<()> {
        let end = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
        if let Some(name) = &self.cgroup
            && self.frozen.load(Ordering::Relaxed)
        {
            let _ = self.cgroups.freeze(name, false);
        }
        match end {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error).at("kill the box"),
        }
    }

    /// Waits until the box has ended. Returns `false` on timeout.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool> {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let ready = rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, timeout.as_ref()))
            .at("wait for the box")?;
        Ok(ready > 0)
    }

    /// Kills the box and waits for its end. The server removes its cgroups later.
    pub fn destroy(self) -> Result<()> {
        self.kill()?;
        self.wait(None)?;
        Ok(())
    }

    /// Resource usage of the box.
    pub fn usage(&self) -> Usage {
        let mut usage = self
            .cgroup
            .as_deref()
            .map(|name| self.cgroups.usage(name))
            .unwrap_or_default();
        usage.cpu = usage.cpu.map(|cpu| cpu.saturating_sub(self.cpu_before));
        usage
    }

    /// Keeps the disk of the box, [`Scratch::FileSystem`](crate::Scratch::FileSystem), after its end.
    ///
    /// Otherwise the server ends the file system together with the box, without its last writes.
    /// The server of an adopted box has ended, so that the disk of the box stays in any case.
    pub fn keep_disk(&self) -> Result<()> {
        let Some(server) = &self.server else {
            return Ok(());
        };
        let pid = self.pid();
        match request(server, &Request::KeepDisk { pid }, &[]) {
            Ok(_) | Err(Error::ServerGone) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Asks the kernel to stop all processes of the box, init included.
    ///
    /// The kernel does so asynchronously; see [`Self::is_frozen`].
    pub fn freeze(&self) -> Result<()> {
        self.set_frozen(true)
    }

    /// Resumes all processes of the box.
    pub fn thaw(&self) -> Result<()> {
        self.set_frozen(false)
    }

    /// Whether all processes of a frozen box have stopped. Disk I/O can delay this.
    pub fn is_frozen(&self) -> bool {
        let name = self.cgroup.as_deref();
        name.is_some_and(|name| self.cgroups.is_frozen(name))
    }

    fn set_frozen(&self, frozen: bool) -> Result<()> {
        let name = self
            .cgroup
            .as_deref()
            .ok_or_else(|| Error::Unavailable("cgroup.freeze".into()))?;
        if frozen {
            self.frozen.store(true, Ordering::Relaxed);
        }
        self.cgroups
            .freeze(name, frozen)
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::Unsupported => Error::Unavailable("cgroup.freeze".into()),
                _ => Error::Step {
                    step: "freeze".into(),
                    source: error,
                },
            })
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let Some(cgroup) = &self.cgroup else {
            return;
        };
        match &self.server {
            Some(server) => {
                // If the server has ended, the send fails, and no server reuses the cgroup.
                let release = Request::Release {
                    cgroup: cgroup.clone(),
                };
                let _ = send_message(server.as_fd(), &release, &[]);
            }
            // No server knows an adopted box, so this handle removes its cgroup. While the box
            // runs, another program may still adopt it.
            None if matches!(has_ended(&self.pidfd), Ok(true)) => self.cgroups.remove_last(cgroup),
            None => {}
        }
    }
}
