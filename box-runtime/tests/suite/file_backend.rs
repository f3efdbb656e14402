//! A backend with agents that serve three file actions, as the path of a call demands.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use box_protocol::actions::{
    AgentHealth, AgentHealthParams, AgentHealthResult, FileChunk, FileKind, FileRead,
    FileReadParams, FileStat, FileStatInfo, FileStatParams, FileStatResult, FileWrite,
    FileWriteParams,
};
use box_protocol::error::Detail;
use box_protocol::{BoxError, MAX_CHUNK_BYTES, UnixMs};
use box_rpc::{Call, Handle, Limits, Options, Router, Session};
use box_runtime::{Availability, Backend, Caller, StartRequest, StartedBox};
use box_transports::queue;
use tokio::sync::Mutex;
use tokio::time::sleep;
use uuid::Uuid;

use super::fixture::seconds;

/// A backend with agents that serve two file actions. The path of a call selects the behaviour.
#[derive(Clone, Default)]
pub(super) struct FileBackend(pub(super) Arc<Shared>);

#[derive(Default)]
pub(super) struct Shared {
    pub(super) start_takes: Duration,
    pub(super) start_fails: bool,
    pub(super) agents: Mutex<Vec<Session>>,
    /// Calls that an agent is serving.
    pub(super) running: AtomicUsize,
}

#[async_trait]
impl Backend for FileBackend {
    fn name(&self) -> &'static str {
        "inner"
    }

    async fn availability(&self) -> Availability {
        Availability::full()
    }

    async fn start(&self, _: StartRequest<'_>) -> Result<StartedBox, BoxError> {
        sleep(self.0.start_takes).await;
        if self.0.start_fails {
            return Err(BoxError::unavailable("no box today"));
        }
        let (near, far) = queue::pair(16);
        let router = Router::builder(Arc::new(self.clone()))
            .on::<AgentHealth>()
            .on::<FileStat>()
            .on::<FileRead>()
            .on::<FileWrite>()
            .build();
        let mut limits = Limits::in_process();
        limits.in_flight = 256;
        let options = Options {
            limits,
            ..Options::new(Caller::Local)
        };
        let agent = Session::start(far, router, options);
        self.0.agents.lock().await.push(agent);
        Ok(StartedBox::new("inner", near))
    }

    async fn alive(&self, _: Uuid) -> bool {
        true
    }

    async fn stop(&self, _: Uuid) -> Result<(), BoxError> {
        Ok(())
    }
}

impl Handle<AgentHealth> for FileBackend {
    async fn handle(
        &self,
        _: AgentHealthParams,
        _: Call<AgentHealth>,
    ) -> Result<AgentHealthResult, BoxError> {
        Ok(AgentHealthResult {
            contract: 2,
            ..AgentHealthResult::default()
        })
    }
}

/// Counts a call while it is alive.
struct Running<'a>(&'a AtomicUsize);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Handle<FileStat> for FileBackend {
    async fn handle(
        &self,
        params: FileStatParams,
        _: Call<FileStat>,
    ) -> Result<FileStatResult, BoxError> {
        self.0.running.fetch_add(1, Ordering::Relaxed);
        let _running = Running(&self.0.running);
        match params.paths[0].as_str() {
            "/slow" => sleep(seconds(1000)).await,
            "/refused" => {
                return Err(BoxError::not_found("no\nsuch file").with_detail(&Detail {
                    errno: Some("ENOENT".into()),
                    limit: Some("of the agent's own making".into()),
                    ..Detail::default()
                }));
            }
            "/rude" => {
                return Err(BoxError::conflict("x".repeat(5000)).with_detail(&Detail {
                    errno: Some("E'; DROP TABLE".into()),
                    ..Detail::default()
                }));
            }
            _ => {}
        }
        Ok(FileStatResult {
            paths: [].into_iter().collect(),
        })
    }
}

impl Handle<FileWrite> for FileBackend {
    async fn handle(
        &self,
        params: FileWriteParams,
        _: Call<FileWrite>,
    ) -> Result<FileStatInfo, BoxError> {
        if params.path == "/slow" {
            sleep(seconds(1000)).await;
        }
        Ok(info(params.path))
    }
}

impl Handle<FileRead> for FileBackend {
    async fn handle(
        &self,
        params: FileReadParams,
        mut call: Call<FileRead>,
    ) -> Result<FileStatInfo, BoxError> {
        self.0.running.fetch_add(1, Ordering::Relaxed);
        let _running = Running(&self.0.running);
        let size = if params.path == "/large" {
            MAX_CHUNK_BYTES + 1
        } else {
            4
        };
        let pieces = if params.path == "/endless" {
            u64::MAX
        } else {
            100
        };
        if let Some(sink) = call.chunks() {
            for piece in 0..pieces {
                let offset = piece * size as u64;
                let data = vec![b'x'; size].into();
                sink.send(&FileChunk { offset, data }).await?;
            }
        }
        Ok(info(params.path))
    }
}

fn info(path: String) -> FileStatInfo {
    FileStatInfo {
        path,
        kind: FileKind::File,
        size: 400,
        mode: 0o644,
        owner: "box".into(),
        group: "box".into(),
        uid: 0,
        gid: 0,
        modified_at: UnixMs(0),
        created_at: None,
        etag: "e".into(),
        target: None,
        xattrs: std::collections::BTreeMap::new(),
    }
}
