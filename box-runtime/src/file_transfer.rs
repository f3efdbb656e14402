//! Transfers files between the runtime and an agent.
//!
//! The data passes through a slot of shared memory if one is free and the agent supports slots.
//! Otherwise the data travels in messages.

use std::future::Future;

use box_protocol::actions::{
    AgentFileChunk, AgentHealth, AgentHealthParams, AgentPack, AgentPackParams, AgentRead,
    AgentReadParams, AgentUnpack, AgentUnpackParams, AgentWrite, AgentWriteParams, FILE_PIECE,
    FILE_PLACES, FileChunk, FilePack, FilePart, FileRead, FileUnpack, FileUnpackParams, FileWrite,
    FileWriteParams, SPOOL_BYTES, UploadPiece,
};
use box_protocol::{Blob, BoxError, MAX_CHUNK_BYTES};
use box_rpc::{Action, Chunks, Peer};
use futures::StreamExt as _;
use tokio::sync::mpsc;

use crate::box_actor::agent_access::AgentLease;
use crate::box_actor::{agent_violation, agents_error};
use crate::data_plane::{DataPlane, Order, ask, stream};
use crate::order::Queued;
use crate::shm::{ShmPool, ShmSlot};

/// Maximum data size in a message. A slot would cost more than it saves.
const INLINE: usize = 4096;

/// Chunks that an agent may send ahead without overwriting an unread one.
#[expect(clippy::cast_possible_truncation, reason = "it is four")]
const CREDIT: u32 = (FILE_PLACES / 2) as u32;

/// A slot that holds the data of a call.
///
/// The slot becomes free after the agent has read it. If the call is dropped before its answer, the
/// agent may not have read the slot yet.
struct Filled {
    agent: Peer,
    slot: Option<ShmSlot>,
}

impl Filled {
    fn with(lease: &AgentLease, slot: ShmSlot, data: &[u8]) -> Option<Self> {
        slot.write(data).ok()?;
        let agent = lease.agent.clone();
        let slot = Some(slot);
        Some(Self { agent, slot })
    }

    fn number(&self) -> u32 {
        self.slot.as_ref().map_or(u32::MAX, ShmSlot::number)
    }

    /// Returns the slot after the agent has answered.
    fn taken(mut self) -> Option<ShmSlot> {
        self.slot.take()
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        let Some(slot) = self.slot.take() else {
            return;
        };
        // The agent reads the slot when it handles the call, and has done so when it answers a
        // later call. Without a tokio runtime this cannot be awaited, so the slot is never used
        // again.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                let agent = self.agent.clone();
                runtime.spawn(async move {
                    let nothing = AgentHealthParams::default();
                    let _ = agent.call::<AgentHealth>(&nothing).await;
                    drop(slot);
                });
            }
            Err(_) => std::mem::forget(slot),
        }
    }
}

/// An action that can have its data in a slot.
trait Carries: Action + DataPlane {
    type Spooled: Action<Result = Self::Result>;

    fn data(params: &Self::Params) -> &Blob;

    fn upload(params: &Self::Params) -> Option<&UploadPiece>;

    /// Returns the parameters with this part of the data.
    fn part(params: &Self::Params, data: Blob, upload: Option<UploadPiece>) -> Self::Params;

    /// Returns the parameters of the variant with its data in a slot.
    fn spooled(asked: Self::Params, spool: u32, bytes: u64) -> <Self::Spooled as Action>::Params;
}

macro_rules! carries {
    ($($action:ty, $params:ident as $spooled:ty, $spooled_params:ident.$field:ident, $some:ident => $upload:expr, $set:expr;)*) => {$(
        impl Carries for $action {
            type Spooled = $spooled;

            fn data(params: &$params) -> &Blob {
                &params.data
            }

            fn upload($some: &$params) -> Option<&UploadPiece> {
                $upload
            }

            fn part(params: &$params, data: Blob, upload: Option<UploadPiece>) -> $params {
                let mut part = $params { data, ..params.clone() };
                let set: fn(&mut $params, Option<UploadPiece>) = $set;
                set(&mut part, upload);
                part
            }

            fn spooled(asked: $params, spool: u32, bytes: u64) -> $spooled_params {
                $spooled_params { $field: asked, spool, bytes }
            }
        }

        impl DataPlane for $action {
            fn box_id(params: &$params) -> &box_protocol::BoxId {
                &params.box_id
            }

            fn fits(chunk: &Self::Chunk) -> bool {
                match *chunk {}
            }

            fn ask(
                lease: &AgentLease,
                params: &$params,
                order: Queued,
            ) -> impl Future<Output = Result<Self::Result, BoxError>> + Send {
                put::<Self>(lease, params, order)
            }
        }
    )*};
}

carries! {
    FileWrite, FileWriteParams as AgentWrite, AgentWriteParams.write,
        params => params.upload.as_ref(), |params, upload| params.upload = upload;
    FileUnpack, FileUnpackParams as AgentUnpack, AgentUnpackParams.unpack,
        params => Some(&params.upload), |params, upload| {
            if let Some(upload) = upload {
                params.upload = upload;
            }
        };
}

