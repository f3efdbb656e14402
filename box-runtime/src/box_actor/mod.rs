//! Actor of one box: it starts the box, runs its execs one at a time, and ends it.
//!
//! # Reading order
//!
//! - `request`: the requests to the actor.
//! - `queue`: its mailbox, the queue of waiting calls, and its timers. The queue accepts requests
//!   while the box is busy.
//! - `turns`: the turns of execs; `current_exec`: the exec that runs.
//! - `instance`: the running box, if one exists. `starting`: its start. `mounts`: mounts besides the
//!   workspace; `prepare`: commands before the box counts as running; `main_command`: the command
//!   started with the box; `pause`: changes of state; `stop`: stops, starts and rollbacks.
//! - `entry`: the shared description of the box; `files`: its layers; `persist`: its record on disk;
//!   `unstarted`: the record of a box that has not started.
//! - `agent_access`: calls that bypass the queue; `silence`: times without answers of the agent.
//! - `ending`: errors of calls to a box that has ended.
//! - `validate`: checks of an agent's messages.
//! - This file: the state transitions.

pub(crate) mod agent_access;
mod current_exec;
mod ending;
pub(crate) mod entry;
pub(crate) mod files;
mod instance;
mod main_command;
mod mounts;
mod pause;
pub(crate) mod persist;
mod prepare;
mod queue;
mod request;
mod silence;
mod starting;
mod stop;
mod turns;
mod unstarted;
mod validate;

use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;

use box_protocol::actions::{BoxCreateResult, BoxDeleteResult};
use box_protocol::error::Ended;
use box_protocol::{BoxError, ExecStatus, Killed};
use box_rpc::Router;
use futures::FutureExt as _;
use tokio::sync::mpsc;

use self::ending::{broken, ended_as};
use self::instance::NotReady;
use self::queue::{EndReason, JobOutcome, Queue, Wakeup};
use crate::adoption::{Reached, Unreached, unreachable};
use crate::backend::Facts;
use crate::backend_choice::BackendSelector;
use crate::box_actor::agent_access::box_ended;
use crate::box_actor::entry::BoxEntry;
use crate::call_order::CallOrders;
use crate::caller::Visibility as _;
use crate::catalog::Items;
use crate::config::RuntimeConfig;
use crate::ended_boxes::EndedBoxes;
use crate::events::Events;
use crate::exec::FinishReply;
use crate::images::Images;
use crate::layers::Layers;
use crate::pools::Pools;
use crate::records::BoxRecords;
use crate::registry::{RegistryMessage, UniqueIds};
use crate::state_directory::StateDirectory;

pub(crate) use self::instance::{Instance, RunningBox, bounded, carrier_limits};
pub(crate) use self::queue::queue_full;
pub(crate) use self::request::{
    Create, Delete, Exec, Mount, ReplySender, Request, Rollback, Transition,
};
pub(crate) use self::validate::{
    CallConsequence, Failure, agent_violation, agents_error, checked_exit, read_slot,
};

/// State shared by the registry and all actors.
pub(crate) struct Shared {
    pub(crate) config: RuntimeConfig,
    pub(crate) selector: BackendSelector,
    /// Events of the boxes.
    pub(crate) events: Events,
    /// Reasons for the end of former boxes.
    pub(crate) ended_boxes: EndedBoxes,
    pub(crate) unique_ids: UniqueIds,
    /// Router of agent connections; agents may not call the runtime.
    pub(crate) empty_router: Router,
    /// Order of calls that name the same object.
    pub(crate) orders: CallOrders,
    /// Items that outlive boxes.
    pub(crate) items: Items,
    /// Boxes that wait for a caller.
    pub(crate) pools: Pools,
    pub(crate) images: Images,
    pub(crate) layers: Layers,
    /// Records of boxes without a sandbox.
    pub(crate) records: BoxRecords,
    pub(crate) state: Arc<StateDirectory>,
}

