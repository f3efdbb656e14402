//! Input of an actor: its mailbox, the queue of waiting calls, and its timers.
//!
//! The queue accepts requests while the box is busy.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::BoxCreateResult;
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxSpec, BoxState, UnixMs, first_conflict};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use super::request::{Create, Delete, Request};
use super::{BoxEntry, RunningBox, Shared};

/// Reason for the immediate end of a box.
pub(super) enum EndReason {
    /// A client forced a delete.
    Deleted(Box<Delete>),
    /// The box has reached its expiry time.
    Expired,
    /// The idle timeout has passed.
    Idle,
    /// The main command that ends the box has ended.
    Done,
    /// The table has closed the mailbox.
    Closed,
}

/// Event that ends the wait of an idle actor.
pub(super) enum Wakeup {
    Request,
    /// An exec has ended in a way that the actor must handle.
    ExecEnded,
    Broken(String),
    /// The agent of an adopted box has answered.
    Reached(Box<RunningBox>),
    EndReason(EndReason),
}

/// Outcome of a job.
pub(super) enum JobOutcome<T> {
    Done(T),
    EndReason(EndReason),
}

pub(super) struct Queue {
    mailbox: mpsc::Receiver<Request>,
    lane: VecDeque<Request>,
    entry: Arc<BoxEntry>,
    shared: Arc<Shared>,
    clock: Clock,
    /// Whether a delete is queued. Later calls are for the next box.
    deleting: bool,
}

/// Timers that end the box.
struct Clock {
    /// Next wake-up, at or before the next relevant time.
    ///
    /// An exec therefore need not reset it.
    alarm: Pin<Box<Sleep>>,
    last_used: Instant,
    idle: Option<Duration>,
    expires: Option<Instant>,
}

impl Clock {
    fn new(shared: &Shared, entry: &BoxEntry) -> Self {
        let now = Instant::now();
        let mut clock = Self {
            alarm: Box::pin(sleep_until(now)),
            last_used: now,
            idle: None,
            expires: None,
        };
        clock.set(shared, entry);
        clock
    }

    fn set(&mut self, shared: &Shared, entry: &BoxEntry) {
        let lifetime = entry.live().lifetime.clone().unwrap_or_default();
        let idle = lifetime
            .idle_ms
            .map_or(shared.config.idle_ttl, Duration::from_millis);
        self.idle = match entry.live().state {
            // A failed entry is removed after the idle timeout.
            BoxState::Failed => Some(idle),
            // No client can use the box in these states, so the idle timeout is off.
            BoxState::Paused | BoxState::Unreachable => None,
            BoxState::Stopped => lifetime.delete_after_stop_ms.map(Duration::from_millis),
            _ => (!entry.spec.persistent).then_some(idle),
        };
        self.expires = lifetime
            .expires_at
            .and_then(|at| Instant::now().checked_add(at.since(UnixMs::now())));
        let first = [self.idle_end(entry), self.expires]
            .into_iter()
            .flatten()
            .min();
        if let Some(first) = first {
            self.alarm.as_mut().reset(first);
        }
    }

    fn idle_end(&self, entry: &BoxEntry) -> Option<Instant> {
        let used = self
            .last_used
            .max(entry.access.used())
            .max(entry.lane.used());
        self.idle.and_then(|idle| used.checked_add(idle))
    }

    /// Waits for the expiry or the idle timeout; `idle` enables the latter.
    ///
    /// A call in progress delays the idle timeout.
    async fn strike(&mut self, idle: bool, entry: &BoxEntry) -> EndReason {
        let access = &entry.access;
        loop {
            let idle_end = self.idle_end(entry).filter(|_| idle);
            let Some(end) = [idle_end, self.expires].into_iter().flatten().min() else {
                return std::future::pending().await;
            };
            let now = Instant::now();
            if self.expires.is_some_and(|expires| now >= expires) {
                return EndReason::Expired;
            }
            if now >= end {
                if access.is_unused() {
                    return EndReason::Idle;
                }
                match self.expires {
                    Some(expires) => drop(timeout_at(expires, access.unused()).await),
                    None => access.unused().await,
                }
                continue;
            }
            if self.alarm.is_elapsed() || self.alarm.deadline() > end {
                self.alarm.as_mut().reset(end);
            }
            self.alarm.as_mut().await;
        }
    }
}

impl Queue {
    pub(super) fn new(
        shared: &Arc<Shared>,
        entry: &Arc<BoxEntry>,
        mailbox: mpsc::Receiver<Request>,
        first: Vec<Request>,
    ) -> Self {
        let mut front = Self {
            mailbox,
            lane: VecDeque::new(),
            entry: Arc::clone(entry),
            shared: Arc::clone(shared),
            clock: Clock::new(shared, entry),
            deleting: false,
        };
        // These requests were admitted already, some of them by the previous actor.
        for work in first {
            front.line_up(work);
        }
        front
    }

    /// Takes the oldest waiting request.
    pub(super) fn next_work(&mut self) -> Option<Request> {
        let work = self.lane.pop_front();
        if self.lane.is_empty() {
            // Releases the memory of a burst.
            self.lane.shrink_to(0);
        }
        work
    }

