//! A command on this process's own streams: what it says goes out, what is typed goes in, Ctrl-C reaches it, and its end is
//! ours.

use std::io;
use std::process::ExitCode;

use anyhow::Result;
use box_client::{
    Chunk, ClientError, CommandBuilder, CommandControl, CommandHandle, Exit, ExitWhy,
};
use futures::{Stream, StreamExt as _};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::output;
use crate::said::{self, Piece};
use crate::terminal::{self, Raw};

/// What is read of standard input at a time.
const INPUT_BYTES: usize = 32 * 1024;

/// Starts a command and stays with it to its end.
pub(crate) async fn run(command: CommandBuilder, tty: bool, json: bool) -> Result<Exit> {
    let mut command = command.with_input().tied().keep(0);
    if !json {
        command = command.bytes();
    }
    let raw = if tty {
        let (cols, rows) = terminal::size().unwrap_or((80, 24));
        let term = std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned());
        command = command.terminal(cols, rows).env("TERM", term);
        Raw::enter()?
    } else {
        None
    };
    let signals = Signals::listen()?;
    let handle = command.start().await?;
    let ended = follow(handle, tty, json, signals).await;
    drop(raw);
    ended
}

/// Passes everything on in both directions until the command ends.
async fn follow(
    mut command: CommandHandle,
    tty: bool,
    json: bool,
    signals: Signals,
) -> Result<Exit> {
    let input = tokio::spawn(pass_input(command.control()));
    let signals = tokio::spawn(signals.pass(command.control(), tty));
    let printed = print(&mut command, json).await;
    input.abort();
    signals.abort();
    if let Err(error) = printed {
        // Nobody reads any more, so nobody is left to run it for.
        let _ = command.kill().await;
        return Err(error);
    }
    Ok(command.exit().await?)
}

/// Prints what a command says until it ends.
pub(crate) async fn print(
    mut chunks: impl Stream<Item = Result<Chunk, ClientError>> + Unpin,
    json: bool,
) -> Result<()> {
    while let Some(chunk) = chunks.next().await {
        match chunk? {
            Chunk::Output {
                stream,
                offset,
                at,
                data,
            } => {
                let data = &data;
                let piece = Piece {
                    stream,
                    offset,
                    at,
                    data,
                };
                said::piece(json, piece)?;
            }
            Chunk::Gap {
                stream,
                offset,
                bytes,
            } => said::gap(json, stream, offset, bytes)?,
            _ => {}
        }
    }
    Ok(())
}

/// Reads standard input by a thread of its own: a file or a terminal may wait for ever, and then so does only that.
async fn pass_input(command: CommandControl) {
    let (sender, mut pieces) = tokio::sync::mpsc::channel::<Vec<u8>>(1);
    std::thread::spawn(move || {
        let mut buffer = vec![0; INPUT_BYTES];
        while let Ok(length @ 1..) = io::Read::read(&mut io::stdin().lock(), &mut buffer) {
            if sender.blocking_send(buffer[..length].to_vec()).is_err() {
                return;
            }
        }
    });
    while let Some(piece) = pieces.recv().await {
        // A command that has closed its input, or has ended, wants no more.
        if command.send_input(piece).await.is_err() {
            return;
        }
    }
    let _ = command.close_input().await;
}

/// What this process is told. Listened to before the command begins, so that none is missed.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    resized: Signal,
}

impl Signals {
    fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            resized: signal(SignalKind::window_change())?,
        })
    }

    /// Ctrl-C and its kin go to the command; a second one ends it. A terminal's own keys are input there already.
    async fn pass(mut self, command: CommandControl, tty: bool) {
        let mut told = false;
        loop {
            let name = tokio::select! {
                _ = self.interrupt.recv() => "INT",
                _ = self.terminate.recv() => "TERM",
                _ = self.hangup.recv() => "HUP",
                _ = self.resized.recv() => {
                    if let Some((cols, rows)) = terminal::size().filter(|_| tty) {
                        let _ = command.resize(cols, rows).await;
                    }
                    continue;
                }
            };
            let sent = if told {
                command.kill().await
            } else {
                command.signal(name).await
            };
            told = true;
            if let Err(ClientError::Disconnected { .. }) = sent {
                return;
            }
        }
    }
}

/// Says why a command ended that did not end by itself.
pub(crate) fn explain(exit: &Exit) {
    let why = match exit.why {
        ExitWhy::Timeout => "the command ran out of time; --timeout gives it more",
        ExitWhy::Oom => "the box ran out of memory; --memory-mb gives it more",
        ExitWhy::BoxEnded => "the box was ended, and the command with it",
        ExitWhy::Lost => "how the command ended was not seen",
        _ => return,
    };
    output::complain(&format!("boxd: {why}"));
}

/// The exit of a program that ran a command: its code, 128 and the signal's number, 124 for a timeout.
pub(crate) fn code_of(exit: &Exit) -> ExitCode {
    let code = match (exit.why, exit.code, exit.signal) {
        (ExitWhy::Timeout | ExitWhy::Idle, ..) => 124,
        (_, Some(code), _) => code,
        (_, None, Some(signal)) => 128 + signal,
        (_, None, None) => 125,
    };
    ExitCode::from(u8::try_from(code).unwrap_or(125))
}
