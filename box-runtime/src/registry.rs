//! The actor that owns the registry of boxes.
//!
//! It finds or creates the box of a call and passes the call to the task of that box. It never
//! waits for a box, so no box can delay another.

mod closing;
mod slot;

use std::collections::HashMap;
use std::sync::Arc;

use box_protocol::actions::{BoxUpdateParams, SystemShutdownResult};
use box_protocol::error::{Detail, Subject};
use box_protocol::{
    BoxError, BoxId, BoxState, Defaults, Invalid, Lifetime, Name, Network, World, check_labels,
};
use serde_json::{Map, Value};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use self::closing::{Closings, End};
use self::slot::Slot;
use crate::adoption::unreachable;
use crate::box_actor::entry::BoxEntry;
use crate::box_actor::{self, Begin, Request, Shared};
use crate::caller::Rights as _;
use box_rpc::Caller;

/// Maximum size of the configuration stored for one caller.
const CONFIGURATION_BYTES: usize = 256 * 1024;

/// A message to the registry.
pub(crate) enum Ask {
    /// Pass this request to the task of its box.
    Request(Request),
    Find {
        box_id: BoxId,
        caller: Caller,
        reply: oneshot::Sender<Result<Arc<BoxEntry>, BoxError>>,
    },
    /// List all boxes that are visible to the caller.
    All {
        caller: Caller,
        reply: oneshot::Sender<Vec<Arc<BoxEntry>>>,
    },
    Count {
        caller: Caller,
        reply: oneshot::Sender<Count>,
    },
    Update {
        caller: Caller,
        params: Box<BoxUpdateParams>,
        stage: Stage,
        reply: oneshot::Sender<Result<Arc<BoxEntry>, BoxError>>,
    },
    Configure {
        caller: Caller,
        members: Map<String, Value>,
        reply: oneshot::Sender<Result<(), BoxError>>,
    },
    Shutdown {
        caller: Caller,
        exit: bool,
        until: Instant,
        reply: oneshot::Sender<Result<SystemShutdownResult, BoxError>>,
    },
    /// Register an adopted box.
    Adopt {
        entry: Arc<BoxEntry>,
        begin: Begin,
        reply: oneshot::Sender<bool>,
    },
    /// The task of a box has ended; `left` holds the calls it did not begin.
    Ended {
        entry: Arc<BoxEntry>,
        left: Vec<Request>,
    },
}

/// Whether an update is only validated or also applied.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Validate the update without applying it.
    Check,
    Change,
}

/// The number of boxes.
pub(crate) struct Count {
    pub(crate) seen: usize,
    pub(crate) all: usize,
}

pub(crate) struct Table {
    shared: Arc<Shared>,
    mailbox: mpsc::Receiver<Ask>,
    me: mpsc::WeakSender<Ask>,
    slots: HashMap<Key, Slot>,
    names: HashMap<NameKey, BoxId>,
    closings: Closings,
    configuration: HashMap<Arc<str>, Map<String, Value>>,
    exited: watch::Sender<bool>,
}

/// The key of a box.
///
/// An id is unique among the boxes of one owner. A caller therefore cannot take or probe the ids of
/// another owner.
type Key = (Arc<str>, BoxId);

/// The key of a name, which is unique per owner and world.
type NameKey = (Arc<str>, World, Name);

impl Table {
    pub(crate) fn new(
        shared: Arc<Shared>,
        mailbox: mpsc::Receiver<Ask>,
        me: mpsc::WeakSender<Ask>,
        exited: watch::Sender<bool>,
    ) -> Self {
        Self {
            shared,
            mailbox,
            me,
            slots: HashMap::new(),
            names: HashMap::new(),
            closings: Closings::default(),
            configuration: HashMap::new(),
            exited,
        }
    }

