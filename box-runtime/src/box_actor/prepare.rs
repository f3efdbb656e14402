//! Commands that run before a box counts as running (`prepare` in its spec).
//!
//! They run one after the other. If one fails, or all together take too long, the start of the box
//! fails, and the error contains the last lines of the command.

use std::time::Duration;

use box_protocol::actions::{AgentChunk, AgentReply, AgentStart, AgentStartParams, Until};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, CommandId, Defaults, Env, Exit, Prepare, Program, is_invisible};
use box_rpc::{CallError, Peer};
use futures::StreamExt as _;
use tokio::time::{Instant, timeout_at};

use super::agents_error;
use super::instance::{Instance, RunningBox};
use crate::environment::command_environment;
use crate::start::{directory, shell_program};

/// Bytes and lines of the output that an error contains.
const TAIL_BYTES: usize = 4096;
const TAIL_LINES: usize = 20;

/// Why a command has not succeeded.
enum Failed {
    Exit(Exit),
    Overdue,
    Error(BoxError),
}

impl Instance {
    /// Runs the commands of `prepare`, if the spec has any.
    pub(super) async fn prepare(&self) -> Result<(), BoxError> {
        let spec = &self.entry.spec;
        let (Some(prepare), Some(running)) = (&spec.prepare, &self.running) else {
            return Ok(());
        };
        let agent = running.agent.peer();
        let defaults = self.entry.command_defaults();
        let env = command_environment(&agent, &spec.box_id, &defaults, Env::new()).await?;
        let limit = Duration::from_secs(prepare.timeout_sec);
        let end = Instant::now().checked_add(limit);
        for (at, program) in prepare.commands.iter().enumerate() {
            let start = self.prepare_command(at, program, (&env, &defaults))?;
            let mut tail = Vec::new();
            let running = self.run_prepared(running, start, end, &mut tail);
            if let Err(failed) = running.await {
                return Err(failure(prepare, at, failed, &tail));
            }
        }
        Ok(())
    }

    fn prepare_command(
        &self,
        at: usize,
        program: &Program,
        (env, defaults): (&Env, &Defaults),
    ) -> Result<AgentStartParams, BoxError> {
        let spec = &self.entry.spec;
        let id = CommandId::new(format!("prepare-{}", at + 1))?;
        let program = shell_program(program.clone(), defaults.shell.clone())?;
        let cwd = directory(None, defaults.cwd.clone(), spec);
        Ok(AgentStartParams {
            env: env.clone(),
            user: defaults.user.clone(),
            file_bytes: spec.file_bytes(),
            keep: true,
            retain_ms: Some(-1),
            reply: AgentReply::Streamed {
                until: Until::default(),
            },
            ..AgentStartParams::new(id, program, cwd)
        })
    }

    async fn run_prepared(
        &self,
        running: &RunningBox,
        start: AgentStartParams,
        end: Option<Instant>,
        tail: &mut Vec<u8>,
    ) -> Result<(), Failed> {
        let agent = running.agent.peer();
        let (audit, owner) = (&running.audit, &self.entry.owner);
        audit.started(owner, &start, &agent, &self.entry);
        let work = run(&agent, &start, tail);
        let exit = match end {
            Some(end) => timeout_at(end, work).await.map_err(|_| Failed::Overdue)?,
            None => work.await,
        };
        let exit = exit.map_err(agents_error).inspect_err(|error| {
            audit.not_started(&start.command_id, Some(error), &self.entry);
        });
        match exit.map_err(Failed::Error)? {
            Some(Exit { code: Some(0), .. }) => Ok(()),
            Some(exit) => Err(Failed::Exit(exit)),
            None => {
                let lost = BoxError::unavailable("the box's agent did not report its end");
                Err(Failed::Error(lost))
            }
        }
    }
}

/// Runs a command to its end, and keeps the end of its output.
async fn run(
    agent: &Peer,
    start: &AgentStartParams,
    tail: &mut Vec<u8>,
) -> Result<Option<Exit>, CallError> {
    let mut stream = agent.stream::<AgentStart>(start).await?;
    while let Some(chunk) = stream.next().await.transpose()? {
        if let AgentChunk::Bytes(piece) = chunk {
            tail.extend_from_slice(&piece.data);
            let extra = tail.len().saturating_sub(TAIL_BYTES);
            tail.drain(..extra);
        }
    }
    Ok(stream.finish().await?.exit)
}

/// Returns the error of a command that failed, with its last lines.
fn failure(prepare: &Prepare, at: usize, failed: Failed, tail: &[u8]) -> BoxError {
    let (which, of) = (at + 1, prepare.commands.len());
    let what = match failed {
        Failed::Error(error) => {
            let message = format!("prepare: command {which} of {of}: {}", error.message());
            return BoxError::new(error.code(), message)
                .with_detail(&Detail::of_field("prepare").of(Subject::Box));
        }
        Failed::Overdue => format!("did not end within {} s", prepare.timeout_sec),
        Failed::Exit(Exit {
            code: Some(code), ..
        }) => format!("exited with code {code}"),
        Failed::Exit(Exit {
            signal: Some(signal),
            ..
        }) => format!("was killed by signal {signal}"),
        Failed::Exit(_) => "did not end properly".to_owned(),
    };
    let output = last_lines(tail);
    let mut message = format!("prepare: command {which} of {of} {what}");
    if let Some(last) = output.lines().last() {
        message = format!("{message}: {last}");
    }
    BoxError::unavailable(message).with_detail(&Detail {
        output: (!output.is_empty()).then_some(output),
        field: Some("prepare".to_owned()),
        ..Detail::lasting().of(Subject::Box)
    })
}

/// Returns the last lines of an output, without characters that would change a terminal.
fn last_lines(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let plain = |line: &str| -> String {
        let shown = |c: char| {
            if c == '\t' || !is_invisible(c) {
                c
            } else {
                '\u{fffd}'
            }
        };
        line.chars().map(shown).collect()
    };
    let lines: Vec<_> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let first = lines.len().saturating_sub(TAIL_LINES);
    let lines: Vec<_> = lines[first..].iter().map(|line| plain(line)).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_few_and_harmless() {
        let many: Vec<_> = (0..100).map(|number| format!("line {number}\n")).collect();
        let last = last_lines(many.join("\n").as_bytes());
        assert!(last.starts_with("line 80\nline 81"), "{last}");
        assert!(last.ends_with("line 99"));
        assert_eq!(
            last_lines(b"\x1b[2Ja\tb\xff\r\n"),
            "\u{fffd}[2Ja\tb\u{fffd}"
        );
        assert_eq!(last_lines(b""), "");
    }
}
