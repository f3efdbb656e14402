//! The handle of the runtime, with one method per action.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{
    BackendInfo, BoxCreateParams, BoxCreateResult, BoxDeleteParams, BoxDeleteResult, BoxListParams,
    BoxListResult, BoxTransitionParams, BoxTransitionResult, BoxUpdateParams, Capacity, IfExists,
    SystemConfigureParams, SystemConfigureResult, SystemShutdownParams, SystemShutdownResult,
    SystemStatusResult,
};
use box_protocol::error::Detail;
use box_protocol::{BoxError, BoxId, BoxInfo, BoxState, GatewayName, Name};
use box_rpc::Router;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::backend_choice::BackendSelector;
use crate::box_actor::entry::BoxEntry;
use crate::box_actor::{Create, Delete, Mount, Request, Shared, Transition};
use crate::call_order::CallOrders;
use crate::caller::Visibility as _;
use crate::catalog::Items;
use crate::config::RuntimeConfig;
use crate::ended_boxes::EndedBoxes;
use crate::events::Events;
use crate::exec::OUTPUT_BYTES;
use crate::images::Images;
use crate::layers::Layers;
use crate::pools::{Mode, Pools};
use crate::records::BoxRecords;
use crate::registry::{BoxCount, Registry, RegistryMessage, UniqueIds, UpdateStage};
use crate::state_directory::StateDirectory;
use box_rpc::Caller;

/// Capacity of the registry's mailbox. The registry never blocks on a box.
const MAILBOX_MESSAGES: usize = 1024;

/// Approximate size limit of one `box.list` answer, below the message limit.
const LIST_BYTES: usize = 8 << 20;

/// Upper bound of the shutdown time that a caller may ask for.
const LONGEST_SHUTDOWN: Duration = Duration::from_hours(24);

/// Manages boxes and runs commands in them.
///
/// A clone is cheap and refers to the same runtime. The runtime ends every box when the last
/// handle, and the last router made from a handle, is dropped.
///
/// Dropping the future of a call cancels the call. The runtime then kills the command that the call
/// started, unless its `on_disconnect` is `keep`. A box that the call began to create is still
/// created.
#[derive(Clone)]
pub struct BoxRuntime {
    registry: mpsc::Sender<RegistryMessage>,
    shared: Arc<Shared>,
    exited: watch::Receiver<bool>,
    /// Maximum number of boxes that each caller of this handle may have.
    max_boxes: Option<usize>,
}

impl fmt::Debug for BoxRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BoxRuntime")
            .field(&self.shared.config)
            .finish()
    }
}

impl BoxRuntime {
    /// Starts a runtime without boxes, on the current tokio runtime.
    pub fn start(config: RuntimeConfig) -> Self {
        let (registry, mailbox) = mpsc::channel(MAILBOX_MESSAGES);
        let (exit, exited) = watch::channel(false);
        let state = Arc::new(StateDirectory::new(config.state_dir.clone()));
        let shared = Arc::new(Shared {
            selector: BackendSelector::new(&config),
            events: Events::new(),
            ended_boxes: EndedBoxes::new(config.ends_file.clone()),
            unique_ids: UniqueIds::default(),
            empty_router: Router::empty(),
            orders: CallOrders::default(),
            items: Items::new(config.catalog.clone()),
            pools: Pools::default(),
            images: Images::new(&config),
            layers: Layers::new(Arc::clone(&state)),
            records: BoxRecords::new(state.stopped()),
            state,
            config,
        });
        let actor = Registry::new(Arc::clone(&shared), mailbox, registry.downgrade(), exit);
        tokio::spawn(actor.run());
        Self {
            registry,
            shared,
            exited,
            max_boxes: None,
        }
    }

    /// Returns a handle to the same runtime with a box limit for each caller.
    ///
    /// The limit applies in addition to [`RuntimeConfig::max_boxes_per_caller`].
    pub fn with_max_boxes(&self, boxes: usize) -> Self {
        Self {
            max_boxes: Some(boxes),
            ..self.clone()
        }
    }

    /// Creates a box, or returns the existing box that matches the spec.
    pub async fn create(
        &self,
        caller: &Caller,
        mut params: BoxCreateParams,
    ) -> Result<BoxCreateResult, BoxError> {
        if !params.template_applied {
            self.apply_template(caller, &mut params.spec).await?;
        }
        let spec = params.spec.build()?;
        let create = |reply| Create {
            caller: caller.clone(),
            max_boxes: self.max_boxes,
            spec,
            must_be_new: params.if_exists == IfExists::Fail,
            keep_failed: params.keep_failed,
            origin: None,
            reply,
        };
        self.request(|reply| Request::Create(Box::new(create(reply))))
            .await
    }

    /// Returns the state and settings of a box.
    pub async fn get(&self, caller: &Caller, id: &BoxId) -> Result<BoxInfo, BoxError> {
        let entry = self.entry(caller, id).await?;
        // After an error, the info names it.
        let _ = entry.persist_unstarted().await;
        Ok(entry.info(caller))
    }

