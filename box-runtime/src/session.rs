//! One box: the actor that starts it, grants its execs their turns one at a time, and ends it.
//!
//! # Reading order
//!
//! - `work`: what it is asked.
//! - `front`: its mailbox, the lane calls wait in, and its clock. The front goes on listening while
//!   the box is busy.
//! - `body`: the box itself, if there is one now: start, liveness, stop; `mounts` beside its workspace; `entry`, the command
//!   that is started with it; `pause` for when it stands still.
//! - `ending`: what calls get whose box has ended.
//! - `doubt`: what is checked before an agent is believed.
//! - this file: what follows from what.

mod body;
mod doubt;
mod ending;
mod entry;
mod front;
mod mounts;
mod pause;
mod work;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use box_protocol::actions::{BoxCreateResult, BoxDeleteResult, OnTimeout};
use box_protocol::error::Ended;
use box_protocol::{BoxError, CommandId, Killed, LaneStatus};
use box_rpc::Router;
use futures::FutureExt as _;
use tokio::sync::{mpsc, oneshot};

use self::body::{Body, NotReady};
use self::ending::{broken, ended_as};
use self::front::{During, Front, Over, Rested};
use crate::adoption::{Unreached, unreachable};
use crate::card::Card;
use crate::config::RuntimeConfig;
use crate::door::{Inside, Purpose, ended};
use crate::ends::Ends;
use crate::events::Events;
use crate::exec::{Finish, Settle, Turn};
use crate::order::Orders;
use crate::select::Selector;
use crate::table::Ask;

pub(crate) use self::body::{Living, carrier_limits};
pub(crate) use self::doubt::{Failure, Meaning, agents_error, end_of, look_up, nonsense};
pub(crate) use self::front::queue_full;
pub(crate) use self::work::{Create, Delete, Exec, Mount, Reply, Transition, Work};

/// What the table and all sessions share.
pub(crate) struct Shared {
    pub(crate) config: RuntimeConfig,
    pub(crate) selector: Selector,
    /// What happened to the boxes.
    pub(crate) events: Events,
    /// Why those ended that are gone.
    pub(crate) ends: Ends,
    /// What agents may call here: nothing.
    pub(crate) nothing: Router,
    /// The order of calls that name the same thing.
    pub(crate) orders: Orders,
}

/// What a session begins with.
pub(crate) enum Begin {
    /// Calls, of which the first has made it.
    With(Vec<Work>),
    /// A box that was adopted.
    In(Box<Living>),
    /// One whose agent has not answered yet.
    Reaching(Box<Unreached>),
}

/// Lives a session from its beginning to its end, and reports the end to the table.
pub(crate) async fn live(
    shared: Arc<Shared>,
    card: Arc<Card>,
    begin: Begin,
    mailbox: mpsc::Receiver<Work>,
    table: mpsc::WeakSender<Ask>,
) {
    let mut body = Body::new(Arc::clone(&shared), Arc::clone(&card));
    let first = match begin {
        Begin::With(first) => first,
        Begin::In(living) => {
            body.is_in(*living);
            Vec::new()
        }
        Begin::Reaching(unreached) => {
            body.reaches(*unreached);
            Vec::new()
        }
    };
    let mut actor = Actor {
        front: Front::new(&shared, &card, mailbox, first),
        body,
        card: Arc::clone(&card),
    };
    let last = AssertUnwindSafe(actor.run()).catch_unwind().await;
    if last.is_err() {
        let (owner, box_id) = (&card.owner, &card.spec.box_id);
        tracing::error!(%owner, %box_id, "the session failed unexpectedly");
        // The box must not outlive it.
        let _ = AssertUnwindSafe(actor.body.stop()).catch_unwind().await;
    }
    let left = actor.front.close();
    drop(actor);
    // A start that failed says more than this.
    if card.door.why_shut().is_none() {
        card.door.shut(ended());
    }
    if let Some(table) = table.upgrade() {
        let _ = table.send(Ask::Ended { card, left }).await;
    }
    // Only now, so that whoever reads the answer finds the session gone.
    if let Ok(last) = last {
        last.say();
    }
}

/// The answer that is given once the session is gone.
enum Last {
    Nothing,
    /// An exec whose timeout has ended the box.
    Exec(Settle),
    Delete(Reply<BoxDeleteResult>, Result<BoxDeleteResult, BoxError>),
}

impl Last {
    fn say(self) {
        match self {
            Self::Nothing => {}
            Self::Exec(settle) => drop(settle.send(Ok(Killed::Box))),
            Self::Delete(reply, result) => drop(reply.send(result)),
        }
    }
}

