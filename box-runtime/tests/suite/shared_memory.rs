//! Files through memory that is shared with an agent: a lying agent, and calls dropped half way.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use async_trait::async_trait;
use box_protocol::actions::{
    AgentFileChunk, AgentHealth, AgentHealthParams, AgentHealthResult, AgentRead, AgentReadParams,
    AgentWrite, AgentWriteParams, BoxCreateParams, FILE_PIECE, FILE_PLACES, FileChunk, FileKind,
    FileRead, FileReadParams, FileStatInfo, FileWrite, FileWriteParams, SLOT_BYTES, SLOTS,
};
use box_protocol::{BoxError, Code, MAX_CHUNK_BYTES, SpecDraft, UnixMs};
use box_rpc::{Call, Handle, Limits, Options, Router, Session};
use box_runtime::{
    Availability, Backend, BoxRuntime, Caller, RuntimeConfig, ShmPool, StartRequest, StartedBox,
};
use box_transports::queue;
use serde_json::json;
use tokio::sync::{Mutex, mpsc};
use uuid::Uuid;

use super::fixture::{seconds, settle};

/// A backend with agents that share memory slots. The path of a call selects the behaviour.
#[derive(Clone)]
struct SharedMemoryBackend(Arc<Shared>);

struct Shared {
    slots: File,
    agents: Mutex<Vec<Session>>,
    /// The slots of the received calls.
    used: Mutex<Vec<u32>>,
}

#[async_trait]
impl Backend for SharedMemoryBackend {
    fn name(&self) -> &'static str {
        "slotted"
    }

    async fn availability(&self) -> Availability {
        Availability::full()
    }

    async fn start(&self, _: StartRequest<'_>) -> Result<StartedBox, BoxError> {
        let (near, far) = queue::pair(16);
        let router = Router::builder(Arc::new(self.clone()))
            .on::<AgentHealth>()
            .on::<AgentRead>()
            .on::<AgentWrite>()
            .build();
        let mut limits = Limits::in_process();
        limits.in_flight = 256;
        let options = Options {
            limits,
            ..Options::new(Caller::Local)
        };
        self.0
            .agents
            .lock()
            .await
            .push(Session::start(far, router, options));
        let slots = self.0.slots.try_clone().unwrap();
        Ok(StartedBox::new("slotted", near).with_shm(ShmPool::new(slots)))
    }

    async fn alive(&self, _: Uuid) -> bool {
        true
    }

    async fn stop(&self, _: Uuid) -> Result<(), BoxError> {
        Ok(())
    }
}

