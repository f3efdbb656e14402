//! Runs a command attached to the streams of this process.
//!
//! Forwards output, input and signals, and exits with the exit code of the command.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use box_client::{
    BoxHandle, Chunk, ClientError, CommandBuilder, CommandControl, CommandHandle, Exit, ExitWhy,
    ShellRunBuilder,
};
use box_rpc::CallError;
use futures::{Stream, StreamExt as _};
use tokio::sync::watch;

use crate::args::ExecOptions;
use crate::output;
use crate::signals::{self, Signals};
use crate::stream_output::{self, OutputChunk};
use crate::terminal::{self, RawMode};

/// The size of one read from stdin.
const INPUT_BYTES: usize = 32 * 1024;

/// The interval at which the end of input is sent again on a terminal.
///
/// A shell that was taking over the terminal misses the first one.
const EOF_RETRY: Duration = Duration::from_secs(1);

/// How long a command without a reader keeps running after a lost connection.
const UNATTENDED_LIMIT: Duration = Duration::from_mins(1);

/// The interval at which input is sent again while the server is unreachable.
const INPUT_RETRY: Duration = Duration::from_millis(200);

/// Starts a command and follows it to its end.
pub(crate) async fn run(
    command: CommandBuilder,
    exec_options: &ExecOptions,
    json: bool,
) -> Result<Exit> {
    let tty = exec_options.tty;
    let mut command = command
        .kill_on_disconnect()
        .idle_limit(UNATTENDED_LIMIT)
        .capture_limit(0);
    if !exec_options.no_stdin {
        command = command.with_input();
    }
    if !json {
        command = command.bytes();
    }
    let raw = if tty {
        let (cols, rows) = terminal::size().unwrap_or((80, 24));
        let term = std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned());
        command = command.terminal(cols, rows).env("TERM", term);
        RawMode::enter()?
    } else {
        None
    };
    let ended = forward_until_exit(command.start(), exec_options, json).await;
    drop(raw);
    ended?.unwrap_or_else(|signal| signals::exit_by_signal(signal))
}

/// Runs a text in a shell without a terminal and follows it to its end.
pub(crate) async fn run_in_shell(
    mut run: ShellRunBuilder,
    exec_options: &ExecOptions,
    json: bool,
) -> Result<Exit> {
    if !exec_options.no_stdin {
        run = run.with_input();
    }
    if !json {
        run = run.bytes();
    }
    let ended = forward_until_exit(run.start(), exec_options, json).await;
    ended?.unwrap_or_else(|signal| signals::exit_by_signal(signal))
}

/// Follows a command until it ends, or until a signal cannot be forwarded to it.
async fn forward_until_exit(
    starting: impl Future<Output = Result<CommandHandle, ClientError>>,
    exec_options: &ExecOptions,
    json: bool,
) -> Result<Result<Result<Exit>, i32>> {
    let (started, control) = watch::channel(None);
    let signals = Signals::listen()?;
    let running = async {
        let handle = starting.await?;
        started.send_replace(Some(handle.control()));
        follow(handle, exec_options.tty, !exec_options.no_stdin, json).await
    };
    Ok(tokio::select! {
        ended = running => Ok(ended),
        signal = signals.forward(control, exec_options.tty) => Err(signal),
    })
}

/// Forwards input and output until the command ends.
async fn follow(mut command: CommandHandle, tty: bool, input: bool, json: bool) -> Result<Exit> {
    let input = input.then(|| tokio::spawn(forward_input(command.control(), tty)));
    let losses = tokio::spawn(report_connection_losses(
        command.control().connection_lost(),
        tty,
        json,
    ));
    let printed = print(&mut command, json).await;
    losses.abort();
    if let Some(input) = input {
        input.abort();
    }
    if let Err(error) = printed {
        // The reader of our output is gone, so the command is no longer needed.
        let _ = command.kill().await;
        return Err(error);
    }
    let exit = command.exit().await?;
    output::report_adjusted(&command.adjusted());
    Ok(exit)
}

/// Prints the output of a command until it ends.
pub(crate) async fn print(
    mut chunks: impl Stream<Item = Result<Chunk, ClientError>> + Unpin,
    json: bool,
) -> Result<()> {
    while let Some(chunk) = chunks.next().await {
        print_chunk(chunk?, json)?;
    }
    Ok(())
}

