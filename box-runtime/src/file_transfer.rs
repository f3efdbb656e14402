//! Transfers files between the runtime and an agent.
//!
//! The data passes through a slot of shared memory if one is free and the agent supports slots.
//! Otherwise the data travels in messages.

use std::future::Future;

use box_protocol::actions::{
    AgentFileChunk, AgentHealth, AgentHealthParams, AgentPack, AgentPackParams, AgentRead,
    AgentReadParams, AgentUnpack, AgentUnpackParams, AgentWrite, AgentWriteParams, FILE_PIECE,
    FILE_PLACES, FileChunk, FilePack, FilePart, FileRead, FileUnpack, FileUnpackParams, FileWrite,
    FileWriteParams, SLOT_BYTES, UploadPiece,
};
use box_protocol::{Blob, BoxError, MAX_CHUNK_BYTES};
use box_rpc::{Action, Chunks, Peer};
use futures::StreamExt as _;
use tokio::sync::mpsc;

use crate::box_actor::agent_access::AgentLease;
use crate::box_actor::{agent_violation, agents_error};
use crate::call_order::OrderTicket;
use crate::data_plane::{DataPlane, NextOffset, call_agent, stream_from_agent};
use crate::shm::{ShmPool, ShmSlot};

/// Maximum data size in a message. A slot would cost more than it saves.
const INLINE_BYTES: usize = 4096;

/// Chunks that an agent may send ahead without overwriting an unread one.
#[expect(clippy::cast_possible_truncation, reason = "it is four")]
const CREDIT: u32 = (FILE_PLACES / 2) as u32;

/// A slot that holds the data of a call.
///
/// The slot becomes free after the agent has read it. If the call is dropped before its answer, the
/// agent may not have read the slot yet.
struct FilledSlot {
    agent: Peer,
    slot: Option<ShmSlot>,
}

impl FilledSlot {
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
    fn release(mut self) -> Option<ShmSlot> {
        self.slot.take()
    }
}

impl Drop for FilledSlot {
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
trait Upload: Action + DataPlane {
    type ViaShm: Action<Result = Self::Result>;

    fn data(params: &Self::Params) -> &Blob;

    fn upload(params: &Self::Params) -> Option<&UploadPiece>;

    /// Returns the parameters with this part of the data.
    fn part(params: &Self::Params, data: Blob, upload: Option<UploadPiece>) -> Self::Params;

