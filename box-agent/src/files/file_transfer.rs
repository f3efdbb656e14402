//! File transfers through shared memory.
//!
//! Only the agent's main thread touches a slot. A cancelled step on a pool thread therefore neither overwrites nor
//! reads the data of the next call.

use std::sync::Arc;

use box_protocol::actions::{
    AgentFileChunk, AgentPack, AgentPackParams, AgentRead, AgentReadParams, AgentUnpack,
    AgentUnpackParams, AgentWrite, AgentWriteParams, FILE_PIECE, FILE_PLACES, FileChunk,
    FileStatInfo, FileTreeResult, SLOT_BYTES,
};
use box_protocol::{Blob, BoxError, MAX_CHUNK_BYTES};
use box_rpc::{Action, Call, ChunkSink, Handle, Router};

use super::{Files, needs_streaming, unpack, write};
use crate::shm::{ShmPool, ShmSlot};

/// The handlers share the files and the shared memory.
struct Handlers {
    files: Arc<Files>,
    shm: ShmPool,
}

pub(super) fn router(files: &Arc<Files>, shm: &ShmPool) -> Router {
    let handlers = Handlers {
        files: Arc::clone(files),
        shm: shm.clone(),
    };
    Router::builder(Arc::new(handlers))
        .on::<AgentRead>()
        .on::<AgentPack>()
        .on::<AgentWrite>()
        .on::<AgentUnpack>()
        .build()
}

impl Handlers {
    /// Copies the data of a new call out of its slot.
    ///
    /// The caller must do this before it awaits anything.
    fn data(&self, slot: u32, bytes: u64) -> Result<Blob, BoxError> {
        if bytes > SLOT_BYTES {
            return Err(BoxError::validation("bytes: larger than a slot"));
        }
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let data = self.shm.read(slot, length);
        let data =
            data.map_err(|_| BoxError::validation("slot: no such slot of the shared memory"))?;
        Ok(data.into())
    }
}

impl Handle<AgentWrite> for Handlers {
    async fn handle(
        &self,
        params: AgentWriteParams,
        _: Call<AgentWrite>,
    ) -> Result<FileStatInfo, BoxError> {
        let mut request = params.write;
        request.data = self.data(params.slot, params.bytes)?;
        self.files.check_user(request.user.as_deref())?;
        let _turn = self.files.turn(&request).await;
        self.files
            .await_earlier_pieces(request.upload.as_ref())
            .await;
        let step = move |step: &super::Step<'_>| write::write(step, &request);
        self.files.step(step).await
    }
}

impl Handle<AgentUnpack> for Handlers {
    async fn handle(
        &self,
        params: AgentUnpackParams,
        _: Call<AgentUnpack>,
    ) -> Result<FileTreeResult, BoxError> {
        let mut request = params.unpack;
        request.data = self.data(params.slot, params.bytes)?;
        self.files.check_user(request.user.as_deref())?;
        self.files.await_earlier_pieces(Some(&request.upload)).await;
        let step = move |step: &super::Step<'_>| unpack::unpack(step, &request);
        self.files.step(step).await
    }
}

impl Handle<AgentRead> for Handlers {
    async fn handle(
        &self,
        params: AgentReadParams,
        mut call: Call<AgentRead>,
    ) -> Result<FileStatInfo, BoxError> {
        self.files.check_user(params.read.user.as_deref())?;
        let sink = call.chunks().ok_or_else(needs_streaming)?;
        let sender = PieceSender::via_slot(self.shm.lease(params.slot), sink);
        self.files.read(params.read, sender).await
    }
}

impl Handle<AgentPack> for Handlers {
    async fn handle(
        &self,
        params: AgentPackParams,
        mut call: Call<AgentPack>,
    ) -> Result<FileTreeResult, BoxError> {
        self.files.check_user(params.pack.user.as_deref())?;
        let sink = call.chunks().ok_or_else(needs_streaming)?;
        let sender = PieceSender::via_slot(self.shm.lease(params.slot), sink);
        self.files.pack(params.pack, sender).await
    }
}

/// Sends pieces, through a slot if the call has one.
pub(super) struct PieceSender<'a, A: Action> {
    sink: &'a mut ChunkSink<A>,
    inline: fn(FileChunk) -> A::Chunk,
    slot: Option<SlotWriter<A>>,
}

/// A slot, the chunk that describes a piece in it, and the number of pieces so far.
struct SlotWriter<A: Action> {
    slot: ShmSlot,
    chunk: fn(u64, u64) -> A::Chunk,
    pieces: u64,
}

impl<'a, A: Action<Chunk = FileChunk>> PieceSender<'a, A> {
    /// Sends pieces in messages.
    pub(super) fn inline(sink: &'a mut ChunkSink<A>) -> Self {
        Self {
            sink,
            inline: std::convert::identity,
            slot: None,
        }
    }
}

impl<'a, A: Action<Chunk = AgentFileChunk>> PieceSender<'a, A> {
    fn via_slot(slot: Option<ShmSlot>, sink: &'a mut ChunkSink<A>) -> Self {
        Self {
            sink,
            inline: AgentFileChunk::Inline,
            slot: slot.map(|slot| SlotWriter {
                slot,
                chunk: |offset, bytes| AgentFileChunk::InSlot { offset, bytes },
                pieces: 0,
            }),
        }
    }
}

impl<A: Action> PieceSender<'_, A> {
    pub(super) async fn send(&mut self, piece: Option<(u64, Vec<u8>)>) -> Result<(), BoxError> {
        let Some((offset, bytes)) = piece else {
            return Ok(());
        };
        let max = usize::try_from(FILE_PIECE).unwrap_or(usize::MAX);
        for (offset, part) in split(offset, &bytes, max) {
            // If the shared memory is full, the data travels in messages.
            if let Some(slot) = &mut self.slot
                && slot.write(part).is_ok()
            {
                let chunk = (slot.chunk)(offset, part.len() as u64);
                self.sink.send(&chunk).await?;
                continue;
            }
            for (offset, data) in split(offset, part, MAX_CHUNK_BYTES) {
                let data = data.to_vec().into();
                let chunk = (self.inline)(FileChunk { offset, data });
                self.sink.send(&chunk).await?;
            }
        }
        Ok(())
    }
}

impl<A: Action> SlotWriter<A> {
    fn write(&mut self, part: &[u8]) -> std::io::Result<()> {
        self.slot
            .write_at(self.pieces % FILE_PLACES * FILE_PIECE, part)?;
        self.pieces += 1;
        Ok(())
    }
}

/// Splits bytes into parts of at most `max`, with their offsets.
fn split(offset: u64, bytes: &[u8], max: usize) -> impl Iterator<Item = (u64, &[u8])> {
    let at = (offset..).step_by(max);
    at.zip(bytes.chunks(max))
}
