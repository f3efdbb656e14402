//! Calls that the agent of a box answers: files and ports.
//!
//! # One call
//! 1. The handler takes an order ticket, finds the entry of the box by caller and id, and resumes or
//!    starts a box with `wake` in its lifetime.
//! 2. It acquires an [`AgentLease`]: it waits while the box starts, and fails with the reason if the
//!    box has ended. The lease counts as activity of the box.
//! 3. It waits for its turn among the calls that name the same object, and sends the call directly
//!    to the agent, past the queue of execs.
//! 4. The agent opens files inside the box, beneath its root, with the rights of the guest. Data
//!    above 4 KiB travels through shared memory (`file_transfer.rs`).
//! 5. The runtime checks the type, size and offset of each chunk and forwards it with back-pressure.
//!    Of an agent's error it keeps the code, a shortened message and the errno.
//!
//! `port.open` lasts as long as its connection, which the agent dials inside the box. `port.send`
//! answers when its bytes are written. Dropping a call cancels it in the agent.

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
use crate::call_order::OrderTicket;
use crate::handlers::forwarded;
use crate::runtime::BoxRuntime;
use box_rpc::Caller;

/// Chunks that an agent may send ahead in each call.
const CREDIT: u32 = 8;

/// An action that an agent serves under the same name and with the same types.
pub trait DataPlane: Action<Params: Ordered> + Sized {
    /// Returns the id of the box.
    fn box_id(params: &Self::Params) -> &BoxId;

    /// Returns whether a chunk is within the size limit.
    fn is_within_limit(chunk: &Self::Chunk) -> bool;

    /// Returns the offset and length of a chunk of a file, which must be contiguous.
    #[doc(hidden)]
    fn byte_range(_: &Self::Chunk) -> Option<(u64, usize)> {
        None
    }

    /// Returns the expected offset of the first chunk.
    #[doc(hidden)]
    fn first_offset(_: &Self::Params) -> NextOffset {
        NextOffset::default()
    }

    /// Called for each forwarded chunk, to count its traffic.
    #[doc(hidden)]
    fn count_traffic(_: &AgentLease, _: &Self::Chunk) {}

    /// Sends the call to the agent.
    #[doc(hidden)]
    fn call(
        lease: &AgentLease,
        params: &Self::Params,
        ticket: OrderTicket,
    ) -> impl Future<Output = Result<Self::Result, BoxError>> + Send {
        call_agent::<Self>(lease, params, ticket)
    }

    /// Sends the call to the agent and forwards its chunks.
    #[doc(hidden)]
    fn stream(
        lease: &AgentLease,
        params: &Self::Params,
        ticket: OrderTicket,
        to: mpsc::Sender<Self::Chunk>,
    ) -> impl Future<Output = Result<Self::Result, BoxError>> + Send {
        stream_from_agent::<Self>(lease, params, ticket, to)
    }
}

/// The expected offset of the next chunk of a file.
///
/// The guest may control the agent. Without this check it could make a caller write chunks at other
/// offsets.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, Default)]
pub struct NextOffset {
    /// The expected offset, if it is known.
    next: Option<u64>,
}

impl NextOffset {
    /// Expects the first chunk at this offset.
    pub(crate) fn from(offset: u64) -> Self {
        Self { next: Some(offset) }
    }

