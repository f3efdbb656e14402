//! Processes: each is a command of the box.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use box_protocol::actions::{
    AttachOptions, CommandChunk, CommandInputParams, CommandKey, CommandKillParams,
    CommandStartParams, CommandStartResult, Stdin, TerminalSize, View,
};
use box_protocol::{BoxError, Env, Program};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::output::{Output, read_log};
use super::paths::FilePath;
use super::session::{Session, in_use, lock};
use super::wire::{Bytes, Fault, notification};
use crate::http::input::{MAX_WAITING_BYTES, READ_MS};
use crate::http::stream::{Step, StreamedCall};

/// How long an ended process can be read.
const RETAINED: Duration = Duration::from_secs(30);

/// How long the record of an ended command stays: longer than the process.
const RETAIN_MS: i64 = 60_000;

/// The size of the log of a command, which a client reads again.
const LOG_BYTES: u64 = 1024 * 1024;

/// The size of a terminal; the protocol cannot change it.
const TERMINAL: TerminalSize = TerminalSize { cols: 80, rows: 24 };

/// The maximum value of `waitMs`.
const MAX_WAIT_MS: u64 = 10 * 60 * 1000;

/// The number of writes that wait for a process to read them.
const WAITING_WRITES: usize = 128;

/// The number of writes that a client may repeat.
const REMEMBERED_WRITES: usize = 1024;

/// The maximum length of one input to a command.
const INPUT_BYTES: usize = 1024 * 1024;

/// A process.
#[derive(Debug)]
pub(super) struct Process {
    key: CommandKey,
    output: Mutex<Output>,
    changed: Notify,
    /// The stdin, if it is open.
    input: Option<WaitingInput>,
    /// Whether the last write was refused. The next one does not wait: requests behind it would wait as well.
    is_unread: AtomicBool,
    /// The ids of the last writes: a client that connects again repeats those without an answer.
    written: Mutex<VecDeque<String>>,
    /// The task that reads the output; the command ends with it.
    reading: Mutex<Option<AbortHandle>>,
}

/// The input that waits for a process to read it.
#[derive(Debug)]
struct WaitingInput {
    queue: mpsc::Sender<(Vec<u8>, OwnedSemaphorePermit)>,
    room: Arc<Semaphore>,
}

impl WaitingInput {
    /// Queues input when there is room for it. An error: the process has ended, or has closed its stdin.
    async fn push(&self, data: Vec<u8>) -> Result<(), Fault> {
        let closed = || Fault::internal("chunk: the process has ended, or has closed its stdin");
        let bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.room).acquire_many_owned(bytes.min(MAX_WAITING_BYTES));
        let room = room.await.map_err(|_| closed())?;
        let queued = self.queue.send((data, room)).await;
        queued.map_err(|_| closed())
    }
}

/// A request for a process. The sandbox of the request is not read: the box is the sandbox.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StartParams {
    process_id: String,
    argv: Vec<String>,
    cwd: FilePath,
    #[serde(default)]
    env_policy: Option<EnvPolicy>,
    env: BTreeMap<String, String>,
    tty: bool,
    #[serde(default)]
    pipe_stdin: bool,
    #[serde(default)]
    arg0: Option<String>,
    #[serde(default)]
    enforce_managed_network: bool,
}

/// The variables of a process besides those of the box.
#[derive(Debug, Deserialize)]
struct EnvPolicy {
    #[serde(default)]
    set: BTreeMap<String, String>,
}

/// A process that runs, and whose output is not read yet.
#[derive(Debug)]
pub(super) struct Started {
    id: String,
    tty: bool,
    process: Arc<Process>,
    call: StreamedCall<CommandChunk, CommandStartResult>,
}

impl StartParams {
    /// Returns the command, in a box that is set later.
    fn command(self, session: &Session) -> Result<CommandStartParams, Fault> {
        if self.argv.is_empty() {
            return Err(Fault::invalid_params("argv: must not be empty"));
        }
        if self.arg0.is_some() {
            let rule = "arg0: a box runs a program under its own name; omit it";
            return Err(Fault::invalid_params(rule));
        }
        if self.enforce_managed_network {
            let rule = "enforceManagedNetwork: a box does not use the proxy of Codex; \
                        allow hosts with --allow";
            return Err(Fault::invalid_params(rule));
        }
        let variables = self.env_policy.map(|policy| policy.set).unwrap_or_default();
        let mut env = Env::try_from(variables)?;
        env.extend(Env::try_from(self.env)?);
        let has_input = self.tty || self.pipe_stdin;
        let place = &session.place;
        Ok(CommandStartParams {
            cwd: Some(self.cwd.0),
            env,
            stdin: if has_input {
                Stdin::Open
            } else {
                Stdin::Closed
            },
            pty: self.tty.then_some(TERMINAL),
            retain_ms: Some(RETAIN_MS),
            log_bytes: Some(LOG_BYTES),
            attach: Some(AttachOptions {
                view: View::Bytes,
                ..AttachOptions::default()
            }),
            ..CommandStartParams::new(place.default.id.clone(), Program::argv(self.argv)?)
        })
    }
}

