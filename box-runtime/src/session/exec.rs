//! One exec: what the agent is asked, how long it is waited for, and what is made of its answer.

use std::time::Duration;

use box_protocol::actions::{
    AgentCommand, AgentKill, AgentKillParams, AgentReply, AgentStart, AgentStartParams, Collected,
    OnDisconnect, StreamName, Until, View,
};
use box_protocol::{
    BoxError, BoxExecutionResult, BoxSpec, Defaults, Env, ExecutionStatus, Exit, ExitWhy,
    PerStream, Program, Role,
};
use box_rpc::{CallError, Peer};
use tokio::time::{Instant, timeout, timeout_at};

use super::body::Body;
use super::doubt::{Failure, end_of, failure, look_up};
use super::relay::Relay;
use super::work::{Exec, Streaming};
use crate::env_file;
use crate::spool::{Slot, Spool};

/// Bytes of each stream that a result holds; the rest is counted.
pub(crate) const OUTPUT_BYTES: usize = 1024 * 1024;

/// What came of a command.
pub(super) enum Ran {
    Result(BoxExecutionResult),
    /// The time is over, and the agent does not say so.
    Silent(BoxExecutionResult),
    /// Nothing ran; the box is fine.
    Refused(BoxError),
    /// The box is of no more use.
    Broken(String),
}

/// What an agent is asked to run, and how long it may take.
pub(super) struct Command {
    params: AgentStartParams,
    /// A file with variables to be read first, and those of the call, which win over them.
    late: Option<Box<(String, Env)>>,
    limit: Duration,
    /// Where much output goes.
    slot: Option<Slot>,
}

/// What an agent answered, and how long that took.
struct Told {
    answer: AgentCommand,
    duration: Duration,
}

impl Body {
    /// The command for an exec. Its text and variables move into it. Boxed, as the session's task holds it.
    pub(super) fn command(&mut self, exec: &mut Exec) -> Result<Box<Command>, BoxError> {
        let Some(living) = &mut self.living else {
            return Err(BoxError::internal("there is no box for the command"));
        };
        let streamed = exec
            .output
            .as_ref()
            .is_some_and(|output| output.view != View::None);
        let reply = if streamed {
            AgentReply::Streamed {
                until: Until::default(),
            }
        } else {
            AgentReply::Collected {
                bytes: OUTPUT_BYTES as u64,
            }
        };
        let command_id = living.next_exec()?;
        let slot = living.spool.as_ref().and_then(Spool::to_read);
        let cmd = std::mem::take(&mut exec.spec.cmd);
        let asked = std::mem::take(&mut exec.spec.env);
        let defaults = self.card.live().defaults.as_deref().cloned();
        let Defaults {
            mut env,
            env_file,
            user,
            ..
        } = defaults.unwrap_or_default();
        let late = if let Some(path) = env_file {
            Some(Box::new((path, asked)))
        } else {
            env.extend(asked);
            None
        };
        let limit = Duration::from_secs(exec.spec.timeout_sec);
        let program = Program::argv(["sh".to_owned(), "-lc".to_owned(), cmd])?;
        let cwd = std::mem::take(&mut exec.spec.workdir);
        let params = AgentStartParams {
            env,
            make_cwd: true,
            user,
            timeout_ms: u64::try_from(limit.as_millis()).ok(),
            file_bytes: self.card.spec.file_bytes(),
            reply,
            // Also by the agent: it outlives this process.
            keep: exec.on_disconnect == OnDisconnect::Keep,
            role: Role::Exec,
            spool: slot.as_ref().map(Slot::number),
            ..AgentStartParams::new(command_id, program, cwd)
        };
        Ok(Box::new(Command {
            params,
            late,
            limit,
            slot,
        }))
    }

    /// Runs a command to its end. Dropping the future kills it.
    pub(super) async fn run(
        &self,
        command: &mut Command,
        spec: &BoxSpec,
        output: Option<&mut Streaming>,
    ) -> Ran {
        let Some(living) = &self.living else {
            return Ran::Broken("there is no box".to_owned());
        };
        let peer = living.agent.peer();
        if let Some(late) = command.late.take() {
            let (path, asked) = *late;
            let reading = Box::pin(env_file::read(&peer, &spec.session_id, &path));
            let Ok(read) = timeout(self.shared.config.probe_timeout, reading).await else {
                return Ran::Refused(BoxError::timeout("defaults.env_file: not read in time"));
            };
            match read {
                Ok(env) => command.params.env.extend(env),
                Err(error) => return Ran::Refused(error),
            }
            command.params.env.extend(asked);
        }
        let params = &command.params;
        let begun = Instant::now();
        let patience = command
            .limit
            .saturating_add(self.shared.config.timeout_grace);
        // Beyond what a clock can hold there is no limit.
        let until = begun.checked_add(patience);
        let answer = match output {
            Some(output) if matches!(params.reply, AgentReply::Streamed { .. }) => {
                let relay = Relay::new(output, params, &spec.session_id, command.slot.take());
                Box::pin(relay.run(&peer, params, until, self.shared.config.timeout_grace)).await
            }
            _ => collect(&peer, params, until).await,
        };
        let told = match answer {
            Ok(answer) => Told {
                answer,
                duration: begun.elapsed(),
            },
            Err(NoAnswer::Silent) => {
                let exit = Exit::by_signal(9, ExitWhy::Timeout);
                let result = self.result(spec, exit, begun.elapsed());
                return result
                    .map_or_else(Ran::Refused, |result| Ran::Silent(excused(result, spec)));
            }
            Err(NoAnswer::Failed(Failure::Refused(error))) => return Ran::Refused(error),
            Err(NoAnswer::Failed(Failure::Broken(reason))) => return Ran::Broken(reason),
        };
        match end_of(&told.answer, &params.command_id) {
            Ok(exit) => self.told(spec, exit, told, command.slot.as_ref()),
            Err(reason) => Ran::Broken(reason),
        }
    }

