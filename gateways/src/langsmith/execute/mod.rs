//! Commands: over a websocket, as one response, or as server-sent events.
//!
//! A command belongs to its box and outlives its client. A client that has lost its connection attaches again with the
//! id of the command and the offsets that it has.

pub(super) mod http;
pub(super) mod socket;
pub(super) mod sse;

use std::collections::BTreeMap;

use box_protocol::actions::{
    AttachOptions, CommandAttachParams, CommandChunk, CommandKey, CommandStartParams, OnDisconnect,
    ReadFrom, Stdin, TerminalSize, Until, View,
};
use box_protocol::error::{Detail, Ended, Subject};
use box_protocol::{
    BoxError, BoxId, Code, CommandId, CommandInfo, Env, ExitWhy, Invalid, PerStream, Program,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::GATEWAY;
use super::run_config::RunConfig;
use crate::http::context::Context;
use crate::http::stream::StreamedCall;

/// The output of a command that its box keeps for clients that are away.
const LOG_BYTES: u64 = 64 * 1024 * 1024;

/// How long a command waits for a client whose connection broke, instead of dropping its output.
///
/// The SDKs try to connect again for a quarter of a minute.
const LOST_MS: u64 = 60_000;

/// The time without a client after which a command ends that must not outlive its clients, in milliseconds.
///
/// A client attaches within this time after the start.
const LEFT_MS: u64 = 1000;

/// The terminal of a command; the protocol has no size.
const TERMINAL: TerminalSize = TerminalSize { cols: 80, rows: 24 };

/// The shell of a request without one.
const SHELL: &str = "/bin/bash";

/// The class of errors over HTTP.
const CLASS: &str = "CommandError";

/// A request for a command.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Execute {
    command: String,
    #[serde(alias = "timeout")]
    timeout_seconds: Option<f64>,
    shell: Option<String>,
    env: Option<BTreeMap<String, String>>,
    cwd: Option<String>,
    /// The time without a client after which the command ends; below 0 for no limit.
    idle_timeout_seconds: Option<f64>,
    kill_on_disconnect: bool,
    /// How long the record is kept after the exit; below 0 for the life of the box.
    ttl_seconds: Option<f64>,
    pty: bool,
    command_id: Option<String>,
    close_stdin: bool,
    run_config: Option<RunConfig>,
}

/// A request for the output of a command.
#[derive(Debug, Deserialize)]
pub(super) struct Reconnect {
    command_id: String,
    #[serde(default)]
    stdout_offset: u64,
    #[serde(default)]
    stderr_offset: u64,
}

/// A running call that reads a command to its end.
type Reading = StreamedCall<CommandChunk, CommandInfo>;

impl Execute {
    /// Returns the parameters of a command that its clients may leave.
    fn into_params(self, box_id: BoxId, view: View) -> Result<CommandStartParams, Invalid> {
        let shell = self.shell.filter(|shell| !shell.is_empty());
        let shell = shell.unwrap_or_else(|| SHELL.to_owned());
        if self.command.trim().is_empty() {
            return Err(Invalid::new("command", "must not be blank"));
        }
        let program = Program::argv([shell, "-c".to_owned(), self.command]);
        let program = program.map_err(|_| Invalid::new("command", "must not contain NUL"))?;
        let mut params = CommandStartParams::new(box_id, program);
        params.command_id = Some(match self.command_id {
            Some(id) => CommandId::new(id)?,
            None => CommandId::fresh(),
        });
        let mut config = self.run_config.unwrap_or_default();
        params.env = config.env()?;
        params
            .env
            .extend(Env::try_from(self.env.unwrap_or_default())?);
        params.user = config.user;
        params.cwd = self.cwd.or(config.work_dir).filter(|cwd| !cwd.is_empty());
        if self.pty {
            params.pty = Some(TERMINAL);
        }
        if self.pty || !self.close_stdin {
            params.stdin = Stdin::Open;
        }
        let timeout = milliseconds("timeout_seconds", self.timeout_seconds)?;
        let timeout = timeout.filter(|timeout| *timeout > 0);
        params.timeout_ms = timeout;
        params.on_disconnect = OnDisconnect::Keep;
        params.detached_ms = if self.kill_on_disconnect {
            Some(LEFT_MS)
        } else {
            milliseconds("idle_timeout_seconds", self.idle_timeout_seconds)?
        };
        if let Some(ttl) = self.ttl_seconds {
            let kept = milliseconds("ttl_seconds", Some(ttl))?;
            let kept = kept.map(|kept| i64::try_from(kept).unwrap_or(i64::MAX));
            params.retain_ms = Some(kept.unwrap_or(-1));
        }
        params.log_bytes = Some(LOG_BYTES);
        params.lost_reader_ms = Some(LOST_MS);
        params.attach = Some(AttachOptions {
            view,
            until: Until::default(),
        });
        Ok(params)
    }
}

