//! Calls that the agent lease a box answers: found, waited for and passed on here, and never believed more than need be.

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

/// Chunks of an agent that may wait here, for each call.
const CREDIT: u32 = 8;

/// An action that the agent lease a box serves, under the same name and with the same types.
pub trait DataPlane: Action<Params: Ordered> + Sized {
    /// The box.
    fn box_id(params: &Self::Params) -> &BoxId;

    /// Whether a chunk is no larger than a chunk may be.
    fn fits(chunk: &Self::Chunk) -> bool;

    /// Where a chunk is, and how long: those of a file follow on each other.
    #[doc(hidden)]
    fn place(_: &Self::Chunk) -> Option<(u64, usize)> {
        None
    }

    /// Where the first of them must be.
    #[doc(hidden)]
    fn order(_: &Self::Params) -> Order {
        Order::default()
    }

    /// A chunk is passed on.
    #[doc(hidden)]
    fn passes(_: &AgentLease, _: &Self::Chunk) {}

    /// Asks the agent.
    #[doc(hidden)]
    fn ask(
        lease: &AgentLease,
        params: &Self::Params,
        order: Queued,
    ) -> impl Future<Output = Result<Self::Result, BoxError>> + Send {
        ask::<Self>(lease, params, order)
    }

    /// Asks the agent, and passes its chunks on.
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

/// Where the next chunk of a file must be. An agent lives with the guest: a caller that writes chunks where they say they are must
/// not be led elsewhere.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Order {
    /// Where it must be, if that is known.
    next: Option<u64>,
}

impl Order {
    /// The first chunk is here.
    pub(crate) fn from(offset: u64) -> Self {
        Self { next: Some(offset) }
    }

    /// An error unless a chunk of so many bytes may be here.
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

/// Asks the agent of a box, in one message, when the call's turn has come. Calls behind it do not wait for its answer.
pub(crate) async fn ask<A: Action>(
    lease: &AgentLease,
    params: &A::Params,
    order: Queued,
) -> Result<A::Result, BoxError> {
    order.comes().await;
    let asking = lease.agent.request::<A>(params).ask();
    let asked = lease.attended(asking).await?;
    drop(order);
    let answer = asked.map_err(agents_error)?.answer();
    lease.attended(answer).await?.map_err(agents_error)
}

/// The same, with chunks that come in messages.
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
            return Err(BoxError::cancelled("nobody takes the chunks"));
        }
        next = chunks.next().await;
    }
    drop(to);
    chunks.finish().await.map_err(agents_error)
}

impl BoxRuntime {
    /// Asks the agent of the box. Waits while the box is being made; overlaps with its execs and keeps it in use. Dropping the
    /// future withdraws the call.
    pub async fn forward<A: DataPlane>(
        &self,
        caller: &Caller,
        params: &A::Params,
    ) -> Result<A::Result, BoxError> {
        let order = self.order(caller, A::box_id(params), params);
        let lease = self.enter(caller, A::box_id(params)).await?;
        lease.outcome(A::ask(&lease, params, order)).await
    }

    /// The same, with chunks before the result, no faster than they are taken.
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

    /// What a box is like from lease, by the words of its agent. To look is not to use.
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

    /// Goes in to ask what the agent knows, which neither wakes the box nor counts as use.
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

/// Those that are asked as they are.
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
        // Where a line begins only the agent knows, but no file is that long.
        assert!(Order::default().follows(4096, 1).is_ok());
        for too_far in [u64::MAX, i64::MAX as u64, u64::MAX - 4] {
            assert!(Order::default().follows(too_far, 5).is_err(), "{too_far}");
        }
    }
}