/// What an actor begins with.
pub(crate) enum ActorStart {
    /// Waiting requests, the first of which created the box.
    Requests(Vec<Request>),
    /// Adopted box.
    Running(Box<RunningBox>),
    /// Adopted box with an agent that has not answered yet.
    Unreached(Box<Unreached>),
    /// Stopped box.
    Stopped,
    /// Box that could not start.
    Failed,
}

/// Runs an actor from start to end and reports the end to the registry.
pub(crate) async fn run(
    shared: Arc<Shared>,
    entry: Arc<BoxEntry>,
    begin: ActorStart,
    mailbox: mpsc::Receiver<Request>,
    registry: mpsc::WeakSender<RegistryMessage>,
) {
    let mut instance = Instance::new(Arc::clone(&shared), Arc::clone(&entry));
    let first = match begin {
        ActorStart::Requests(first) => first,
        ActorStart::Running(running) => {
            instance.set_running(*running);
            Vec::new()
        }
        ActorStart::Unreached(unreached) => {
            instance.reaches(*unreached);
            Vec::new()
        }
        ActorStart::Stopped => {
            entry.access.close(entry.not_running());
            Vec::new()
        }
        ActorStart::Failed => Vec::new(),
    };
    let mut actor = Actor {
        queue: Queue::new(&shared, &entry, mailbox, first),
        instance,
        entry: Arc::clone(&entry),
    };
    let last = AssertUnwindSafe(actor.run()).catch_unwind().await;
    if last.is_err() {
        let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
        tracing::error!(%owner, %box_id, "the actor of the box panicked");
        // The box must not outlive its actor.
        let _ = AssertUnwindSafe(actor.instance.stop()).catch_unwind().await;
    }
    let left = actor.queue.close();
    drop(actor);
    Box::pin(entry.discard_files(&shared)).await;
    // The error of a failed start is more specific.
    if entry.access.end_reason().is_none() {
        entry.access.close(box_ended());
    }
    if let Some(registry) = registry.upgrade() {
        let _ = registry.send(RegistryMessage::Ended { entry, left }).await;
    }
    // The response comes last, so that a client that receives it finds the box gone.
    if let Ok(last) = last {
        last.send();
    }
}

/// Response to send once the box is gone.
enum FinalReply {
    None,
    /// Exec with a timeout that has ended the box.
    Exec(FinishReply),
    Delete(
        ReplySender<BoxDeleteResult>,
        Result<BoxDeleteResult, BoxError>,
    ),
}

impl FinalReply {
    fn send(self) {
        match self {
            Self::None => {}
            Self::Exec(reply) => drop(reply.send(Ok(Killed::Box))),
            Self::Delete(reply, result) => drop(reply.send(result)),
        }
    }
}

struct Actor {
    queue: Queue,
    instance: Instance,
    entry: Arc<BoxEntry>,
}

/// Whether the actor continues.
enum Next {
    Continue,
    End(FinalReply),
}

impl Actor {
    async fn run(&mut self) -> FinalReply {
        loop {
            let next = match self.queue.next_request() {
                Some(request) if self.instance.is_unreachable(&request) => {
                    request.refuse(unreachable(&self.entry.spec.box_id));
                    Next::Continue
                }
                Some(request) => match (self.entry.current_exec.watch(), request) {
                    (None, request) => self.serve(request).await,
                    (Some(_), Request::Delete(delete)) if delete.force => {
                        Box::pin(self.end_for(EndReason::Deleted(delete))).await
                    }
                    (Some(command_id), request) => {
                        self.queue.put_back(request);
                        self.wait_exec(&command_id).await
                    }
                },
                None => self.wait().await,
            };
            if let Next::End(last) = next {
                return last;
            }
        }
    }

    /// Handles a request while no exec runs.
    async fn serve(&mut self, request: Request) -> Next {
        match request {
            Request::Exec(exec) => self.exec(exec).await,
            Request::Create(create) => self.create(create).await,
            Request::Delete(delete) => self.delete(delete).await,
            Request::Transition(request) => self.transition(request).await,
            Request::Mount(request) => self.mount(request).await,
            Request::Rollback(request) => self.rollback(request).await,
        }
    }