struct Actor {
    front: Front,
    body: Body,
    card: Arc<Card>,
}

/// Whether the session goes on.
enum Next {
    GoOn,
    End(Last),
}

impl Actor {
    async fn run(&mut self) -> Last {
        loop {
            let next = match self.front.next_work() {
                Some(work) if self.body.is_out_of_reach(&work) => {
                    work.refuse(unreachable(&self.card.spec.box_id));
                    Next::GoOn
                }
                Some(Work::Exec(exec)) => self.exec(exec).await,
                Some(Work::Create(create)) => self.create(create).await,
                Some(Work::Delete(delete)) => self.delete(delete).await,
                Some(Work::Transition(asked)) => self.transition(asked).await,
                Some(Work::Mount(asked)) => self.mount(asked).await,
                None => self.rest().await,
            };
            if let Next::End(last) = next {
                return last;
            }
        }
    }

    /// Nothing to do: waits for work, for the end of the agent, or for its own end.
    async fn rest(&mut self) -> Next {
        match self.front.rest(self.body.ended()).await {
            Rested::Work => Next::GoOn,
            Rested::Broken(reason) => {
                let why = self.why_broken(reason);
                Box::pin(self.fail(why)).await;
                Next::GoOn
            }
            Rested::Reached(living) => {
                self.body.is_in(*living);
                self.tell("adopted", "its agent answers");
                self.front.used();
                self.front.set_clock();
                Next::GoOn
            }
            Rested::Over(Over::Idle) => Box::pin(self.idle()).await,
            Rested::Over(over) => Box::pin(self.over(over)).await,
        }
    }

    /// Nobody has used the box for long. Commands that go on by themselves are work, though nobody asks about them.
    async fn idle(&mut self) -> Next {
        match self.front.during(self.body.may_be_busy()).await {
            During::Done(false) => {}
            During::Done(true) => {
                self.front.used();
                return Next::GoOn;
            }
            During::Over(over) => return Box::pin(self.over(over)).await,
        }
        // Somebody may have come meanwhile; from here on nobody can.
        if !self.front.is_idle() {
            return Next::GoOn;
        }
        if self.stops_when_idle() {
            return self.stop_idle().await;
        }
        let reason = Over::Idle.reason(&self.card.spec.box_id);
        if self.card.door.shut_if_unused(reason) {
            return Box::pin(self.over(Over::Idle)).await;
        }
        Next::GoOn
    }

    /// Makes the box ready for this call, unless the session is over meanwhile.
    async fn ready(&mut self, work: &Work) -> Result<bool, Unready> {
        let Some(spec) = work.spec() else {
            return Ok(false);
        };
        match self.front.during(self.body.ready(spec)).await {
            During::Done(Ok(started)) => {
                self.front.used();
                if started {
                    self.front.set_clock();
                }
                Ok(started)
            }
            During::Done(Err(NotReady::Refused(error))) => Err(Unready::Refused(error)),
            During::Done(Err(NotReady::Failed(error))) => Err(Unready::Failed(error)),
            During::Over(over) => Err(Unready::Over(over)),
        }
    }

    /// What follows for a call whose box is not ready.
    async fn unready(&mut self, work: Work, why: Unready) -> Next {
        match why {
            Unready::Refused(error) => {
                work.refuse(error);
                Next::GoOn
            }
            Unready::Failed(error) => {
                self.tell("failed", error.message());
                // All who waited for this start share its outcome.
                self.card.door.shut(error.clone());
                self.front.refuse_waiting(&error);
                work.refuse(error);
                let _ = self.body.stop().await;
                Next::End(Last::Nothing)
            }
            Unready::Over(over) => {
                let id = &self.card.spec.box_id;
                match over {
                    // The next box would have the same end.
                    Over::Expired | Over::Idle => work.refuse(BoxError::conflict(format!(
                        "box {id} expired before it was ready"
                    ))),
                    Over::Deleted(_) => work.refuse(over.reason(id)),
                    // It has not begun, so it may begin in the next box.
                    Over::Done | Over::Closed => self.front.put_back(work),
                }
                Box::pin(self.over(over)).await
            }
        }
    }

