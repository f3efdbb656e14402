//! A scripted server behind a link. The test can end each of its connections.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use box_client::{BoxClient, BoxError, BoxHandle, Exit};
use box_protocol::actions::{
    BoxGet, BoxGetParams, BoxGetResult, CommandAttach, CommandAttachParams, CommandAttachResult,
    CommandChunk, CommandGet, CommandInput, CommandInputParams, CommandInputResult, CommandKey,
    CommandKill, CommandKillParams, CommandKillResult, CommandStart, CommandStartParams,
    CommandStartResult, FileChunk, FileList, FileListParams, FileListResult, FileRead,
    FileReadParams, FileStatInfo, FileWrite, FileWriteParams, ReadEnd, ReadWhy, ShellCreate,
    ShellCreateParams, ShellCreateResult, ShellDelete, ShellDeleteParams, ShellDeleteResult,
    ShellRun, ShellRunParams,
};
use box_protocol::{CommandInfo, PerStream};
use box_rpc::{
    Action, Call, Caller, Connection, ConnectionError, Handle, Limits, Options, Router, Session,
};
use box_transports::queue;
use box_transports::reconnecting::{Connector, ReconnectOptions, Reconnecting};
use serde_json::{Value, json};
use tokio::time::Instant;

/// How the server answers a call that reads a command.
#[derive(Clone)]
pub(crate) struct Reply(pub(crate) Vec<CommandChunk>, pub(crate) Then);

#[derive(Clone)]
pub(crate) enum Then {
    /// The command has ended.
    Exit(i32),
    /// Reading ends, but the command continues.
    Stop(ReadWhy),
    Refuse(BoxError),
    /// The connection is lost.
    Cut,
    /// The connection is lost after an announced restart.
    Restart,
    Hang,
}

/// A received call.
#[derive(Debug, Clone)]
pub(crate) struct ReceivedCall {
    pub(crate) action: &'static str,
    pub(crate) params: Value,
    /// Since the script began.
    pub(crate) at: Duration,
    /// The deadline that the caller set.
    pub(crate) within: Option<Duration>,
}

