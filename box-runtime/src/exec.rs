//! `box.exec`: finds or creates a box, runs a command, and returns its result.
//!
//! # Steps
//! 1. The registry finds the box of the caller and id, or creates it, and passes the request to the
//!    actor of the box (`registry/mod.rs`).
//! 2. The actor starts the box if necessary. Execs of one box run one at a time: the actor grants
//!    each exec a [`Turn`], which ends with a [`Finish`].
//! 3. The task of the call starts the command as `command.start` does (`start.rs`), so no output
//!    passes through the actor.
//! 4. The agent answers with the exit and at most 1 MiB of each stream, or streams the output.
//! 5. The runtime validates the answer (`box_actor/validate.rs`) and finishes the turn. After a
//!    timeout, the actor kills the command or deletes the box, as `on_timeout` says.
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
    BoxError, BoxExecutionResult, CommandId, ExecStatus, ExecutionStatus, Exit, ExitWhy, Invalid,
    Killed, PerStream, Program, Role,
};
use box_rpc::Caller;
use futures::future::Either;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use crate::box_actor::agent_access::AgentLease;
use crate::box_actor::{CallConsequence, Exec, Failure, Request, Shared, checked_exit, read_slot};
use crate::call_order::OrderTicket;
use crate::registry::RegistryMessage;
use crate::runtime::{BoxRuntime, unanswered, unsupported};
use crate::start::{Deadline, ReplyMode, StartAnswer};

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
        let current = &self.lease.entry().current_exec;
        current.abandon(&self.command_id);
    }
}

/// The effect of an exec's end on its box.
pub(crate) enum Finish {
    /// The box continues to run.
    Done,
    /// The command timed out, and the caller wants the box deleted.
    DropBox(FinishReply),
    /// The command timed out, and the agent did not end it.
    Overdue(OnTimeout, FinishReply),
    /// The box is unusable, for this reason.
    Broken(String, FinishReply),
}

/// The channel for the actor's answer after it has handled a `Finish`.
///
/// The answer is the scope that it killed because of a timeout, or the reason that the box failed.
pub(crate) type FinishReply = oneshot::Sender<Result<Killed, BoxError>>;

/// The command of an exec.
struct ExecRequest {
    start: CommandStartParams,
    limit: Duration,
    on_timeout: OnTimeout,
    output: Option<(View, mpsc::Sender<CommandChunk>)>,
}