    /// Returns the parameters of the variant with its data in a slot.
    fn via_shm(params: Self::Params, slot: u32, bytes: u64) -> <Self::ViaShm as Action>::Params;
}

macro_rules! uploads {
    ($($action:ty, $params:ident as $via_shm:ty, $via_shm_params:ident.$field:ident, $some:ident => $upload:expr, $set:expr;)*) => {$(
        impl Upload for $action {
            type ViaShm = $via_shm;

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

            fn via_shm(params: $params, slot: u32, bytes: u64) -> $via_shm_params {
                $via_shm_params { $field: params, slot, bytes }
            }
        }

        impl DataPlane for $action {
            fn box_id(params: &$params) -> &box_protocol::BoxId {
                &params.box_id
            }

            fn is_within_limit(chunk: &Self::Chunk) -> bool {
                match *chunk {}
            }

            fn call(
                lease: &AgentLease,
                params: &$params,
                ticket: OrderTicket,
            ) -> impl Future<Output = Result<Self::Result, BoxError>> + Send {
                upload::<Self>(lease, params, ticket)
            }
        }
    )*};
}

uploads! {
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
async fn upload<A: Upload>(
    lease: &AgentLease,
    params: &A::Params,
    ticket: OrderTicket,
) -> Result<A::Result, BoxError>
where
    A::Params: Send + Sync,
{
    let data = A::data(params);
    let _reserved = lease.reserve(data.len())?;
    // The call waits for its turn before it takes a slot, which other calls may need.
    ticket.wait_turn().await;
    let max = usize::try_from(SLOT_BYTES).unwrap_or(usize::MAX);
    let upload = A::upload(params).filter(|_| data.len() > max);
    let Some(whole) = upload else {
        return upload_part::<A>(lease, params, data, ticket).await;
    };
    let pieces = data.len().div_ceil(max);
    let mut at = 0;
    for number in 1..=pieces {
        let end = data.len().min(at + max);
        let upload = UploadPiece {
            id: whole.id.clone(),
            offset: whole.offset.saturating_add(at as u64),
            done: whole.done && number == pieces,
            abort: whole.abort,
        };
        let piece = Blob(data.0.slice(at..end));
        let part = A::part(params, piece, Some(upload));
        let result = upload_part::<A>(lease, &part, A::data(&part), OrderTicket::none()).await?;
        if number == pieces {
            return Ok(result);
        }
        at = end;
    }
    Err(BoxError::internal("an upload has no pieces"))
}

async fn upload_part<A: Upload>(
    lease: &AgentLease,
    params: &A::Params,
    data: &Blob,
    ticket: OrderTicket,
) -> Result<A::Result, BoxError> {
    let is_worth_it = data.len() > INLINE_BYTES && data.len() as u64 <= SLOT_BYTES;
    let slots = lease.file_shm().filter(|_| is_worth_it);
    let slot = slots.and_then(ShmPool::to_fill);
    let Some(filled) = slot.and_then(|slot| FilledSlot::with(lease, slot, data)) else {
        let _permit = lease.wait_to_send(data.len()).await;
        return call_agent::<A>(lease, params, ticket).await;
    };
    let upload = A::upload(params).cloned();
    let bare = A::part(params, Blob::default(), upload);
    let params = A::via_shm(bare, filled.number(), data.len() as u64);
    let sending = lease.agent.request::<A::ViaShm>(&params).send();
    let sent = lease.with_health_checks(sending).await?;
    drop(ticket);
    let answer = lease
        .with_health_checks(sent.map_err(agents_error)?.result())
        .await?;
    filled.release();
    answer.map_err(agents_error)
}

macro_rules! downloads {
    ($($action:ty as $via_shm:ty, $params:ident.$field:ident, $asked:ident => $first_offset:expr;)*) => {$(
        impl DataPlane for $action {
            fn box_id(params: &Self::Params) -> &box_protocol::BoxId {
                &params.box_id
            }

            fn is_within_limit(chunk: &FileChunk) -> bool {
                chunk.data.len() <= MAX_CHUNK_BYTES
            }

            fn byte_range(chunk: &FileChunk) -> Option<(u64, usize)> {
                Some((chunk.offset, chunk.data.len()))
            }

            fn first_offset($asked: &Self::Params) -> NextOffset {
                $first_offset
            }

            async fn stream(
                lease: &AgentLease,
                params: &Self::Params,
                ticket: OrderTicket,
                to: mpsc::Sender<FileChunk>,
            ) -> Result<Self::Result, BoxError> {
                let Some(slot) = lease.file_shm().and_then(ShmPool::to_read) else {
                    return stream_from_agent::<Self>(lease, params, ticket, to).await;
                };
                let via_shm = $params { $field: params.clone(), slot: slot.number() };
                ticket.wait_turn().await;
                let request = lease.agent.request::<$via_shm>(&via_shm).credit(CREDIT);
                let streaming = lease.with_health_checks(request.stream()).await?;
                let chunks = streaming.map_err(agents_error)?;
                drop(ticket);
                forward_chunks::<$via_shm>(lease, chunks, (&slot, Self::first_offset(params)), to).await
            }
        }
    )*};
}

downloads! {
    FileRead as AgentRead, AgentReadParams.read, params => match params.part {
        None => NextOffset::from(0),
        Some(FilePart::Bytes { offset, .. }) => NextOffset::from(offset),
        // Only the agent knows where a line begins.
        Some(FilePart::Lines { .. }) => NextOffset::default(),
    };
    FilePack as AgentPack, AgentPackParams.pack, _params => NextOffset::from(0);
}

/// Forwards the chunks that the agent writes to a slot.
async fn forward_chunks<A: Action<Chunk = AgentFileChunk>>(
    lease: &AgentLease,
    mut chunks: Chunks<A>,
    (slot, mut next_offset): (&ShmSlot, NextOffset),
    to: mpsc::Sender<FileChunk>,
) -> Result<A::Result, BoxError> {
    let mut number = 0;
    let mut next = lease.with_health_checks(chunks.next()).await?;
    while let Some(chunk) = next {
        let chunk = chunk.map_err(agents_error)?;
        let FileChunk { mut offset, data } = checked(chunk, slot, &mut number, &mut next_offset)?;
        let mut rest = data.0;
        while !rest.is_empty() {
            let data = Blob(rest.split_to(rest.len().min(MAX_CHUNK_BYTES)));
            let length = data.len() as u64;
            if to.send(FileChunk { offset, data }).await.is_err() {
                return Err(BoxError::cancelled("the reader has disconnected"));
            }
            offset = offset.saturating_add(length);
        }
        next = chunks.next().await;
    }
    drop(to);
    chunks.finish().await.map_err(agents_error)
}

/// Returns the data of a chunk, if its size and its offset are allowed.
///
/// `number` counts the chunks in the slot.
pub(crate) fn checked(
    chunk: AgentFileChunk,
    slot: &ShmSlot,
    number: &mut u64,
    next_offset: &mut NextOffset,
) -> Result<FileChunk, BoxError> {
    let chunk = match chunk {
        AgentFileChunk::Inline(chunk) if FileRead::is_within_limit(&chunk) => chunk,
        AgentFileChunk::InSlot { offset, bytes } if bytes <= FILE_PIECE => {
            let piece = slot.read_at(*number % FILE_PLACES * FILE_PIECE, bytes);
            let piece = piece.map_err(|_| {
                BoxError::unavailable(agent_violation("referred to data outside its slot"))
            })?;
            *number += 1;
            let data = piece.into();
            FileChunk { offset, data }
        }
        _ => {
            return Err(BoxError::unavailable(agent_violation(
                "sent a chunk beyond the size limit",
            )));
        }
    };
    next_offset.advance(chunk.offset, chunk.data.len())?;
    Ok(chunk)
}