impl Handle<AgentHealth> for SharedMemoryBackend {
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

fn info(path: String, size: u64) -> FileStatInfo {
    FileStatInfo {
        path,
        kind: FileKind::File,
        size,
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

impl Handle<AgentRead> for SharedMemoryBackend {
    async fn handle(
        &self,
        params: AgentReadParams,
        mut call: Call<AgentRead>,
    ) -> Result<FileStatInfo, BoxError> {
        self.0.used.lock().await.push(params.slot);
        let path = params.read.path;
        let in_slot = |bytes| AgentFileChunk::InSlot { offset: 0, bytes };
        let lie = match path.as_str() {
            "/longer" => Some(in_slot(FILE_PIECE + 1)),
            "/endless" => Some(in_slot(u64::MAX)),
            "/inline" => Some(AgentFileChunk::Inline(FileChunk {
                offset: 0,
                data: vec![0; MAX_CHUNK_BYTES + 1].into(),
            })),
            _ => None,
        };
        let sink = call.chunks().unwrap();
        if let Some(lie) = lie {
            sink.send(&lie).await?;
            return Ok(info(path, 0));
        }
        let at = u64::from(params.slot) * SLOT_BYTES;
        for piece in 0..4 {
            let bytes = vec![b'a' + u8::try_from(piece).unwrap(); 8192];
            let place = at + piece % FILE_PLACES * FILE_PIECE;
            self.0.slots.write_all_at(&bytes, place).unwrap();
            let chunk = AgentFileChunk::InSlot {
                offset: piece * 8192,
                bytes: 8192,
            };
            sink.send(&chunk).await?;
            if path == "/stuck" {
                tokio::time::sleep(seconds(1000)).await;
            }
        }
        Ok(info(path, 4 * 8192))
    }
}

impl Handle<AgentWrite> for SharedMemoryBackend {
    async fn handle(
        &self,
        params: AgentWriteParams,
        _: Call<AgentWrite>,
    ) -> Result<FileStatInfo, BoxError> {
        self.0.used.lock().await.push(params.slot);
        let mut data = vec![0; usize::try_from(params.bytes).unwrap()];
        let at = u64::from(params.slot) * SLOT_BYTES;
        self.0.slots.read_exact_at(&mut data, at).unwrap();
        let path = params.write.path;
        if path == "/stuck" {
            tokio::time::sleep(seconds(1000)).await;
        }
        let first = data[0];
        assert!(data.iter().all(|byte| *byte == first), "two calls' bytes");
        Ok(info(path, params.bytes))
    }
}

async fn slotted() -> (BoxRuntime, SharedMemoryBackend) {
    let slots = tempfile::tempfile().unwrap();
    slots.set_len(u64::from(SLOTS) * SLOT_BYTES).unwrap();
    let backend = SharedMemoryBackend(Arc::new(Shared {
        slots,
        agents: Mutex::default(),
        used: Mutex::default(),
    }));
    let runtime = BoxRuntime::start(RuntimeConfig::with(backend.clone()));
    let params = BoxCreateParams::new(SpecDraft::new("s"));
    runtime.create(&Caller::Local, params).await.unwrap();
    (runtime, backend)
}

async fn read(runtime: &BoxRuntime, path: &str) -> (Result<FileStatInfo, BoxError>, Vec<u8>) {
    let params = json!({"box_id": "s", "path": path});
    let params: FileReadParams = serde_json::from_value(params).unwrap();
    let (to, mut chunks) = mpsc::channel(2);
    let caller = Caller::Local;
    let reading = runtime.forward_streamed::<FileRead>(&caller, &params, to);
    tokio::join!(reading, async {
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.recv().await {
            bytes.extend_from_slice(&chunk.data);
        }
        bytes
    })
}

async fn write(runtime: &BoxRuntime, path: &str, byte: u8) -> Result<FileStatInfo, BoxError> {
    let params = json!({"box_id": "s", "path": path, "data": ""});
    let mut params: FileWriteParams = serde_json::from_value(params).unwrap();
    params.data = vec![byte; 64 << 10].into();
    let caller = Caller::Local;
    runtime.forward::<FileWrite>(&caller, &params).await
}

#[tokio::test(start_paused = true)]
async fn invalid_sizes_from_an_agent_are_refused() {
    let (runtime, _backend) = slotted().await;
    for path in ["/longer", "/endless", "/inline"] {
        let (answer, bytes) = read(&runtime, path).await;
        assert_eq!(answer.unwrap_err().code(), Code::Unavailable, "{path}");
        assert!(bytes.is_empty(), "{path}");
    }
    let (answer, bytes) = read(&runtime, "/fine").await;
    assert_eq!(answer.unwrap().size, 4 * 8192);
    let expected: Vec<u8> = b"abcd".iter().flat_map(|byte| [*byte; 8192]).collect();
    assert!(bytes == expected, "slots of other calls block no call");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_call_frees_its_slot() {
    let (runtime, backend) = slotted().await;
    for round in 0..3 * SLOTS {
        tokio::select! {
            biased;
            _ = read(&runtime, "/stuck") => panic!("the call does not end"),
            _ = write(&runtime, "/stuck", 1) => panic!("the call does not end"),
            () = tokio::time::sleep(seconds(1)) => {}
        }
        settle().await;
        let used = std::mem::take(&mut *backend.0.used.lock().await);
        assert_eq!(used.len(), 2, "round {round}: both had a slot: {used:?}");
        let written = write(&runtime, "/fine", 2).await.unwrap();
        assert_eq!(written.size, 64 << 10);
        let (_, bytes) = read(&runtime, "/fine").await;
        assert_eq!(bytes.len(), 4 * 8192);
        let used = std::mem::take(&mut *backend.0.used.lock().await);
        assert_eq!(used.len(), 2, "round {round}: they had one again: {used:?}");
    }
}
