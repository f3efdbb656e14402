//! One run in a session: its start, its output, and how it ended.

use std::collections::VecDeque;

use box_protocol::actions::{
    AttachOptions, CommandAttachParams, CommandAttachResult, CommandChunk, CommandKillParams,
    Displayed, OnDisconnect, ReadEnd, ReadFrom, ReadWhy, ShellRunParams, Stdin, StreamName, Until,
    View,
};
use box_protocol::{
    BoxError, CommandId, CommandInfo, CommandState, Env, Exit, ExitWhy, PerStream, ShellId,
};

use super::GATEWAY;
use super::sessions::Sessions;
use crate::http::stream::{Step, StreamedCall};

/// How long a killed run may take to end, before the answer says that it runs.
const KILL_WAIT_MS: u64 = 10_000;

/// What a run needs.
#[derive(Debug)]
pub(super) struct RunRequest {
    pub(super) shell_id: ShellId,
    pub(super) text: String,
    pub(super) cwd: Option<String>,
    /// Whether the session stays in the directory where the run ends.
    pub(super) cwd_stays: bool,
    pub(super) env: Env,
    /// The run ends with its process tree after this time.
    pub(super) hard_ms: Option<u64>,
    /// The request returns at these limits, and the run goes on.
    pub(super) until: Until,
    /// Whether the run goes on when the client leaves.
    pub(super) keep: bool,
    pub(super) stdin: Stdin,
}

/// The output of a run, and how reading it ended.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) info: CommandInfo,
    /// Why the request returned.
    pub(super) read: Option<ReadEnd>,
    pub(super) stdout: Text,
    pub(super) stderr: Text,
    pub(super) displayed: Vec<Displayed>,
}

/// How a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Pending,
    Running,
    Silent,
    Completed,
    TimedOut,
    Killed,
}

/// Returns how a run stands; `read` is why the request returned.
pub(super) fn status_of(info: &CommandInfo, read: Option<ReadEnd>) -> Status {
    match (&info.exit, info.state) {
        (Some(exit), _) => match exit.why {
            ExitWhy::Timeout => Status::TimedOut,
            ExitWhy::Killed | ExitWhy::BoxEnded | ExitWhy::Lost | ExitWhy::Idle => Status::Killed,
            ExitWhy::Exit | ExitWhy::Signal | ExitWhy::Oom => Status::Completed,
        },
        (None, CommandState::Lost) => Status::Killed,
        (None, _) if read.is_some_and(|read| read.why == ReadWhy::Silence) => Status::Silent,
        (None, CommandState::Pending | CommandState::Held) => Status::Pending,
        (None, _) => Status::Running,
    }
}

/// Returns the exit code as a shell shows it.
pub(super) fn exit_code(info: &CommandInfo) -> Option<i32> {
    info.exit.as_ref().and_then(Exit::shell_code)
}

impl Sessions {
    /// Runs a text until its end or a limit of the request.
    pub(super) async fn run(&self, request: RunRequest) -> Result<Outcome, BoxError> {
        let params = self.params(request);
        let context = self.context.clone();
        let call = StreamedCall::new(move |chunks| async move {
            let started = context.run_in_shell(&GATEWAY, params, Some(chunks)).await?;
            Ok((started.info, started.read))
        });
        collect(call).await
    }

    /// Starts a text, which goes on when the client leaves.
    pub(super) async fn start(&self, request: RunRequest) -> Result<CommandInfo, BoxError> {
        let mut params = self.params(request);
        params.attach = None;
        params.on_disconnect = OnDisconnect::Keep;
        let context = &self.context;
        Ok(context.run_in_shell(&GATEWAY, params, None).await?.info)
    }

    fn params(&self, request: RunRequest) -> ShellRunParams {
        let (box_id, shell_id) = (self.box_id.clone(), request.shell_id);
        ShellRunParams {
            cwd: request.cwd,
            cwd_stays: request.cwd_stays,
            env: request.env,
            stdin: request.stdin,
            timeout_ms: request.hard_ms,
            on_disconnect: if request.keep {
                OnDisconnect::Keep
            } else {
                OnDisconnect::Kill
            },
            attach: Some(AttachOptions {
                view: View::Text,
                until: request.until,
            }),
            ..ShellRunParams::new(box_id, shell_id, request.text)
        }
    }

    /// Reads the output of a run from these offsets, until its end or a limit.
    pub(super) async fn read(
        &self,
        command_id: &CommandId,
        from: PerStream,
        view: View,
        until: Until,
    ) -> Result<Outcome, BoxError> {
        let params = CommandAttachParams {
            from: ReadFrom::Offsets(from),
            view,
            until,
            ..CommandAttachParams::new(self.box_id.clone(), command_id.clone())
        };
        let context = self.context.clone();
        let call = StreamedCall::new(move |chunks| async move {
            let runtime = context.runtime();
            let read = runtime
                .attach_command(&context.caller, params, chunks)
                .await;
            let CommandAttachResult { info, read } = read?;
            Ok((info, Some(read)))
        });
        collect(call).await
    }

