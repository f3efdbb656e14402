//! A box under construction.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};

use super::sandbox::Sandbox;
use crate::cgroup::Cgroups;
use crate::error::{At, Error, Result};
use crate::wire::{Reply, next_length, receive_message};

/// A box under construction. Dropping it ends the box.
#[derive(Debug)]
pub struct PendingSandbox {
    pub(super) near: OwnedFd,
    pub(super) finished: bool,
    /// User and group id of the guest.
    pub(super) guest: (u32, u32),
    pub(super) cgroups: Arc<Cgroups>,
    pub(super) server: Arc<OwnedFd>,
}

impl AsFd for PendingSandbox {
    /// Readable when [`Self::finish`] does not block.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.near.as_fd()
    }
}

impl PendingSandbox {
    /// Waits until the box's init is about to run.
    pub fn finish(mut self) -> Result<Sandbox> {
        self.finished = true;
        self.receive()
    }

    fn receive(&self) -> Result<Sandbox> {
        let mut buffer = vec![0; next_length(self.near.as_fd()).at("receive")?];
        let (reply, fds) =
            receive_message::<Reply>(self.near.as_fd(), &mut buffer)?.ok_or(Error::ServerGone)?;
        let mut fds = fds.into_iter();
        let reply = reply.into_result()?;
        let (
            Reply::Ready {
                cgroup,
                missing,
                cpu_before,
                egress: cookies,
                workspace,
            },
            [Some(pidfd), Some(mounts), Some(upper)],
        ) = (reply, [fds.next(), fds.next(), fds.next()])
        else {
            return Err(Error::Protocol("invalid reply of a box".into()));
        };
        let egress = cookies.find(fds);
        Ok(Sandbox {
            pidfd,
            mounts,
            upper: Some(upper),
            pid: OnceLock::new(),
            started: OnceLock::new(),
            cgroup,
            missing,
            guest: self.guest,
            workspace,
            cpu_before,
            frozen: AtomicBool::new(false),
            cookies,
            egress: Mutex::new(egress),
            cgroups: self.cgroups.clone(),
            server: Some(self.server.clone()),
        })
    }
}

impl Drop for PendingSandbox {
    fn drop(&mut self) {
        if !self.finished {
            // From now on the box cannot report that it is ready, and exits. It may have reported
            // before.
            let _ = rustix::net::shutdown(&self.near, rustix::net::Shutdown::Read);
            if let Ok(sandbox) = self.receive() {
                let _ = sandbox.kill();
            }
        }
    }
}