/// Prints one chunk of output.
pub(crate) fn print_chunk(chunk: Chunk, json: bool) -> Result<()> {
    match chunk {
        Chunk::Output {
            stream,
            offset,
            at,
            data,
        } => {
            let chunk = OutputChunk {
                stream,
                offset,
                at,
                data: &data,
            };
            stream_output::print_chunk(json, chunk)?;
        }
        Chunk::Gap {
            stream,
            offset,
            bytes,
        } => stream_output::print_gap(json, stream, offset, bytes)?,
        _ => {}
    }
    Ok(())
}

/// Reports a lost connection and the reconnect.
async fn report_connection_losses(mut lost: watch::Receiver<bool>, tty: bool, json: bool) {
    while lost.changed().await.is_ok() {
        let text = if *lost.borrow_and_update() {
            "lost the connection to the server; the command still runs, and its output continues after the reconnect"
        } else {
            "reconnected to the server"
        };
        if json {
            output::eprintln(&serde_json::json!({"notice": text}).to_string());
        } else if tty {
            // The terminal is raw.
            output::eprintln(&format!("\r\nboxd: {text}\r"));
        } else {
            output::eprintln(&format!("boxd: {text}"));
        }
    }
}

/// Forwards stdin to the command.
///
/// A separate thread reads stdin, because a read of a file or a terminal may block forever.
async fn forward_input(command: CommandControl, tty: bool) {
    let (sender, mut chunks) = tokio::sync::mpsc::channel::<Vec<u8>>(1);
    std::thread::spawn(move || {
        let mut buffer = vec![0; INPUT_BYTES];
        loop {
            terminal::wait_for_input();
            let Ok(length @ 1..) = io::Read::read(&mut io::stdin().lock(), &mut buffer) else {
                return;
            };
            if sender.blocking_send(buffer[..length].to_vec()).is_err() {
                return;
            }
        }
    });
    while let Some(print_chunk) = chunks.recv().await {
        loop {
            match command.send_input(print_chunk.clone()).await {
                Ok(()) => break,
                // The server is unreachable. The reader decides when to give up.
                Err(ClientError::Failed(CallError::NotSent(_))) => {
                    tokio::time::sleep(INPUT_RETRY).await;
                }
                // On a terminal the user presses the key again. In a pipe no byte may be lost or sent twice.
                Err(ClientError::Failed(CallError::Lost(_))) if tty => break,
                Err(ClientError::Failed(CallError::Lost(_))) => {
                    output::eprintln(
                        "boxd: lost the connection while sending input, so part of the input may be missing; killing the command when the server is back",
                    );
                    // Not `kill`, which ends the reading: the server is not back yet.
                    while let Err(ClientError::Failed(_)) = command.signal("KILL").await {
                        tokio::time::sleep(INPUT_RETRY).await;
                    }
                    return;
                }
                // The command has closed its input or has ended.
                Err(_) => return,
            }
        }
    }
    while command.close_input().await.is_ok() && tty {
        tokio::time::sleep(EOF_RETRY).await;
    }
}

/// The hint for an existing box that ran out of memory.
pub(crate) const RECREATE_HINT: &str = "; to get more, create a box with a higher --memory-mb";

/// The hint for a box that ran out of memory.
pub(crate) fn memory_hint(handle: &BoxHandle) -> &'static str {
    if handle.existed() {
        RECREATE_HINT
    } else {
        "; raise --memory-mb"
    }
}

/// Prints why a command was ended, with a hint for more time or memory.
pub(crate) fn report_abnormal_exit(exit: &Exit, time_hint: &str, memory_hint: &str) {
    let (why, more) = match exit.why {
        ExitWhy::Timeout => ("command timed out", time_hint),
        ExitWhy::Oom => ("box ran out of memory", memory_hint),
        ExitWhy::Idle => (
            "command killed: no reader attached within its idle limit",
            "",
        ),
        ExitWhy::BoxEnded => ("command killed: its box ended", ""),
        ExitWhy::Lost => ("exit status unknown", ""),
        _ => return,
    };
    output::eprintln(&format!("boxd: {why}{more}"));
}

/// The exit code for a command: its own, 128 plus the signal number, or 124 for a timeout.
pub(crate) fn exit_code(exit: &Exit) -> ExitCode {
    let code = match (exit.why, exit.code, exit.signal) {
        (ExitWhy::Timeout | ExitWhy::Idle, ..) => 124,
        (_, Some(code), _) => code,
        (_, None, Some(signal)) => 128 + signal,
        (_, None, None) => 125,
    };
    ExitCode::from(u8::try_from(code).unwrap_or(125))
}
