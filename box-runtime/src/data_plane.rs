//! Calls that the agent of a box answers: found, ordered, forwarded, validated.

use std::future::Future;

use box_protocol::actions::{
    AgentGuest, BoxTransitionParams, FileAttributes, FileFind, FileGrep, FileList, FileMkdir,
    FileMove, FilePack, FileRead, FileRemove, FileReplace, FileStat, FileUnpack, FileWrite,
    GuestInfo, Ordered, PortChunk, PortOpen, PortSend, TargetState,
};
use box_protocol::{Access, BoxError, BoxId, MAX_CHUNK_BYTES};
use box_rpc::{Action, Call, Empty, Handle, Never};
use futures::StreamExt as _;
use tokio::sync::mpsc;

use crate::box_actor::agent_access::{AgentLease, Purpose};
use crate::box_actor::{agent_violation, agents_error};
use crate::handlers::forwarded;
use crate::order::Queued;
use crate::runtime::BoxRuntime;
use box_rpc::Caller;

/// Chunks that an agent may send ahead in each call.
const CREDIT: u32 = 8;

/// An action that an agent serves under the same name and with the same types.
pub trait DataPlane: Action<Params: Ordered> + Sized {
    /// Returns the id of the box.
    fn box_id(params: &Self::Params) -> &BoxId;

    /// Returns whether a chunk is within the size limit.
    fn fits(chunk: &Self::Chunk) -> bool;

    /// Returns the offset and length of a chunk of a file, which must be contiguous.
    #[doc(hidden)]
    fn place(_: &Self::Chunk) -> Option<(u64, usize)> {
        None
    }

    /// Returns the expected offset of the first chunk.
    #[doc(hidden)]
    fn order(_: &Self::Params) -> Order {
        Order::default()
    }

    /// Called for each forwarded chunk, to count its traffic.
    #[doc(hidden)]
    fn passes(_: &AgentLease, _: &Self::Chunk) {}

    /// Sends the call to the agent.
    #[doc(hidden)]
    fn ask(
        lease: &AgentLease,
        params: &Self::Params,
        order: Queued,
    ) -> impl Future<Output = Result<Self::Result, BoxError>> + Send {
        ask::<Self>(lease, params, order)
    }

    /// Sends the call to the agent and forwards its chunks.
    #[doc(hidden)]
    fn stream(
        lease: &AgentLease,
        params: &Self::Params,
        order: Queued,
        to: mpsc::Sender<Self::Chunk>,
    ) -> impl Future<Output = Result<Self::Result, BoxError>> + Send {
        stream::<Self>(lease, params, order, to)
    }
}

/// The expected offset of the next chunk of a file.
///
/// The guest may control the agent. Without this check it could make a caller write chunks at other
/// offsets.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Order {
    /// The expected offset, if it is known.
    next: Option<u64>,
}

impl Order {
    /// Expects the first chunk at this offset.
    pub(crate) fn from(offset: u64) -> Self {
        Self { next: Some(offset) }
    }

    /// Checks that a chunk of this length may be at this offset.
    pub(crate) fn follows(&mut self, offset: u64, bytes: usize) -> Result<(), BoxError> {
        let is_next = self.next.is_none_or(|next| next == offset);
        let end = offset.checked_add(bytes as u64).filter(|_| is_next);
        let end = end.filter(|end| i64::try_from(*end).is_ok());
        let end =
            end.ok_or_else(|| BoxError::unavailable(agent_violation("sent a file out of order")))?;
        self.next = Some(end);
        Ok(())
    }
}

/// Sends a call to the agent in one message, when its turn has come.
///
/// Later calls do not wait for the answer.
pub(crate) async fn ask<A: Action>(
    lease: &AgentLease,
    params: &A::Params,
    order: Queued,
) -> Result<A::Result, BoxError> {
    order.comes().await;
    let asking = lease.agent.request::<A>(params).send();
    let asked = lease.attended(asking).await?;
    drop(order);
    let answer = asked.map_err(agents_error)?.result();
    lease.attended(answer).await?.map_err(agents_error)
}

/// Sends a call and forwards the chunks that the agent sends in messages.
pub(crate) async fn stream<A: DataPlane>(
    lease: &AgentLease,
    params: &A::Params,
    order: Queued,
    to: mpsc::Sender<A::Chunk>,
) -> Result<A::Result, BoxError> {
    order.comes().await;
    let request = lease.agent.request::<A>(params).credit(CREDIT);
    let streaming = lease.attended(request.stream()).await?;
    let mut chunks = streaming.map_err(agents_error)?;
    drop(order);
    let mut order = A::order(params);
    let mut next = lease.attended(chunks.next()).await?;
    while let Some(chunk) = next {
        let chunk = chunk.map_err(agents_error)?;
        if !A::fits(&chunk) {
            return Err(BoxError::unavailable(agent_violation(
                "sent too large a chunk",
            )));
        }
        if let Some((offset, bytes)) = A::place(&chunk) {
            order.follows(offset, bytes)?;
        }
        A::passes(lease, &chunk);
        if to.send(chunk).await.is_err() {
            return Err(BoxError::cancelled("the reader is gone"));
        }
        next = chunks.next().await;
    }
    drop(to);
    chunks.finish().await.map_err(agents_error)
}

impl BoxRuntime {
    /// Forwards a call to the agent of the box.
    ///
    /// The call waits while the box is being created. It runs concurrently with execs and counts as
    /// activity of the box. Dropping the future cancels the call.
    pub async fn forward<A: DataPlane>(
        &self,
        caller: &Caller,
        params: &A::Params,
    ) -> Result<A::Result, BoxError> {
        let order = self.order(caller, A::box_id(params), params);
        let lease = self.enter(caller, A::box_id(params)).await?;
        lease.outcome(A::ask(&lease, params, order)).await
    }