    /// Returns the state and settings of the caller's box with this name.
    pub async fn get_named(
        &self,
        caller: &Caller,
        gateway: GatewayName,
        name: Name,
    ) -> Result<BoxInfo, BoxError> {
        let key = (caller.name(), gateway, name);
        let owner = caller.clone();
        let message = |reply| RegistryMessage::FindNamed {
            key,
            caller: owner,
            reply,
        };
        let entry = self.query(message).await??;
        let _ = entry.persist_unstarted().await;
        Ok(entry.info(caller))
    }

    /// Returns the entry of a box that is visible to the caller.
    pub(crate) async fn entry(
        &self,
        caller: &Caller,
        id: &BoxId,
    ) -> Result<Arc<BoxEntry>, BoxError> {
        let (box_id, caller) = (id.clone(), caller.clone());
        let message = |reply| RegistryMessage::Find {
            box_id,
            caller,
            reply,
        };
        self.query(message).await?
    }

    /// Lists the boxes of the caller, sorted by id.
    pub async fn list(
        &self,
        caller: &Caller,
        params: &BoxListParams,
    ) -> Result<BoxListResult, BoxError> {
        let owner = caller.clone();
        let message = |reply| RegistryMessage::All {
            caller: owner,
            reply,
        };
        let mut entries = self.query(message).await?;
        entries.retain(|entry| is_listed(entry, params));
        let total = entries.len() as u64;
        let mut entries: Vec<_> = entries
            .into_iter()
            .map(|entry| (entry.visible_id(caller), entry))
            .collect();
        entries.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        if let Some(after) = &params.after {
            entries.retain(|(id, _)| id > after);
        }
        let limit = params.limit.map_or(usize::MAX, |limit| limit as usize);
        let (mut items, mut room) = (Vec::new(), LIST_BYTES);
        for (_, entry) in entries.iter().take(limit) {
            // After an error, the info names it.
            let _ = entry.persist_unstarted().await;
            let info = entry.list_info(caller);
            let bytes = info.estimated_bytes();
            if bytes > room && !items.is_empty() {
                break;
            }
            room = room.saturating_sub(bytes);
            items.push(info);
        }
        let next = items.last().filter(|_| items.len() < entries.len());
        Ok(BoxListResult {
            next: next.map(|info| info.box_id.clone()),
            items,
            total,
        })
    }

    /// Returns the states of all boxes, for figures that name no box.
    pub async fn states(&self) -> Vec<BoxState> {
        let entries = self.all_entries().await;
        entries.iter().map(|entry| entry.status().state).collect()
    }

    /// Changes the mutable settings of a box.
    ///
    /// These are the name, labels, note, lifetime, defaults and network policy. The runtime applies
    /// either all changes or none. If boxes outlive the runtime, it answers after the change is on
    /// disk.
    ///
    /// The runtime adds mounts first, after the execs that arrived earlier. The mounts stay even if
    /// another box takes the requested name in the meantime.
    pub async fn update(
        &self,
        caller: &Caller,
        mut params: BoxUpdateParams,
    ) -> Result<BoxInfo, BoxError> {
        if let Some(mounts) = params.extra_mounts.take() {
            self.change(caller, params.clone(), UpdateStage::Validate)
                .await?;
            let mount = |reply| Mount {
                caller: caller.clone(),
                box_id: params.box_id.clone(),
                mounts,
                reply,
            };
            self.request(|reply| Request::Mount(Box::new(mount(reply))))
                .await?;
        }
        let entry = self.change(caller, params, UpdateStage::Apply).await?;
        entry.persist_unstarted().await?;
        entry.wait_persisted().await?;
        Ok(entry.info(caller))
    }

    async fn change(
        &self,
        caller: &Caller,
        params: BoxUpdateParams,
        stage: UpdateStage,
    ) -> Result<Arc<BoxEntry>, BoxError> {
        let (caller, params) = (caller.clone(), Box::new(params));
        let message = |reply| RegistryMessage::Update {
            caller,
            params,
            stage,
            reply,
        };
        self.query(message).await?
    }

    /// Pauses or resumes a box, after the execs that arrived earlier.
    ///
    /// All processes of a paused box are frozen, including its agent. The agent answers pending
    /// calls after the box is resumed. A paused box does not expire for being idle, but its other
    /// time limits still apply.
    pub async fn transition(
        &self,
        caller: &Caller,
        params: BoxTransitionParams,
    ) -> Result<BoxTransitionResult, BoxError> {
        let transition = |reply| Transition {
            caller: caller.clone(),
            box_id: params.box_id,
            to: params.to,
            reply,
        };
        self.request(|reply| Request::Transition(Box::new(transition(reply))))
            .await
    }

    /// Deletes a box and returns after the box has ended.
    pub async fn delete(
        &self,
        caller: &Caller,
        params: BoxDeleteParams,
    ) -> Result<BoxDeleteResult, BoxError> {
        let delete = |reply| Delete {
            caller: caller.clone(),
            box_id: params.box_id,
            force: params.force,
            reply,
        };
        self.request(|reply| Request::Delete(Box::new(delete(reply))))
            .await
    }

