//! The readers attached to a command.

use std::sync::atomic::Ordering;

use box_protocol::BoxError;
use box_protocol::actions::Exclusive;
use tokio::sync::watch;

use super::{Command, Progress};

/// An attached reader. Dropping it detaches the reader.
#[derive(Debug)]
pub(crate) struct ReaderGuard<'a> {
    command: &'a Command,
    number: u64,
    seen: watch::Receiver<Progress>,
    exclusive: bool,
}

impl Command {
    /// Attaches a reader.
    ///
    /// An exclusive reader displaces the other exclusive reader or is refused.
    pub(crate) fn attach_reader(
        &self,
        exclusive: Option<Exclusive>,
    ) -> Result<ReaderGuard<'_>, BoxError> {
        let number = self.next_reader.fetch_add(1, Ordering::Relaxed);
        let mut refused = false;
        self.progress.send_modify(|progress| {
            refused = exclusive == Some(Exclusive::Refuse) && progress.exclusive.is_some();
            if !refused {
                progress.readers += 1;
                if exclusive.is_some() {
                    progress.exclusive = Some(number);
                }
            }
        });
        if refused {
            return Err(BoxError::conflict(
                "exclusive: another exclusive reader is attached; retry or take over",
            ));
        }
        Ok(ReaderGuard {
            command: self,
            number,
            seen: self.watch(),
            exclusive: exclusive.is_some(),
        })
    }
}

impl ReaderGuard<'_> {
    /// Returns once another reader has displaced this one.
    pub(crate) async fn displaced(&mut self) {
        let (exclusive, number) = (self.exclusive, self.number);
        if !exclusive {
            return std::future::pending().await;
        }
        let _ = self
            .seen
            .wait_for(|progress| progress.exclusive != Some(number))
            .await;
    }
}

impl Drop for ReaderGuard<'_> {
    fn drop(&mut self) {
        self.command.progress.send_modify(|progress| {
            progress.readers -= 1;
            if progress.exclusive == Some(self.number) {
                progress.exclusive = None;
            }
        });
    }
}