    /// Waits for a request, the end of an exec, a disconnect of the agent, or a timer.
    async fn wait(&mut self) -> Next {
        let wakeup = {
            // Pinned here: an argument is stored a second time in the future of the actor.
            let ended = pin!(self.instance.ended());
            self.queue.wait(ended).await
        };
        // These wait for a running exec: it reports a disconnect itself and uses an idle box.
        if matches!(
            wakeup,
            Wakeup::ExecEnded
                | Wakeup::Broken(_)
                | Wakeup::End(EndReason::Idle | EndReason::MainEnded)
        ) && let Some(command_id) = self.entry.current_exec.watch()
        {
            let next = Box::pin(self.wait_exec(&command_id)).await;
            let main_ended = matches!(wakeup, Wakeup::End(EndReason::MainEnded));
            if !main_ended || matches!(next, Next::End(_)) {
                return next;
            }
        }
        match wakeup {
            Wakeup::Request | Wakeup::ExecEnded => Next::Continue,
            Wakeup::Broken(reason) => {
                let why = self.failure_reason(reason);
                Box::pin(self.fail(why)).await;
                Next::Continue
            }
            Wakeup::Reached(reached) => {
                match reached {
                    Reached::Running(running) => self.instance.set_running(*running),
                    Reached::Stopped => self.instance.set_unreached_stopped(),
                }
                self.record_event("adopted", "it was reached");
                self.queue.mark_used();
                self.queue.reset_timers();
                Next::Continue
            }
            Wakeup::End(EndReason::Idle) => Box::pin(self.idle()).await,
            Wakeup::End(EndReason::Expired) => Box::pin(self.expired()).await,
            Wakeup::End(reason) => Box::pin(self.end_for(reason)).await,
        }
    }

    /// Handles the idle timeout.
    ///
    /// Running background commands count as use, even if no client is attached.
    async fn idle(&mut self) -> Next {
        match self.queue.run_job(self.instance.may_be_busy()).await {
            JobOutcome::Done(false) => {}
            JobOutcome::Done(true) => {
                self.queue.mark_used();
                return Next::Continue;
            }
            JobOutcome::BoxEnds(reason) => return Box::pin(self.end_for(reason)).await,
        }
        // A call may have arrived in the meantime; from here on none can.
        if !self.queue.is_idle() {
            return Next::Continue;
        }
        if let Some(target) = self.idle_target() {
            return self.rest_idle(target).await;
        }
        let reason = EndReason::Idle.error(&self.entry.spec.box_id);
        if self.entry.access.close_if_unused(reason) {
            return Box::pin(self.end_for(EndReason::Idle)).await;
        }
        Next::Continue
    }

    /// Prepares the box for a call, unless the box ends first.
    async fn ready(&mut self, request: &Request) -> Result<bool, Unready> {
        let Some(spec) = request.spec() else {
            return Ok(false);
        };
        let (_, caller) = request.subject();
        let outcome = {
            let job = pin!(self.instance.ready(spec, caller.can_see_all()));
            self.queue.run_job(job).await
        };
        match outcome {
            JobOutcome::Done(Ok(started)) => {
                self.queue.mark_used();
                if started {
                    self.queue.reset_timers();
                }
                Ok(started)
            }
            JobOutcome::Done(Err(NotReady::Refused(error))) => Err(Unready::Refused(error)),
            JobOutcome::Done(Err(NotReady::Failed(error))) => Err(Unready::Failed(error)),
            JobOutcome::BoxEnds(reason) => Err(Unready::BoxEnds(reason)),
        }
    }

