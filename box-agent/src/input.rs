//! What a command reads: a pipe or its terminal.

use std::os::fd::OwnedFd;

use box_protocol::BoxError;
use box_protocol::actions::TerminalSize;
use rustix::termios::Winsize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Mutex;

/// The agent's end of it.
#[derive(Debug, Default)]
pub(crate) struct Input(Mutex<Way>);

#[derive(Debug, Default)]
enum Way {
    /// There is none, or no more.
    #[default]
    Closed,
    Pipe(AsyncFd<OwnedFd>),
    Terminal(AsyncFd<OwnedFd>),
}

/// What the terminal's line discipline takes for the end of input, at the begin of a line.
const END_OF_INPUT: u8 = 4;

impl Input {
    pub(crate) async fn is_pipe(&self, fd: AsyncFd<OwnedFd>) {
        *self.0.lock().await = Way::Pipe(fd);
    }

    pub(crate) async fn is_terminal(&self, fd: AsyncFd<OwnedFd>) {
        *self.0.lock().await = Way::Terminal(fd);
    }

    /// Writes all of it; waits for the command to read. Writers take turns.
    pub(crate) async fn write(&self, mut bytes: &[u8]) -> Result<(), BoxError> {
        let way = self.0.lock().await;
        let (Way::Pipe(fd) | Way::Terminal(fd)) = &*way else {
            return Err(BoxError::conflict("the command has no open input"));
        };
        while !bytes.is_empty() {
            let wrote = fd
                .async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, bytes)?))
                .await;
            match wrote {
                Ok(written) => bytes = &bytes[written..],
                Err(_) => {
                    return Err(BoxError::conflict(
                        "the command does not read its input any more",
                    ));
                }
            }
        }
        Ok(())
    }

    /// Nothing more will be written. A terminal stays, and is told.
    pub(crate) async fn close(&self) -> Result<(), BoxError> {
        if matches!(&*self.0.lock().await, Way::Terminal(_)) {
            return self.write(&[END_OF_INPUT]).await;
        }
        *self.0.lock().await = Way::Closed;
        Ok(())
    }

    /// Lets go of it, at the command's end.
    pub(crate) async fn end(&self) {
        *self.0.lock().await = Way::Closed;
    }

    pub(crate) async fn resize(&self, size: TerminalSize) -> Result<(), BoxError> {
        match &*self.0.lock().await {
            Way::Terminal(fd) => set_size(fd.get_ref(), size)
                .map_err(|_| BoxError::conflict("the command's terminal is gone")),
            Way::Closed | Way::Pipe(_) => Err(BoxError::conflict("the command has no terminal")),
        }
    }
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
