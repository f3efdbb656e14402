//! The terminal of this process.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::getpgrp;
use rustix::termios::{
    LocalModes, OptionalActions, Termios, isatty, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr,
};

/// The interval at which a background process checks whether it is in the foreground.
const FOREGROUND_POLL: Duration = Duration::from_millis(200);

/// Columns and rows of the terminal on stdout.
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

/// Waits until this process can read stdin.
///
/// The kernel stops a background process that reads its terminal, so this waits for the foreground.
pub(crate) fn wait_for_input() {
    let stdin = io::stdin();
    while isatty(&stdin) {
        let mut input = [PollFd::new(&stdin, PollFlags::IN)];
        // Only the controlling terminal has a foreground process group.
        match (poll(&mut input, None), tcgetpgrp(&stdin)) {
            (Err(Errno::INTR), _) => {}
            (Ok(_), Ok(foreground)) if foreground != getpgrp() => thread::sleep(FOREGROUND_POLL),
            _ => return,
        }
    }
}

/// Raw mode of the terminal on stdin; restored on drop.
#[derive(Debug)]
pub(crate) struct RawMode(Termios);

impl RawMode {
    /// Enters raw mode if stdin is a terminal.
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

impl Drop for RawMode {
    fn drop(&mut self) {
        // A closed terminal needs no reset.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

/// The terminal on stdin before its input was hidden.
static VISIBLE: Mutex<Option<Termios>> = Mutex::new(None);

/// Input that the terminal does not show; restored on drop.
#[derive(Debug)]
pub(crate) struct HiddenInput(());

impl HiddenInput {
    /// Hides the input of the terminal on stdin.
    pub(crate) fn begin() -> Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut hidden = before.clone();
        hidden.local_modes.remove(LocalModes::ECHO);
        *VISIBLE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        tcsetattr(io::stdin(), OptionalActions::Flush, &hidden)?;
        Ok(Self(()))
    }

    /// Shows the input again. A process that exits calls this itself.
    pub(crate) fn restore() {
        let before = VISIBLE
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(before) = before {
            // A closed terminal needs no reset.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
        }
    }
}

impl Drop for HiddenInput {
    fn drop(&mut self) {
        Self::restore();
    }
}