    /// Forwards a call with chunks before its result, with back-pressure.
    pub async fn forward_streamed<A: DataPlane>(
        &self,
        caller: &Caller,
        params: &A::Params,
        to: mpsc::Sender<A::Chunk>,
    ) -> Result<A::Result, BoxError> {
        let order = self.order(caller, A::box_id(params), params);
        let lease = self.enter(caller, A::box_id(params)).await?;
        let streaming = A::stream(&lease, params, order, to);
        lease.outcome(streaming).await
    }

    /// Returns the agent's description of the box.
    ///
    /// Does not count as activity and does not wake the box.
    pub async fn guest(&self, caller: &Caller, id: &BoxId) -> Result<GuestInfo, BoxError> {
        let lease = self.look(caller, id).await?;
        lease
            .outcome(ask::<AgentGuest>(&lease, &Empty {}, Queued::none()))
            .await
    }

    pub(crate) async fn enter(&self, caller: &Caller, id: &BoxId) -> Result<AgentLease, BoxError> {
        let entry = self.entry(caller, id).await?;
        if entry.access() == Access::WakeFirst {
            let wake = BoxTransitionParams {
                box_id: id.clone(),
                to: TargetState::Running,
            };
            self.transition(caller, wake).await?;
        }
        AgentLease::enter(entry, caller, Purpose::Use).await
    }

    /// Acquires the agent without waking the box and without counting as activity.
    pub(crate) async fn look(&self, caller: &Caller, id: &BoxId) -> Result<AgentLease, BoxError> {
        AgentLease::enter(self.entry(caller, id).await?, caller, Purpose::Look).await
    }
}

macro_rules! data_plane {
    (plain: $($plain:ty),*; streamed: $($streamed:ty),*;) => {
        $(impl Handle<$plain> for BoxRuntime {
            async fn handle(
                &self,
                params: <$plain as Action>::Params,
                call: Call<$plain>,
            ) -> Result<<$plain as Action>::Result, BoxError> {
                self.forward::<$plain>(&call.caller(), &params).await
            }
        })*

        $(impl Handle<$streamed> for BoxRuntime {
            async fn handle(
                &self,
                params: <$streamed as Action>::Params,
                mut call: Call<$streamed>,
            ) -> Result<<$streamed as Action>::Result, BoxError> {
                let caller = call.caller();
                if call.chunks().is_none() {
                    return self.forward::<$streamed>(&caller, &params).await;
                }
                forwarded(call, |chunks| self.forward_streamed::<$streamed>(&caller, &params, chunks)).await
            }
        })*
    };
}

/// Implements actions that the runtime forwards unchanged.
macro_rules! as_they_are {
    ($($action:ty),*) => {$(
        impl DataPlane for $action {
            fn box_id(params: &Self::Params) -> &BoxId {
                &params.box_id
            }

            fn fits(chunk: &Never) -> bool {
                match *chunk {}
            }
        }
    )*};
}

as_they_are! {
    FileStat, FileList, FileFind, FileGrep, FileReplace, FileMove, FileRemove, FileMkdir, FileAttributes
}

impl DataPlane for PortOpen {
    fn box_id(params: &Self::Params) -> &BoxId {
        &params.box_id
    }

    fn fits(chunk: &PortChunk) -> bool {
        match chunk {
            PortChunk::ConnId(_) => true,
            PortChunk::Data(data) => data.len() <= MAX_CHUNK_BYTES,
        }
    }

    fn passes(lease: &AgentLease, chunk: &PortChunk) {
        if let PortChunk::Data(data) = chunk {
            lease.has_sent(data.len());
        }
    }
}

impl DataPlane for PortSend {
    fn box_id(params: &Self::Params) -> &BoxId {
        &params.box_id
    }

    fn fits(chunk: &Never) -> bool {
        match *chunk {}
    }

    async fn ask(
        lease: &AgentLease,
        params: &Self::Params,
        order: Queued,
    ) -> Result<Empty, BoxError> {
        let bytes = params.data.as_ref().map_or(0, |data| data.len());
        let _room = lease.carry(bytes)?;
        ask::<Self>(lease, params, order).await?;
        lease.has_received(bytes);
        Ok(Empty {})
    }
}

data_plane! {
    plain:
        FileWrite, FileStat, FileList, FileFind, FileGrep, FileReplace, FileMove, FileRemove, FileMkdir, FileAttributes,
        FileUnpack, PortSend;
    streamed: FileRead, FilePack, PortOpen;
}

#[cfg(test)]
mod tests {
    use box_protocol::Code;

    use super::*;

    #[test]
    fn chunks_of_a_file_follow_on_each_other() {
        let mut order = Order::from(10);
        order.follows(10, 5).unwrap();
        order.follows(15, 0).unwrap();
        order.follows(15, 1).unwrap();
        for elsewhere in [0, 15, 17, u64::MAX] {
            let error = order.follows(elsewhere, 1).unwrap_err();
            assert_eq!(error.code(), Code::Unavailable, "{elsewhere}");
        }
        assert!(Order::from(0).follows(4096, 1).is_err(), "not where asked");
        // Only the agent knows where a line begins, but no file has such an offset.
        assert!(Order::default().follows(4096, 1).is_ok());
        for too_far in [u64::MAX, i64::MAX as u64, u64::MAX - 4] {
            assert!(Order::default().follows(too_far, 5).is_err(), "{too_far}");
        }
    }
}
