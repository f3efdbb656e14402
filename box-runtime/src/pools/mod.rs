//! Pools: boxes that the runtime starts and prepares before a caller asks for them.
//!
//! Each pool has a task (`fill.rs`) that keeps a number of boxes ready. A box of a pool has passed
//! every step of a start except the last one: it has no record, and no call can use it. After a
//! crash it therefore ends by itself. Taking it completes the start under the id of the request.
//!
//! A request can only take a box that is what it asks for: [`first_difference`] compares the specs.

mod fill;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_protocol::{BoxSpec, ItemId, Name, first_difference};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;

use crate::box_actor::Instance;
use crate::catalog::ItemUse;
use crate::registry::BoxCount;

pub(crate) use fill::{member_spec, start};

/// Number of boxes that all pools of a runtime start at the same time.
///
/// More would compete with the boxes of callers for the CPUs.
const CONCURRENT_STARTS: usize = 4;

/// All pools of a runtime.
pub(crate) struct Pools {
    all: Mutex<AllPools>,
    /// Permits to start boxes.
    starts: Semaphore,
}

#[derive(Default)]
struct AllPools {
    by_id: HashMap<ItemId, Arc<Pool>>,
    /// The mode of new pools.
    mode: Mode,
}

/// Whether a pool keeps boxes ready.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd)]
pub(crate) enum Mode {
    #[default]
    Filled,
    /// It keeps no boxes during a shutdown.
    Empty,
    /// It never keeps boxes again: it is deleted, or its runtime ends.
    Closed,
}

impl Default for Pools {
    fn default() -> Self {
        Self {
            all: Mutex::default(),
            starts: Semaphore::new(CONCURRENT_STARTS),
        }
    }
}

/// The result of asking the pools for a box.
pub(crate) enum Taken {
    /// The request names neither a pool nor a template with one.
    NotAsked,
    /// No box can serve the request, for this reason.
    Missed(String),
    /// A box of the pool with this name.
    Member(Name, Box<Instance>),
}

/// A pool and the boxes that wait in it.
pub(crate) struct Pool {
    pub(crate) id: ItemId,
    pub(crate) owner: Arc<str>,
    state: Mutex<PoolState>,
    /// Signals the task that something has changed.
    changed: Notify,
    mode: watch::Sender<Mode>,
}

/// The settings of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PoolSettings {
    /// Number of boxes to keep ready.
    pub(crate) size: usize,
    /// Age at which a waiting box is replaced.
    pub(crate) max_age: Duration,
}

struct PoolState {
    name: Name,
    /// The use of its template.
    template: ItemUse,
    settings: PoolSettings,
    /// The spec of the boxes, once it is decided.
    spec: Option<Arc<BoxSpec>>,
    /// Changes with the spec.
    generation: u64,
    ready: VecDeque<Member>,
    /// Whether the task is starting or ending boxes.
    busy: bool,
    /// Why the last start failed.
    error: Option<String>,
}

/// A box that waits in a pool.
struct Member {
    instance: Instance,
    created_at: Instant,
    generation: u64,
}

/// The current figures of a pool.
#[derive(Debug, Clone, Default)]
pub(crate) struct PoolStats {
    pub(crate) ready: u64,
    pub(crate) error: Option<String>,
}

impl Pools {
    /// Takes a box for this request, from the first of these pools that can give one.
    pub(crate) fn take(pools: &[Arc<Pool>], spec: &BoxSpec) -> Taken {
        let mut missed = None;
        for pool in pools {
            match pool.take(spec) {
                Ok(member) => return Taken::Member(pool.name(), Box::new(member.instance)),
                Err(reason) => missed = Some(format!("pool {}: {reason}", pool.name())),
            }
        }
        missed.map_or(Taken::NotAsked, Taken::Missed)
    }

    pub(crate) fn get(&self, id: &ItemId) -> Option<Arc<Pool>> {
        self.lock().by_id.get(id).map(Arc::clone)
    }

    pub(crate) fn insert(&self, pool: Arc<Pool>) {
        let mut all = self.lock();
        pool.set_mode(all.mode);
        all.by_id.insert(pool.id.clone(), pool);
    }

    /// Removes a pool, which ends its boxes.
    pub(crate) fn remove(&self, id: &ItemId) -> Option<Arc<Pool>> {
        let removed = self.lock().by_id.remove(id);
        removed.inspect(|pool| pool.set_mode(Mode::Closed))
    }

    /// Returns the pools with this template.
    pub(crate) fn of_template(&self, id: &ItemId) -> Vec<Arc<Pool>> {
        let all = self.lock();
        let pools = all.by_id.values();
        let of_template = pools.filter(|pool| pool.state().template.id() == id);
        of_template.map(Arc::clone).collect()
    }

