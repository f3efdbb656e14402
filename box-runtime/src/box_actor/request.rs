//! What a session is asked to do.

use box_protocol::actions::{BoxCreateResult, BoxDeleteResult, BoxTransitionResult, TargetState};
use box_protocol::{BoxError, BoxId, BoxMountSpec, BoxSpec};
use tokio::sync::oneshot;

use box_rpc::Caller;

use crate::exec::Turn;

/// Where the answer to a call goes.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, BoxError>>;

/// A call on its way to a session. Two words, so that a mailbox is small.
pub(crate) enum Request {
    Exec(Box<Exec>),
    Create(Box<Create>),
    Delete(Box<Delete>),
    Transition(Box<Transition>),
    Mount(Box<Mount>),
}

/// An exec that waits for its turn, in a box that fits this spec.
pub(crate) struct Exec {
    pub(crate) caller: Caller,
    pub(crate) max_boxes: Option<usize>,
    pub(crate) spec: BoxSpec,
    /// Closed if the call was withdrawn.
    pub(crate) reply: Reply<Turn>,
}

pub(crate) struct Create {
    pub(crate) caller: Caller,
    pub(crate) max_boxes: Option<usize>,
    pub(crate) spec: BoxSpec,
    pub(crate) must_be_new: bool,
    pub(crate) reply: Reply<BoxCreateResult>,
}

pub(crate) struct Delete {
    pub(crate) caller: Caller,
    pub(crate) box_id: BoxId,
    pub(crate) force: bool,
    pub(crate) reply: Reply<BoxDeleteResult>,
}

pub(crate) struct Transition {
    pub(crate) caller: Caller,
    pub(crate) box_id: BoxId,
    pub(crate) to: TargetState,
    pub(crate) reply: Reply<BoxTransitionResult>,
}

/// Mounts for a box that is there.
pub(crate) struct Mount {
    pub(crate) caller: Caller,
    pub(crate) box_id: BoxId,
    pub(crate) mounts: Vec<BoxMountSpec>,
    pub(crate) reply: Reply<()>,
}

impl Request {
    /// The session it is for, and who asks.
    pub(crate) fn subject(&self) -> (&BoxId, &Caller) {
        match self {
            Self::Exec(exec) => (&exec.spec.box_id, &exec.caller),
            Self::Create(create) => (&create.spec.box_id, &create.caller),
            Self::Delete(delete) => (&delete.box_id, &delete.caller),
            Self::Transition(asked) => (&asked.box_id, &asked.caller),
            Self::Mount(asked) => (&asked.box_id, &asked.caller),
        }
    }

    /// What the box must be for it; the others do not care.
    pub(crate) fn spec(&self) -> Option<&BoxSpec> {
        match self {
            Self::Exec(exec) => Some(&exec.spec),
            Self::Create(create) => Some(&create.spec),
            Self::Delete(_) | Self::Transition(_) | Self::Mount(_) => None,
        }
    }

    /// The most boxes that its caller may have, if the handle that it came through says so.
    pub(crate) fn max_boxes(&self) -> Option<usize> {
        match self {
            Self::Exec(exec) => exec.max_boxes,
            Self::Create(create) => create.max_boxes,
            Self::Delete(_) | Self::Transition(_) | Self::Mount(_) => None,
        }
    }

    /// Answers it with an error. Nobody to hear it is fine.
    pub(crate) fn refuse(self, error: BoxError) {
        match self {
            Self::Exec(exec) => drop(exec.reply.send(Err(error))),
            Self::Create(create) => drop(create.reply.send(Err(error))),
            Self::Delete(delete) => drop(delete.reply.send(Err(error))),
            Self::Transition(asked) => drop(asked.reply.send(Err(error))),
            Self::Mount(asked) => drop(asked.reply.send(Err(error))),
        }
    }
}
