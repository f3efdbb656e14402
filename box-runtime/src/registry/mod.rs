//! The actor that owns the registry of boxes.
//!
//! It finds or creates the box of a call and passes the call to the task of that box. It never
//! waits for a box, so no box can delay another.

mod shutdown;
mod unique_ids;
mod update;

use std::collections::HashMap;
use std::sync::Arc;

use box_protocol::actions::{BoxUpdateParams, SystemShutdownResult};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxId, GatewayName, Name};
use serde_json::{Map, Value};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use self::shutdown::{BoxOutcome, Shutdowns};
pub(crate) use self::unique_ids::UniqueIds;
use crate::box_actor::entry::BoxEntry;
use crate::box_actor::{self, ActorStart, Request, Shared, queue_full};
use crate::caller::Visibility as _;
use box_rpc::Caller;

/// A message to the registry.
pub(crate) enum RegistryMessage {
    /// Pass this request to the task of its box.
    Request(Request),
    Find {
        box_id: BoxId,
        caller: Caller,
        reply: oneshot::Sender<Result<Arc<BoxEntry>, BoxError>>,
    },
    /// Find the box with a name.
    FindNamed {
        key: NameKey,
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
        reply: oneshot::Sender<BoxCount>,
    },
    /// Counts the boxes of an owner, and all.
    CountOf {
        owner: Arc<str>,
        reply: oneshot::Sender<BoxCount>,
    },
    Update {
        caller: Caller,
        params: Box<BoxUpdateParams>,
        stage: UpdateStage,
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
        begin: ActorStart,
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
pub(crate) enum UpdateStage {
    /// Validate the update without applying it.
    Validate,
    /// Validate the update and apply it.
    Apply,
}

/// The number of boxes.
#[derive(Clone, Copy, Default)]
pub(crate) struct BoxCount {
    pub(crate) visible: usize,
    pub(crate) total: usize,
}

pub(crate) struct Registry {
    shared: Arc<Shared>,
    mailbox: mpsc::Receiver<RegistryMessage>,
    sender: mpsc::WeakSender<RegistryMessage>,
    boxes: HashMap<Key, ActorHandle>,
    names: HashMap<NameKey, BoxId>,
    shutdowns: Shutdowns,
    configuration: HashMap<Arc<str>, Map<String, Value>>,
    exited: watch::Sender<bool>,
}

/// The registry's handle of one box and its actor.
struct ActorHandle {
    entry: Arc<BoxEntry>,
    /// The only sender to the box's task. Dropping it ends the box.
    mailbox: Option<mpsc::Sender<Request>>,
    /// Calls that arrived after the task had stopped receiving.
    waiting: Vec<Request>,
    task: AbortHandle,
}

impl ActorHandle {
    /// Passes a call to the task without waiting.
    fn deliver(&mut self, request: Request, limit: usize) {
        let request = match &self.mailbox {
            None => request,
            Some(mailbox) => match mailbox.try_send(request) {
                Ok(()) => return,
                Err(mpsc::error::TrySendError::Full(request)) => {
                    return request.refuse(queue_full(limit));
                }
                Err(mpsc::error::TrySendError::Closed(request)) => request,
            },
        };
        if self.waiting.len() < limit {
            self.waiting.push(request);
        } else {
            request.refuse(queue_full(limit));
        }
    }
}

/// The key of a box.
///
/// An id is unique among the boxes of one owner. A caller therefore cannot take or probe the ids of
/// another owner.
type Key = (Arc<str>, BoxId);

/// The key of a name, which is unique per owner and gateway.
pub(crate) type NameKey = (Arc<str>, GatewayName, Name);

impl Registry {
    pub(crate) fn new(
        shared: Arc<Shared>,
        mailbox: mpsc::Receiver<RegistryMessage>,
        sender: mpsc::WeakSender<RegistryMessage>,
        exited: watch::Sender<bool>,
    ) -> Self {
        Self {
            shared,
            mailbox,
            sender,
            boxes: HashMap::new(),
            names: HashMap::new(),
            shutdowns: Shutdowns::default(),
            configuration: HashMap::new(),
            exited,
        }
    }

    /// Serves until the last handle is dropped, then ends every box.
    pub(crate) async fn run(mut self) {
        loop {
            let until = self.shutdowns.first_deadline();
            let deadline = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                message = self.mailbox.recv() => match message {
                    Some(message) => self.handle(message),
                    None => break,
                },
                () = deadline => self.abandon_overdue(),
            }
        }
        self.shared.pools.close();
    }

    fn handle(&mut self, message: RegistryMessage) {
        match message {
            RegistryMessage::Request(request) => self.route(request),
            RegistryMessage::Find {
                box_id,
                caller,
                reply,
            } => {
                let found = self
                    .find(&box_id, &caller)
                    .map(|handle| Arc::clone(&handle.entry));
                let _ = reply.send(found);
            }
            RegistryMessage::FindNamed { key, caller, reply } => {
                let _ = reply.send(self.find_named(&key, &caller));
            }
            RegistryMessage::All { caller, reply } => {
                let _ = reply.send(self.visible_to(&caller).map(Arc::clone).collect());
            }
            RegistryMessage::Count { caller, reply } => {
                let visible = if caller.can_see_all() {
                    self.boxes.len()
                } else {
                    self.visible_to(&caller).count()
                };
                let total = self.boxes.len();
                let _ = reply.send(BoxCount { visible, total });
            }
            RegistryMessage::CountOf { owner, reply } => {
                let visible = self.boxes_of(&owner);
                let total = self.boxes.len();
                let _ = reply.send(BoxCount { visible, total });
            }
            RegistryMessage::Update {
                caller,
                params,
                stage,
                reply,
            } => {
                let _ = reply.send(self.update(&caller, *params, stage));
            }
            RegistryMessage::Configure {
                caller,
                members,
                reply,
            } => {
                let _ = reply.send(self.configure(&caller, members));
            }
            RegistryMessage::Shutdown {
                caller,
                exit,
                until,
                reply,
            } => self.shutdown(caller, exit, until, reply),
            RegistryMessage::Adopt {
                entry,
                begin,
                reply,
            } => {
                let _ = reply.send(self.adopt(entry, begin));
            }
            RegistryMessage::Ended { entry, left } => self.ended(&entry, left),
        }
    }

    fn visible_to<'a>(&'a self, caller: &'a Caller) -> impl Iterator<Item = &'a Arc<BoxEntry>> {
        self.boxes
            .values()
            .map(|handle| &handle.entry)
            .filter(|entry| match caller.only_box() {
                Some(only) => entry.has_unique_id(only),
                None => caller.can_see(&entry.owner),
            })
    }

    fn find(&self, id: &BoxId, caller: &Caller) -> Result<&ActorHandle, BoxError> {
        let found = self.key_of(id, caller);
        found
            .and_then(|key| self.boxes.get(&key))
            .ok_or_else(|| self.shared.ended_boxes.not_found(&caller.name(), id))
    }

    fn find_named(&self, key: &NameKey, caller: &Caller) -> Result<Arc<BoxEntry>, BoxError> {
        let Some(id) = self.names.get(key) else {
            let error = BoxError::not_found(format!("name: no box is named {}", key.2));
            return Err(error.with_detail(&Detail::of_field("name").of(Subject::Box)));
        };
        let handle = self.find(id, caller)?;
        Ok(Arc::clone(&handle.entry))
    }

    /// Returns the key of the box that a caller refers to.
    ///
    /// The id names a box of the caller. A caller that sees all boxes can also use the `ID@OWNER`
    /// form. The holder of a capability uses the unique id of its box.
    fn key_of(&self, id: &BoxId, caller: &Caller) -> Option<Key> {
        if let Some(only) = caller.only_box() {
            return self.unique(only).filter(|_| id.as_str() == only);
        }
        let own = (caller.name(), id.clone());
        if self.boxes.contains_key(&own) {
            return Some(own);
        }
        if !caller.can_see_all() {
            return None;
        }
        let id = id.as_str();
        // An id and an owner may contain the separator.
        let mut separators = id.match_indices('@');
        let of_owner = separators.find_map(|(at, _)| {
            let key = (Arc::from(&id[at + 1..]), BoxId::new(&id[..at]).ok()?);
            self.boxes.contains_key(&key).then_some(key)
        });
        of_owner.or_else(|| self.unique(id))
    }

    /// Returns the key of the box with this unique id.
    fn unique(&self, id: &str) -> Option<Key> {
        let key = self.shared.unique_ids.find(id)?;
        let is_same = |handle: &ActorHandle| handle.entry.has_unique_id(id);
        self.boxes.get(&key).is_some_and(is_same).then_some(key)
    }

    /// Passes a request to the task of its box, and creates the box if needed.
    fn route(&mut self, request: Request) {
        let (id, caller) = request.subject();
        let key = self.key_of(id, caller);
        if let Err(error) = self.admit(&request, key.as_ref()) {
            return request.refuse(error);
        }
        match key.and_then(|key| self.boxes.get_mut(&key)) {
            Some(handle) => {
                let limit = self.shared.config.queued_calls;
                handle.deliver(request, limit);
            }
            None => self.create(request),
        }
    }

    /// Checks whether a request is allowed. An existing box has a key.
    fn admit(&self, request: &Request, key: Option<&Key>) -> Result<(), BoxError> {
        let (id, caller) = request.subject();
        if self.is_shutting_down_for(&caller.name()) {
            return Err(shutting_down());
        }
        if key.is_some() {
            return check_may_exist(request, id);
        }
        let Some(spec) = request.spec() else {
            return Err(self.shared.ended_boxes.not_found(&caller.name(), id));
        };
        caller.check_may_own()?;
        self.check_capacity(caller, request.max_boxes())?;
        if let Some(name) = &spec.name {
            let gateway = spec.gateway.clone().unwrap_or_default();
            self.check_name_free(&(caller.name(), gateway, name.clone()))?;
        }
        Ok(())
    }

    /// Checks the limit of all boxes and the limit of the caller's boxes.
    fn check_capacity(&self, caller: &Caller, max_boxes: Option<usize>) -> Result<(), BoxError> {
        let config = &self.shared.config;
        let full = |name: &str, limit: usize| {
            let message = format!("{name}: the limit of {limit} is reached; delete a box");
            BoxError::capacity(message).with_detail(&Detail {
                limit: Some(name.to_owned()),
                max: u64::try_from(limit).ok(),
                ..Detail::about(Subject::Box)
            })
        };
        if self.boxes.len() >= config.max_boxes {
            return Err(full("max_boxes", config.max_boxes));
        }
        let per_caller = config
            .max_boxes_per_caller
            .filter(|_| !caller.can_see_all());
        let limit = max_boxes.into_iter().chain(per_caller).min();
        if let Some(limit) = limit.filter(|limit| self.boxes_of(&caller.name()) >= *limit) {
            return Err(full("max_boxes_per_caller", limit));
        }
        Ok(())
    }

    fn boxes_of(&self, owner: &Arc<str>) -> usize {
        let owners = self.boxes.values().map(|handle| &handle.entry.owner);
        owners.filter(|other| *other == owner).count()
    }

    fn check_name_free(&self, key: &NameKey) -> Result<(), BoxError> {
        if !self.names.contains_key(key) {
            return Ok(());
        }
        Err(
            BoxError::conflict(format!("name: {} is taken by another box", key.2))
                .with_detail(&Detail::of_field("name").of(Subject::Box)),
        )
    }

    /// Creates the box for a request and passes the request to its task.
    fn create(&mut self, mut request: Request) {
        let owner = request.subject().1.name();
        if let Some(entry) = self.new_entry(owner, &mut request) {
            self.insert(entry, ActorStart::Requests(vec![request]));
        }
    }

    /// Creates the entry of the box that a request asks for, if it can create one.
    fn new_entry(&self, owner: Arc<str>, request: &mut Request) -> Option<Arc<BoxEntry>> {
        let entry = Arc::new(BoxEntry::new(owner, request.spec()?));
        if let Some(origin) = request.take_origin() {
            entry.set_origin(*origin);
        }
        if matches!(&request, Request::Create(create) if create.keep_failed) {
            entry.set_record_place(&self.shared.records);
        }
        Some(entry)
    }

    /// Registers an adopted box, unless another box has its key.
    fn adopt(&mut self, entry: Arc<BoxEntry>, begin: ActorStart) -> bool {
        let free = !self.boxes.contains_key(&entry.key());
        if free {
            self.insert(entry, begin);
        }
        free
    }

    fn insert(&mut self, entry: Arc<BoxEntry>, begin: ActorStart) {
        let key = entry.key();
        if let Some(name) = entry.status().name.clone() {
            let id = entry.spec.box_id.clone();
            self.names
                .insert((Arc::clone(&entry.owner), entry.gateway(), name), id);
        }
        self.shared.unique_ids.insert(&entry);
        let limit = self.shared.config.queued_calls;
        let (sender, mailbox) = mpsc::channel(limit.max(1));
        let (shared, registry) = (Arc::clone(&self.shared), self.sender.clone());
        let actor = box_actor::run(shared, Arc::clone(&entry), begin, mailbox, registry);
        let handle = ActorHandle {
            entry,
            mailbox: Some(sender),
            waiting: Vec::new(),
            task: tokio::spawn(actor).abort_handle(),
        };
        self.boxes.insert(key, handle);
    }

    /// Returns whether a shutdown covers the boxes of this owner.
    fn is_shutting_down_for(&self, owner: &str) -> bool {
        *self.exited.borrow() || self.shutdowns.covers(owner)
    }

    /// Ends every box visible to the caller and answers when the last has ended.
    fn shutdown(
        &mut self,
        caller: Caller,
        exit: bool,
        until: Instant,
        reply: oneshot::Sender<Result<SystemShutdownResult, BoxError>>,
    ) {
        if exit && !caller.can_see_all() {
            let refused = BoxError::denied(
                "exit: only the user of the server may stop it; use the Unix socket",
            );
            return drop(reply.send(Err(refused)));
        }
        if exit {
            self.exited.send_replace(true);
        }
        let mut left = 0;
        for handle in self.boxes.values_mut() {
            if caller.can_see(&handle.entry.owner) {
                handle.mailbox = None;
                left += 1;
            }
        }
        self.shutdowns.begin(caller, left, until, reply);
    }

    /// Ends overdue shutdowns and leaves boxes that still run to their backend.
    fn abandon_overdue(&mut self) {
        for caller in self.shutdowns.overdue(Instant::now()) {
            let overdue: Vec<_> = self.visible_to(&caller).map(Arc::clone).collect();
            tracing::error!(
                count = overdue.len(),
                "boxes did not end in time; abandoned"
            );
            for entry in overdue {
                if let Some(handle) = self.remove(&entry) {
                    handle.task.abort();
                    entry.access.close(shutting_down());
                    self.shutdowns
                        .count_box(&entry.owner, BoxOutcome::Abandoned);
                    for request in handle.waiting {
                        request.refuse(shutting_down());
                    }
                }
            }
        }
        self.shutdowns.answer_finished();
    }

    fn remove(&mut self, entry: &Arc<BoxEntry>) -> Option<ActorHandle> {
        let key = entry.key();
        // A new box may have this key already.
        self.boxes
            .get(&key)
            .filter(|handle| Arc::ptr_eq(&handle.entry, entry))?;
        self.shared.unique_ids.remove(entry);
        self.shared.ended_boxes.set_error(entry);
        if let Some(name) = entry.status().name.clone() {
            self.names
                .remove(&(Arc::clone(&entry.owner), entry.gateway(), name));
        }
        self.boxes.remove(&key)
    }

    /// Removes a box that has ended; a new box serves the calls it did not begin.
    fn ended(&mut self, entry: &Arc<BoxEntry>, left: Vec<Request>) {
        let mut waiting = Vec::new();
        if let Some(handle) = self.remove(entry) {
            waiting = handle.waiting;
            self.shutdowns.count_box(&entry.owner, BoxOutcome::Ended);
        }
        let id = &entry.spec.box_id;
        let mut next = Vec::new();
        for request in left.into_iter().chain(waiting) {
            let caller = request.subject().1;
            let admitted = if *caller.name() != *entry.owner {
                // The call meant the box of another owner. A new box would belong to the caller
                // instead.
                Err(self.shared.ended_boxes.not_found(&entry.owner, id))
            } else if next.is_empty() {
                self.admit(&request, None)
            } else {
                check_may_exist(&request, id)
            };
            match admitted {
                Ok(()) => next.push(request),
                Err(error) => request.refuse(error),
            }
        }
        let first = next.first_mut();
        let owner = Arc::clone(&entry.owner);
        if let Some(entry) = first.and_then(|first| self.new_entry(owner, first)) {
            self.insert(entry, ActorStart::Requests(next));
        }
        self.shutdowns.answer_finished();
    }
}

/// Checks whether a request may go to an existing box.
fn check_may_exist(request: &Request, id: &BoxId) -> Result<(), BoxError> {
    if matches!(request, Request::Create(create) if create.must_be_new) {
        let error = BoxError::conflict(format!("box {id} already exists"));
        return Err(error.with_detail(&Detail::about(Subject::Box)));
    }
    Ok(())
}

fn shutting_down() -> BoxError {
    BoxError::unavailable("the runtime is shutting down")
}