    /// Returns the selected backend and its missing features.
    pub async fn health(&self) -> BackendInfo {
        self.shared.selector.choose().await.info.clone()
    }

    /// Returns the health, the caller's box count, the limits and the free capacity.
    pub async fn status(&self, caller: &Caller) -> Result<SystemStatusResult, BoxError> {
        let caller = caller.clone();
        let BoxCount { visible, total } = self
            .query(|reply| RegistryMessage::Count { caller, reply })
            .await?;
        let config = &self.shared.config;
        let limits = [
            ("max_boxes", config.max_boxes),
            ("queued_calls", config.queued_calls),
            ("output_bytes", OUTPUT_BYTES),
        ];
        Ok(SystemStatusResult {
            backend: self.health().await,
            active_boxes: visible as u64,
            idle_ttl_sec: config.idle_ttl.as_secs(),
            limits: limits
                .map(|(name, limit)| (name.to_owned(), limit as u64))
                .into(),
            capacity: Capacity {
                limit: config.max_boxes as u64,
                used: total as u64,
                remaining: config.max_boxes.saturating_sub(total) as u64,
            },
            ..SystemStatusResult::default()
        })
    }

    /// Merges configuration members into those of the caller.
    ///
    /// The runtime stores the configuration but does not read it yet.
    pub async fn configure(
        &self,
        caller: &Caller,
        params: SystemConfigureParams,
    ) -> Result<SystemConfigureResult, BoxError> {
        let (caller, members) = (caller.clone(), params.0);
        let message = |reply| RegistryMessage::Configure {
            caller,
            members,
            reply,
        };
        self.query(message).await??;
        Ok(SystemConfigureResult { initialized: true })
    }

    /// Ends every box that is visible to the caller, within a time limit.
    ///
    /// The runtime refuses new boxes during the shutdown. It accepts calls again afterwards, unless
    /// the caller asked it to exit.
    pub async fn shutdown(
        &self,
        caller: &Caller,
        params: SystemShutdownParams,
    ) -> Result<SystemShutdownResult, BoxError> {
        let within = params.within_ms.map(Duration::from_millis);
        let within = within.unwrap_or(self.shared.config.shutdown_within);
        let until = Instant::now() + within.min(LONGEST_SHUTDOWN);
        let pools = &self.shared.pools;
        if caller.can_see_all() {
            let closes = params.exit;
            pools.set_mode(if closes { Mode::Closed } else { Mode::Empty });
        }
        let caller_of_boxes = caller.clone();
        let message = |reply| RegistryMessage::Shutdown {
            caller: caller_of_boxes,
            exit: params.exit,
            until,
            reply,
        };
        let ended = self.query(message).await?;
        if caller.can_see_all() {
            let _ = tokio::time::timeout_at(until, pools.wait_empty()).await;
            pools.set_mode(Mode::Filled);
        }
        ended
    }

    /// Ends the boxes that wait in pools and starts no others, within a time limit.
    ///
    /// A process that exits calls this, because a box of a pool is of no use to another process.
    pub async fn close_pools(&self, within: Duration) {
        let pools = &self.shared.pools;
        pools.set_mode(Mode::Closed);
        let _ = tokio::time::timeout(within, pools.wait_empty()).await;
    }

    /// Waits until a caller has asked the server to exit.
    pub async fn exit_requested(&self) {
        let mut exited = self.exited.clone();
        if exited.wait_for(|exited| *exited).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    pub(crate) fn max_boxes(&self) -> Option<usize> {
        self.max_boxes
    }

    pub(crate) fn registry(&self) -> mpsc::Sender<RegistryMessage> {
        self.registry.clone()
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    pub(crate) fn shared_arc(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Sends a request to the actor of its box, through the registry.
    pub(crate) async fn request<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, BoxError>>) -> Request,
    ) -> Result<T, BoxError> {
        self.query(|reply| RegistryMessage::Request(request(reply)))
            .await?
    }

    /// Sends a message to the registry and waits for the answer.
    pub(crate) async fn query<T>(
        &self,
        message: impl FnOnce(oneshot::Sender<T>) -> RegistryMessage,
    ) -> Result<T, BoxError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.registry.send(message(reply)).await;
        sent.map_err(|_| unanswered())?;
        answer.await.map_err(|_| unanswered())
    }
}

/// The error for a box task that was aborted or panicked before it answered.
pub(crate) fn unanswered() -> BoxError {
    BoxError::unavailable("the box ended before it answered the call")
}

pub(crate) fn unsupported(field: &str, why: &str) -> BoxError {
    BoxError::unsupported(format!("{field}: {why}")).with_detail(&Detail::of_field(field))
}

fn is_listed(entry: &BoxEntry, params: &BoxListParams) -> bool {
    if params
        .gateway
        .as_ref()
        .is_some_and(|gateway| entry.gateway() != *gateway)
    {
        return false;
    }
    let status = entry.status();
    params
        .name
        .as_ref()
        .is_none_or(|name| status.name.as_ref() == Some(name))
        && (params.state.is_empty() || params.state.contains(&status.state))
        && params
            .labels
            .iter()
            .all(|(label, value)| status.labels.get(label) == Some(value))
}