/// Starts a process.
pub(super) async fn start(session: &Session, params: StartParams) -> Result<Started, Fault> {
    let (id, tty) = (params.process_id.clone(), params.tty);
    if session.process(&id).is_some() {
        return Err(in_use(&id));
    }
    let cwd = params.cwd.0.clone();
    let command = params.command(session)?;
    let box_id = session.place.open().await?;
    let has_input = command.stdin == Stdin::Open;
    let target = session.place.target.clone();
    let mut call =
        StreamedCall::new(|chunks| async move { target.start_command(command, chunks).await });
    let command_id = match call.next().await {
        Step::Chunk(CommandChunk::Started(info)) => info.command_id,
        Step::End(Err(error)) => return Err(refused(&error, &cwd)),
        _ => return Err(Fault::internal("process: the box did not report its start")),
    };
    let (queue, waiting) = mpsc::channel(WAITING_WRITES);
    let process = Arc::new(Process {
        key: CommandKey { box_id, command_id },
        output: Mutex::default(),
        changed: Notify::new(),
        input: has_input.then(|| WaitingInput {
            queue,
            room: Arc::new(Semaphore::new(MAX_WAITING_BYTES as usize)),
        }),
        is_unread: AtomicBool::new(false),
        written: Mutex::default(),
        reading: Mutex::default(),
    });
    session.add(id.clone(), Arc::clone(&process))?;
    if has_input {
        let (target, key) = (session.place.target.clone(), process.key.clone());
        tokio::spawn(async move {
            let mut waiting = waiting;
            while let Some((data, _room)) = waiting.recv().await {
                for piece in data.chunks(INPUT_BYTES) {
                    let params = CommandInputParams {
                        data: Some(piece.to_vec().into()),
                        ..CommandInputParams::new(key.box_id.clone(), key.command_id.clone())
                    };
                    // The command has ended, or has closed its stdin.
                    if target.input_command(params).await.is_err() {
                        return;
                    }
                }
            }
        });
    }
    Ok(Started {
        id,
        tty,
        process,
        call,
    })
}

/// Returns the error of a start. Codex names directories of its own machine, which the box may not have.
fn refused(error: &BoxError, cwd: &str) -> Fault {
    let message = error.message();
    match message.strip_prefix("cwd: ") {
        Some(problem) => Fault::internal(format!(
            "cwd: {cwd}: {problem} in the box; mount it there with --workspace or -v"
        )),
        None => Fault::internal(message),
    }
}

impl Started {
    pub(super) fn answer(&self) -> Value {
        // The protocol has no name for the sandbox that a box is; `none` of its own is in use.
        json!({"processId": self.id, "sandboxType": "none"})
    }

    /// Begins to send the output, after the client has the answer to its request.
    pub(super) fn follow(self, session: &Arc<Session>) {
        let (process, session) = (Arc::clone(&self.process), Arc::downgrade(session));
        let reading = tokio::spawn(self.read(session)).abort_handle();
        *lock(&process.reading) = Some(reading);
    }

