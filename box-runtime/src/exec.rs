//! `box.exec`: finds or creates a box, runs a command, and returns its result.
//!
//! Execs of one box run one at a time. The actor of the box grants each exec a [`Turn`], which ends
//! with a [`Finish`]. The task of the call starts the command as `command.start` does, so no output
//! passes through the actor.
//!
//! A cancelled call drops its turn without a finish. The actor then makes sure that the command has
//! ended before it grants the next turn.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{
    AttachOptions, BoxExecParams, Collected, CommandChunk, CommandStartParams, OnDisconnect,
    OnTimeout, StreamName, Until, View,
};
use box_protocol::{
    BoxError, BoxExecutionResult, CommandId, ExecutionStatus, Exit, ExitWhy, Invalid, Killed,
    LaneStatus, PerStream, Program, Role,
};
use box_rpc::Caller;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use crate::box_actor::agent_access::AgentLease;
use crate::box_actor::{Exec, Failure, Meaning, Request, Shared, end_of, look_up};
use crate::order::Queued;
use crate::registry::Ask;
use crate::runtime::{BoxRuntime, unanswered, unsupported};
use crate::start::{Answer, Deadline, Reply};

/// Maximum bytes of each stream in a result. The result counts the rest.
pub(crate) const OUTPUT_BYTES: usize = 1024 * 1024;

/// The permission to run a command while no other exec of the box runs.
pub(crate) struct Turn {
    pub(crate) lease: AgentLease,
    pub(crate) command_id: CommandId,
}

impl Drop for Turn {
    /// Reports a cancelled call. After a finish this changes nothing.
    fn drop(&mut self) {
        self.lease.entry().lane.abandon(&self.command_id);
    }
}

/// The effect of an exec's end on its box.
pub(crate) enum Finish {
    /// The box continues to run.
    Done,
    /// The command timed out, and the caller wants the box deleted.
    DropBox(Settle),
    /// The command timed out, and the agent did not end it.
    Overdue(OnTimeout, Settle),
    /// The box is unusable, for this reason.
    Broken(String, Settle),
}

/// The channel for the actor's answer after it has handled a `Finish`.
///
/// The answer is the scope that it killed because of a timeout, or the reason that the box failed.
pub(crate) type Settle = oneshot::Sender<Result<Killed, BoxError>>;

/// The command of an exec.
struct ExecRequest {
    start: CommandStartParams,
    limit: Duration,
    on_timeout: OnTimeout,
    output: Option<(View, mpsc::Sender<CommandChunk>)>,
}

/// How a command ended.
enum Ran {
    Result(BoxExecutionResult),
    Silent(BoxExecutionResult),
    Refused(BoxError),
    Broken(String),
    /// The call is abandoned, and the actor ends the command.
    GivenUp(BoxError),
}

impl BoxRuntime {
    /// Runs `spec.cmd` or `program` in a box and returns the result with output.
    ///
    /// The runtime creates the box if necessary. A timeout is a result, not an error.
    pub fn exec(
        &self,
        caller: &Caller,
        params: BoxExecParams,
    ) -> impl Future<Output = Result<BoxExecutionResult, BoxError>> + Send + use<> {
        self.run(ExecRequest::new(caller, self.max_boxes(), params, None))
    }

    /// Runs a command like [`exec`](Self::exec) and streams its output as chunks.
    ///
    /// The chunks use the view in `attach`, and the result contains no output. A reader that does
    /// not read blocks the command.
    pub fn exec_streamed(
        &self,
        caller: &Caller,
        mut params: BoxExecParams,
        chunks: mpsc::Sender<CommandChunk>,
    ) -> impl Future<Output = Result<BoxExecutionResult, BoxError>> + Send + use<> {
        let AttachOptions { view, until } = params.attach.take().unwrap_or_default();
        self.run(if until == Until::default() {
            ExecRequest::new(caller, self.max_boxes(), params, Some((view, chunks)))
        } else {
            Err(unsupported("attach.until", "an exec is read to its end"))
        })
    }

    fn run(
        &self,
        asked: Result<(Request, Turns, Box<ExecRequest>), BoxError>,
    ) -> impl Future<Output = Result<BoxExecutionResult, BoxError>> + Send + use<> {
        let (table, shared) = (self.table(), self.shared_arc());
        async move {
            let (work, turn, request) = asked?;
            let keeps = request.start.on_disconnect == OnDisconnect::Keep;
            let running = Box::pin(async move {
                let sent = table.send(Ask::Request(work)).await;
                // Dropped here so that the runtime can end while this exec runs.
                drop(table);
                sent.map_err(|_| unanswered())?;
                let turn = turn.await.map_err(|_| unanswered())??;
                turn.run(request, &shared).await
            });
            if keeps {
                // The exec continues without its caller and keeps its turn.
                return tokio::spawn(running).await.map_err(|_| unanswered())?;
            }
            running.await
        }
    }
}