    /// Updates the timers after a change of state.
    pub(super) fn set_clock(&mut self) {
        self.clock.set(&self.shared, &self.entry);
    }

    /// Returns whether the idle timeout has passed and no call waits.
    pub(super) fn is_idle(&self) -> bool {
        let end = self.clock.idle_end(&self.entry);
        self.lane.is_empty() && end.is_some_and(|end| end <= Instant::now())
    }

    /// Restarts the idle timeout.
    pub(super) fn used(&mut self) {
        self.clock.last_used = Instant::now();
    }

    /// Waits for a request, a timer or the end of the instance.
    pub(super) async fn rest(&mut self, ended: impl Future<Output = Wakeup>) -> Wakeup {
        tokio::select! {
            biased;
            work = self.mailbox.recv() => match work {
                Some(work) => {
                    self.take(work);
                    Wakeup::Request
                }
                None => Wakeup::EndReason(EndReason::Closed),
            },
            () = self.entry.lane.needs_actor() => Wakeup::ExecEnded,
            rested = ended => rested,
            () = self.entry.other_end.notified() => {
                self.set_clock();
                Wakeup::Request
            }
            over = self.clock.strike(true, &self.entry) => Wakeup::EndReason(over),
        }
    }

    /// Runs a job and accepts requests meanwhile; drops the job if the box ends.
    pub(super) async fn during<T>(&mut self, job: impl Future<Output = T>) -> JobOutcome<T> {
        let mut job = std::pin::pin!(job);
        loop {
            tokio::select! {
                biased;
                done = &mut job => return JobOutcome::Done(done),
                work = self.mailbox.recv() => match work {
                    Some(Request::Delete(delete)) if delete.force => {
                        return JobOutcome::EndReason(EndReason::Deleted(delete));
                    }
                    Some(work) => self.take(work),
                    None => return JobOutcome::EndReason(EndReason::Closed),
                },
                () = self.entry.other_end.notified() => self.set_clock(),
                over = self.clock.strike(false, &self.entry) => return JobOutcome::EndReason(over),
            }
        }
    }

    /// Queues a call, or answers it at once if possible.
    fn take(&mut self, work: Request) {
        let limit = self.shared.config.queued_calls;
        if self.lane.len() >= limit {
            return work.refuse(queue_full(limit));
        }
        self.line_up(work);
    }

    fn line_up(&mut self, work: Request) {
        if !self.deleting {
            if let Some(error) = work.spec().and_then(|spec| misfit(&self.entry, spec)) {
                return work.refuse(error);
            }
            if let Request::Create(create) = work {
                return self.take_create(create);
            }
        }
        self.deleting |= matches!(work, Request::Delete(_));
        self.lane.push_back(work);
    }

    /// Handles a create, which need not wait for a running exec.
    fn take_create(&mut self, create: Box<Create>) {
        let live = self.entry.live();
        let busy =
            live.state == BoxState::Running && live.lane == box_protocol::LaneStatus::Running;
        drop(live);
        if !busy || !create.spec.extra_mounts.is_empty() {
            return self.lane.push_back(Request::Create(create));
        }
        let _ = create.reply.send(Ok(BoxCreateResult {
            info: self.entry.info(&create.caller),
            existed: true,
            earlier: None,
            adjusted: Vec::new(),
        }));
    }

    /// Puts a call back at the front, to run in the next box.
    pub(super) fn put_back(&mut self, work: Request) {
        self.lane.push_front(work);
    }

    /// Refuses all calls that wait for the box.
    pub(super) fn refuse_waiting(&mut self, error: &BoxError) {
        while let Ok(work) = self.mailbox.try_recv() {
            self.take(work);
        }
        self.refuse_lane(error);
    }

    /// Refuses the queued calls. Calls in the mailbox came later and stay.
    pub(super) fn refuse_lane(&mut self, error: &BoxError) {
        let (waiting, others) = self
            .lane
            .drain(..)
            .partition::<Vec<_>, _>(|work| work.spec().is_some());
        for work in waiting {
            work.refuse(error.clone());
        }
        self.lane.extend(others);
    }

    /// Closes the mailbox and returns the remaining requests for the next actor.
    pub(super) fn close(&mut self) -> Vec<Request> {
        self.mailbox.close();
        let mut left: Vec<_> = self.lane.drain(..).collect();
        while let Ok(work) = self.mailbox.try_recv() {
            left.push(work);
        }
        left
    }
}

pub(crate) fn queue_full(limit: usize) -> BoxError {
    BoxError::capacity(format!(
        "{limit} calls wait for this box already (queued_calls)"
    ))
    .with_detail(&Detail {
        limit: Some("queued_calls".to_owned()),
        max: u64::try_from(limit).ok(),
        ..Detail::default()
    })
}

/// Returns the error if the box does not match the spec.
fn misfit(entry: &BoxEntry, asked: &BoxSpec) -> Option<BoxError> {
    let id = &entry.spec.box_id;
    if let Some(conflict) = first_conflict(&entry.spec, asked) {
        return Some(conflict.into_error(id));
    }
    (entry.world() != asked.world.clone().unwrap_or_default()).then(|| {
        BoxError::conflict(format!("box {id} already exists in another world"))
            .with_detail(&Detail::of_field("world").of(Subject::Box))
    })
}