/// Returns seconds as milliseconds; `None` if absent or negative, which means no limit.
fn milliseconds(field: &'static str, seconds: Option<f64>) -> Result<Option<u64>, Invalid> {
    let Some(seconds) = seconds.filter(|seconds| *seconds >= 0.0 || seconds.is_nan()) else {
        return Ok(None);
    };
    let time = std::time::Duration::try_from_secs_f64(seconds);
    let time = time.map_err(|_| Invalid::new(field, "must be a number of seconds"))?;
    Ok(Some(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)))
}

/// What a client asked for, on which the meaning of an error depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    /// A new command.
    Execute,
    /// The output of a known command.
    Reconnect,
}

/// Starts a command, or attaches to the one with its id.
fn starting(context: &Context, params: CommandStartParams) -> Reading {
    let context = context.clone();
    Reading::new(|chunks| async move {
        let started = context
            .start_command(&GATEWAY, params, Some(chunks))
            .await?;
        Ok(started.info)
    })
}

/// Reads the output of a command from these offsets.
///
/// A client that is beyond the end of a stream gets only what follows there.
fn attaching(context: &Context, command: &CommandKey, from: PerStream, view: View) -> Reading {
    let context = context.clone();
    let mut params = CommandAttachParams::new(command.box_id.clone(), command.command_id.clone());
    params.view = view;
    params.from = ReadFrom::Offsets(from);
    Reading::new(|chunks| async move {
        let (runtime, caller) = (context.runtime(), &context.caller);
        let attached = runtime.attach_command(caller, params.clone(), chunks.clone());
        let attached = match attached.await {
            Err(error) if error.code() == Code::Validation => {
                let end = end_of_output(&context, params.clone()).await?;
                params.from = ReadFrom::Offsets(PerStream {
                    stdout: from.stdout.min(end.stdout),
                    stderr: from.stderr.min(end.stderr),
                });
                runtime.attach_command(caller, params, chunks).await
            }
            attached => attached,
        };
        attached.map(|attached| attached.info)
    })
}

/// Returns the offsets of the end of the output so far, in the units of the view.
async fn end_of_output(
    context: &Context,
    mut params: CommandAttachParams,
) -> Result<PerStream, BoxError> {
    params.from = ReadFrom::Tail(0);
    params.until.ms = Some(0);
    let (sender, mut unread) = mpsc::channel(1);
    let attaching = context
        .runtime()
        .attach_command(&context.caller, params, sender);
    let discarding = async { while unread.recv().await.is_some() {} };
    let (attached, ()) = tokio::join!(attaching, discarding);
    attached.map(|attached| attached.read.next)
}

impl Reconnect {
    fn offsets(&self) -> PerStream {
        PerStream {
            stdout: self.stdout_offset,
            stderr: self.stderr_offset,
        }
    }

    /// Finds the command; returns its key as the client names it, and its record.
    async fn find(
        &self,
        context: &Context,
        box_id: BoxId,
    ) -> Result<(CommandKey, CommandInfo), BoxError> {
        let key = CommandKey {
            box_id,
            command_id: CommandId::new(&self.command_id)?,
        };
        let runtime = context.runtime();
        let info = runtime.get_command(&context.caller, key.clone()).await?;
        Ok((key, info))
    }
}