type Turns = oneshot::Receiver<Result<Turn, BoxError>>;

impl ExecRequest {
    fn new(
        caller: &Caller,
        max_boxes: Option<usize>,
        params: BoxExecParams,
        output: Option<(View, mpsc::Sender<CommandChunk>)>,
    ) -> Result<(Request, Turns, Box<Self>), BoxError> {
        let names_directory = |directory: &str| !directory.trim().is_empty();
        let has_directory = params.spec.workdir.as_deref().is_some_and(names_directory);
        let mut spec = params.spec.build()?;
        let program = match params.program {
            None => {
                spec.require_cmd()?;
                Program::text(std::mem::take(&mut spec.cmd))?
            }
            Some(program) if spec.cmd.is_empty() => program,
            Some(_) => {
                let rule = "must not be given together with spec.cmd; give one of them";
                return Err(Invalid::new("program", rule).into());
            }
        };
        let limit = Duration::from_secs(spec.timeout_sec);
        let start = CommandStartParams {
            cwd: has_directory.then(|| spec.workdir.clone()),
            env: std::mem::take(&mut spec.env),
            timeout_ms: u64::try_from(limit.as_millis()).ok(),
            on_disconnect: params.on_disconnect,
            role: Role::Exec,
            ..CommandStartParams::new(spec.box_id.clone(), program)
        };
        let request = Self {
            start,
            limit,
            on_timeout: params.on_timeout,
            output: output.filter(|(view, _)| *view != View::None),
        };
        let (reply, turn) = oneshot::channel();
        let exec = Exec {
            caller: caller.clone(),
            max_boxes,
            spec,
            reply,
        };
        Ok((Request::Exec(Box::new(exec)), turn, Box::new(request)))
    }
}

impl Turn {
    /// Runs the command until it ends, and finishes the turn.
    async fn run(
        self,
        request: Box<ExecRequest>,
        shared: &Arc<Shared>,
    ) -> Result<BoxExecutionResult, BoxError> {
        let on_timeout = request.on_timeout;
        let ran = self.command(request, shared).await;
        let entry = Arc::clone(self.lease.entry());
        let tell = |kind: &str, message: &str| shared.events.tell(&entry, kind, message);
        match ran {
            Ran::Result(mut result) => {
                let timed_out = result.status == ExecutionStatus::TimedOut;
                if timed_out {
                    tell("timeout", "an exec took too long");
                }
                if result.oom {
                    tell("oom", "an exec was killed for want of memory");
                }
                if timed_out && on_timeout == OnTimeout::DropBox {
                    // The box may have ended for another reason, which gives the same result.
                    let _ = self.settled(Finish::DropBox).await;
                    result.killed = Some(Killed::Box);
                    return Ok(result);
                }
                self.done();
                Ok(result)
            }
            Ran::Silent(mut result) => {
                tell(
                    "timeout",
                    "an exec took too long, and was not ended in time",
                );
                let overdue = |settle| Finish::Overdue(on_timeout, settle);
                result.killed = Some(self.settled(overdue).await.unwrap_or(Killed::Box));
                Ok(result)
            }
            Ran::Refused(error) => {
                self.done();
                Err(error)
            }
            Ran::Broken(reason) => {
                let broken = |settle| Finish::Broken(reason, settle);
                Err(match self.settled(broken).await {
                    Err(why) => why,
                    Ok(_) => entry.access.why_gone().await,
                })
            }
            Ran::GivenUp(error) => Err(error),
        }
    }

    /// Finishes the turn of a command that has ended.
    fn done(self) {
        let entry = self.lease.entry();
        entry.used(LaneStatus::Idle);
        entry.lane.finish(&self.command_id, Finish::Done);
    }

    /// Finishes the turn, and waits until the actor has handled it.
    ///
    /// If the box has ended already, the error contains the reason.
    async fn settled(self, finish: impl FnOnce(Settle) -> Finish) -> Result<Killed, BoxError> {
        let (settle, settled) = oneshot::channel();
        let entry = Arc::clone(self.lease.entry());
        entry.lane.finish(&self.command_id, finish(settle));
        match settled.await {
            Ok(settled) => settled,
            Err(_) => Err(entry.access.why_gone().await),
        }
    }

