//! This process's terminal, if it has one.

use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::getpgrp;
use rustix::termios::{
    OptionalActions, Termios, isatty, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr,
};

/// How long input that is somebody else's is left to them before it is looked at again.
const BEHIND: Duration = Duration::from_millis(200);

/// Columns and rows of the terminal that output goes to.
pub(crate) fn size() -> Option<(u16, u16)> {
    let size = [
        io::stdout().as_fd(),
        io::stdin().as_fd(),
        io::stderr().as_fd(),
    ]
    .into_iter()
    .find_map(|fd| tcgetwinsize(fd).ok())?;
    (size.ws_col > 0 && size.ws_row > 0).then_some((size.ws_col, size.ws_row))
}

/// Waits until standard input has something for this process. Who reads a terminal in the background is stopped, so it waits to
/// be in front; anything else is simply read.
pub(crate) fn wait_for_input() {
    let stdin = io::stdin();
    while isatty(&stdin) {
        let mut input = [PollFd::new(&stdin, PollFlags::IN)];
        // One that is not this process's own terminal has nobody in front of it.
        match (poll(&mut input, None), tcgetpgrp(&stdin)) {
            (Err(Errno::INTR), _) => {}
            (Ok(_), Ok(front)) if front != getpgrp() => thread::sleep(BEHIND),
            _ => return,
        }
    }
}

/// Standard input as a terminal that passes every key on. Ends when dropped.
#[derive(Debug)]
pub(crate) struct Raw(Termios);

impl Raw {
    /// Takes it, if it is a terminal.
    pub(crate) fn enter() -> Result<Option<Self>> {
        let stdin = io::stdin();
        if !isatty(&stdin) {
            return Ok(None);
        }
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(Some(Self(before)))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}
