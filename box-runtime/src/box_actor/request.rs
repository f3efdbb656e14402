//! Requests to the actor of a box.

use box_protocol::actions::{BoxCreateResult, BoxDeleteResult, BoxTransitionResult, TargetState};
use box_protocol::{BoxError, BoxId, BoxInfo, BoxMountSpec, BoxSpec, Name};
use tokio::sync::oneshot;

use box_rpc::Caller;

use crate::box_actor::files::Origin;
use crate::exec::Turn;

/// Channel for the response to a call.
pub(crate) type ReplySender<T> = oneshot::Sender<Result<T, BoxError>>;

/// Request to an actor. Variants are boxed, so that a mailbox is small.
pub(crate) enum Request {
    Exec(Box<Exec>),
    Create(Box<Create>),
    Delete(Box<Delete>),
    Transition(Box<Transition>),
    Mount(Box<Mount>),
    Rollback(Box<Rollback>),
}

/// Exec that waits for its turn in a box that matches the spec.
pub(crate) struct Exec {
    pub(crate) caller: Caller,
    pub(crate) max_boxes: Option<usize>,
    pub(crate) spec: BoxSpec,
    /// Closed if the caller has cancelled the call.
    pub(crate) reply: ReplySender<Turn>,
}

pub(crate) struct Create {
    pub(crate) caller: Caller,
    pub(crate) max_boxes: Option<usize>,
    pub(crate) spec: BoxSpec,
    pub(crate) must_be_new: bool,
    /// Whether the box stays if it cannot start.
    pub(crate) keep_failed: bool,
    /// Files that the box begins with, until the registry takes them.
    pub(crate) origin: Option<Box<Origin>>,
    pub(crate) reply: ReplySender<BoxCreateResult>,
}

pub(crate) struct Delete {
    pub(crate) caller: Caller,
    pub(crate) box_id: BoxId,
    pub(crate) force: bool,
    pub(crate) reply: ReplySender<BoxDeleteResult>,
}

pub(crate) struct Transition {
    pub(crate) caller: Caller,
    pub(crate) box_id: BoxId,
    pub(crate) to: TargetState,
    pub(crate) reply: ReplySender<BoxTransitionResult>,
}

/// Mounts to add to a running box.
pub(crate) struct Mount {
    pub(crate) caller: Caller,
    pub(crate) box_id: BoxId,
    pub(crate) mounts: Vec<BoxMountSpec>,
    pub(crate) reply: ReplySender<()>,
}

/// Return to a checkpoint.
pub(crate) struct Rollback {
    pub(crate) caller: Caller,
    pub(crate) box_id: BoxId,
    /// The newest checkpoint if absent.
    pub(crate) name: Option<Name>,
    pub(crate) reply: ReplySender<BoxInfo>,
}

impl Request {
    /// Returns the id of the box and the caller.
    pub(crate) fn subject(&self) -> (&BoxId, &Caller) {
        match self {
            Self::Exec(exec) => (&exec.spec.box_id, &exec.caller),
            Self::Create(create) => (&create.spec.box_id, &create.caller),
            Self::Delete(delete) => (&delete.box_id, &delete.caller),
            Self::Transition(request) => (&request.box_id, &request.caller),
            Self::Mount(request) => (&request.box_id, &request.caller),
            Self::Rollback(request) => (&request.box_id, &request.caller),
        }
    }

    /// Returns the spec that the box must match, if the request has one.
    pub(crate) fn spec(&self) -> Option<&BoxSpec> {
        match self {
            Self::Exec(exec) => Some(&exec.spec),
            Self::Create(create) => Some(&create.spec),
            Self::Delete(_) | Self::Transition(_) | Self::Mount(_) | Self::Rollback(_) => None,
        }
    }

    /// Takes the files that a new box begins with, if the request has any.
    pub(crate) fn take_origin(&mut self) -> Option<Box<Origin>> {
        match self {
            Self::Create(create) => create.origin.take(),
            _ => None,
        }
    }

    /// Returns the box limit of the caller, if its handle sets one.
    pub(crate) fn max_boxes(&self) -> Option<usize> {
        match self {
            Self::Exec(exec) => exec.max_boxes,
            Self::Create(create) => create.max_boxes,
            Self::Delete(_) | Self::Transition(_) | Self::Mount(_) | Self::Rollback(_) => None,
        }
    }

    /// Responds with an error. The caller may have disconnected.
    pub(crate) fn refuse(self, error: BoxError) {
        match self {
            Self::Exec(exec) => drop(exec.reply.send(Err(error))),
            Self::Create(create) => drop(create.reply.send(Err(error))),
            Self::Delete(delete) => drop(delete.reply.send(Err(error))),
            Self::Transition(request) => drop(request.reply.send(Err(error))),
            Self::Mount(request) => drop(request.reply.send(Err(error))),
            Self::Rollback(request) => drop(request.reply.send(Err(error))),
        }
    }
}
