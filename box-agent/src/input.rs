//! What a command reads: a pipe or its terminal.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::BoxError;
use box_protocol::actions::TerminalSize;
use box_rpc::{Turn, Turns};
use rustix::termios::Winsize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

/// The agent's end of it, as long as it is open.
#[derive(Debug, Default)]
pub(crate) struct Input {
    way: Mutex<Option<Arc<Open>>>,
    /// Writers take turns.
    turns: Turns<()>,
}

/// Where input goes.
#[derive(Debug)]
pub(crate) enum Way {
    Pipe(AsyncFd<OwnedFd>),
    Terminal(AsyncFd<OwnedFd>),
}

#[derive(Debug)]
struct Open {
    way: Way,
    /// Nothing more is to be written, also not by those who wait for the command to read.
    shut: watch::Sender<bool>,
}

/// What the terminal's line discipline takes for the end of input, at the begin of a line.
const END_OF_INPUT: u8 = 4;

impl Input {
    fn way(&self) -> MutexGuard<'_, Option<Arc<Open>>> {
        self.way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place behind those that write, or wait to.
    pub(crate) fn queue(&self) -> Turn<()> {
        self.turns.take([()])
    }

    /// Takes what there is to write to. Nothing is waited for: a command that was started must not be left half way.
    pub(crate) fn open(&self, way: Way) {
        *self.way() = Some(Arc::new(Open {
            way,
            shut: watch::Sender::new(false),
        }));
    }

    /// Writes all of it in its turn; waits for the command to read, for as long as it lives.
    pub(crate) async fn write(&self, turn: &Turn<()>, bytes: &[u8]) -> Result<(), BoxError> {
        let open = self.way().clone().ok_or_else(none)?;
        open.write(turn, bytes).await
    }

    /// Nothing more will be written, once what was asked for before is. A terminal stays, and is told.
    pub(crate) async fn close(&self, turn: &Turn<()>) -> Result<(), BoxError> {
        let Some(open) = self.way().clone() else {
            return Ok(());
        };
        if matches!(open.way, Way::Terminal(_)) {
            return open.write(turn, &[END_OF_INPUT]).await;
        }
        // Whoever has shut it meanwhile did the same.
        let _ = open.in_turn(turn, async { Ok(()) }).await;
        self.shut();
        Ok(())
    }

    /// Lets go of it. Whoever writes, or waits to, is told so: somebody else may hold the other end, and never read.
    pub(crate) fn shut(&self) {
        if let Some(open) = self.way().take() {
            open.shut.send_replace(true);
        }
    }

    pub(crate) fn resize(&self, size: TerminalSize) -> Result<(), BoxError> {
        let open = self.way().clone();
        match open.as_deref().map(|open| &open.way) {
            Some(Way::Terminal(fd)) => set_size(fd.get_ref(), size)
                .map_err(|_| BoxError::conflict("the command's terminal is gone")),
            Some(Way::Pipe(_)) | None => Err(BoxError::conflict("the command has no terminal")),
        }
    }
}

impl Open {
    async fn write(&self, turn: &Turn<()>, mut bytes: &[u8]) -> Result<(), BoxError> {
        let (Way::Pipe(fd) | Way::Terminal(fd)) = &self.way;
        let writing = async {
            while !bytes.is_empty() {
                let wrote = fd
                    .async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, bytes)?))
                    .await;
                let unread = |_| BoxError::conflict("the command does not read its input any more");
                bytes = &bytes[wrote.map_err(unread)?..];
            }
            Ok(())
        };
        self.in_turn(turn, writing).await
    }

    /// Does something when its turn has come, unless this is shut before it is done.
    async fn in_turn(
        &self,
        turn: &Turn<()>,
        work: impl Future<Output = Result<(), BoxError>>,
    ) -> Result<(), BoxError> {
        let mut shut = self.shut.subscribe();
        tokio::select! {
            biased;
            _ = shut.wait_for(|shut| *shut) => Err(none()),
            done = async { turn.comes().await; work.await } => done,
        }
    }
}

fn none() -> BoxError {
    BoxError::conflict("the command has no open input")
}

pub(crate) fn set_size(terminal: &OwnedFd, size: TerminalSize) -> std::io::Result<()> {
    let size = Winsize {
        ws_row: size.rows,
        ws_col: size.cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(rustix::termios::tcsetwinsize(terminal, size)?)
}