/// The last message to a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum End {
    /// The command has ended.
    Exit { exit_code: i32 },
    /// The call has failed, or the command has no exit code.
    Error {
        error_type: &'static str,
        error: String,
    },
    /// The client should connect again: the server stops, or cannot reach the box now.
    #[serde(skip)]
    Lost,
}

impl End {
    fn error(error_type: &'static str, error: impl Into<String>) -> Self {
        Self::Error {
            error_type,
            error: error.into(),
        }
    }

    /// Returns the end of a call that reads a command.
    fn of(ended: Result<CommandInfo, BoxError>, context: &Context, request: Request) -> Self {
        let stops = context.server.closing.borrow().is_some();
        let info = match ended {
            Ok(info) => info,
            Err(error) => {
                return if stops {
                    Self::Lost
                } else {
                    Self::of_error(&error, request)
                };
            }
        };
        let Some(exit) = info.exit else {
            return Self::error("CommandError", "the exit status of the command is unknown");
        };
        if exit.why == ExitWhy::BoxEnded && stops {
            return Self::Lost;
        }
        match exit.shell_code() {
            Some(exit_code) => Self::Exit { exit_code },
            None if exit.why == ExitWhy::Timeout => {
                Self::error("CommandTimeout", "the command exceeded its timeout")
            }
            None => Self::error("CommandError", "the command ended without an exit status"),
        }
    }

    fn of_error(error: &BoxError, request: Request) -> Self {
        let detail: Detail = error.detail().unwrap_or_default();
        let error_type = match error.code() {
            Code::NotFound if request == Request::Execute => match detail.subject {
                None | Some(Subject::Box) => "SandboxNotFound",
                Some(_) => "CommandError",
            },
            Code::NotFound if detail.expired => "SessionExpired",
            Code::NotFound => "CommandNotFound",
            Code::Denied => "PermissionDenied",
            // A box that the server cannot reach now may answer the next attempt; a failed one will not.
            Code::Unavailable
                if !detail.lasting && detail.ended.is_none_or(|ended| ended == Ended::Shutdown) =>
            {
                return Self::Lost;
            }
            Code::Cancelled => return Self::Lost,
            _ => "CommandError",
        };
        Self::error(error_type, error.message())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_times_are_no_limit() {
        assert_eq!(milliseconds("t", Some(-1.0)), Ok(None));
        assert_eq!(milliseconds("t", None), Ok(None));
        assert_eq!(milliseconds("t", Some(1.5)), Ok(Some(1500)));
        assert!(milliseconds("t", Some(f64::NAN)).is_err());
        assert!(milliseconds("t", Some(f64::INFINITY)).is_err());
    }

    #[test]
    fn errors_have_the_types_that_the_sdk_knows() {
        let of = |error: BoxError| End::of_error(&error, Request::Reconnect);
        let expired = Detail {
            expired: true,
            ..Detail::default()
        };
        let expired = BoxError::not_found("gone").with_detail(&expired);
        assert_eq!(of(expired), End::error("SessionExpired", "gone"));
        let unknown = BoxError::not_found("none");
        assert_eq!(of(unknown.clone()), End::error("CommandNotFound", "none"));
        assert_eq!(
            End::of_error(&unknown, Request::Execute),
            End::error("SandboxNotFound", "none")
        );
        let of_end = |why| box_protocol::error::with_end(BoxError::unavailable("gone"), why);
        for unreachable in [BoxError::unavailable("gone"), of_end(Ended::Shutdown)] {
            assert_eq!(of(unreachable), End::Lost);
        }
        let lasting = BoxError::unavailable("gone").with_detail(&Detail::lasting());
        for failed in [of_end(Ended::Failed), lasting] {
            assert_eq!(of(failed), End::error("CommandError", "gone"));
        }
        let json = serde_json::to_value(End::Exit { exit_code: 7 }).unwrap();
        assert_eq!(json, serde_json::json!({"type": "exit", "exit_code": 7}));
    }
}
