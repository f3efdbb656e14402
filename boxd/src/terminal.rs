//! This process's terminal, if it has one.

use std::io;
use std::os::fd::AsFd;

use anyhow::Result;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

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
