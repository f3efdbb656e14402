//! The front of a session: its mailbox, the lane in which calls wait, and its clock. It listens while
//! the box behind it is busy.

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
use crate::box_actor::agent_access::AgentAccess;

/// Why a session ends now, whatever it does.
pub(super) enum EndReason {
    /// A delete that waits for nothing.
    Deleted(Box<Delete>),
    /// Its time is over.
    Expired,
    /// Nobody has used it for long.
    Idle,
    /// The command has ended that its box ends with.
    Done,
    /// The table let go of it.
    Closed,
}

/// What ended a rest.
pub(super) enum Wakeup {
    Request,
    Broken(String),
    /// The agent of a box that was adopted has answered.
    Reached(Box<RunningBox>),
    EndReason(EndReason),
}

/// What came of a job.
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
    /// A delete waits in the lane: what comes after it is for another box.
    deleting: bool,
}

/// When the session ends by itself.
struct Clock {
    /// Set to some moment not after the next one that matters, so that an exec need not touch it.
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
            // What has failed is not worth keeping for ever.
            BoxState::Failed => Some(idle),
            // Nobody can use it, so nobody fails to.
            BoxState::Paused | BoxState::Unreachable => None,
            BoxState::Stopped => lifetime.delete_after_stop_ms.map(Duration::from_millis),
            _ => (!entry.spec.persistent).then_some(idle),
        };
        self.expires = lifetime
            .expires_at
            .and_then(|at| Instant::now().checked_add(at.since(UnixMs::now())));
        let first = [self.idle_end(&entry.access), self.expires]
            .into_iter()
            .flatten()
            .min();
        if let Some(first) = first {
            self.alarm.as_mut().reset(first);
        }
    }

    fn idle_end(&self, access: &AgentAccess) -> Option<Instant> {
        let used = self.last_used.max(access.used());
        self.idle.and_then(|idle| used.checked_add(idle))
    }

    /// Returns once the session's time is over; `idle` if idleness counts now. Whoever is inside keeps it from being idle.
    async fn strike(&mut self, idle: bool, access: &AgentAccess) -> EndReason {
        loop {
            let idle_end = self.idle_end(access).filter(|_| idle);
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
        // They were let in already, some of them by the session before.
        for work in first {
            front.line_up(work);
        }
        front
    }

    /// What has waited longest.
    pub(super) fn next_work(&mut self) -> Option<Request> {
        let work = self.lane.pop_front();
        if self.lane.is_empty() {
            // A burst leaves no memory behind.
            self.lane.shrink_to(0);
        }
        work
    }

    /// The box has another state, and with it maybe another end.
    pub(super) fn set_clock(&mut self) {
        self.clock.set(&self.shared, &self.entry);
    }

    /// Whether nobody has used the box for as long as it takes, and nobody waits for it.
    pub(super) fn is_idle(&self) -> bool {
        let end = self.clock.idle_end(&self.entry.access);
        self.lane.is_empty() && end.is_some_and(|end| end <= Instant::now())
    }

    /// The box has had work until now.
    pub(super) fn used(&mut self) {
        self.clock.last_used = Instant::now();
    }

    /// Waits for work while nothing is to be done.
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
            rested = ended => rested,
            () = self.entry.other_end.notified() => {
                self.set_clock();
                Wakeup::Request
            }
            over = self.clock.strike(true, &self.entry.access) => Wakeup::EndReason(over),
        }
    }

    /// Does a job, and listens meanwhile. The job is dropped if the session is over.
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
                over = self.clock.strike(false, &self.entry.access) => return JobOutcome::EndReason(over),
            }
        }
    }

    /// Puts a call into the lane, or answers it where that needs no waiting.
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

    /// A create need not wait for an exec: what is busy is there.
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

    /// Gives up what a call waited for: it goes first when the session is made anew.
    pub(super) fn put_back(&mut self, work: Request) {
        self.lane.push_front(work);
    }

    /// Answers everybody who waits for a box.
    pub(super) fn refuse_waiting(&mut self, error: &BoxError) {
        while let Ok(work) = self.mailbox.try_recv() {
            self.take(work);
        }
        self.refuse_lane(error);
    }

    /// Answers those who have waited for a box until now. What is still in the mailbox came later.
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

    /// Takes no more calls. What is left is for the next session of this id.
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

/// Why the box cannot serve this spec.
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