    /// Handles a call that cannot use its box.
    async fn unready(&mut self, request: Request, why: Unready) -> Next {
        match why {
            Unready::Refused(error) => {
                request.refuse(error);
                Next::Continue
            }
            Unready::Failed(error) => {
                self.record_event("failed", error.message());
                if matches!(&request, Request::Create(create) if create.keep_failed) {
                    self.keep_failed(request, error).await;
                    return Next::Continue;
                }
                // All calls that waited for this start receive its error.
                self.entry.access.close(error.clone());
                self.queue.refuse_waiting(&error);
                request.refuse(error);
                let _ = self.instance.stop().await;
                Next::End(FinalReply::None)
            }
            Unready::BoxEnds(reason) => {
                let id = &self.entry.spec.box_id;
                match reason {
                    // The next box would expire as well.
                    EndReason::Expired | EndReason::Idle => request.refuse(BoxError::conflict(
                        format!("box {id} expired before it was ready"),
                    )),
                    EndReason::Deleted(_) => request.refuse(reason.error(id)),
                    // The call has not begun, so it can run in the next box.
                    EndReason::MainEnded | EndReason::Shutdown => self.queue.put_back(request),
                }
                Box::pin(self.end_for(reason)).await
            }
        }
    }

    async fn create(&mut self, create: Box<Create>) -> Next {
        let request = Request::Create(create);
        let started = match self.ready(&request).await {
            Ok(started) => started,
            Err(why) => return Box::pin(self.unready(request, why)).await,
        };
        if let Request::Create(create) = request {
            let _ = create.reply.send(Ok(BoxCreateResult {
                info: self.entry.info(&create.caller),
                existed: !started,
                earlier: started
                    .then(|| self.shared().ended_boxes.earlier(&self.entry))
                    .flatten(),
                adjusted: Vec::new(),
            }));
        }
        Next::Continue
    }

    async fn mount(&mut self, request: Box<Mount>) -> Next {
        let job = Box::pin(self.instance.add_mounts(&request.mounts));
        match self.queue.run_job(job).await {
            JobOutcome::Done(added) => drop(request.reply.send(added)),
            JobOutcome::BoxEnds(reason) => {
                return Box::pin(self.unready(Request::Mount(request), Unready::BoxEnds(reason)))
                    .await;
            }
        }
        Next::Continue
    }

    /// Replaces the files of the box by those of a checkpoint, after the execs queued before.
    async fn rollback(&mut self, request: Box<Rollback>) -> Next {
        let job = Box::pin(self.instance.rollback(request.name.as_ref()));
        match self.queue.run_job(job).await {
            JobOutcome::Done(Ok(name)) => {
                self.record_event("rolled_back", name.as_str());
                self.queue.mark_used();
                self.queue.reset_timers();
                let _ = request.reply.send(Ok(self.entry.info(&request.caller)));
                Next::Continue
            }
            JobOutcome::Done(Err(error)) => {
                self.queue.reset_timers();
                let _ = request.reply.send(Err(error));
                Next::Continue
            }
            JobOutcome::BoxEnds(reason) => {
                let request = Request::Rollback(request);
                Box::pin(self.unready(request, Unready::BoxEnds(reason))).await
            }
        }
    }

    async fn delete(&mut self, delete: Box<Delete>) -> Next {
        self.entry.set_exec_status(ExecStatus::Closing);
        let box_id = &self.entry.spec.box_id;
        self.entry.access.close(ended_as(Ended::Deleted, box_id));
        let stopped = self.instance.stop().await;
        self.record_event("deleted", "a caller deleted it");
        self.shared().ended_boxes.record_deletion(&self.entry);
        let Delete { reply, box_id, .. } = *delete;
        let result = stopped.map(|()| BoxDeleteResult { deleted: box_id });
        Next::End(FinalReply::Delete(reply, result))
    }

    async fn end(&mut self, last: FinalReply) -> Next {
        self.entry.set_exec_status(ExecStatus::Closing);
        let box_id = &self.entry.spec.box_id;
        self.entry.access.close(ended_as(Ended::Deleted, box_id));
        let _ = self.instance.stop().await;
        Next::End(last)
    }