    fn told(&self, spec: &BoxSpec, exit: Exit, told: Told, slot: Option<&Slot>) -> Ran {
        let mut result = match self.result(spec, exit, told.duration) {
            Ok(result) => result,
            Err(error) => return Ran::Broken(error.message().to_owned()),
        };
        let Collected {
            mut stdout,
            mut stderr,
        } = told.answer.collected.unwrap_or_default();
        let spooled = told.answer.spooled;
        for (stream, bytes, output) in [
            (StreamName::Stdout, spooled.stdout, &mut stdout),
            (StreamName::Stderr, spooled.stderr, &mut stderr),
        ] {
            if bytes > 0 {
                match look_up(slot, stream, 0, bytes) {
                    Ok(found) => *output = found,
                    Err(reason) => return Ran::Broken(reason),
                }
            }
        }
        let PerStream {
            stdout: mut stdout_dropped,
            stderr: mut stderr_dropped,
        } = told.answer.dropped;
        result = result.with_output(
            clipped(&stdout, &mut stdout_dropped),
            clipped(&stderr, &mut stderr_dropped),
        );
        result.stdout_dropped = stdout_dropped;
        result.stderr_dropped = stderr_dropped;
        Ran::Result(excused(result, spec))
    }

    fn result(
        &self,
        spec: &BoxSpec,
        exit: Exit,
        duration: Duration,
    ) -> Result<BoxExecutionResult, BoxError> {
        let backend = self.card.live().backend_name.clone();
        let duration = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        BoxExecutionResult::new(spec.session_id.clone(), &*backend, exit, duration)
    }

    /// Waits until nothing is left of a command whose call was dropped, so that the next one does not
    /// meet it. The reason if the agent cannot do that.
    pub(super) async fn confirm_killed(&self, command: &Command) -> Result<(), String> {
        let Some(living) = &self.living else {
            return Ok(());
        };
        let params = AgentKillParams {
            command_id: command.params.command_id.clone(),
            signal: "KILL".to_owned(),
            grace_ms: 0,
            forget: false,
        };
        let peer = living.agent.peer();
        // Its end is in nobody's answer.
        living.trail.expect(&peer, &self.card);
        let killed = peer.call::<AgentKill>(&params);
        match timeout(self.shared.config.stop_timeout, killed).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(CallError::Refused(error))) if error.code() == box_protocol::Code::NotFound => {
                Ok(())
            }
            Ok(Err(error)) => Err(format!("the box's agent cannot kill: {}", error.code())),
            Err(_) => Err("the box's agent does not kill in time".to_owned()),
        }
    }
}

/// Why there is no answer.
pub(super) enum NoAnswer {
    Silent,
    Failed(Failure),
}

impl From<CallError> for NoAnswer {
    fn from(error: CallError) -> Self {
        Self::Failed(failure(error))
    }
}

async fn collect(
    peer: &Peer,
    params: &AgentStartParams,
    until: Option<Instant>,
) -> Result<AgentCommand, NoAnswer> {
    let call = peer.call::<AgentStart>(params);
    let answer = match until {
        Some(until) => timeout_at(until, call)
            .await
            .map_err(|_| NoAnswer::Silent)?,
        None => call.await,
    };
    Ok(answer?)
}

/// The first of an output as text; `dropped` grows by what is cut off.
fn clipped(bytes: &[u8], dropped: &mut u64) -> String {
    let kept = &bytes[..bytes.len().min(OUTPUT_BYTES)];
    let over = u64::try_from(bytes.len() - kept.len()).unwrap_or(u64::MAX);
    *dropped = dropped.saturating_add(over);
    String::from_utf8_lossy(kept).into_owned()
}

/// A command that was ended and said nothing about it gets a word of ours.
fn excused(mut result: BoxExecutionResult, spec: &BoxSpec) -> BoxExecutionResult {
    if !result.stderr.is_empty() {
        return result;
    }
    if result.status == ExecutionStatus::TimedOut {
        result.stderr = format!("Command timed out after {} seconds.", spec.timeout_sec);
    } else if result.oom {
        let limit = spec.memory_mb;
        result.stderr = format!("Command was killed: the box has {limit} MB of memory.");
    }
    result
}
