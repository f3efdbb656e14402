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
use box_protocol::{BoxError, BoxSpec, BoxState, LifetimeAction, UnixMs, first_conflict};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use super::request::{Create, Delete, Request};
use super::{BoxEntry, Shared};
use crate::adoption::Reached;

/// Longest time for which the entry of a box that could not start is kept.
///
/// Its idle time may be longer than any caller asks for the reason.
const UNSTARTED_TTL: Duration = Duration::from_hours(1);

/// Reason for the immediate end of a box.
pub(super) enum EndReason {
    /// A client forced a delete.
    Deleted(Box<Delete>),
    /// The box has reached its expiry time.
    Expired,
    /// The idle timeout has passed.
    Idle,
    /// The main command that ends the box has ended.
    MainEnded,
    /// The registry has closed the mailbox.
    Shutdown,
}

/// Event that ends the wait of an idle actor.
pub(super) enum Wakeup {
    Request,
    /// An exec has ended in a way that the actor must handle.
    ExecEnded,
    Broken(String),
    /// The agent of an adopted box has answered.
    Reached(Reached),
    End(EndReason),
}

/// Outcome of a job.
pub(super) enum JobOutcome<T> {
    Done(T),
    /// The box must end; the job is dropped.
    BoxEnds(EndReason),
}

pub(super) struct Queue {
    mailbox: mpsc::Receiver<Request>,
    waiting: VecDeque<Request>,
    entry: Arc<BoxEntry>,
    shared: Arc<Shared>,
    timers: Timers,
    /// Whether a delete is queued. Later calls are for the next box.
    deleting: bool,
}

/// Timers that end the box.
struct Timers {
    /// Next wake-up, at or before the next relevant time.
    ///
    /// An exec therefore need not reset it.
    alarm: Pin<Box<Sleep>>,
    last_used: Instant,
    idle: Option<Duration>,
    expires: Option<Instant>,
    /// Whether the box ends at `expires`. Otherwise the expiry waits for a job.
    ends_at_expiry: bool,
}

impl Timers {
    fn new(shared: &Shared, entry: &BoxEntry) -> Self {
        let now = Instant::now();
        let mut timers = Self {
            alarm: Box::pin(sleep_until(now)),
            last_used: now,
            idle: None,
            expires: None,
            ends_at_expiry: true,
        };
        timers.set(shared, entry);
        timers
    }

    fn set(&mut self, shared: &Shared, entry: &BoxEntry) {
        let lifetime = entry.status().lifetime.clone().unwrap_or_default();
        let idle = lifetime
            .idle_ms
            .map_or(shared.config.idle_ttl, Duration::from_millis);
        let (state, has_run) = {
            let status = entry.status();
            (status.state, !status.backend_id.is_empty())
        };
        self.idle = match state {
            // A failed entry is removed after the idle timeout.
            BoxState::Failed if has_run => Some(idle),
            BoxState::Failed => Some(idle.min(UNSTARTED_TTL)),
            // No client can use the box in these states, so the idle timeout is off.
            BoxState::Paused | BoxState::Unreachable => None,
            BoxState::Stopped => lifetime.delete_after_stop_ms.map(Duration::from_millis),
            _ => (!entry.spec.persistent).then_some(idle),
        };
        self.ends_at_expiry = lifetime.on_expiry == LifetimeAction::Delete;
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
            .max(entry.access.last_used())
            .max(entry.current_exec.last_used());
        self.idle.and_then(|idle| used.checked_add(idle))
    }

