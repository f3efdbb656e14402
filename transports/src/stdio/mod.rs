//! Messages over the standard streams of a process, newline framed.
//!
//! [`serve`] is the child's side: it takes the two descriptors for itself and points fd 0 at
//! nothing and fd 1 at standard error, so that a stray `println!` of any library cannot break the
//! protocol. [`spawn`] is the parent's side: it starts a command in a process group of its own and
//! never leaves any of it behind.
//!
//! The parent skips lines that are not of the form `{…}` or `[…]`, which some library of the child has printed. Both sides
//! understand LangBot's pieces (`chunk_start`, `chunk_data`, `chunk_end`); in that dialect they also send them, because
//! its readers break on lines of more than 64 KiB.
//!
//! ```no_run
//! use box_rpc::{Connection, Limits};
//! use box_transports::stdio;
//! use tokio::process::Command;
//!
//! # async fn example() -> Result<(), box_rpc::ConnectionError> {
//! let child = stdio::spawn(Command::new("boxd"), &Limits::default())?;
//! let (mut send, mut receive) = Box::new(child).split();
//! send.send("{}".to_owned()).await?;
//! send.flush().await?;
//! let answer = receive.receive().await?;
//! // Ends the command, and everything it started.
//! send.close().await?;
//! # let _ = answer;
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: this file, `pieces`, `serve` with `thread_pipe`, `spawn` with `group`.

mod group;
mod pieces;
mod serve;
mod spawn;
#[cfg(test)]
mod tests;
mod thread_pipe;

use std::collections::VecDeque;

use async_trait::async_trait;
use box_rpc::{Connection, ConnectionError, Dialect, Limits, ReceiveHalf, SendHalf};
use tokio::io::{AsyncRead, AsyncWrite};

use self::pieces::{Assembly, PIECE_BYTES, Pieces, Step};
use crate::line::{Line, LineReceive, LineSend, NoiseCount};

pub use self::{
    serve::{Served, serve},
    spawn::{Child, spawn},
};

/// No line of LangBot's is longer, whatever the limit on messages.
const LANGBOT_LINE_BYTES: usize = 64 * 1024;

/// Lines with LangBot's pieces on top, over any byte stream.
#[derive(Debug)]
pub struct Stdio<R, W> {
    send: StdioSend<W>,
    receive: StdioReceive<R>,
}

impl<R, W> Stdio<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    /// Frames what `read` and `write` carry, as the standard streams are framed.
    pub fn new(read: R, write: W, limits: &Limits) -> Self {
        Self::over(Line::new(read, write, limits), limits)
    }

    fn over(line: Line<R, W>, limits: &Limits) -> Self {
        let (send, mut receive) = line.into_parts();
        receive.read_lines_of(LANGBOT_LINE_BYTES);
        Self {
            send: StdioSend {
                lines: send,
                dialect: Dialect::JsonRpc,
            },
            receive: StdioReceive {
                lines: receive,
                assembly: Assembly::new(limits.message_bytes),
                failed: None,
            },
        }
    }

    /// From now on, lines that are not of the form `{…}` or `[…]` are skipped and counted.
    pub fn skip_noise(&mut self) -> NoiseCount {
        self.receive.lines.skip_noise()
    }

    pub(super) fn into_parts(self) -> (StdioSend<W>, StdioReceive<R>) {
        (self.send, self.receive)
    }
}

impl<R, W> Connection for Stdio<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    fn split(self: Box<Self>) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
        (Box::new(self.send), Box::new(self.receive))
    }
}

/// The half that sends.
#[derive(Debug)]
pub(super) struct StdioSend<W> {
    lines: LineSend<W>,
    dialect: Dialect,
}

impl<W: AsyncWrite + Unpin> StdioSend<W> {
    /// Takes one message, cut up where the dialect wants it so.
    async fn put(&mut self, message: String) -> Result<(), ConnectionError> {
        if self.dialect == Dialect::LangBot && message.len() > PIECE_BYTES {
            for line in Pieces::of(&message) {
                self.lines.put(line).await?;
            }
            return Ok(());
        }
        self.lines.put(message).await
    }
}

#[async_trait]
impl<W: AsyncWrite + Unpin + Send> SendHalf for StdioSend<W> {
    async fn send(&mut self, message: String) -> Result<(), ConnectionError> {
        self.put(message).await
    }

    async fn flush(&mut self) -> Result<(), ConnectionError> {
        self.lines.finish().await
    }

    async fn send_all(&mut self, messages: &mut VecDeque<String>) -> Result<(), ConnectionError> {
        while let Some(message) = messages.pop_front() {
            self.put(message).await?;
        }
        self.lines.finish().await
    }

    async fn close(&mut self) -> Result<(), ConnectionError> {
        self.lines.end().await
    }

    async fn probe(&mut self) -> Result<(), ConnectionError> {
        self.lines.probe().await
    }

    fn speak(&mut self, dialect: Dialect) {
        self.dialect = dialect;
    }
}

/// The half that receives.
#[derive(Debug)]
pub(super) struct StdioReceive<R> {
    lines: LineReceive<R>,
    assembly: Assembly,
    /// What went wrong where only a message could be returned.
    failed: Option<ConnectionError>,
}

impl<R: AsyncRead + Unpin> StdioReceive<R> {
    /// What the next line amounts to.
    fn take(&mut self, line: String) -> Result<Step, ConnectionError> {
        let step = self.assembly.take(line);
        if !self.assembly.is_open() {
            self.lines.message_ended();
        }
        step
    }
}

#[async_trait]
impl<R: AsyncRead + Unpin + Send> ReceiveHalf for StdioReceive<R> {
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        loop {
            let line = match self.lines.next(self.assembly.is_open()).await {
                Ok(Some(line)) => line,
                Ok(None) => return Ok(None),
                Err(ConnectionError::TooLarge { .. }) if self.assembly.is_open() => {
                    return Err(ConnectionError::Framing("a piece longer than its message"));
                }
                Err(error) => return Err(error),
            };
            match self.take(line)? {
                Step::Message(message) => return Ok(Some(message)),
                Step::More => {}
            }
        }
    }

    fn receive_ready(&mut self) -> Option<String> {
        while self.failed.is_none() {
            let line = self.lines.next_ready(self.assembly.is_open())?;
            match self.take(line) {
                Ok(Step::Message(message)) => return Some(message),
                Ok(Step::More) => {}
                Err(error) => self.failed = Some(error),
            }
        }
        None
    }

    fn accept_up_to(&mut self, bytes: usize) {
        self.lines.accept_up_to(bytes);
        self.assembly.accept_up_to(bytes);
    }
}