/// Sends a call with its data in a slot.
///
/// An upload that is larger than a slot is sent in several calls.
async fn put<A: Carries>(
    lease: &AgentLease,
    params: &A::Params,
    order: Queued,
) -> Result<A::Result, BoxError>
where
    A::Params: Send + Sync,
{
    let data = A::data(params);
    let _room = lease.carry(data.len())?;
    // The call waits for its turn before it takes a slot, which other calls may need.
    order.comes().await;
    let most = usize::try_from(SPOOL_BYTES).unwrap_or(usize::MAX);
    let upload = A::upload(params).filter(|_| data.len() > most);
    let Some(whole) = upload else {
        return put_one::<A>(lease, params, data, order).await;
    };
    let pieces = data.len().div_ceil(most);
    let mut at = 0;
    for number in 1..=pieces {
        let end = data.len().min(at + most);
        let upload = UploadPiece {
            id: whole.id.clone(),
            offset: whole.offset.saturating_add(at as u64),
            done: whole.done && number == pieces,
            abort: whole.abort,
        };
        let piece = Blob(data.0.slice(at..end));
        let part = A::part(params, piece, Some(upload));
        let result = put_one::<A>(lease, &part, A::data(&part), Queued::none()).await?;
        if number == pieces {
            return Ok(result);
        }
        at = end;
    }
    Err(BoxError::internal("an upload of no pieces"))
}

async fn put_one<A: Carries>(
    lease: &AgentLease,
    params: &A::Params,
    data: &Blob,
    order: Queued,
) -> Result<A::Result, BoxError> {
    let worth = data.len() > INLINE && data.len() as u64 <= SPOOL_BYTES;
    let slots = lease.file_slots().filter(|_| worth);
    let slot = slots.and_then(ShmPool::to_fill);
    let Some(filled) = slot.and_then(|slot| Filled::with(lease, slot, data)) else {
        let _ahead = lease.go_ahead(data.len()).await;
        return ask::<A>(lease, params, order).await;
    };
    let upload = A::upload(params).cloned();
    let bare = A::part(params, Blob::default(), upload);
    let asked = A::spooled(bare, filled.number(), data.len() as u64);
    let asking = lease.agent.request::<A::Spooled>(&asked).send();
    let asked = lease.attended(asking).await?;
    drop(order);
    let answer = lease
        .attended(asked.map_err(agents_error)?.result())
        .await?;
    filled.taken();
    answer.map_err(agents_error)
}

macro_rules! streams {
    ($($action:ty as $spooled:ty, $params:ident.$field:ident, $asked:ident => $order:expr;)*) => {$(
        impl DataPlane for $action {
            fn box_id(params: &Self::Params) -> &box_protocol::BoxId {
                &params.box_id
            }

            fn fits(chunk: &FileChunk) -> bool {
                chunk.data.len() <= MAX_CHUNK_BYTES
            }

            fn place(chunk: &FileChunk) -> Option<(u64, usize)> {
                Some((chunk.offset, chunk.data.len()))
            }

            fn order($asked: &Self::Params) -> Order {
                $order
            }

            async fn stream(
                lease: &AgentLease,
                params: &Self::Params,
                order: Queued,
                to: mpsc::Sender<FileChunk>,
            ) -> Result<Self::Result, BoxError> {
                let Some(slot) = lease.file_slots().and_then(ShmPool::to_read) else {
                    return stream::<Self>(lease, params, order, to).await;
                };
                let asked = $params { $field: params.clone(), spool: slot.number() };
                order.comes().await;
                let request = lease.agent.request::<$spooled>(&asked).credit(CREDIT);
                let streaming = lease.attended(request.stream()).await?;
                let chunks = streaming.map_err(agents_error)?;
                drop(order);
                get::<$spooled>(lease, chunks, (&slot, Self::order(params)), to).await
            }
        }
    )*};
}

streams! {
    FileRead as AgentRead, AgentReadParams.read, params => match params.part {
        None => Order::from(0),
        Some(FilePart::Bytes { offset, .. }) => Order::from(offset),
        // Only the agent knows where a line begins.
        Some(FilePart::Lines { .. }) => Order::default(),
    };
    FilePack as AgentPack, AgentPackParams.pack, _params => Order::from(0);
}

/// Forwards the chunks that the agent writes to a slot.
async fn get<A: Action<Chunk = AgentFileChunk>>(
    lease: &AgentLease,
    mut chunks: Chunks<A>,
    (slot, mut order): (&ShmSlot, Order),
    to: mpsc::Sender<FileChunk>,
) -> Result<A::Result, BoxError> {
    let mut number = 0;
    let mut next = lease.attended(chunks.next()).await?;
    while let Some(chunk) = next {
        let FileChunk { mut offset, data } = match chunk.map_err(agents_error)? {
            AgentFileChunk::Inline(chunk) if FileRead::fits(&chunk) => chunk,
            AgentFileChunk::Spooled { offset, bytes } if bytes <= FILE_PIECE => {
                let piece = slot.read_at(number % FILE_PLACES * FILE_PIECE, bytes);
                let piece = piece.map_err(|_| {
                    BoxError::unavailable(agent_violation("told of what is not there"))
                })?;
                number += 1;
                let data = piece.into();
                FileChunk { offset, data }
            }
            _ => {
                return Err(BoxError::unavailable(agent_violation(
                    "sent too large a chunk",
                )));
            }
        };
        order.follows(offset, data.len())?;
        let mut rest = data.0;
        while !rest.is_empty() {
            let data = Blob(rest.split_to(rest.len().min(MAX_CHUNK_BYTES)));
            let length = data.len() as u64;
            if to.send(FileChunk { offset, data }).await.is_err() {
                return Err(BoxError::cancelled("the reader is gone"));
            }
            offset = offset.saturating_add(length);
        }
        next = chunks.next().await;
    }
    drop(to);
    chunks.finish().await.map_err(agents_error)
}