    /// Serves until the last handle is dropped, then ends every box.
    pub(crate) async fn run(mut self) {
        loop {
            let until = self.closings.first_deadline();
            let deadline = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                ask = self.mailbox.recv() => match ask {
                    Some(ask) => self.answer(ask),
                    None => return,
                },
                () = deadline => self.give_up(),
            }
        }
    }

    fn answer(&mut self, ask: Ask) {
        match ask {
            Ask::Request(work) => self.route(work),
            Ask::Find {
                box_id,
                caller,
                reply,
            } => {
                let found = self
                    .find(&box_id, &caller)
                    .map(|slot| Arc::clone(&slot.entry));
                let _ = reply.send(found);
            }
            Ask::All { caller, reply } => {
                let _ = reply.send(self.seen_by(&caller).map(Arc::clone).collect());
            }
            Ask::Count { caller, reply } => {
                let seen = if caller.sees_all() {
                    self.slots.len()
                } else {
                    self.seen_by(&caller).count()
                };
                let all = self.slots.len();
                let _ = reply.send(Count { seen, all });
            }
            Ask::Update {
                caller,
                params,
                stage,
                reply,
            } => {
                let _ = reply.send(self.update(&caller, *params, stage));
            }
            Ask::Configure {
                caller,
                members,
                reply,
            } => {
                let _ = reply.send(self.configure(&caller, members));
            }
            Ask::Shutdown {
                caller,
                exit,
                until,
                reply,
            } => self.shutdown(caller, exit, until, reply),
            Ask::Adopt {
                entry,
                begin,
                reply,
            } => {
                let _ = reply.send(self.adopt(entry, begin));
            }
            Ask::Ended { entry, left } => self.ended(&entry, left),
        }
    }

    fn seen_by<'a>(&'a self, caller: &'a Caller) -> impl Iterator<Item = &'a Arc<BoxEntry>> {
        self.slots
            .values()
            .map(|slot| &slot.entry)
            .filter(|entry| caller.sees(&entry.owner))
    }

    fn find(&self, id: &BoxId, caller: &Caller) -> Result<&Slot, BoxError> {
        let found = self.key_of(id, caller);
        found
            .and_then(|key| self.slots.get(&key))
            .ok_or_else(|| self.shared.ends.not_found(&caller.name(), id))
    }

    /// Returns the key of the box that a caller refers to.
    ///
    /// The id names a box of the caller. A caller that sees all boxes can also use the `ID@OWNER`
    /// form.
    fn key_of(&self, id: &BoxId, caller: &Caller) -> Option<Key> {
        let own = (caller.name(), id.clone());
        if self.slots.contains_key(&own) {
            return Some(own);
        }
        let mut others = self.slots.iter().filter(|_| caller.sees_all());
        let named = others.find(|(_, slot)| slot.entry.is_called(id));
        named.map(|(key, _)| key.clone())
    }

    /// Passes a request to the task of its box, and creates the box if needed.
    fn route(&mut self, work: Request) {
        let (id, caller) = work.subject();
        let key = self.key_of(id, caller);
        if let Err(error) = self.admit(&work, key.as_ref()) {
            return work.refuse(error);
        }
        match key.and_then(|key| self.slots.get_mut(&key)) {
            Some(slot) => {
                let limit = self.shared.config.queued_calls;
                slot.give(work, limit);
            }
            None => self.make(work),
        }
    }

    /// Checks whether a request is allowed. An existing box has a key.
    fn admit(&self, work: &Request, key: Option<&Key>) -> Result<(), BoxError> {
        let (id, caller) = work.subject();
        if self.is_closing_for(&caller.name()) {
            return Err(shutting_down());
        }
        if key.is_some() {
            return may_find_one(work, id);
        }
        let Some(spec) = work.spec() else {
            return Err(self.shared.ends.not_found(&caller.name(), id));
        };
        self.has_room(caller, work.max_boxes())?;
        if let Some(name) = &spec.name {
            let world = spec.world.clone().unwrap_or_default();
            self.name_is_free(&(caller.name(), world, name.clone()))?;
        }
        Ok(())
    }

    /// Checks the limit of all boxes and the limit of the caller's boxes.
    fn has_room(&self, caller: &Caller, max_boxes: Option<usize>) -> Result<(), BoxError> {
        let config = &self.shared.config;
        let full = |name: &str, limit: usize| {
            let message = format!("box capacity reached ({limit})");
            BoxError::capacity(message).with_detail(&Detail {
                limit: Some(name.to_owned()),
                max: u64::try_from(limit).ok(),
                ..Detail::about(Subject::Box)
            })
        };
        if self.slots.len() >= config.max_boxes {
            return Err(full("max_boxes", config.max_boxes));
        }
        let per_caller = config.max_boxes_per_caller.filter(|_| !caller.sees_all());
        if let Some(limit) = max_boxes.into_iter().chain(per_caller).min() {
            let owners = self.slots.values().map(|slot| &slot.entry.owner);
            let name = caller.name();
            if owners.filter(|owner| **owner == name).count() >= limit {
                return Err(full("max_boxes_per_caller", limit));
            }
        }
        Ok(())
    }

    fn name_is_free(&self, key: &NameKey) -> Result<(), BoxError> {
        if !self.names.contains_key(key) {
            return Ok(());
        }
        Err(
            BoxError::conflict(format!("the name {} is taken by another box", key.2))
                .with_detail(&Detail::of_field("name").of(Subject::Box)),
        )
    }

    /// Creates the box for a request and passes the request to its task.
    fn make(&mut self, work: Request) {
        let ((_, caller), Some(spec)) = (work.subject(), work.spec()) else {
            return;
        };
        let entry = Arc::new(BoxEntry::new(caller.name(), spec));
        self.enter(entry, Begin::With(vec![work]));
    }

    /// Registers an adopted box, unless another box has its key.
    fn adopt(&mut self, entry: Arc<BoxEntry>, begin: Begin) -> bool {
        let free = !self.slots.contains_key(&entry.key());
        if free {
            self.enter(entry, begin);
        }
        free
    }

    fn enter(&mut self, entry: Arc<BoxEntry>, begin: Begin) {
        let key = entry.key();
        if let Some(name) = entry.live().name.clone() {
            let id = entry.spec.box_id.clone();
            self.names
                .insert((Arc::clone(&entry.owner), entry.world(), name), id);
        }
        let limit = self.shared.config.queued_calls;
        let (sender, mailbox) = mpsc::channel(limit.max(1));
        let (shared, table) = (Arc::clone(&self.shared), self.me.clone());
        let living = box_actor::live(shared, Arc::clone(&entry), begin, mailbox, table);
        let slot = Slot {
            entry,
            mailbox: Some(sender),
            waiting: Vec::new(),
            task: tokio::spawn(living).abort_handle(),
        };
        self.slots.insert(key, slot);
    }

    /// Updates the entry of a box after validating every change.
    ///
    /// The returned entry's [`kept`](BoxEntry::kept) completes when the change is on disk.
    fn update(
        &mut self,
        caller: &Caller,
        params: BoxUpdateParams,
        stage: Stage,
    ) -> Result<Arc<BoxEntry>, BoxError> {
        let entry = Arc::clone(&self.find(&params.box_id, caller)?.entry);
        let now = entry.live().state;
        if now == BoxState::Unreachable {
            return Err(unreachable(&params.box_id));
        }
        if now == BoxState::Failed {
            let message = format!("box {} has failed", params.box_id);
            return Err(BoxError::conflict(message).with_detail(&Detail::about(Subject::Box)));
        }
        if params.network_policy.is_some() && entry.spec.network == Network::Off {
            let rule = "must not be given to a box without a network";
            return Err(Invalid::new("network_policy", rule).into());
        }
        let old = entry.live().name.clone();
        let name = params.name.filter(|name| old.as_ref() != Some(name));
        let key = |name| (Arc::clone(&entry.owner), entry.world(), name);
        if let Some(name) = &name {
            self.name_is_free(&key(name.clone()))?;
        }
        let (mut labels, mut lifetime, mut defaults) = {
            let live = entry.live();
            (
                live.labels.clone(),
                live.lifetime.clone(),
                live.defaults.clone(),
            )
        };
        for (label, value) in params.labels {
            match value {
                Some(value) => labels.insert(label, value),
                None => labels.remove(&label),
            };
        }
        check_labels(&labels)?;
        if let Some(change) = params.lifetime {
            let before = lifetime.map_or_else(Lifetime::default, |before| *before);
            lifetime = Some(Box::new(before.changed(change)));
        }
        if let Some(change) = params.defaults {
            let before = defaults.map_or_else(Defaults::default, |before| *before);
            defaults = Some(Box::new(before.changed(change)?));
        }
        if stage == Stage::Check {
            return Ok(entry);
        }
        // Only this change can fail, so it comes before the others.
        if let Some(policy) = params.network_policy {
            entry.set_policy(policy)?;
        }
        if let Some(name) = name {
            if let Some(old) = old {
                self.names.remove(&key(old));
            }
            self.names
                .insert(key(name.clone()), entry.spec.box_id.clone());
            entry.live().name = Some(name);
        }
        {
            let mut live = entry.live();
            live.labels = labels;
            live.note = params.note.or(live.note.take());
            live.lifetime = lifetime;
            live.defaults = defaults;
        }
        entry.other_end.notify_one();
        entry.changed();
        Ok(entry)
    }

    fn configure(&mut self, caller: &Caller, members: Map<String, Value>) -> Result<(), BoxError> {
        let kept = self.configuration.entry(caller.name()).or_default();
        let mut merged = kept.clone();
        merged.extend(members);
        let size = serde_json::to_string(&merged).map_or(usize::MAX, |text| text.len());
        if size > CONFIGURATION_BYTES {
            return Err(BoxError::limit(
                box_protocol::Code::TooLarge,
                "configuration",
                "configuration_bytes",
                CONFIGURATION_BYTES,
            ));
        }
        *kept = merged;
        Ok(())
    }

    /// Returns whether a shutdown covers the boxes of this owner.
    fn is_closing_for(&self, owner: &str) -> bool {
        *self.exited.borrow() || self.closings.cover(owner)
    }

    /// Ends every box visible to the caller and answers when the last has ended.
    fn shutdown(
        &mut self,
        caller: Caller,
        exit: bool,
        until: Instant,
        reply: oneshot::Sender<Result<SystemShutdownResult, BoxError>>,
    ) {
        if exit && !caller.sees_all() {
            let refused = BoxError::denied("only a local caller may end the server");
            return drop(reply.send(Err(refused)));
        }
        if exit {
            self.exited.send_replace(true);
        }
        let mut left = 0;
        for slot in self.slots.values_mut() {
            if caller.sees(&slot.entry.owner) {
                slot.mailbox = None;
                left += 1;
            }
        }
        self.closings.begin(caller, left, until, reply);
    }

    /// Ends overdue shutdowns and leaves boxes that still run to their backend.
    fn give_up(&mut self) {
        for caller in self.closings.overdue(Instant::now()) {
            let stuck: Vec<_> = self.seen_by(&caller).map(Arc::clone).collect();
            tracing::error!(
                count = stuck.len(),
                "boxes did not end in time and are given up"
            );
            for entry in stuck {
                if let Some(slot) = self.remove(&entry) {
                    slot.task.abort();
                    entry.access.shut(shutting_down());
                    self.closings.gone(&entry.owner, End::GivenUp);
                    for work in slot.waiting {
                        work.refuse(shutting_down());
                    }
                }
            }
        }
        self.closings.answer_finished();
    }

    fn remove(&mut self, entry: &Arc<BoxEntry>) -> Option<Slot> {
        let key = entry.key();
        // A new box may have this key already.
        self.slots
            .get(&key)
            .filter(|slot| Arc::ptr_eq(&slot.entry, entry))?;
        self.shared.ends.gone(entry);
        if let Some(name) = entry.live().name.clone() {
            self.names
                .remove(&(Arc::clone(&entry.owner), entry.world(), name));
        }
        self.slots.remove(&key)
    }

    /// Removes a box that has ended; a new box serves the calls it did not begin.
    fn ended(&mut self, entry: &Arc<BoxEntry>, left: Vec<Request>) {
        let mut waiting = Vec::new();
        if let Some(slot) = self.remove(entry) {
            waiting = slot.waiting;
            self.closings.gone(&entry.owner, End::Orderly);
        }
        let id = &entry.spec.box_id;
        let mut lane = Vec::new();
        for work in left.into_iter().chain(waiting) {
            let caller = work.subject().1;
            let admitted = if *caller.name() != *entry.owner {
                // The call meant the box of another owner. A new box would belong to the caller
                // instead.
                Err(self.shared.ends.not_found(&entry.owner, id))
            } else if lane.is_empty() {
                self.admit(&work, None)
            } else {
                may_find_one(&work, id)
            };
            match admitted {
                Ok(()) => lane.push(work),
                Err(error) => work.refuse(error),
            }
        }
        if let Some(spec) = lane.first().and_then(Request::spec) {
            let entry = Arc::new(BoxEntry::new(Arc::clone(&entry.owner), spec));
            self.enter(entry, Begin::With(lane));
        }
        self.closings.answer_finished();
    }
}

/// Checks whether a request may go to an existing box.
fn may_find_one(work: &Request, id: &BoxId) -> Result<(), BoxError> {
    if matches!(work, Request::Create(create) if create.must_be_new) {
        let error = BoxError::conflict(format!("box {id} already exists"));
        return Err(error.with_detail(&Detail::about(Subject::Box)));
    }
    Ok(())
}

fn shutting_down() -> BoxError {
    BoxError::unavailable("Box runtime is shutting down")
}
