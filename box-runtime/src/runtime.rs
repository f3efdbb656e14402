//! The handle: one method an action.

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
use box_protocol::{BoxError, BoxId, BoxInfo};
use box_rpc::Router;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::box_actor::entry::BoxEntry;
use crate::box_actor::{Create, Delete, Mount, Request, Shared, Transition};
use crate::config::RuntimeConfig;
use crate::ends::Ends;
use crate::events::Events;
use crate::exec::OUTPUT_BYTES;
use crate::order::Orders;
use crate::registry::{Ask, Count, Stage, Table};
use crate::select::Selector;
use box_rpc::Caller;

/// Calls that may wait for the table, which waits for nobody.
const TABLE_MAILBOX: usize = 1024;

/// About the most bytes of boxes that one answer lists; a message holds more.
const LIST_BYTES: usize = 8 << 20;

/// The longest a shutdown may be asked to take.
const LONGEST_SHUTDOWN: Duration = Duration::from_hours(24);

/// Keeps boxes and runs commands in them. Cheap to clone; dropping the last handle, and the last
/// router made from one, ends every box.
///
/// Dropping the future of a call withdraws the call. A command it began is killed, unless it was
/// asked to go on; a box it began to make is made.
#[derive(Clone)]
pub struct BoxRuntime {
    table: mpsc::Sender<Ask>,
    shared: Arc<Shared>,
    exited: watch::Receiver<bool>,
    /// The most boxes that a caller of this handle may have.
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
        let (table, mailbox) = mpsc::channel(TABLE_MAILBOX);
        let (exit, exited) = watch::channel(false);
        let shared = Arc::new(Shared {
            selector: Selector::new(&config),
            events: Events::new(),
            ends: Ends::new(config.ends_file.clone()),
            nothing: Router::empty(),
            orders: Orders::default(),
            config,
        });
        let actor = Table::new(Arc::clone(&shared), mailbox, table.downgrade(), exit);
        tokio::spawn(actor.run());
        Self {
            table,
            shared,
            exited,
            max_boxes: None,
        }
    }

    /// A handle to the same runtime whose callers may have at most so many boxes each, beside
    /// [`RuntimeConfig::max_boxes_per_caller`].
    pub fn with_max_boxes(&self, boxes: usize) -> Self {
        Self {
            max_boxes: Some(boxes),
            ..self.clone()
        }
    }

    /// Makes a box, or finds the one that fits.
    pub async fn create(
        &self,
        caller: &Caller,
        params: BoxCreateParams,
    ) -> Result<BoxCreateResult, BoxError> {
        let spec = params.spec.build()?;
        let (reply, answer) = oneshot::channel();
        let create = Create {
            caller: caller.clone(),
            max_boxes: self.max_boxes,
            spec,
            must_be_new: params.if_exists == IfExists::Fail,
            reply,
        };
        self.send(Ask::Request(Request::Create(Box::new(create))))
            .await?;
        answer.await.map_err(|_| unanswered())?
    }

    /// What is known of a box.
    pub async fn get(&self, caller: &Caller, id: &BoxId) -> Result<BoxInfo, BoxError> {
        Ok(self.entry(caller, id).await?.info(caller))
    }

    /// The entry of a box that the caller sees.
    pub(crate) async fn entry(
        &self,
        caller: &Caller,
        id: &BoxId,
    ) -> Result<Arc<BoxEntry>, BoxError> {
        let (box_id, caller) = (id.clone(), caller.clone());
        let ask = |reply| Ask::Find {
            box_id,
            caller,
            reply,
        };
        self.ask(ask).await?
    }

    /// The caller's boxes, by id.
    pub async fn list(
        &self,
        caller: &Caller,
        params: &BoxListParams,
    ) -> Result<BoxListResult, BoxError> {
        let asker = caller.clone();
        let ask = |reply| Ask::All {
            caller: asker,
            reply,
        };
        let mut cards = self.ask(ask).await?;
        cards.retain(|entry| is_listed(entry, params));
        let total = cards.len() as u64;
        let mut cards: Vec<_> = cards
            .into_iter()
            .map(|entry| (entry.seen_as(caller), entry))
            .collect();
        cards.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        if let Some(after) = &params.after {
            cards.retain(|(id, _)| id > after);
        }
        let limit = params.limit.map_or(usize::MAX, |limit| limit as usize);
        let (mut items, mut room) = (Vec::new(), LIST_BYTES);
        for (_, entry) in cards.iter().take(limit) {
            let info = entry.listed(caller);
            let bytes = info.about_bytes();
            if bytes > room && !items.is_empty() {
                break;
            }
            room = room.saturating_sub(bytes);
            items.push(info);
        }
        let next = items.last().filter(|_| items.len() < cards.len());
        Ok(BoxListResult {
            next: next.map(|info| info.box_id.clone()),
            items,
            total,
        })
    }

    /// Changes what may change: name, labels, note, lifetime, defaults, network policy. All of it or nothing; answered once it is
    /// on disk, where boxes outlive the runtime. Mounts are added before, after the execs that were asked for earlier, and stay
    /// also if somebody takes the name meanwhile.
    pub async fn update(
        &self,
        caller: &Caller,
        mut params: BoxUpdateParams,
    ) -> Result<BoxInfo, BoxError> {
        if let Some(mounts) = params.extra_mounts.take() {
            self.change(caller, params.clone(), Stage::Check).await?;
            let (reply, answer) = oneshot::channel();
            let asked = Mount {
                caller: caller.clone(),
                box_id: params.box_id.clone(),
                mounts,
                reply,
            };
            self.send(Ask::Request(Request::Mount(Box::new(asked))))
                .await?;
            answer.await.map_err(|_| unanswered())??;
        }
        let entry = self.change(caller, params, Stage::Change).await?;
        entry.kept().await?;
        Ok(entry.info(caller))
    }

    async fn change(
        &self,
        caller: &Caller,
        params: BoxUpdateParams,
        stage: Stage,
    ) -> Result<Arc<BoxEntry>, BoxError> {
        let (caller, params) = (caller.clone(), Box::new(params));
        let ask = |reply| Ask::Update {
            caller,
            params,
            stage,
            reply,
        };
        self.ask(ask).await?
    }

    /// Pauses or resumes a box, after the execs that were asked for before. A paused box stands still, its agent included: what
    /// was asked of its inside is answered once it goes on. It has no end for want of use, and keeps its other ends.
    pub async fn transition(
        &self,
        caller: &Caller,
        params: BoxTransitionParams,
    ) -> Result<BoxTransitionResult, BoxError> {
        let (reply, answer) = oneshot::channel();
        let asked = Transition {
            caller: caller.clone(),
            box_id: params.box_id,
            to: params.to,
            reply,
        };
        self.send(Ask::Request(Request::Transition(Box::new(asked))))
            .await?;
        answer.await.map_err(|_| unanswered())?
    }

    /// Deletes a box and returns once it is gone.
    pub async fn delete(
        &self,
        caller: &Caller,
        params: BoxDeleteParams,
    ) -> Result<BoxDeleteResult, BoxError> {
        let (reply, answer) = oneshot::channel();
        let delete = Delete {
            caller: caller.clone(),
            box_id: params.box_id,
            force: params.force,
            reply,
        };
        self.send(Ask::Request(Request::Delete(Box::new(delete))))
            .await?;
        answer.await.map_err(|_| unanswered())?
    }

    /// Which backend there is and what it lacks.
    pub async fn health(&self) -> BackendInfo {
        self.shared.selector.choose().await.info.clone()
    }

    /// Health, the caller's boxes, limits and room.
    pub async fn status(&self, caller: &Caller) -> Result<SystemStatusResult, BoxError> {
        let caller = caller.clone();
        let Count { seen, all } = self.ask(|reply| Ask::Count { caller, reply }).await?;
        let config = &self.shared.config;
        let limits = [
            ("max_boxes", config.max_boxes),
            ("queued_calls", config.queued_calls),
            ("output_bytes", OUTPUT_BYTES),
        ];
        Ok(SystemStatusResult {
            backend: self.health().await,
            active_boxes: seen as u64,
            idle_ttl_sec: config.idle_ttl.as_secs(),
            limits: limits
                .map(|(name, limit)| (name.to_owned(), limit as u64))
                .into(),
            capacity: Capacity {
                limit: config.max_boxes as u64,
                used: all as u64,
                remaining: config.max_boxes.saturating_sub(all) as u64,
            },
            ..SystemStatusResult::default()
        })
    }

    /// Merges the caller's configuration, member by member. It is kept, and nothing reads it yet.
    pub async fn configure(
        &self,
        caller: &Caller,
        params: SystemConfigureParams,
    ) -> Result<SystemConfigureResult, BoxError> {
        let (caller, members) = (caller.clone(), params.0);
        let ask = |reply| Ask::Configure {
            caller,
            members,
            reply,
        };
        self.ask(ask).await??;
        Ok(SystemConfigureResult { initialized: true })
    }

    /// Ends every box the caller sees, within a bound, refusing new ones meanwhile. Afterwards the
    /// runtime serves again, or never more if it was asked to exit.
    pub async fn shutdown(
        &self,
        caller: &Caller,
        params: SystemShutdownParams,
    ) -> Result<SystemShutdownResult, BoxError> {
        let within = params.within_ms.map(Duration::from_millis);
        let within = within.unwrap_or(self.shared.config.shutdown_within);
        let caller = caller.clone();
        let ask = |reply| Ask::Shutdown {
            caller,
            exit: params.exit,
            until: Instant::now() + within.min(LONGEST_SHUTDOWN),
            reply,
        };
        self.ask(ask).await?
    }

    /// Returns once somebody has asked the server to exit.
    pub async fn exit_asked(&self) {
        let mut exited = self.exited.clone();
        if exited.wait_for(|exited| *exited).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    pub(crate) fn max_boxes(&self) -> Option<usize> {
        self.max_boxes
    }

    pub(crate) fn table(&self) -> mpsc::Sender<Ask> {
        self.table.clone()
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    pub(crate) fn shared_arc(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    pub(crate) async fn send(&self, ask: Ask) -> Result<(), BoxError> {
        self.table.send(ask).await.map_err(|_| unanswered())
    }

    async fn ask<T>(&self, ask: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Result<T, BoxError> {
        let (reply, answer) = oneshot::channel();
        self.send(ask(reply)).await?;
        answer.await.map_err(|_| unanswered())
    }
}

/// A session that was given up, or failed in a way nobody foresaw.
pub(crate) fn unanswered() -> BoxError {
    BoxError::unavailable("the box ended without an answer")
}

pub(crate) fn unsupported(field: &str, why: &str) -> BoxError {
    BoxError::unsupported(format!("{field}: {why}")).with_detail(&Detail::of_field(field))
}

fn is_listed(entry: &BoxEntry, params: &BoxListParams) -> bool {
    if params
        .world
        .as_ref()
        .is_some_and(|world| entry.world() != *world)
    {
        return false;
    }
    let live = entry.live();
    params
        .name
        .as_ref()
        .is_none_or(|name| live.name.as_ref() == Some(name))
        && (params.state.is_empty() || params.state.contains(&live.state))
        && params
            .labels
            .iter()
            .all(|(label, value)| live.labels.get(label) == Some(value))
}
