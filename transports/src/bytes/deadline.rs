//! Timeout of one message, without cost for messages that arrive whole.

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
/// It reads the clock once per message that needs more than one read or write. A timer exists only while a task waits
/// for such a message.
pub(crate) struct Deadline {
    limit: Duration,
    started: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Deadline {
    /// Creates a deadline that does not run yet.
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            limit,
            started: None,
            timer: None,
        }
    }

    /// Returns the timeout.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Starts the clock, unless it is running.
    pub(crate) fn start(&mut self) {
        if self.started.is_none() {
            self.started = Some(Instant::now());
        }
    }

    /// Stops the clock, because the message is complete.
    ///
    /// The timer stays registered. A stale timer wakes the task once, which costs less than removing it for every
    /// message.
    pub(crate) fn stop(&mut self) {
        self.started = None;
    }

    /// Whether the time is over.
    /// Used for a peer so busy that its reader never waits.
    pub(crate) fn has_passed(&self) -> bool {
        self.started
            .is_some_and(|started| started.elapsed() >= self.limit)
    }

    /// Ready when the time is over; wakes the task then.
    /// Never ready while the clock is stopped.
    pub(crate) fn poll_passed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(started) = self.started else {
            return Poll::Pending;
        };
        // A limit too far in the future to represent is no limit.
        let Some(end) = started.checked_add(self.limit) else {
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
            .field("started", &self.started)
            .finish_non_exhaustive()
    }
}