    /// Checks that a chunk of this length may be at this offset.
    pub(crate) fn advance(&mut self, offset: u64, bytes: usize) -> Result<(), BoxError> {
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
pub(crate) async fn call_agent<A: Action>(
    lease: &AgentLease,
    params: &A::Params,
    ticket: OrderTicket,
) -> Result<A::Result, BoxError> {
    ticket.wait_turn().await;
    let sending = lease.agent.request::<A>(params).send();
    let sent = lease.with_health_checks(sending).await?;
    drop(ticket);
    let answer = sent.map_err(agents_error)?.result();
    lease
        .with_health_checks(answer)
        .await?
        .map_err(agents_error)
}

/// Sends a call and forwards the chunks that the agent sends in messages.
pub(crate) async fn stream_from_agent<A: DataPlane>(
    lease: &AgentLease,
    params: &A::Params,
    ticket: OrderTicket,
    to: mpsc::Sender<A::Chunk>,
) -> Result<A::Result, BoxError> {
    ticket.wait_turn().await;
    let request = lease.agent.request::<A>(params).credit(CREDIT);
    let streaming = lease.with_health_checks(request.stream()).await?;
    let mut chunks = streaming.map_err(agents_error)?;
    drop(ticket);
    let mut next_offset = A::first_offset(params);
    let mut next = lease.with_health_checks(chunks.next()).await?;
    while let Some(chunk) = next {
        let chunk = chunk.map_err(agents_error)?;
        if !A::is_within_limit(&chunk) {
            return Err(BoxError::unavailable(agent_violation(
                "sent a chunk beyond the size limit",
            )));
        }
        if let Some((offset, bytes)) = A::byte_range(&chunk) {
            next_offset.advance(offset, bytes)?;
        }
        A::count_traffic(lease, &chunk);
        if to.send(chunk).await.is_err() {
            return Err(BoxError::cancelled("the reader has disconnected"));
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
        let ticket = self.order_ticket(caller, A::box_id(params), params);
        let lease = self.acquire(caller, A::box_id(params)).await?;
        lease.outcome(A::call(&lease, params, ticket)).await
    }

    /// Forwards a call with chunks before its result, with back-pressure.
    pub async fn forward_streamed<A: DataPlane>(
        &self,
        caller: &Caller,
        params: &A::Params,
        to: mpsc::Sender<A::Chunk>,
    ) -> Result<A::Result, BoxError> {
        let ticket = self.order_ticket(caller, A::box_id(params), params);
        let lease = self.acquire(caller, A::box_id(params)).await?;
        let streaming = A::stream(&lease, params, ticket, to);
        lease.outcome(streaming).await
    }

    /// Returns the agent's description of the box.
    ///
    /// Does not count as activity and does not wake the box.
    pub async fn guest(&self, caller: &Caller, id: &BoxId) -> Result<GuestInfo, BoxError> {
        let lease = self.acquire_readonly(caller, id).await?;
        lease
            .outcome(call_agent::<AgentGuest>(
                &lease,
                &Empty {},
                OrderTicket::none(),
            ))
            .await
    }

    pub(crate) async fn acquire(
        &self,
        caller: &Caller,
        id: &BoxId,
    ) -> Result<AgentLease, BoxError> {
        let entry = self.entry(caller, id).await?;
        if entry.access() == Access::WakeFirst {
            let wake = BoxTransitionParams {
                box_id: id.clone(),
                to: TargetState::Running,
            };
            self.transition(caller, wake).await?;
        }
        AgentLease::acquire(entry, caller, Purpose::Use).await
    }

    /// Acquires the agent without waking the box and without counting as activity.
    pub(crate) async fn acquire_readonly(
        &self,
        caller: &Caller,
        id: &BoxId,
    ) -> Result<AgentLease, BoxError> {
        AgentLease::acquire(self.entry(caller, id).await?, caller, Purpose::ReadOnly).await
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
macro_rules! forwarded_unchanged {
    ($($action:ty),*) => {$(
        impl DataPlane for $action {
            fn box_id(params: &Self::Params) -> &BoxId {
                &params.box_id
            }

            fn is_within_limit(chunk: &Never) -> bool {
                match *chunk {}
            }
        }
    )*};
}

forwarded_unchanged! {
    FileStat, FileList, FileFind, FileGrep, FileReplace, FileMove, FileRemove, FileMkdir, FileAttributes
}

impl DataPlane for PortOpen {
    fn box_id(params: &Self::Params) -> &BoxId {
        &params.box_id
    }

    fn is_within_limit(chunk: &PortChunk) -> bool {
        match chunk {
            PortChunk::ConnId(_) => true,
            PortChunk::Data(data) => data.len() <= MAX_CHUNK_BYTES,
        }
    }

    fn count_traffic(lease: &AgentLease, chunk: &PortChunk) {
        if let PortChunk::Data(data) = chunk {
            lease.count_sent(data.len());
        }
    }
}

impl DataPlane for PortSend {
    fn box_id(params: &Self::Params) -> &BoxId {
        &params.box_id
    }

    fn is_within_limit(chunk: &Never) -> bool {
        match *chunk {}
    }

    async fn call(
        lease: &AgentLease,
        params: &Self::Params,
        ticket: OrderTicket,
    ) -> Result<Empty, BoxError> {
        let bytes = params.data.as_ref().map_or(0, |data| data.len());
        let _reserved = lease.reserve(bytes)?;
        call_agent::<Self>(lease, params, ticket).await?;
        lease.count_received(bytes);
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
    fn chunks_of_a_file_must_be_contiguous() {
        let mut offset = NextOffset::from(10);
        offset.advance(10, 5).unwrap();
        offset.advance(15, 0).unwrap();
        offset.advance(15, 1).unwrap();
        for elsewhere in [0, 15, 17, u64::MAX] {
            let error = offset.advance(elsewhere, 1).unwrap_err();
            assert_eq!(error.code(), Code::Unavailable, "{elsewhere}");
        }
        assert!(
            NextOffset::from(0).advance(4096, 1).is_err(),
            "not at the requested offset"
        );
        // Only the agent knows where a line begins, but no file has such an offset.
        assert!(NextOffset::default().advance(4096, 1).is_ok());
        for too_far in [u64::MAX, i64::MAX as u64, u64::MAX - 4] {
            assert!(
                NextOffset::default().advance(too_far, 5).is_err(),
                "{too_far}"
            );
        }
    }
}