/// How a command ended.
enum ExecOutcome {
    Result(BoxExecutionResult),
    Silent(BoxExecutionResult),
    Refused(BoxError),
    Broken(String),
    /// The call is abandoned, and the actor ends the command.
    Abandoned(BoxError),
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
        self.run_with(caller, Ok(params), None)
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
        let params = if until == Until::default() {
            Ok(params)
        } else {
            Err(unsupported(
                "attach.until",
                "an exec is always read to its end",
            ))
        };
        self.run_with(caller, params, Some((view, chunks)))
    }

    /// Runs an exec, after its template has filled its spec.
    fn run_with(
        &self,
        caller: &Caller,
        params: Result<BoxExecParams, BoxError>,
        output: Option<(View, mpsc::Sender<CommandChunk>)>,
    ) -> impl Future<Output = Result<BoxExecutionResult, BoxError>> + Send + use<> {
        let mut params = match params {
            Ok(params) if needs_template(&params) => params,
            params => {
                let request = |params| ExecRequest::new(caller, self.max_boxes(), params, output);
                return Either::Left(self.run(params.and_then(request)));
            }
        };
        let (runtime, caller) = (self.clone(), caller.clone());
        Either::Right(Box::pin(async move {
            runtime.apply_template(&caller, &mut params.spec).await?;
            let request = ExecRequest::new(&caller, runtime.max_boxes(), params, output);
            let running = runtime.run(request);
            // Dropped here so that the runtime can end while this exec runs.
            drop(runtime);
            running.await
        }))
    }

    fn run(
        &self,
        prepared: Result<(Request, TurnReceiver, Box<ExecRequest>), BoxError>,
    ) -> impl Future<Output = Result<BoxExecutionResult, BoxError>> + Send + use<> {
        let (registry, shared) = (self.registry(), self.shared_arc());
        async move {
            let (message, turn, request) = prepared?;
            let keeps = request.start.on_disconnect == OnDisconnect::Keep;
            let running = Box::pin(async move {
                let sent = registry.send(RegistryMessage::Request(message)).await;
                // Dropped here so that the runtime can end while this exec runs.
                drop(registry);
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

/// Whether a template must fill the spec of an exec.
fn needs_template(params: &BoxExecParams) -> bool {
    let names_one = params.spec.template.is_some() || params.spec.pool.is_some();
    names_one && !params.template_applied
}

type TurnReceiver = oneshot::Receiver<Result<Turn, BoxError>>;

impl ExecRequest {
    fn new(
        caller: &Caller,
        max_boxes: Option<usize>,
        params: BoxExecParams,
        output: Option<(View, mpsc::Sender<CommandChunk>)>,
    ) -> Result<(Request, TurnReceiver, Box<Self>), BoxError> {
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
                let rule = "must not be set together with spec.cmd; set one of them";
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
        let record = |kind: &str, message: &str| shared.events.record(&entry, kind, message);
        match ran {
            ExecOutcome::Result(mut result) => {
                let timed_out = result.status == ExecutionStatus::TimedOut;
                if timed_out {
                    record("timeout", "an exec timed out");
                }
                if result.oom {
                    record("oom", "an exec was killed: out of memory");
                }
                if timed_out && on_timeout == OnTimeout::DropBox {
                    // The box may have ended for another reason, which gives the same result.
                    let _ = self.finish_and_wait(Finish::DropBox).await;
                    result.killed = Some(Killed::Box);
                    return Ok(result);
                }
                self.done();
                Ok(result)
            }
            ExecOutcome::Silent(mut result) => {
                record("timeout", "an exec timed out, and its agent did not end it");
                let overdue = |reply| Finish::Overdue(on_timeout, reply);
                result.killed = Some(self.finish_and_wait(overdue).await.unwrap_or(Killed::Box));
                Ok(result)
            }
            ExecOutcome::Refused(error) => {
                self.done();
                Err(error)
            }
            ExecOutcome::Broken(reason) => {
                let broken = |reply| Finish::Broken(reason, reply);
                Err(match self.finish_and_wait(broken).await {
                    Err(why) => why,
                    Ok(_) => entry.access.wait_end_reason().await,
                })
            }
            ExecOutcome::Abandoned(error) => Err(error),
        }
    }

    /// Finishes the turn of a command that has ended.
    fn done(self) {
        let entry = self.lease.entry();
        entry.set_used(ExecStatus::Idle);
        entry.current_exec.finish(&self.command_id, Finish::Done);
    }

    /// Finishes the turn, and waits until the actor has handled it.
    ///
    /// If the box has ended already, the error contains the reason.
    async fn finish_and_wait(
        self,
        finish: impl FnOnce(FinishReply) -> Finish,
    ) -> Result<Killed, BoxError> {
        let (reply, handled) = oneshot::channel();
        let entry = Arc::clone(self.lease.entry());
        entry.current_exec.finish(&self.command_id, finish(reply));
        match handled.await {
            Ok(outcome) => outcome,
            Err(_) => Err(entry.access.wait_end_reason().await),
        }
    }

    async fn command(&self, request: Box<ExecRequest>, shared: &Arc<Shared>) -> ExecOutcome {
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
        let Ok(agent_params) = timeout(config.probe_timeout, preparing).await else {
            return ExecOutcome::Refused(BoxError::timeout("defaults.env_file: not read in time"));
        };
        let mut agent_params = match agent_params {
            Ok(agent_params) => agent_params,
            Err(error) => return ExecOutcome::Refused(error),
        };
        agent_params.make_cwd = true;
        let reply = match &output {
            Some((view, to)) => ReplyMode::Streamed {
                attach: AttachOptions {
                    view: *view,
                    until: Until::default(),
                },
                to,
            },
            None => ReplyMode::Collected {
                bytes: OUTPUT_BYTES as u64,
            },
        };
        let started = Instant::now();
        let deadline = Deadline::after(limit, config.timeout_grace);
        let answer = lease
            .start(agent_params, OrderTicket::none(), reply, deadline)
            .await;
        let result = |exit| {
            let backend = lease.entry().status().backend_name.clone();
            let duration = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
            BoxExecutionResult::new(box_id, &*backend, exit, duration)
        };
        match answer {
            Ok(answer) => {
                let exit = match checked_exit(&answer.command, &self.command_id) {
                    Ok(exit) => exit,
                    Err(reason) => return ExecOutcome::Broken(reason),
                };
                match result(exit) {
                    Ok(result) => match with_output(result, answer) {
                        Ok(result) => ExecOutcome::Result(self.with_kill_reason(result, limit)),
                        Err(reason) => ExecOutcome::Broken(reason),
                    },
                    Err(error) => ExecOutcome::Broken(error.message().to_owned()),
                }
            }
            Err(Failure::Silent) => match result(Exit::by_signal(9, ExitWhy::Timeout)) {
                Ok(result) => ExecOutcome::Silent(self.with_kill_reason(result, limit)),
                Err(error) => ExecOutcome::Refused(error),
            },
            Err(Failure::Call(error)) => match CallConsequence::of(error) {
                CallConsequence::Refused(error) => ExecOutcome::Refused(error),
                CallConsequence::Broken(reason) => ExecOutcome::Broken(reason),
            },
            Err(Failure::Violation(reason)) => ExecOutcome::Broken(reason),
            Err(Failure::Other(error)) => ExecOutcome::Abandoned(error),
        }
    }

    /// Adds the reason for a kill to a result with empty standard error.
    fn with_kill_reason(
        &self,
        mut result: BoxExecutionResult,
        limit: Duration,
    ) -> BoxExecutionResult {
        if !result.stderr.is_empty() {
            return result;
        }
        if result.status == ExecutionStatus::TimedOut {
            result.stderr = format!("Command timed out after {} seconds.", limit.as_secs());
        } else if result.oom {
            let limit = self.lease.spec().memory_mb;
            result.stderr = format!("command killed: out of memory; memory_mb is {limit}");
        }
        result
    }
}

/// Adds the collected output to the result. The error describes an invalid answer.
fn with_output(
    result: BoxExecutionResult,
    answer: StartAnswer,
) -> Result<BoxExecutionResult, String> {
    let StartAnswer { command, slot, .. } = answer;
    let Collected {
        mut stdout,
        mut stderr,
    } = command.collected.unwrap_or_default();
    for (stream, bytes, output) in [
        (StreamName::Stdout, command.in_slot.stdout, &mut stdout),
        (StreamName::Stderr, command.in_slot.stderr, &mut stderr),
    ] {
        if bytes > 0 {
            *output = read_slot(slot.as_ref(), stream, 0, bytes)?;
        }
    }
    let PerStream {
        stdout: mut stdout_dropped,
        stderr: mut stderr_dropped,
    } = command.dropped;
    let mut result = result.with_output(
        truncated(&stdout, &mut stdout_dropped),
        truncated(&stderr, &mut stderr_dropped),
    );
    result.stdout_dropped = stdout_dropped;
    result.stderr_dropped = stderr_dropped;
    Ok(result)
}

/// Returns the start of an output as text, and adds the bytes cut off to `dropped`.
fn truncated(bytes: &[u8], dropped: &mut u64) -> String {
    let head = &bytes[..bytes.len().min(OUTPUT_BYTES)];
    let excess = u64::try_from(bytes.len() - head.len()).unwrap_or(u64::MAX);
    *dropped = dropped.saturating_add(excess);
    String::from_utf8_lossy(head).into_owned()
}