    /// Waits for the expiry or the idle timeout; a job disables the latter.
    ///
    /// A call in progress delays the idle timeout.
    async fn next_end(&mut self, job: bool, entry: &BoxEntry) -> EndReason {
        let access = &entry.access;
        loop {
            let idle_end = self.idle_end(entry).filter(|_| !job);
            let expires = self.expires.filter(|_| !job || self.ends_at_expiry);
            let Some(end) = [idle_end, expires].into_iter().flatten().min() else {
                return std::future::pending().await;
            };
            let now = Instant::now();
            if expires.is_some_and(|expires| now >= expires) {
                return EndReason::Expired;
            }
            if now >= end {
                if access.is_unused() {
                    return EndReason::Idle;
                }
                match expires {
                    Some(expires) => {
                        drop(Box::pin(timeout_at(expires, access.wait_unused())).await);
                    }
                    None => Box::pin(access.wait_unused()).await,
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
        let mut queue = Self {
            mailbox,
            waiting: VecDeque::new(),
            entry: Arc::clone(entry),
            shared: Arc::clone(shared),
            timers: Timers::new(shared, entry),
            deleting: false,
        };
        // These requests were admitted already, some of them by the previous actor.
        for request in first {
            queue.enqueue(request);
        }
        queue
    }

    /// Takes the oldest waiting request.
    pub(super) fn next_request(&mut self) -> Option<Request> {
        let request = self.waiting.pop_front();
        if self.waiting.is_empty() {
            // Releases the memory of a burst.
            self.waiting.shrink_to(0);
        }
        request
    }

    /// Updates the timers after a change of state.
    pub(super) fn reset_timers(&mut self) {
        self.timers.set(&self.shared, &self.entry);
    }

    /// Lets the expiry come again later, or after a change of state.
    pub(super) fn postpone_expiry(&mut self, by: Duration) {
        self.timers.expires = Instant::now().checked_add(by);
    }

    /// Returns whether the idle timeout has passed and no call waits.
    pub(super) fn is_idle(&self) -> bool {
        let end = self.timers.idle_end(&self.entry);
        self.waiting.is_empty() && end.is_some_and(|end| end <= Instant::now())
    }

    /// Restarts the idle timeout.
    pub(super) fn mark_used(&mut self) {
        self.timers.last_used = Instant::now();
    }

    /// Waits for a request, a timer or the end of the instance.
    pub(super) async fn wait(&mut self, ended: impl Future<Output = Wakeup>) -> Wakeup {
        tokio::select! {
            biased;
            request = self.mailbox.recv() => match request {
                Some(request) => {
                    self.accept(request);
                    Wakeup::Request
                }
                None => Wakeup::End(EndReason::Shutdown),
            },
            () = self.entry.current_exec.needs_actor() => Wakeup::ExecEnded,
            wakeup = ended => wakeup,
            () = self.entry.lifetime_changed.notified() => {
                self.reset_timers();
                Wakeup::Request
            }
            reason = self.timers.next_end(false, &self.entry) => Wakeup::End(reason),
        }
    }

    /// Runs a job and accepts requests meanwhile; drops the job if the box ends.
    pub(super) async fn run_job<T>(&mut self, job: impl Future<Output = T>) -> JobOutcome<T> {
        let mut job = std::pin::pin!(job);
        loop {
            tokio::select! {
                biased;
                done = &mut job => return JobOutcome::Done(done),
                request = self.mailbox.recv() => match request {
                    Some(Request::Delete(delete)) if delete.force => {
                        return JobOutcome::BoxEnds(EndReason::Deleted(delete));
                    }
                    Some(request) => self.accept(request),
                    None => return JobOutcome::BoxEnds(EndReason::Shutdown),
                },
                () = self.entry.lifetime_changed.notified() => self.reset_timers(),
                reason = self.timers.next_end(true, &self.entry) => return JobOutcome::BoxEnds(reason),
            }
        }
    }

    /// Queues a call, or answers it at once if possible.
    fn accept(&mut self, request: Request) {
        let limit = self.shared.config.queued_calls;
        if self.waiting.len() >= limit {
            return request.refuse(queue_full(limit));
        }
        self.enqueue(request);
    }

    fn enqueue(&mut self, request: Request) {
        if !self.deleting {
            if let Some(error) = request
                .spec()
                .and_then(|spec| spec_conflict(&self.entry, spec))
            {
                return request.refuse(error);
            }
            if let Request::Create(create) = request {
                return self.accept_create(create);
            }
        }
        self.deleting |= matches!(request, Request::Delete(_));
        self.waiting.push_back(request);
    }

    /// Handles a create, which need not wait for a running exec.
    fn accept_create(&mut self, create: Box<Create>) {
        let status = self.entry.status();
        let busy = status.state == BoxState::Running
            && status.exec_status == box_protocol::ExecStatus::Running;
        drop(status);
        if !busy || !create.spec.extra_mounts.is_empty() {
            return self.waiting.push_back(Request::Create(create));
        }
        let _ = create.reply.send(Ok(BoxCreateResult {
            info: self.entry.info(&create.caller),
            existed: true,
            earlier: None,
            adjusted: Vec::new(),
        }));
    }

    /// Puts a request back at the front of the queue.
    pub(super) fn put_back(&mut self, request: Request) {
        self.waiting.push_front(request);
    }

    /// Refuses all calls that wait for the box.
    pub(super) fn refuse_waiting(&mut self, error: &BoxError) {
        while let Ok(request) = self.mailbox.try_recv() {
            self.accept(request);
        }
        self.refuse_queued(error);
    }

    /// Refuses the queued calls. Calls in the mailbox came later and stay.
    pub(super) fn refuse_queued(&mut self, error: &BoxError) {
        let (refused, others) = self
            .waiting
            .drain(..)
            .partition::<Vec<_>, _>(|request| request.spec().is_some());
        for request in refused {
            request.refuse(error.clone());
        }
        self.waiting.extend(others);
    }

    /// Closes the mailbox and returns the remaining requests for the next actor.
    pub(super) fn close(&mut self) -> Vec<Request> {
        self.mailbox.close();
        let mut left: Vec<_> = self.waiting.drain(..).collect();
        while let Ok(request) = self.mailbox.try_recv() {
            left.push(request);
        }
        left
    }
}

pub(crate) fn queue_full(limit: usize) -> BoxError {
    BoxError::capacity(format!(
        "queued_calls: {limit} calls already wait for this box; try again later"
    ))
    .with_detail(&Detail {
        limit: Some("queued_calls".to_owned()),
        max: u64::try_from(limit).ok(),
        ..Detail::default()
    })
}

/// Returns the error if the box does not match the spec.
fn spec_conflict(entry: &BoxEntry, requested: &BoxSpec) -> Option<BoxError> {
    let id = &entry.spec.box_id;
    if let Some(conflict) = first_conflict(&entry.spec, requested) {
        return Some(conflict.into_error(id));
    }
    (entry.gateway() != requested.gateway.clone().unwrap_or_default()).then(|| {
        BoxError::conflict(format!("box {id} was created through another gateway"))
            .with_detail(&Detail::of_field("gateway").of(Subject::Box))
    })
}