    async fn create(&mut self, create: Box<Create>) -> Next {
        let work = Work::Create(create);
        let started = match self.ready(&work).await {
            Ok(started) => started,
            Err(why) => return Box::pin(self.unready(work, why)).await,
        };
        if let Work::Create(create) = work {
            let _ = create.reply.send(Ok(BoxCreateResult {
                info: self.card.info(&create.caller),
                existed: !started,
                earlier: started
                    .then(|| self.shared().ends.earlier(&self.card))
                    .flatten(),
                adjusted: Vec::new(),
            }));
        }
        Next::GoOn
    }

    /// Grants an exec its turn, and waits for its end.
    async fn exec(&mut self, exec: Box<Exec>) -> Next {
        if exec.reply.is_closed() {
            return Next::GoOn;
        }
        let work = Work::Exec(exec);
        if let Err(why) = self.ready(&work).await {
            return Box::pin(self.unready(work, why)).await;
        }
        let Work::Exec(exec) = work else {
            return Next::GoOn;
        };
        if exec.reply.is_closed() {
            return Next::GoOn;
        }
        if let Err(why) = Box::pin(self.wake()).await {
            return Box::pin(self.unready(Work::Exec(exec), why)).await;
        }
        let (finish, finished) = oneshot::channel();
        let turn = self.turn(&exec, finish);
        let command_id = turn.as_ref().ok().map(|turn| turn.command_id.clone());
        self.card.used(LaneStatus::Running);
        let granted = exec.reply.send(turn).is_ok();
        let Some(command_id) = command_id.filter(|_| granted) else {
            self.card.set_lane(LaneStatus::Idle);
            return Next::GoOn;
        };
        let during = self.front.during(finished).await;
        self.front.used();
        match during {
            During::Done(Ok(finish)) => self.finish(finish, &command_id).await,
            During::Done(Err(_)) => {
                match self.ended(&command_id).await {
                    During::Done(Err(reason)) => {
                        let why = self.why_broken(reason);
                        Box::pin(self.fail(why)).await;
                    }
                    During::Over(over) => return Box::pin(self.over(over)).await,
                    During::Done(Ok(())) => {}
                }
                self.card.used(LaneStatus::Idle);
                Next::GoOn
            }
            During::Over(over) => Box::pin(self.over(over)).await,
        }
    }

    fn turn(&mut self, exec: &Exec, finish: oneshot::Sender<Finish>) -> Result<Turn, BoxError> {
        let (Some(inside), Some(living)) = (
            Inside::now(&self.card, &exec.caller, Purpose::Exec)?,
            &mut self.body.living,
        ) else {
            return Err(BoxError::internal("there is no box for the command"));
        };
        Ok(Turn {
            inside,
            command_id: living.next_exec()?,
            finish,
        })
    }

    /// Waits until nothing is left of an exec.
    async fn ended(&mut self, command_id: &CommandId) -> During<Result<(), String>> {
        let job = self.body.confirm_killed(command_id);
        self.front.during(Box::pin(job)).await
    }

    /// What follows from the end of an exec.
    async fn finish(&mut self, finish: Finish, command_id: &CommandId) -> Next {
        match finish {
            Finish::Done => Next::GoOn,
            Finish::DropBox(settle) => {
                self.ends("deleted", "an exec took too long");
                self.end(Last::Exec(settle)).await
            }
            Finish::Overdue(OnTimeout::DropBox, settle) => {
                self.ends("deleted", "its agent is silent");
                self.end(Last::Exec(settle)).await
            }
            Finish::Overdue(OnTimeout::Kill, settle) => {
                // A box in want of processor time has a slow agent: it gets the time that a kill has.
                match Box::pin(self.ended(command_id)).await {
                    During::Done(Ok(())) => {
                        self.card.used(LaneStatus::Idle);
                        let _ = settle.send(Ok(Killed::Command));
                        return Next::GoOn;
                    }
                    During::Done(Err(_)) => {}
                    During::Over(over) => {
                        let next = Box::pin(self.over(over)).await;
                        let _ = settle.send(Ok(Killed::Command));
                        return next;
                    }
                }
                // Nobody asked for the end of the box, so what is known of it stays, and says why.
                let why = "the box's agent does not end a command whose time is over";
                Box::pin(self.fail(broken(why.to_owned()))).await;
                let _ = settle.send(Ok(Killed::Box));
                Next::GoOn
            }
            Finish::Broken(reason, settle) => {
                let why = self.why_broken(reason);
                Box::pin(self.fail(why.clone())).await;
                let _ = settle.send(Err(why));
                Next::GoOn
            }
        }
    }

