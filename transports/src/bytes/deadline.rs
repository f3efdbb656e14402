//! The time one message may take, at no cost for messages that arrive whole.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Instant, Sleep};

/// Runs from the moment a message is known to be incomplete until its end.
///
/// The clock is read once per message that needs more than one read or write; a timer exists only
/// while such a message has to be waited for.
pub(crate) struct Deadline {
    limit: Duration,
    begun: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Deadline {
    /// A deadline that does not run yet.
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            limit,
            begun: None,
            timer: None,
        }
    }

    /// What it allows.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Starts the clock, unless it runs already.
    pub(crate) fn begin(&mut self) {
        if self.begun.is_none() {
            self.begun = Some(Instant::now());
        }
    }

    /// The message is complete.
    ///
    /// The timer stays where it is: a stale one wakes the task once, which is cheaper than taking it
    /// out of the wheel for every message.
    pub(crate) fn end(&mut self) {
        self.begun = None;
    }

    /// Whether the time is over. For a peer so busy that its reader never has to wait.
    pub(crate) fn is_over(&self) -> bool {
        self.begun
            .is_some_and(|begun| begun.elapsed() >= self.limit)
    }

    /// Ready when the time is over; wakes the task then. Never ready while the clock stands.
    pub(crate) fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(begun) = self.begun else {
            return Poll::Pending;
        };
        // A limit too far away to be a time is no limit.
        let Some(end) = begun.checked_add(self.limit) else {
            return Poll::Pending;
        };
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(end)));
        if timer.deadline() != end {
            timer.as_mut().reset(end);
        }
        timer.as_mut().poll(cx)
    }
}

impl fmt::Debug for Deadline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deadline")
            .field("limit", &self.limit)
            .field("begun", &self.begun)
            .finish_non_exhaustive()
    }
}
