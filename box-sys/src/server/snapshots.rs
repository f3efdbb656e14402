//! New layers: a process for each, which copies the private files of a box or merges layers.
//!
//! The server has the rights over these files, and a copy can take minutes. A child therefore does
//! the work and replies to the client. It ends when the client gives up, and with the server.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;

use super::Server;
use super::layers;
use super::pools::IDS;
use crate::child::close_all_but;
use crate::error::{At, Error, Result};
use crate::plan::Layer;
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
        let owners = self.owners();
        start(reply, &[from, to], |is_cancelled| {
            snapshot::copy(from.as_fd(), to.as_fd(), owners, limits, is_cancelled)
        })
    }

    /// Starts to merge layers. The child replies.
    pub(super) fn start_merge(
        &mut self,
        layers: &[Layer],
        fds: &[OwnedFd],
        reply: &OwnedFd,
        limits: SnapshotLimits,
    ) -> Result<()> {
        let [to] = fds else {
            return Err(Error::Protocol("merged layers need a directory".into()));
        };
        let trees = self.in_host_mounts(|server| {
            let privileged = server.template.privileged;
            let pools = &mut server.pools;
            server.layers.open_listed(layers, privileged, pools)
        });
        let owners = self.owners();
        let started = trees.and_then(|trees| {
            let mut used: Vec<&OwnedFd> = trees.iter().collect();
            used.push(to);
            start(reply, &used, |is_cancelled| {
                snapshot::merge(&trees, to.as_fd(), owners, limits, is_cancelled)
            })
        });
        // The child has its own descriptors.
        self.drop_unused(&layers::disks(layers));
        started
    }

    /// How copies store the owners of files.
    fn owners(&self) -> Owners {
        if self.template.privileged {
            Owners::OfBox {
                base: self.ids.guest(0),
                count: IDS,
            }
        } else {
            Owners::Same
        }
    }
}

/// Starts a child for the work, with only these descriptors.
fn start(
    reply: &OwnedFd,
    used: &[&OwnedFd],
    work: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<SnapshotSize>,
) -> Result<()> {
    // SAFETY: this process has a single thread.
    match unsafe { raw::fork_into(0, None) }.at("fork the copy")? {
        Forked::Parent(..) => Ok(()),
        Forked::Child => {
            let answer = match run(reply, used, work) {
                Ok(size) => Reply::Snapshot(size),
                Err(error) => Reply::from_error(&error),
            };
            let _ = send_message(reply.as_fd(), &answer, &[]);
            raw::exit_now(0)
        }
    }
}

fn run(
    reply: &OwnedFd,
    used: &[&OwnedFd],
    work: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<SnapshotSize>,
) -> Result<SnapshotSize> {
    let _ = rustix::thread::set_name(c"box-snapshot");
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .at("set the parent death signal")?;
    // The inherited descriptors include the sockets of spares, which must see the server close them.
    let used = used.iter().copied().chain([reply]);
    close_all_but(used.map(AsRawFd::as_raw_fd).collect())?;
    work(&mut || has_given_up(reply))
}

/// Whether the client no longer waits for the reply.
pub(super) fn has_given_up(reply: &OwnedFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(reply, PollFlags::RDHUP)];
    // An error is not a reason to leave the client without a reply.
    rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}
