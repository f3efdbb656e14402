//! The task of a pool: starts boxes, replaces old ones and ends those that are no longer wanted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use box_protocol::{BoxError, BoxId, BoxSpec, SpecDraft};
use box_rpc::Caller;
use tokio::sync::mpsc::WeakSender;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout_at};
use uuid::Uuid;

use super::{Member, Mode, Pool};
use crate::box_actor::entry::BoxEntry;
use crate::box_actor::{Instance, Shared};
use crate::registry::RegistryMessage;

/// Interval between checks whether the waiting boxes live.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// First and longest pause after a failed start.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// The next step of a pool.
enum Step {
    /// Start a box with this spec.
    Start(Arc<BoxSpec>, u64),
    /// Wait until this time, or for a change.
    Wait(Instant),
    End,
}

/// Number of boxes below and above a limit.
#[derive(Clone, Copy, Default)]
struct Room {
    free: usize,
    excess: usize,
}

impl Room {
    fn within(limit: usize, boxes: usize) -> Self {
        Self {
            free: limit.saturating_sub(boxes),
            excess: boxes.saturating_sub(limit),
        }
    }
}

/// Starts the task of a pool.
pub(crate) fn start(shared: Arc<Shared>, registry: WeakSender<RegistryMessage>, pool: Arc<Pool>) {
    // The pool waits for this receiver when it ends.
    let running = pool.mode.subscribe();
    tokio::spawn(async move {
        Filler {
            shared,
            registry,
            pool,
            retry: None,
            pause: FIRST_PAUSE,
        }
        .run(running)
        .await;
    });
}

struct Filler {
    shared: Arc<Shared>,
    registry: WeakSender<RegistryMessage>,
    pool: Arc<Pool>,
    /// When the next start with the spec of this generation may begin, after a failed one.
    retry: Option<(u64, Instant)>,
    pause: Duration,
}

impl Filler {
    async fn run(mut self, mut mode: watch::Receiver<Mode>) {
        loop {
            let room = self.room().await;
            let (unwanted, step) = self.plan(room);
            for member in unwanted {
                end(member).await;
            }
            self.pool.state().busy = matches!(step, Step::Start(..));
            match step {
                Step::End => return,
                Step::Wait(until) => {
                    let _ = timeout_at(until, self.pool.changed.notified()).await;
                }
                Step::Start(spec, generation) => {
                    let spec = numbered(&spec);
                    let mut instance = self.member(&spec);
                    let launched = tokio::select! {
                        launched = self.launch(&mut instance, &spec) => Some(launched),
                        _ = mode.wait_for(|mode| *mode != Mode::Filled) => None,
                    };
                    match launched {
                        Some(Ok(())) => self.add(instance, generation),
                        Some(Err(error)) => self.failed(generation, &error),
                        None => drop(instance.stop().await),
                    }
                }
            }
        }
    }

    /// Removes the boxes that are no longer wanted, and decides the next step.
    fn plan(&self, room: Room) -> (Vec<Member>, Step) {
        let mut state = self.pool.state();
        let now = Instant::now();
        let mode = self.pool.mode();
        let size = if mode == Mode::Filled {
            let most = (state.ready.len() + room.free).saturating_sub(room.excess);
            state.settings.size.min(most)
        } else {
            0
        };
        let (generation, max_age) = (state.generation, state.settings.max_age);
        let mut unwanted = Vec::new();
        let mut kept = VecDeque::new();
        for member in std::mem::take(&mut state.ready) {
            let is_old = now.duration_since(member.created_at) >= max_age;
            let is_dead = !member.instance.is_connected();
            if member.generation != generation || is_old || is_dead || kept.len() >= size {
                unwanted.push(member);
            } else {
                kept.push_back(member);
            }
        }
        let next_old = kept.front().map(|member| member.created_at + max_age);
        let missing = size.saturating_sub(kept.len());
        state.ready = kept;
        if mode == Mode::Closed {
            state.busy = !unwanted.is_empty();
            return (unwanted, Step::End);
        }
        let check = now + CHECK_INTERVAL;
        let waits = self.retry.filter(|(failed, _)| *failed == generation);
        let waits = waits.map(|(_, until)| until).filter(|until| *until > now);
        let step = match &state.spec {
            Some(spec) if missing > 0 && waits.is_none() => {
                Step::Start(Arc::clone(spec), generation)
            }
            _ => Step::Wait(next_old.into_iter().chain(waits).fold(check, Instant::min)),
        };
        // Under the same lock as the mode: nothing starts unseen after a change of mode.
        state.busy = !unwanted.is_empty() || matches!(step, Step::Start(..));
        (unwanted, step)
    }

