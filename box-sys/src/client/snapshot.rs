//! A snapshot under construction.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::{ForkServer, Sandbox};
use crate::error::{At, Error, Result};
use crate::plan::{LAYERS_MAX, Layer};
use crate::snapshot::{SnapshotLimits, SnapshotSize};
use crate::wire::{Reply, Request, next_length, receive_message, send_message, socket_pair};

/// A snapshot under construction. Dropping it ends the copy soon.
#[derive(Debug)]
pub struct PendingSnapshot {
    near: OwnedFd,
}

impl ForkServer {
    /// Starts to copy the private files of a box to an empty directory.
    ///
    /// The user of the server must be able to write to the directory. The caller freezes the box
    /// for the duration of the copy; otherwise the copy can contain parts of different times.
    pub fn start_snapshot(
        &self,
        sandbox: &Sandbox,
        to: BorrowedFd<'_>,
        limits: SnapshotLimits,
    ) -> Result<PendingSnapshot> {
        let upper = sandbox.upper.as_ref();
        let upper = upper
            .ok_or_else(|| Error::Unavailable("snapshots of boxes of an earlier version".into()))?;
        let (near, far) = socket_pair().at("create a socket pair")?;
        let fds = [far.as_fd(), upper.as_fd(), to];
        send_message(self.socket.as_fd(), &Request::Snapshot { limits }, &fds)?;
        Ok(PendingSnapshot { near })
    }
}

impl ForkServer {
    /// Starts to write the files of layers, the topmost first, to an empty directory.
    ///
    /// The result is a layer of copied files. Boxes on it see what boxes on all of these layers
    /// see. The user of the server must be able to write to the directory.
    pub fn start_merge(
        &self,
        layers: &[Layer],
        to: BorrowedFd<'_>,
        limits: SnapshotLimits,
    ) -> Result<PendingSnapshot> {
        if layers.is_empty() || layers.len() > LAYERS_MAX {
            let count = layers.len();
            return Err(Error::Invalid(format!(
                "layers: {count}; must be 1 to {LAYERS_MAX}"
            )));
        }
        let (near, far) = socket_pair().at("create a socket pair")?;
        let layers = layers.to_vec();
        let request = Request::Merge { layers, limits };
        send_message(self.socket.as_fd(), &request, &[far.as_fd(), to])?;
        Ok(PendingSnapshot { near })
    }
}

impl AsFd for PendingSnapshot {
    /// Readable when [`Self::finish`] does not block.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.near.as_fd()
    }
}

impl PendingSnapshot {
    /// Waits until the copy is complete, and returns its size.
    pub fn finish(self) -> Result<SnapshotSize> {
        self.receive()
    }

    /// Ends the copy, and waits until nothing writes to the directory any more.
    pub fn cancel(self) {
        if rustix::net::shutdown(&self.near, rustix::net::Shutdown::Write).is_ok() {
            // The reply, or the end of the copy without one.
            let _ = self.receive();
        }
    }

    fn receive(&self) -> Result<SnapshotSize> {
        let mut buffer = vec![0; next_length(self.near.as_fd()).at("receive")?];
        let (reply, _) =
            receive_message::<Reply>(self.near.as_fd(), &mut buffer)?.ok_or(Error::ServerGone)?;
        match reply.into_result()? {
            Reply::Snapshot(size) => Ok(size),
            _ => Err(Error::Protocol("no snapshot".into())),
        }
    }
}
