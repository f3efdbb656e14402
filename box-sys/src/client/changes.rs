//! Comparisons of a box's files in progress.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::{ForkServer, Sandbox};
use crate::changes::{Applied, ApplyOptions, ChangePage, Comparison, LayerSource, Selection};
use crate::error::{At, Error, Result};
use crate::wire::{
    ChangesTask, Reply, Request, next_length, receive_message, send_message, socket_pair,
};

/// Work on the changes of a box in progress. Dropping it ends the work soon.
#[derive(Debug)]
pub struct PendingChanges<T> {
    near: OwnedFd,
    result: fn(Reply) -> Option<T>,
}

/// What to compare, with its descriptors.
#[derive(Debug, Clone, Copy)]
pub struct ChangesOf<'a> {
    /// The views.
    pub comparison: &'a Comparison,
    /// Which differences are wanted.
    pub selection: &'a Selection,
    /// The box, if it runs.
    pub sandbox: Option<&'a Sandbox>,
    /// The directory of the host, for a workspace.
    pub workspace: Option<BorrowedFd<'a>>,
}

impl ForkServer {
    /// Lists at most `limit` differences after a position.
    ///
    /// A page can be shorter. The box may run meanwhile; the list is then not of one moment.
    pub fn start_list(
        &self,
        of: ChangesOf<'_>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<PendingChanges<ChangePage>> {
        let after = after.map(str::to_owned);
        let task = ChangesTask::List { after, limit };
        self.start_changes(of, task, &[], |reply| match reply {
            Reply::Changes(result) => Some(result),
            _ => None,
        })
    }

    /// Writes the new view of a workspace to its directory of the host.
    ///
    /// The caller freezes the box, so that each file is of one moment. `fallback_time` is the time
    /// in nanoseconds since 1970 after which a change on the host is a conflict, for files whose
    /// time of copying is unknown.
    pub fn start_apply(
        &self,
        of: ChangesOf<'_>,
        options: &ApplyOptions,
        fallback_time: i64,
    ) -> Result<PendingChanges<Applied>> {
        let options = options.clone();
        let task = ChangesTask::Apply {
            options,
            fallback_time,
        };
        self.start_changes(of, task, &[], |reply| match reply {
            Reply::Applied(result) => Some(result),
            _ => None,
        })
    }

    /// Writes the old view of a workspace to the box. Returns the number of differences.
    pub fn start_discard(&self, of: ChangesOf<'_>, temporary: &str) -> Result<PendingChanges<u64>> {
        let sandbox = of.sandbox.and_then(|sandbox| {
            let device = sandbox.workspace?;
            Some((sandbox, device))
        });
        let (sandbox, device) =
            sandbox.ok_or_else(|| Error::Invalid("the box has no overlay".into()))?;
        let task = ChangesTask::Discard {
            device,
            guest: sandbox.guest,
            temporary: temporary.to_owned(),
        };
        self.start_changes(of, task, &[sandbox.mounts.as_fd()], |reply| match reply {
            Reply::Discarded(result) => Some(result),
            _ => None,
        })
    }

    fn start_changes<T>(
        &self,
        of: ChangesOf<'_>,
        task: ChangesTask,
        more: &[BorrowedFd<'_>],
        result: fn(Reply) -> Option<T>,
    ) -> Result<PendingChanges<T>> {
        let (near, far) = socket_pair().at("create a socket pair")?;
        let mut fds = vec![far.as_fd()];
        for layer in &of.comparison.layers {
            match layer.source {
                LayerSource::Private => {
                    let upper = of.sandbox.and_then(|sandbox| sandbox.upper.as_ref());
                    let upper = upper.ok_or_else(|| {
                        Error::Unavailable("the changes of boxes of an earlier version".into())
                    })?;
                    fds.push(upper.as_fd());
                }
                LayerSource::Workspace | LayerSource::WorkspaceAt(_) => fds.extend(of.workspace),
                LayerSource::Image(_) | LayerSource::Layer(_) => {}
            }
        }
        fds.extend(more);
        let request = Request::Changes {
            comparison: Box::new(of.comparison.clone()),
            selection: of.selection.clone(),
            task: Box::new(task),
        };
        send_message(self.socket.as_fd(), &request, &fds)?;
        Ok(PendingChanges { near, result })
    }
}

impl<T> AsFd for PendingChanges<T> {
    /// Readable when [`Self::finish`] does not block.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.near.as_fd()
    }
}

impl<T> PendingChanges<T> {
    /// Waits for the result.
    pub fn finish(self) -> Result<T> {
        self.receive()
    }

    /// Ends the work, and waits until nothing is written any more.
    pub fn cancel(self) {
        if rustix::net::shutdown(&self.near, rustix::net::Shutdown::Write).is_ok() {
            // The reply, or the end of the work without one.
            let _ = self.receive();
        }
    }

    fn receive(&self) -> Result<T> {
        let mut buffer = vec![0; next_length(self.near.as_fd()).at("receive")?];
        let (reply, _) =
            receive_message::<Reply>(self.near.as_fd(), &mut buffer)?.ok_or(Error::ServerGone)?;
        (self.result)(reply.into_result()?)
            .ok_or_else(|| Error::Protocol("another reply than that of a comparison".into()))
    }
}