    /// Waits for the end of a run, at most this long.
    pub(super) async fn wait(
        &self,
        command_id: &CommandId,
        limit_ms: u64,
    ) -> Result<CommandInfo, BoxError> {
        let until = Until {
            ms: Some(limit_ms),
            ..Until::default()
        };
        let from = PerStream::default();
        Ok(self.read(command_id, from, View::None, until).await?.info)
    }

    /// Sends a signal to a run.
    pub(super) async fn signal(
        &self,
        command_id: &CommandId,
        signal: &str,
    ) -> Result<(), BoxError> {
        let params = CommandKillParams {
            signal: signal.to_owned(),
            ..CommandKillParams::new(self.box_id.clone(), command_id.clone())
        };
        let (runtime, caller) = (self.context.runtime(), &self.context.caller);
        runtime.kill_command(caller, params).await.map(drop)
    }

    /// Kills a run, and returns its record after its end, if that comes soon.
    pub(super) async fn kill(&self, command_id: &CommandId) -> Result<CommandInfo, BoxError> {
        self.signal(command_id, "KILL").await?;
        self.wait(command_id, KILL_WAIT_MS).await
    }
}

async fn collect(
    mut call: StreamedCall<CommandChunk, (CommandInfo, Option<ReadEnd>)>,
) -> Result<Outcome, BoxError> {
    let (mut stdout, mut stderr) = (Text::default(), Text::default());
    let mut displayed = Vec::new();
    loop {
        match call.next().await {
            Step::Chunk(CommandChunk::Text(piece)) => match piece.stream {
                StreamName::Stdout => stdout.push(&piece.data),
                StreamName::Stderr => stderr.push(&piece.data),
            },
            Step::Chunk(CommandChunk::Gap(gap)) => match gap.stream {
                StreamName::Stdout => stdout.skip(gap.bytes),
                StreamName::Stderr => stderr.skip(gap.bytes),
            },
            Step::Chunk(CommandChunk::Display(value)) => displayed.push(value),
            Step::Chunk(CommandChunk::Started(_) | CommandChunk::Bytes(_)) | Step::Idle => {}
            Step::End(ended) => {
                let (info, read) = ended?;
                return Ok(Outcome {
                    info,
                    read,
                    stdout,
                    stderr,
                    displayed,
                });
            }
        }
    }
}

/// Output of limited length: its start and its end.
#[derive(Debug, Default)]
pub(super) struct Text {
    /// The bytes that are missing before the start.
    lost: u64,
    head: String,
    tail: VecDeque<String>,
    tail_bytes: usize,
    dropped: u64,
}

impl Text {
    /// The maximum bytes of the start, and of the end.
    const HALF_BYTES: usize = 4 * 1024 * 1024;

    fn push(&mut self, piece: &str) {
        if self.tail.is_empty() && self.head.len() + piece.len() <= Self::HALF_BYTES {
            self.head.push_str(piece);
            return;
        }
        self.tail.push_back(piece.to_owned());
        self.tail_bytes += piece.len();
        while self.tail_bytes > Self::HALF_BYTES {
            let Some(oldest) = self.tail.pop_front() else {
                return;
            };
            self.tail_bytes -= oldest.len();
            self.dropped += oldest.len() as u64;
        }
    }

    /// Counts bytes that the log of the run has dropped: usually its oldest.
    fn skip(&mut self, bytes: u64) {
        if self.head.is_empty() && self.tail.is_empty() {
            self.lost += bytes;
        } else {
            self.dropped += bytes;
        }
    }

    /// Returns the output, with notices where something is missing.
    pub(super) fn into_text(self) -> String {
        let mut text = self.head;
        if self.lost > 0 {
            let notice = format!("... [{} bytes dropped] ...\n\n", self.lost);
            text.insert_str(0, &notice);
        }
        if self.dropped > 0 {
            let notice = format!("\n\n... [{} bytes dropped] ...\n\n", self.dropped);
            text.push_str(&notice);
        }
        text.extend(self.tail);
        text
    }

    /// Returns the output within a number of characters; 0 is no limit.
    pub(super) fn within(self, max_chars: usize) -> String {
        let text = self.into_text();
        if max_chars == 0 {
            return text;
        }
        box_service::truncate::truncate(&text, max_chars).unwrap_or(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_output_keeps_its_start_and_its_end() {
        let mut text = Text::default();
        text.push("start ");
        let piece = "x".repeat(1024 * 1024);
        for _ in 0..12 {
            text.push(&piece);
        }
        text.push("end");
        let text = text.into_text();
        assert!(text.starts_with("start ") && text.ends_with("end"));
        assert!(text.contains("bytes dropped") && text.len() < 9 * 1024 * 1024);
        let mut late = Text::default();
        late.skip(7);
        late.push("end\n");
        assert_eq!(late.into_text(), "... [7 bytes dropped] ...\n\nend\n");
        let mut short = Text::default();
        short.push("abc");
        assert_eq!(short.within(0), "abc");
    }
}