    async fn read(mut self, session: Weak<Session>) {
        let process = self.process;
        let notify = async |method, mut params: Value| {
            params["processId"] = self.id.as_str().into();
            process.changed.notify_waiters();
            if let Some(session) = session.upgrade() {
                session.notify(notification(method, &params)).await;
            }
        };
        let ended = loop {
            match self.call.next().await {
                Step::Chunk(CommandChunk::Bytes(piece)) => {
                    let params = {
                        let mut output = lock(&process.output);
                        output.push(self.tty, piece.stream, piece.pos, &piece.data)
                    };
                    notify("process/output", params).await;
                }
                Step::Chunk(_) | Step::Idle => {}
                Step::End(ended) => break ended.map(|ended| ended.info),
            }
        };
        let (seq, code) = lock(&process.output).exit(ended);
        let params = json!({"seq": seq, "exitCode": code, "sandboxDenied": false});
        notify("process/exited", params).await;
        let seq = lock(&process.output).close();
        notify("process/closed", json!({"seq": seq})).await;
        sleep(RETAINED).await;
        if let Some(session) = session.upgrade() {
            session.forget(&self.id);
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ReadParams {
    process_id: String,
    #[serde(default)]
    after_seq: Option<u64>,
    #[serde(default)]
    max_bytes: Option<usize>,
    #[serde(default)]
    pub(super) wait_ms: Option<u64>,
}

/// Reads output that was sent before, or waits for more.
pub(super) async fn read(session: &Session, params: ReadParams) -> Result<Value, Fault> {
    let id = &params.process_id;
    let unknown = || Fault::invalid_request(format!("unknown process id {id}"));
    let process = session.process(id).ok_or_else(unknown)?;
    let after = params.after_seq.unwrap_or(0);
    let wait = params.wait_ms.unwrap_or(0).min(MAX_WAIT_MS);
    let deadline = Instant::now() + Duration::from_millis(wait);
    let (chunks, mut answer) = loop {
        let changed = process.changed.notified();
        let mut changed = std::pin::pin!(changed);
        changed.as_mut().enable();
        let (found, has_ended) = {
            let output = lock(&process.output);
            let found = output.after(after, params.max_bytes);
            (found, output.has_ended_after(after))
        };
        if !found.0.is_empty() || has_ended || timeout_at(deadline, changed).await.is_err() {
            break found;
        }
    };
    let read = read_log(&session.place.target, &process.key, &chunks).await?;
    answer["chunks"] = read.into();
    Ok(answer)
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WriteParams {
    process_id: String,
    chunk: Bytes,
    write_id: String,
}

/// Writes to the stdin of a process, or waits for a moment until it has read earlier writes.
pub(super) async fn write(session: &Session, params: WriteParams) -> Result<Value, Fault> {
    if params.write_id.is_empty() {
        return Err(Fault::invalid_params("writeId: must not be empty"));
    }
    let status = |status: &str| Ok(json!({"status": status}));
    let Some(process) = session.process(&params.process_id) else {
        return status("unknownProcess");
    };
    let Some(input) = &process.input else {
        return status("stdinClosed");
    };
    if lock(&process.written).contains(&params.write_id) {
        return status("accepted");
    }
    let wait = if process.is_unread.load(Ordering::Relaxed) {
        Duration::ZERO
    } else {
        Duration::from_millis(READ_MS)
    };
    let queued = timeout(wait, input.push(params.chunk.0)).await;
    process.is_unread.store(queued.is_err(), Ordering::Relaxed);
    queued.unwrap_or_else(|_| {
        let rule = format!(
            "chunk: the process does not read its stdin, and the limit of {WAITING_WRITES} waiting writes or \
             {MAX_WAITING_BYTES} bytes is reached; write it again when the process reads"
        );
        Err(Fault::internal(rule))
    })?;
    let mut written = lock(&process.written);
    if written.len() == REMEMBERED_WRITES {
        written.pop_front();
    }
    written.push_back(params.write_id);
    drop(written);
    status("accepted")
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SignalParams {
    process_id: String,
    signal: Signal,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Signal {
    Interrupt,
}

/// Sends a signal to a process, if it runs.
pub(super) async fn signal(session: &Session, params: SignalParams) -> Result<Value, Fault> {
    if let Some(process) = session.process(&params.process_id)
        && process.is_running()
    {
        let signal = match params.signal {
            Signal::Interrupt => "INT",
        };
        process.kill(session, signal, None).await?;
    }
    Ok(json!({}))
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TerminateParams {
    process_id: String,
}

/// Kills a process with its tree, if it runs.
pub(super) async fn terminate(session: &Session, params: TerminateParams) -> Result<Value, Fault> {
    let process = session.process(&params.process_id);
    let process = process.filter(|process| process.is_running());
    if let Some(process) = &process {
        process.kill(session, "KILL", Some(0)).await?;
    }
    Ok(json!({"running": process.is_some()}))
}

impl Process {
    /// Stops to read the output, which kills the command.
    pub(super) fn abandon(&self) {
        if let Some(reading) = lock(&self.reading).take() {
            reading.abort();
        }
    }

    fn is_running(&self) -> bool {
        lock(&self.output).exit_code.is_none()
    }

    async fn kill(
        &self,
        session: &Session,
        signal: &str,
        grace_ms: Option<u64>,
    ) -> Result<(), BoxError> {
        let key = self.key.clone();
        let params = CommandKillParams {
            signal: signal.to_owned(),
            grace_ms,
            ..CommandKillParams::new(key.box_id, key.command_id)
        };
        session.place.target.kill_command(params).await.map(drop)
    }
}