    /// Counts the waiting boxes of an owner, and all.
    fn waiting(&self, owner: &Arc<str>) -> BoxCount {
        let mut count = BoxCount::default();
        for pool in self.lock().by_id.values() {
            let waiting = pool.state().ready.len();
            count.total += waiting;
            if pool.owner == *owner {
                count.visible += waiting;
            }
        }
        count
    }

    /// Changes the mode of all pools, unless they are closed.
    pub(crate) fn set_mode(&self, mode: Mode) {
        let mut all = self.lock();
        if all.mode < Mode::Closed {
            all.mode = mode;
        }
        for pool in all.by_id.values() {
            pool.set_mode(mode);
        }
    }

    /// Waits until no box waits or starts, after the mode has changed.
    pub(crate) async fn wait_empty(&self) {
        let is_empty = || {
            let all = self.lock();
            let busy = |pool: &Arc<Pool>| {
                let state = pool.state();
                state.busy || !state.ready.is_empty()
            };
            !all.by_id.values().any(busy)
        };
        while !is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Closes and forgets every pool, because the runtime ends.
    pub(crate) fn close(&self) {
        self.set_mode(Mode::Closed);
        self.lock().by_id.clear();
    }

    fn lock(&self) -> MutexGuard<'_, AllPools> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    pub(crate) fn new(
        id: ItemId,
        owner: Arc<str>,
        name: Name,
        template: ItemUse,
        settings: PoolSettings,
    ) -> Arc<Self> {
        let state = PoolState {
            name,
            template,
            settings,
            spec: None,
            generation: 0,
            ready: VecDeque::new(),
            busy: false,
            error: None,
        };
        Arc::new(Self {
            id,
            owner,
            state: Mutex::new(state),
            changed: Notify::new(),
            mode: watch::Sender::new(Mode::Filled),
        })
    }

    /// Sets the spec of the boxes. Boxes with another spec end.
    pub(crate) fn set_spec(&self, spec: BoxSpec) {
        let mut state = self.state();
        if state.spec.as_deref() == Some(&spec) {
            return;
        }
        state.spec = Some(Arc::new(spec));
        state.generation += 1;
        state.error = None;
        drop(state);
        self.changed.notify_one();
    }

    /// Ends all boxes, because no spec is allowed, for this reason.
    pub(crate) fn refuse(&self, reason: String) {
        let mut state = self.state();
        state.spec = None;
        state.generation += 1;
        state.error = Some(reason);
        drop(state);
        self.changed.notify_one();
    }

    /// Changes the name and the settings.
    pub(crate) fn configure(&self, name: Name, settings: PoolSettings) {
        let mut state = self.state();
        state.name = name;
        state.settings = settings;
        drop(state);
        self.changed.notify_one();
    }

    /// Changes the template.
    pub(crate) fn set_template(&self, template: ItemUse) {
        self.state().template = template;
    }

    pub(crate) fn figures(&self) -> PoolStats {
        let state = self.state();
        PoolStats {
            ready: state.ready.len() as u64,
            error: state.error.clone(),
        }
    }

    fn name(&self) -> Name {
        self.state().name.clone()
    }

    /// Takes the oldest box that fits the request, or returns why none does.
    fn take(&self, asked: &BoxSpec) -> Result<Member, String> {
        let mut state = self.state();
        let Some(spec) = &state.spec else {
            return Err(match &state.error {
                Some(error) => format!("it has no boxes: {error}"),
                None => "its spec is not decided yet".to_owned(),
            });
        };
        if !asked.volumes.is_empty() {
            return Err("a box with volumes is always new".to_owned());
        }
        if let Some(field) = first_difference(spec, asked) {
            return Err(format!("the request has another {field} than its boxes"));
        }
        let generation = state.generation;
        let fits = |member: &Member| member.generation == generation;
        let at = state.ready.iter().position(fits);
        let member = at.and_then(|at| state.ready.remove(at));
        let missing = || match &state.error {
            Some(error) => format!("no box is ready: {error}"),
            None => "no box is ready".to_owned(),
        };
        let member = member.ok_or_else(missing)?;
        drop(state);
        self.changed.notify_one();
        Ok(member)
    }

    fn set_mode(&self, mode: Mode) {
        self.mode.send_if_modified(|current| {
            let changes = *current < Mode::Closed && *current != mode;
            if changes {
                *current = mode;
            }
            changes
        });
        self.changed.notify_one();
    }

    fn mode(&self) -> Mode {
        *self.mode.borrow()
    }

    /// Waits until the task has ended, after a close.
    pub(crate) async fn ended(&self) {
        self.mode.closed().await;
    }

    /// Only assignments run under this lock.
    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