    async fn end_for(&mut self, reason: EndReason) -> Next {
        self.entry.current_exec.reset();
        // The access shuts before the agent disconnects, so that calls in progress get the reason.
        self.entry
            .access
            .close(reason.error(&self.entry.spec.box_id));
        match reason {
            EndReason::Deleted(delete) => {
                // These calls came before the delete and must not start another box.
                let error = ended_as(Ended::Deleted, &self.entry.spec.box_id);
                self.queue.refuse_queued(&error);
                self.delete(delete).await
            }
            EndReason::Expired => self.end_as("expired", "it reached its expires_at").await,
            EndReason::Idle => self.end_as("expired", "idle for too long").await,
            EndReason::MainEnded => self.end_as("deleted", "its main command has ended").await,
            EndReason::Shutdown => self.end_as("deleted", "the runtime shut down").await,
        }
    }

    async fn end_as(&mut self, kind: &str, why: &str) -> Next {
        self.record_end(kind, why);
        self.end(FinalReply::None).await
    }

    /// Returns the backend's reason for a broken box, or this one.
    fn failure_reason(&self, reason: String) -> BoxError {
        self.instance.end_reason().unwrap_or_else(|| broken(reason))
    }

    /// Publishes an event of the box.
    fn record_event(&self, kind: &str, message: &str) {
        self.shared().events.record(&self.entry, kind, message);
    }

    /// Publishes an end that no client requested, and records its reason.
    fn record_end(&self, kind: &str, why: &str) {
        self.record_event(kind, why);
        self.shared().ended_boxes.record(&self.entry, why);
    }

    fn shared(&self) -> &Shared {
        &self.instance.shared
    }

    /// Marks the box as failed and stops it.
    ///
    /// The entry stays, so that clients can read the reason. The next call starts a new box.
    async fn fail(&mut self, why: BoxError) {
        let reason = why.message().to_owned();
        let (owner, box_id) = (&self.entry.owner, &self.entry.spec.box_id);
        tracing::warn!(%owner, %box_id, %reason, "box failed");
        self.record_end("failed", &reason);
        self.entry.set_failed(why, reason);
        let _ = self.instance.stop().await;
        self.entry.set_exec_status(ExecStatus::Idle);
        // From here on, the idle timer applies to the failed entry.
        self.queue.mark_used();
        self.queue.reset_timers();
    }
}

/// Reason why a call cannot use its box.
enum Unready {
    /// The box refuses only this call.
    Refused(BoxError),
    /// The box does not exist.
    Failed(BoxError),
    /// The box ends.
    BoxEnds(EndReason),
}

#[cfg(test)]
mod tests {
    use box_protocol::SpecDraft;

    use super::*;
    use crate::RuntimeConfig;

    #[test]
    fn a_box_actor_is_small() {
        let config = RuntimeConfig::new(Vec::new());
        let state = Arc::new(StateDirectory::new(None));
        let shared = Arc::new(Shared {
            selector: BackendSelector::new(&config),
            events: Events::new(),
            ended_boxes: EndedBoxes::new(None),
            unique_ids: UniqueIds::default(),
            empty_router: Router::empty(),
            orders: CallOrders::default(),
            items: Items::default(),
            pools: Pools::default(),
            images: Images::new(&config),
            layers: Layers::new(Arc::clone(&state)),
            records: BoxRecords::default(),
            state,
            config,
        });
        let spec = SpecDraft::new("s").build().unwrap();
        let entry = Arc::new(BoxEntry::new("me".into(), &spec));
        let (_sender, mailbox) = mpsc::channel(1);
        let (registry, _messages) = mpsc::channel(1);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let _guard = runtime.enter();
        let begin = ActorStart::Requests(Vec::new());
        let task = run(
            shared,
            Arc::clone(&entry),
            begin,
            mailbox,
            registry.downgrade(),
        );
        let size = size_of_val(&task) + size_of_val(&*entry);
        assert!(
            size < 3456,
            "{} and {} bytes",
            size_of_val(&task),
            size_of_val(&*entry)
        );
    }
}