pub(crate) struct ScriptedServer {
    begun: Instant,
    replies: Mutex<VecDeque<Reply>>,
    /// Refusals of other calls, each used once.
    pub(crate) refusals: Mutex<VecDeque<(&'static str, BoxError)>>,
    asked: Mutex<Vec<ReceivedCall>>,
    session: Mutex<Option<Arc<Session>>>,
    /// No client can connect.
    pub(crate) down: AtomicBool,
    pub(crate) connects: AtomicUsize,
    /// How many calls of slow actions run now, and the maximum so far.
    running: AtomicUsize,
    pub(crate) most: AtomicUsize,
    /// The answer to a kill.
    pub(crate) kill_exit: Mutex<Option<Exit>>,
    pub(crate) cut_on_kill: AtomicBool,
    file: Mutex<Vec<u8>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

impl ScriptedServer {
    pub(crate) fn new(replies: impl IntoIterator<Item = Reply>) -> Arc<Self> {
        Arc::new(Self {
            begun: Instant::now(),
            replies: Mutex::new(replies.into_iter().collect()),
            refusals: Mutex::default(),
            asked: Mutex::default(),
            session: Mutex::default(),
            down: AtomicBool::new(false),
            connects: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            kill_exit: Mutex::default(),
            cut_on_kill: AtomicBool::new(false),
            file: Mutex::new(b"seed\n".to_vec()),
        })
    }

    pub(crate) fn add(&self, reply: Reply) {
        lock(&self.replies).push_back(reply);
    }

    pub(crate) fn refuse(&self, action: &'static str, error: BoxError) {
        lock(&self.refusals).push_back((action, error));
    }

    /// A client of this server. The pauses of the link itself are long enough to be noticed.
    pub(crate) fn client(self: &Arc<Self>) -> BoxClient {
        let script = Arc::clone(self);
        let connector: Connector = Box::new(move || {
            let script = Arc::clone(&script);
            Box::pin(async move {
                script.connects.fetch_add(1, Ordering::SeqCst);
                if script.down.load(Ordering::SeqCst) {
                    return Err(ConnectionError::Closed);
                }
                let (near, far) = queue::pair(64);
                let options = Options {
                    limits: Limits::in_process(),
                    ..Options::new(Caller::Local)
                };
                let session = Session::start(far, script.router(), options);
                *lock(&script.session) = Some(Arc::new(session));
                Ok(Box::new(near) as Box<dyn Connection>)
            })
        });
        let mut options = ReconnectOptions {
            hello: None,
            first_wait: Duration::from_secs(1000),
            longest_wait: Duration::from_secs(1000),
            ..ReconnectOptions::default()
        };
        options.session.limits = Limits::in_process();
        BoxClient::from_reconnecting(Arc::new(Reconnecting::with_connector(connector, options)))
    }

    /// A box of this server.
    pub(crate) async fn work(self: &Arc<Self>) -> BoxHandle {
        let client = self.client();
        while client.peer().is_err() {
            tokio::task::yield_now().await;
        }
        client.open("b").await.unwrap()
    }

    /// The received calls of these actions.
    pub(crate) fn asked(&self, actions: &[&str]) -> Vec<ReceivedCall> {
        let asked = lock(&self.asked).clone();
        asked
            .into_iter()
            .filter(|call| actions.contains(&call.action))
            .collect()
    }

    pub(crate) fn cut(&self) {
        if let Some(session) = lock(&self.session).take() {
            session.cut();
        }
    }

    fn note<A: Action>(&self, params: &A::Params, call: &Call<A>) -> Result<(), BoxError> {
        lock(&self.asked).push(ReceivedCall {
            action: A::NAME,
            params: serde_json::to_value(params).unwrap(),
            at: self.begun.elapsed(),
            within: call.time_left(),
        });
        let mut refusals = lock(&self.refusals);
        match refusals.front() {
            Some((action, _)) if *action == A::NAME => {
                Err(refusals.pop_front().map(|(_, error)| error).unwrap())
            }
            _ => Ok(()),
        }
    }

    /// Takes a while, and is counted meanwhile.
    async fn slowly(&self) {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(running, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(50)).await;
        self.running.fetch_sub(1, Ordering::SeqCst);
    }

    /// Answers a reading call as the script says.
    async fn reply<A>(
        &self,
        params: &A::Params,
        mut call: Call<A>,
    ) -> Result<(CommandInfo, ReadEnd), BoxError>
    where
        A: Action<Chunk = CommandChunk>,
    {
        self.note(params, &call)?;
        let next = lock(&self.replies).pop_front();
        let Reply(chunks, then) = next.unwrap_or(Reply(Vec::new(), Then::Hang));
        if let Some(sink) = call.chunks() {
            for chunk in chunks {
                sink.send(&chunk).await?;
            }
        }
        let end = |why| ReadEnd {
            why,
            next: PerStream::default(),
            pos: 0,
            dropped: PerStream::default(),
        };
        match then {
            Then::Exit(code) => {
                let mut info = info("c");
                info.exit = Some(Exit::returned(code));
                Ok((info, end(ReadWhy::Exit)))
            }
            Then::Stop(why) => Ok((info("c"), end(why))),
            Then::Refuse(error) => Err(error),
            Then::Cut => {
                // Earlier messages are read first.
                tokio::time::sleep(Duration::from_millis(1)).await;
                self.cut();
                std::future::pending().await
            }
            Then::Restart => {
                let session = lock(&self.session).take().unwrap();
                tokio::spawn(async move {
                    session.close_for_restart(Duration::from_millis(1)).await;
                });
                std::future::pending().await
            }
            Then::Hang => std::future::pending().await,
        }
    }

    fn router(self: &Arc<Self>) -> Router {
        Router::builder(Arc::clone(self))
            .on::<BoxGet>()
            .on::<CommandStart>()
            .on::<CommandAttach>()
            .on::<CommandGet>()
            .on::<CommandInput>()
            .on::<CommandKill>()
            .on::<ShellCreate>()
            .on::<ShellRun>()
            .on::<ShellDelete>()
            .on::<FileList>()
            .on::<FileRead>()
            .on::<FileWrite>()
            .build()
    }
}

/// The description of a command.
pub(crate) fn info(id: &str) -> CommandInfo {
    let info = json!({"box_id": "b", "command_id": id, "state": "running", "pid": 7,
        "program": {"text": "x"}, "cwd": "/", "created_at": 1});
    serde_json::from_value(info).unwrap()
}

pub(crate) fn started() -> CommandChunk {
    CommandChunk::Started(Box::new(info("c")))
}

/// A piece of output.
pub(crate) fn said(stream: &str, offset: u64, text: &str) -> CommandChunk {
    let piece =
        json!({"text": {"stream": stream, "offset": offset, "pos": 0, "at": 1, "data": text}});
    serde_json::from_value(piece).unwrap()
}

pub(crate) fn out(offset: u64, text: &str) -> CommandChunk {
    said("stdout", offset, text)
}

impl Handle<BoxGet> for ScriptedServer {
    async fn handle(
        &self,
        params: BoxGetParams,
        _: Call<BoxGet>,
    ) -> Result<BoxGetResult, BoxError> {
        let id = params.box_id.unwrap();
        let spec = box_client::SpecDraft::new(id.as_str()).build()?;
        let info =
            box_protocol::BoxInfo::starting(&spec, "scripted", "none", box_protocol::UnixMs(1));
        Ok(BoxGetResult { info, guest: None })
    }
}

impl Handle<CommandStart> for ScriptedServer {
    async fn handle(
        &self,
        params: CommandStartParams,
        call: Call<CommandStart>,
    ) -> Result<CommandStartResult, BoxError> {
        let (info, read) = self.reply(&params, call).await?;
        Ok(CommandStartResult {
            info,
            existed: false,
            read: Some(read),
            adjusted: Vec::new(),
        })
    }
}

impl Handle<CommandAttach> for ScriptedServer {
    async fn handle(
        &self,
        params: CommandAttachParams,
        call: Call<CommandAttach>,
    ) -> Result<CommandAttachResult, BoxError> {
        let (info, read) = self.reply(&params, call).await?;
        Ok(CommandAttachResult { info, read })
    }
}

impl Handle<CommandGet> for ScriptedServer {
    async fn handle(
        &self,
        params: CommandKey,
        call: Call<CommandGet>,
    ) -> Result<CommandInfo, BoxError> {
        self.note(&params, &call)?;
        Ok(info("c"))
    }
}

impl Handle<CommandInput> for ScriptedServer {
    async fn handle(
        &self,
        params: CommandInputParams,
        call: Call<CommandInput>,
    ) -> Result<CommandInputResult, BoxError> {
        self.note(&params, &call)?;
        Ok(CommandInputResult { accepted: 0 })
    }
}

impl Handle<CommandKill> for ScriptedServer {
    async fn handle(
        &self,
        params: CommandKillParams,
        call: Call<CommandKill>,
    ) -> Result<CommandKillResult, BoxError> {
        self.note(&params, &call)?;
        if self.cut_on_kill.load(Ordering::SeqCst) {
            self.cut();
            std::future::pending::<()>().await;
        }
        let mut info = info("c");
        info.exit = *lock(&self.kill_exit);
        Ok(CommandKillResult {
            info,
            already: false,
        })
    }
}

impl Handle<ShellCreate> for ScriptedServer {
    async fn handle(
        &self,
        params: ShellCreateParams,
        call: Call<ShellCreate>,
    ) -> Result<ShellCreateResult, BoxError> {
        self.note(&params, &call)?;
        let info = json!({"box_id": "b", "shell_id": params.shell_id, "language": "bash", "state": "idle",
            "cwd": "/", "persist": true, "created_at": 1, "last_used_at": 1});
        Ok(ShellCreateResult {
            info: serde_json::from_value(info).unwrap(),
            existed: false,
        })
    }
}

impl Handle<ShellRun> for ScriptedServer {
    async fn handle(
        &self,
        params: ShellRunParams,
        call: Call<ShellRun>,
    ) -> Result<CommandStartResult, BoxError> {
        self.note(&params, &call)?;
        self.slowly().await;
        Ok(CommandStartResult {
            info: info("c"),
            existed: false,
            read: None,
            adjusted: Vec::new(),
        })
    }
}

impl Handle<ShellDelete> for ScriptedServer {
    async fn handle(
        &self,
        params: ShellDeleteParams,
        call: Call<ShellDelete>,
    ) -> Result<ShellDeleteResult, BoxError> {
        self.note(&params, &call)?;
        Ok(ShellDeleteResult { deleted: true })
    }
}

impl Handle<FileList> for ScriptedServer {
    async fn handle(
        &self,
        params: FileListParams,
        call: Call<FileList>,
    ) -> Result<FileListResult, BoxError> {
        self.note(&params, &call)?;
        self.slowly().await;
        let entries = vec![stat("/a"), stat("/b")];
        Ok(FileListResult {
            entries,
            next: None,
        })
    }
}

fn stat(path: &str) -> FileStatInfo {
    let stat = json!({"path": path, "kind": "file", "size": 1, "mode": 420, "owner": "box", "group": "box",
        "modified_at": 1, "etag": "e"});
    serde_json::from_value(stat).unwrap()
}

/// The scripted file. A read returns it in two chunks. A write pauses between reading and writing
/// it, so that two concurrent writes would lose one.
impl Handle<FileWrite> for ScriptedServer {
    async fn handle(
        &self,
        params: FileWriteParams,
        call: Call<FileWrite>,
    ) -> Result<FileStatInfo, BoxError> {
        self.note(&params, &call)?;
        let mut content = if params.append {
            lock(&self.file).clone()
        } else {
            Vec::new()
        };
        self.slowly().await;
        content.extend_from_slice(&params.data);
        *lock(&self.file) = content;
        Ok(stat(&params.path))
    }
}

impl Handle<FileRead> for ScriptedServer {
    async fn handle(
        &self,
        params: FileReadParams,
        mut call: Call<FileRead>,
    ) -> Result<FileStatInfo, BoxError> {
        self.note(&params, &call)?;
        self.slowly().await;
        let content = if params.path.ends_with("empty") {
            Vec::new()
        } else {
            lock(&self.file).clone()
        };
        if let Some(sink) = call.chunks() {
            let mut offset = 0;
            for piece in content.chunks(3) {
                let data = piece.to_vec().into();
                sink.send(&FileChunk { offset, data }).await?;
                offset += piece.len() as u64;
            }
        }
        Ok(stat(&params.path))
    }
}
