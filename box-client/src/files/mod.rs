//! Access to the files of a box, through its agent.

mod contents;
mod entries;
mod reader;
mod trees;
mod writer;

use std::time::Duration;

use box_protocol::BoxId;
use box_rpc::{Action, CallError, Chunks};
use box_transports::reconnecting::Remote;
use futures::StreamExt as _;

use crate::error::ClientError;

pub use reader::FileReader;
pub use writer::FileWriter;

/// Maximum size of a file that is read into memory.
///
/// [`reader`](Files::reader) reads larger files.
pub const MAX_READ_BYTES: u64 = 256 * 1024 * 1024;

/// Size of the pieces in which larger files are uploaded.
pub const PIECE_BYTES: usize = 1024 * 1024;

/// The files of a box. Paths are absolute.
#[derive(Debug, Clone)]
pub struct Files {
    server: Remote,
    box_id: BoxId,
    timeout: Option<Duration>,
}

impl Files {
    pub(crate) fn new(server: Remote, box_id: BoxId) -> Self {
        Self {
            server,
            box_id,
            timeout: None,
        }
    }

    /// Sets the timeout of each answer and of each chunk of a read file; unlimited unless set.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    fn box_id(&self) -> BoxId {
        self.box_id.clone()
    }

    async fn call<A: Action>(&self, params: &A::Params) -> Result<A::Result, ClientError> {
        let peer = self.server.peer()?;
        let mut request = peer.request::<A>(params);
        if let Some(limit) = self.timeout {
            request = request.deadline(limit);
        }
        Ok(request.call().await?)
    }

    async fn next<A: Action>(
        &self,
        chunks: &mut Chunks<A>,
    ) -> Result<Option<A::Chunk>, ClientError> {
        let next = match self.timeout {
            None => chunks.next().await,
            Some(limit) => tokio::time::timeout(limit, chunks.next())
                .await
                .map_err(|_| CallError::Timeout(limit))?,
        };
        Ok(next.transpose()?)
    }
}
