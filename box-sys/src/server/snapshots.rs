//! Snapshots: a process for each, which copies the private files of a box.
//!
//! The server has the rights over these files, and a copy can take minutes. A child therefore does
//! the work and replies to the client. It ends when the client gives up, and with the server.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;

use super::Server;
use super::pools::IDS;
use crate::child::close_all_but;
use crate::error::{At, Error, Result};
use crate::raw::{self, Forked};
use crate::snapshot::{self, Owners, SnapshotLimits, SnapshotSize};
use crate::wire::{Reply, send_message};

impl Server {
    /// Starts the copy of a box's private files. The child replies.
    pub(super) fn start_snapshot(
        &self,
        fds: &[OwnedFd],
        reply: &OwnedFd,
        limits: SnapshotLimits,
    ) -> Result<()> {
        let [from, to] = fds else {
            return Err(Error::Protocol("a snapshot needs two directories".into()));
        };
        let owners = if self.template.privileged {
            Owners::OfBox {
                base: self.ids.guest(0),
                count: IDS,
            }
        } else {
            Owners::Same
        };
        // SAFETY: this process has a single thread.
        match unsafe { raw::fork_into(0, None) }.at("fork the copy")? {
            Forked::Parent(..) => Ok(()),
            Forked::Child => {
                let answer = match run(from, to, reply, owners, limits) {
                    Ok(size) => Reply::Snapshot(size),
                    Err(error) => Reply::from_error(&error),
                };
                let _ = send_message(reply.as_fd(), &answer, &[]);
                raw::exit_now(0)
            }
        }
    }
}

fn run(
    from: &OwnedFd,
    to: &OwnedFd,
    reply: &OwnedFd,
    owners: Owners,
    limits: SnapshotLimits,
) -> Result<SnapshotSize> {
    let _ = rustix::thread::set_name(c"box-snapshot");
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .at("set the parent death signal")?;
    // The inherited descriptors include the sockets of spares, which must see the server close them.
    close_all_but([from, to, reply].map(AsRawFd::as_raw_fd).to_vec())?;
    let mut is_cancelled = || has_given_up(reply);
    snapshot::copy(from.as_fd(), to.as_fd(), owners, limits, &mut is_cancelled)
}

/// Whether the client no longer waits for the reply.
fn has_given_up(reply: &OwnedFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(reply, PollFlags::RDHUP)];
    // An error is not a reason to leave the client without a reply.
    rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}