    /// Returns how many boxes more or less the runtime and the owner of the pool may have.
    ///
    /// Waiting boxes give way to those of callers.
    async fn room(&self) -> Room {
        let Some(registry) = self.registry.upgrade() else {
            return Room::default();
        };
        let (reply, count) = oneshot::channel();
        let owner = Arc::clone(&self.pool.owner);
        if registry
            .send(RegistryMessage::CountOf { owner, reply })
            .await
            .is_err()
        {
            return Room::default();
        }
        drop(registry);
        let Ok(boxes) = count.await else {
            return Room::default();
        };
        let (config, waiting) = (
            &self.shared.config,
            self.shared.pools.waiting(&self.pool.owner),
        );
        let of_owner = config.max_boxes_per_caller.filter(|_| !self.is_local());
        let total = Room::within(config.max_boxes, boxes.total + waiting.total);
        let of_owner = of_owner.unwrap_or(usize::MAX);
        let own = Room::within(of_owner, boxes.visible + waiting.visible);
        Room {
            free: total.free.min(own.free),
            excess: total.excess.max(own.excess),
        }
    }

    /// Whether the pool belongs to the caller without limits.
    fn is_local(&self) -> bool {
        self.pool.owner == Caller::Local.name()
    }

    /// A box of the pool that has not started.
    fn member(&self, spec: &BoxSpec) -> Instance {
        let entry = BoxEntry::new(Arc::clone(&self.pool.owner), spec);
        Instance::new(Arc::clone(&self.shared), Arc::new(entry))
    }

    async fn launch(&self, member: &mut Instance, spec: &BoxSpec) -> Result<(), BoxError> {
        let _permit = self.shared.pools.starts.acquire().await;
        // Boxed, because it is large.
        Box::pin(member.launch(spec, self.is_local())).await
    }

    fn add(&mut self, instance: Instance, generation: u64) {
        (self.retry, self.pause) = (None, FIRST_PAUSE);
        let mut state = self.pool.state();
        state.error = None;
        state.ready.push_back(Member {
            instance,
            created_at: Instant::now(),
            generation,
        });
    }

    fn failed(&mut self, generation: u64, error: &BoxError) {
        let (pool, owner) = (self.pool.name(), &self.pool.owner);
        tracing::warn!(%owner, %pool, %error, "cannot start a box of a pool; retrying later");
        self.pool.state().error = Some(error.message().to_owned());
        self.retry = Some((generation, Instant::now() + self.pause));
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
    }
}

async fn end(mut member: Member) {
    let _ = member.instance.stop().await;
}

/// Returns the spec of a pool's boxes.
pub(crate) fn member_spec(draft: SpecDraft) -> Result<BoxSpec, BoxError> {
    let draft = SpecDraft {
        box_id: Some("pool".to_owned()),
        ..draft
    };
    Ok(draft.build()?)
}

/// Returns the spec of one box of a pool.
///
/// No call can use its id, which appears in logs until a request takes the box.
fn numbered(spec: &BoxSpec) -> BoxSpec {
    let mut spec = spec.clone();
    let id = format!("pool-{}", Uuid::now_v7().simple());
    spec.box_id = BoxId::new(id).unwrap_or(spec.box_id);
    spec
}