    async fn mount(&mut self, asked: Box<Mount>) -> Next {
        let job = Box::pin(self.body.add_mounts(&asked.mounts));
        match self.front.during(job).await {
            During::Done(added) => drop(asked.reply.send(added)),
            During::Over(over) => {
                return Box::pin(self.unready(Work::Mount(asked), Unready::Over(over))).await;
            }
        }
        Next::GoOn
    }

    async fn delete(&mut self, delete: Box<Delete>) -> Next {
        self.card.set_lane(LaneStatus::Closing);
        let box_id = &self.card.spec.box_id;
        self.card.door.shut(ended_as(Ended::Deleted, box_id));
        let stopped = self.body.stop().await;
        self.tell("deleted", "somebody deleted it");
        self.shared().ends.deleted(&self.card);
        let Delete { reply, box_id, .. } = *delete;
        let result = stopped.map(|()| BoxDeleteResult { deleted: box_id });
        Next::End(Last::Delete(reply, result))
    }

    async fn end(&mut self, last: Last) -> Next {
        self.card.set_lane(LaneStatus::Closing);
        let box_id = &self.card.spec.box_id;
        self.card.door.shut(ended_as(Ended::Deleted, box_id));
        let _ = self.body.stop().await;
        Next::End(last)
    }

    async fn over(&mut self, over: Over) -> Next {
        // Before the agent goes, so that calls inside learn why it does.
        self.card.door.shut(over.reason(&self.card.spec.box_id));
        match over {
            Over::Deleted(delete) => {
                // What waited for the box was asked for before: it shall not make another one.
                let error = ended_as(Ended::Deleted, &self.card.spec.box_id);
                self.front.refuse_lane(&error);
                self.delete(delete).await
            }
            Over::Expired => self.end_as("expired", "its time is over").await,
            Over::Idle => self.end_as("expired", "nobody has used it for long").await,
            Over::Done => self.end_as("deleted", "its main command has ended").await,
            Over::Closed => self.end_as("deleted", "the runtime lets go of it").await,
        }
    }

    async fn end_as(&mut self, kind: &str, why: &str) -> Next {
        self.ends(kind, why);
        self.end(Last::Nothing).await
    }

    /// Why a box is of no more use: what its backend knows, or else this.
    fn why_broken(&self, reason: String) -> BoxError {
        self.body.why_gone().unwrap_or_else(|| broken(reason))
    }

    /// Tells whoever wants to know what happened to the box.
    fn tell(&self, kind: &str, message: &str) {
        self.shared().events.tell(&self.card, kind, message);
    }

    /// The same, of an end that no caller asked for.
    fn ends(&self, kind: &str, why: &str) {
        self.tell(kind, why);
        self.shared().ends.ended(&self.card, why);
    }

    fn shared(&self) -> &Shared {
        &self.body.shared
    }

    /// The box is of no more use. Its record stays, so that people find out; the next call makes a
    /// new box.
    async fn fail(&mut self, why: BoxError) {
        let reason = why.message();
        let (owner, box_id) = (&self.card.owner, &self.card.spec.box_id);
        tracing::warn!(%owner, %box_id, %reason, "the box failed");
        self.ends("failed", reason);
        self.card.failed(why);
        let _ = self.body.stop().await;
        self.card.set_lane(LaneStatus::Idle);
        // From here on it is the record that waits to be forgotten.
        self.front.used();
        self.front.set_clock();
    }
}

/// Why a call's box is not ready.
enum Unready {
    /// Only this call's fault.
    Refused(BoxError),
    /// There is no box.
    Failed(BoxError),
    /// The session ends.
    Over(Over),
}

#[cfg(test)]
mod tests {
    use box_protocol::SpecDraft;

    use super::*;
    use crate::RuntimeConfig;

    #[test]
    fn a_session_is_small() {
        let config = RuntimeConfig::new(Vec::new());
        let shared = Arc::new(Shared {
            selector: Selector::new(&config),
            events: Events::new(),
            ends: Ends::new(None),
            nothing: Router::empty(),
            orders: Orders::default(),
            config,
        });
        let spec = SpecDraft::new("s").build().unwrap();
        let card = Arc::new(Card::new("me".into(), &spec));
        let (_sender, mailbox) = mpsc::channel(1);
        let (table, _asks) = mpsc::channel(1);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let _guard = runtime.enter();
        let begin = Begin::With(Vec::new());
        let task = live(shared, Arc::clone(&card), begin, mailbox, table.downgrade());
        let size = size_of_val(&task) + size_of_val(&*card);
        assert!(
            size < 3584,
            "{} and {} bytes",
            size_of_val(&task),
            size_of_val(&*card)
        );
    }
}
