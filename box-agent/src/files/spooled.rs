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

use super::pack::Packing;
use super::read::Reading;
use super::{Files, unpack, write};
use crate::slot::{Lease, Slots};

/// The files of the box, and the slots.
struct Spooled {
    files: Arc<Files>,
    slots: Slots,
}

pub(super) fn router(files: &Arc<Files>, slots: &Slots) -> Router {
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
        let (files, asked) = (&self.files, params.read);
        files.check_user(asked.user.as_deref())?;
        let mut told = Telling::new(self.slots.lease(params.spool), call.chunks())?;
        let mut reading = files.step(move |step| Reading::open(step, &asked)).await?;
        let mut piece = None;
        loop {
            // The next piece is read while the one before is told.
            let next = files.step(move |_| {
                let next = reading.next()?;
                Ok((reading, next))
            });
            let (sent, next) = tokio::join!(told.tell(piece), next);
            sent?;
            (reading, piece) = next?;
            if piece.is_none() {
                return Ok(reading.info);
            }
        }
    }
}

impl Handle<AgentPack> for Spooled {
    async fn handle(
        &self,
        params: AgentPackParams,
        mut call: Call<AgentPack>,
    ) -> Result<FileTreeResult, BoxError> {
        let (files, asked) = (&self.files, params.pack);
        files.check_user(asked.user.as_deref())?;
        let mut told = Telling::new(self.slots.lease(params.spool), call.chunks())?;
        let mut packing = files.step(move |step| Packing::open(step, &asked)).await?;
        let (mut piece, mut offset) = (None, 0);
        loop {
            let next = files.step(move |step| {
                let bytes = packing.next(step)?;
                Ok((packing, bytes))
            });
            let (sent, next) = tokio::join!(told.tell(piece), next);
            sent?;
            let (back, bytes) = next?;
            packing = back;
            if bytes.is_empty() {
                return Ok(packing.total());
            }
            let length = bytes.len() as u64;
            piece = Some((offset, bytes));
            offset += length;
        }
    }
}

/// Tells of pieces, through a slot if there is one.
struct Telling<'a, A: Action> {
    slot: Option<Lease>,
    sink: &'a mut ChunkSink<A>,
    /// Pieces that went through the slot.
    told: u64,
}

impl<'a, A: Action<Chunk = AgentFileChunk>> Telling<'a, A> {
    fn new(slot: Option<Lease>, sink: Option<&'a mut ChunkSink<A>>) -> Result<Self, BoxError> {
        let sink = sink.ok_or_else(|| BoxError::validation("files only come in chunks"))?;
        let told = 0;
        Ok(Self { slot, sink, told })
    }

    async fn tell(&mut self, piece: Option<(u64, Vec<u8>)>) -> Result<(), BoxError> {
        let Some((offset, bytes)) = piece else {
            return Ok(());
        };
        let most = usize::try_from(FILE_PIECE).unwrap_or(usize::MAX);
        for (offset, part) in cut(offset, &bytes, most) {
            let place = self.told % FILE_PLACES * FILE_PIECE;
            let slot = self.slot.as_ref();
            // Without memory for the slot it travels in messages.
            if slot.is_some_and(|slot| slot.write_at(place, part).is_ok()) {
                self.told += 1;
                let bytes = part.len() as u64;
                let chunk = AgentFileChunk::Spooled { offset, bytes };
                self.sink.send(&chunk).await?;
                continue;
            }
            for (offset, data) in cut(offset, part, MAX_CHUNK_BYTES) {
                let data = data.to_vec().into();
                let chunk = AgentFileChunk::Inline(FileChunk { offset, data });
                self.sink.send(&chunk).await?;
            }
        }
        Ok(())
    }
}

/// Pieces of so many bytes at most, and where each begins.
fn cut(offset: u64, bytes: &[u8], most: usize) -> impl Iterator<Item = (u64, &[u8])> {
    let at = (offset..).step_by(most);
    at.zip(bytes.chunks(most))
}