    async fn command(&self, request: Box<ExecRequest>, shared: &Arc<Shared>) -> Ran {
        let ExecRequest {
            mut start,
            limit,
            output,
            ..
        } = *request;
        let (lease, config) = (&self.lease, &shared.config);
        let box_id = start.box_id.clone();
        start.command_id = Some(self.command_id.clone());
        let preparing = lease.outcome(Box::pin(lease.command(start)));
        let Ok(asked) = timeout(config.probe_timeout, preparing).await else {
            return Ran::Refused(BoxError::timeout("defaults.env_file: not read in time"));
        };
        let mut asked = match asked {
            Ok(asked) => asked,
            Err(error) => return Ran::Refused(error),
        };
        asked.make_cwd = true;
        let reply = match &output {
            Some((view, to)) => Reply::Streamed {
                attach: AttachOptions {
                    view: *view,
                    until: Until::default(),
                },
                to,
            },
            None => Reply::Collected {
                bytes: OUTPUT_BYTES as u64,
            },
        };
        let begun = Instant::now();
        let deadline = Deadline::after(limit, config.timeout_grace);
        let answer = lease.start(asked, Queued::none(), reply, deadline).await;
        let result = |exit| {
            let backend = lease.entry().live().backend_name.clone();
            let duration = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
            BoxExecutionResult::new(box_id, &*backend, exit, duration)
        };
        match answer {
            Ok(answer) => {
                let exit = match end_of(&answer.told, &self.command_id) {
                    Ok(exit) => exit,
                    Err(reason) => return Ran::Broken(reason),
                };
                match result(exit) {
                    Ok(result) => match with_output(result, answer) {
                        Ok(result) => Ran::Result(self.explained(result, limit)),
                        Err(reason) => Ran::Broken(reason),
                    },
                    Err(error) => Ran::Broken(error.message().to_owned()),
                }
            }
            Err(Failure::Silent) => match result(Exit::by_signal(9, ExitWhy::Timeout)) {
                Ok(result) => Ran::Silent(self.explained(result, limit)),
                Err(error) => Ran::Refused(error),
            },
            Err(Failure::Call(error)) => match Meaning::of(error) {
                Meaning::Refused(error) => Ran::Refused(error),
                Meaning::Broken(reason) => Ran::Broken(reason),
            },
            Err(Failure::Violation(reason)) => Ran::Broken(reason),
            Err(Failure::Other(error)) => Ran::GivenUp(error),
        }
    }

    /// Adds the reason for a kill to a result with empty standard error.
    fn explained(&self, mut result: BoxExecutionResult, limit: Duration) -> BoxExecutionResult {
        if !result.stderr.is_empty() {
            return result;
        }
        if result.status == ExecutionStatus::TimedOut {
            result.stderr = format!("Command timed out after {} seconds.", limit.as_secs());
        } else if result.oom {
            let limit = self.lease.spec().memory_mb;
            result.stderr = format!("Command was killed: the box has {limit} MB of memory.");
        }
        result
    }
}

/// Adds the collected output to the result. The error describes an invalid answer.
fn with_output(result: BoxExecutionResult, answer: Answer) -> Result<BoxExecutionResult, String> {
    let Answer { told, slot, .. } = answer;
    let Collected {
        mut stdout,
        mut stderr,
    } = told.collected.unwrap_or_default();
    for (stream, bytes, output) in [
        (StreamName::Stdout, told.spooled.stdout, &mut stdout),
        (StreamName::Stderr, told.spooled.stderr, &mut stderr),
    ] {
        if bytes > 0 {
            *output = look_up(slot.as_ref(), stream, 0, bytes)?;
        }
    }
    let PerStream {
        stdout: mut stdout_dropped,
        stderr: mut stderr_dropped,
    } = told.dropped;
    let mut result = result.with_output(
        clipped(&stdout, &mut stdout_dropped),
        clipped(&stderr, &mut stderr_dropped),
    );
    result.stdout_dropped = stdout_dropped;
    result.stderr_dropped = stderr_dropped;
    Ok(result)
}

/// Returns the start of an output as text, and adds the bytes cut off to `dropped`.
fn clipped(bytes: &[u8], dropped: &mut u64) -> String {
    let kept = &bytes[..bytes.len().min(OUTPUT_BYTES)];
    let over = u64::try_from(bytes.len() - kept.len()).unwrap_or(u64::MAX);
    *dropped = dropped.saturating_add(over);
    String::from_utf8_lossy(kept).into_owned()
}
