//! The standard input of a command: a pipe or a terminal.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_protocol::actions::{AgentInputParams, TerminalSize};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code};
use box_rpc::{Turn, Turns};
use rustix::termios::Winsize;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// The agent's end of the input while it is open.
#[derive(Debug, Default)]
pub(crate) struct Input {
    target: Mutex<Option<Arc<OpenInput>>>,
    /// Orders the writers.
    turns: Turns<()>,
}

/// What the input is written to.
#[derive(Debug)]
pub(crate) enum InputTarget {
    Pipe(AsyncFd<OwnedFd>),
    Terminal(AsyncFd<OwnedFd>),
}

#[derive(Debug)]
struct OpenInput {
    target: InputTarget,
    /// Set when the input is shut down.
    ///
    /// Writers that wait for the command to read then stop.
    shut: watch::Sender<bool>,
}

/// Time between two writes to a full terminal.
const FULL_TERMINAL: Duration = Duration::from_millis(5);

/// The byte that a terminal treats as end of input at the start of a line.
const END_OF_INPUT: u8 = 4;

impl Input {
    fn target(&self) -> MutexGuard<'_, Option<Arc<OpenInput>>> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place in the queue of writers.
    pub(crate) fn queue(&self) -> Turn<()> {
        self.turns.take([()])
    }

    /// Opens the input.
    ///
    /// It awaits nothing, so that a started command always gets its input.
    pub(crate) fn open(&self, target: InputTarget) {
        *self.target() = Some(Arc::new(OpenInput {
            target,
            shut: watch::Sender::new(false),
        }));
    }

    /// Writes the data of a call in turn, then closes the input if the call says so; returns the number of bytes.
    ///
    /// It waits for the command to read them for as long as the call says, else for as long as the command runs.
    pub(crate) async fn apply(
        &self,
        turn: &Turn<()>,
        params: &AgentInputParams,
    ) -> Result<u64, BoxError> {
        let mut written = 0;
        let applying = async {
            if let Some(data) = &params.data {
                let open = self.target().clone().ok_or_else(no_input)?;
                open.write(turn, data, &mut written).await?;
            }
            if params.close {
                self.close(turn).await?;
            }
            Ok(())
        };
        let applied = match params.wait_ms {
            Some(limit) => timeout(Duration::from_millis(limit), applying).await,
            None => Ok(applying.await),
        };
        match applied {
            Ok(applied) => applied.map(|()| written),
            Err(_) => Err(unread(params, written)),
        }
    }

    /// Closes the input after the writes queued before.
    ///
    /// A terminal stays open and gets an end-of-input byte.
    async fn close(&self, turn: &Turn<()>) -> Result<(), BoxError> {
        let Some(open) = self.target().clone() else {
            return Ok(());
        };
        if matches!(open.target, InputTarget::Terminal(_)) {
            return open.write(turn, &[END_OF_INPUT], &mut 0).await;
        }
        // An input that another call has shut down is closed as well.
        let _ = open.in_turn(turn, async { Ok(()) }).await;
        self.shut();
        Ok(())
    }

    /// Shuts the input down and stops its writers.
    ///
    /// A process that inherited the other end may never read it.
    pub(crate) fn shut(&self) {
        if let Some(open) = self.target().take() {
            open.shut.send_replace(true);
        }
    }

    pub(crate) fn resize(&self, size: TerminalSize) -> Result<(), BoxError> {
        let open = self.target().clone();
        match open.as_deref().map(|open| &open.target) {
            Some(InputTarget::Terminal(fd)) => set_size(fd.get_ref(), size)
                .map_err(|_| BoxError::conflict("size: the command's terminal is closed")),
            Some(InputTarget::Pipe(_)) | None => Err(BoxError::conflict(
                "size: the command has no terminal; start it with pty",
            )),
        }
    }
}

impl OpenInput {
    /// Writes all bytes in turn, and counts them. The count is exact also if the write is cancelled.
    async fn write(
        &self,
        turn: &Turn<()>,
        mut bytes: &[u8],
        written: &mut u64,
    ) -> Result<(), BoxError> {
        let (InputTarget::Pipe(fd) | InputTarget::Terminal(fd)) = &self.target;
        let writing = async {
            let closed = || BoxError::conflict("data: the command has closed its input");
            while !bytes.is_empty() {
                let mut ready = fd.writable().await.map_err(|_| closed())?;
                match ready.try_io(|fd| Ok(rustix::io::write(fd.get_ref(), bytes)?)) {
                    Ok(wrote) => {
                        let count = wrote.map_err(|_| closed())?;
                        *written += count as u64;
                        bytes = &bytes[count..];
                    }
                    Err(_) if ready.ready().is_write_closed() => return Err(closed()),
                    // A full terminal stays ready and takes nothing: waiting for it would be a busy loop.
                    Err(_) if matches!(self.target, InputTarget::Terminal(_)) => {
                        drop(ready);
                        sleep(FULL_TERMINAL).await;
                    }
                    Err(_) => {}
                }
            }
            Ok(())
        };
        self.in_turn(turn, writing).await
    }

    /// Runs `work` in its turn, unless the input is shut down first.
    async fn in_turn(
        &self,
        turn: &Turn<()>,
        work: impl Future<Output = Result<(), BoxError>>,
    ) -> Result<(), BoxError> {
        let mut shut = self.shut.subscribe();
        tokio::select! {
            biased;
            _ = shut.wait_for(|shut| *shut) => Err(no_input()),
            done = async { turn.wait().await; work.await } => done,
        }
    }
}

/// The error for input that the command did not read in time.
fn unread(params: &AgentInputParams, written: u64) -> BoxError {
    let all = params.data.as_ref().map_or(0, |data| data.len());
    let limit = params.wait_ms.unwrap_or_default();
    let open = if params.close {
        ", and stdin is not closed"
    } else {
        ""
    };
    let message = format!(
        "data: the command does not read its input: {written} of {all} bytes were written within {limit} ms{open}; send \
         the rest when it reads, or kill it"
    );
    BoxError::new(Code::Timeout, message).with_detail(&Detail {
        accepted: Some(written),
        ..Detail::about(Subject::Command)
    })
}

fn no_input() -> BoxError {
    BoxError::conflict("data: the command's input is not open; start it with an open stdin")
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
