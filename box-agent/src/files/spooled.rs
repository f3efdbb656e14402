//! Files whose bytes are in a slot. The slot is touched by the agent's own thread only: what a call that was dropped left to
//! the threads of the pool never writes over what the next call has there, and never reads it.

use std::sync::Arc;

use box_protocol::actions::{
    AgentFileChunk, AgentPack, AgentPackParams, AgentRead, AgentReadParams, AgentUnpack,
    AgentUnpackParams, AgentWrite, AgentWriteParams, FILE_PIECE, FILE_PLACES, FileChunk,
    FileStatInfo, FileTreeResult, SPOOL_BYTES,
};
use box_protocol::{Blob, BoxError, MAX_CHUNK_BYTES};
use box_rpc::{Action, Call, ChunkSink, Handle, Router};

use super::{Files, only_in_chunks, unpack, write};
use crate::shm::{ShmPool, ShmSlot};

/// The files of the box, and the slots.
struct Spooled {
    files: Arc<Files>,
    slots: ShmPool,
}

pub(super) fn router(files: &Arc<Files>, slots: &ShmPool) -> Router {
    let spooled = Spooled {
        files: Arc::clone(files),
        slots: slots.clone(),
    };
    Router::builder(Arc::new(spooled))
        .on::<AgentRead>()
        .on::<AgentPack>()
        .on::<AgentWrite>()
        .on::<AgentUnpack>()
        .build()
}

impl Spooled {
    /// What was put into a slot for a call that begins. To be called before anything is waited for.
    fn data(&self, spool: u32, bytes: u64) -> Result<Blob, BoxError> {
        if bytes > SPOOL_BYTES {
            return Err(BoxError::validation("bytes: more than a slot has"));
        }
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let data = self.slots.read(spool, length);
        let data = data.map_err(|_| BoxError::validation("spool: no such slot"))?;
        Ok(data.into())
    }
}

impl Handle<AgentWrite> for Spooled {
    async fn handle(
        &self,
        params: AgentWriteParams,
        _: Call<AgentWrite>,
    ) -> Result<FileStatInfo, BoxError> {
        let mut asked = params.write;
        asked.data = self.data(params.spool, params.bytes)?;
        self.files.check_user(asked.user.as_deref())?;
        let _turn = self.files.turn(&asked).await;
        self.files.begin_piece(asked.upload.as_ref()).await;
        let step = move |step: &super::Step<'_>| write::write(step, &asked);
        self.files.step(step).await
    }
}

impl Handle<AgentUnpack> for Spooled {
    async fn handle(
        &self,
        params: AgentUnpackParams,
        _: Call<AgentUnpack>,
    ) -> Result<FileTreeResult, BoxError> {
        let mut asked = params.unpack;
        asked.data = self.data(params.spool, params.bytes)?;
        self.files.check_user(asked.user.as_deref())?;
        self.files.begin_piece(Some(&asked.upload)).await;
        let step = move |step: &super::Step<'_>| unpack::unpack(step, &asked);
        self.files.step(step).await
    }
}

impl Handle<AgentRead> for Spooled {
    async fn handle(
        &self,
        params: AgentReadParams,
        mut call: Call<AgentRead>,
    ) -> Result<FileStatInfo, BoxError> {
        self.files.check_user(params.read.user.as_deref())?;
        let sink = call.chunks().ok_or_else(only_in_chunks)?;
        let told = Telling::spooled(self.slots.lease(params.spool), sink);
        self.files.read(params.read, told).await
    }
}

impl Handle<AgentPack> for Spooled {
    async fn handle(
        &self,
        params: AgentPackParams,
        mut call: Call<AgentPack>,
    ) -> Result<FileTreeResult, BoxError> {
        self.files.check_user(params.pack.user.as_deref())?;
        let sink = call.chunks().ok_or_else(only_in_chunks)?;
        let told = Telling::spooled(self.slots.lease(params.spool), sink);
        self.files.pack(params.pack, told).await
    }
}

/// Tells of pieces, through a slot if there is one.
pub(super) struct Telling<'a, A: Action> {
    sink: &'a mut ChunkSink<A>,
    inline: fn(FileChunk) -> A::Chunk,
    spool: Option<Spool<A>>,
}

/// A slot, how a piece in it is told of, and how many went through it.
struct Spool<A: Action> {
    slot: ShmSlot,
    chunk: fn(u64, u64) -> A::Chunk,
    told: u64,
}

impl<'a, A: Action<Chunk = FileChunk>> Telling<'a, A> {
    /// In messages.
    pub(super) fn inline(sink: &'a mut ChunkSink<A>) -> Self {
        Self {
            sink,
            inline: std::convert::identity,
            spool: None,
        }
    }
}

impl<'a, A: Action<Chunk = AgentFileChunk>> Telling<'a, A> {
    fn spooled(slot: Option<ShmSlot>, sink: &'a mut ChunkSink<A>) -> Self {
        Self {
            sink,
            inline: AgentFileChunk::Inline,
            spool: slot.map(|slot| Spool {
                slot,
                chunk: |offset, bytes| AgentFileChunk::Spooled { offset, bytes },
                told: 0,
            }),
        }
    }
}

impl<A: Action> Telling<'_, A> {
    pub(super) async fn tell(&mut self, piece: Option<(u64, Vec<u8>)>) -> Result<(), BoxError> {
        let Some((offset, bytes)) = piece else {
            return Ok(());
        };
        let most = usize::try_from(FILE_PIECE).unwrap_or(usize::MAX);
        for (offset, part) in cut(offset, &bytes, most) {
            // Without memory for the slot it travels in messages.
            if let Some(spool) = &mut self.spool
                && spool.put(part).is_ok()
            {
                let chunk = (spool.chunk)(offset, part.len() as u64);
                self.sink.send(&chunk).await?;
                continue;
            }
            for (offset, data) in cut(offset, part, MAX_CHUNK_BYTES) {
                let data = data.to_vec().into();
                let chunk = (self.inline)(FileChunk { offset, data });
                self.sink.send(&chunk).await?;
            }
        }
        Ok(())
    }
}

impl<A: Action> Spool<A> {
    fn put(&mut self, part: &[u8]) -> std::io::Result<()> {
        self.slot
            .write_at(self.told % FILE_PLACES * FILE_PIECE, part)?;
        self.told += 1;
        Ok(())
    }
}

/// Pieces of so many bytes at most, and where each begins.
fn cut(offset: u64, bytes: &[u8], most: usize) -> impl Iterator<Item = (u64, &[u8])> {
    let at = (offset..).step_by(most);
    at.zip(bytes.chunks(most))
}
