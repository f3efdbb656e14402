//! The private directory over which an interpreter and the agent speak. Everything has a name in it, so that an interpreter
//! holds no descriptor that its guest could close or write to by accident:
//!
//! - `go`: a line for each run, its number and whether it has settings of its own and input; `text`: what to run; `before`, `after`:
//!   those settings; `state`: the exports of the interpreter before this one.
//! - `in`, `out`, `err`: the streams of the run under way, new ones for each.
//! - `done`: the end of a run: its number, exit code, directory, error and exports, each with a NUL at its end. Before that,
//!   with `begun` for the code, that a run has opened its input.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use box_protocol::actions::{OutputMode, Stdin};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

use crate::pipe::{Pipe, watched};

/// Where it is: every command may write there, and each box has its own.
const PLACE: &str = "/tmp";

/// The most that the end of a run may say.
const DONE_BYTES: usize = 4 << 20;

const NAMES: [&str; 9] = [
    "go", "text", "before", "after", "state", "in", "out", "err", "done",
];

/// The directory, which goes when this is dropped.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) path: String,
    dir: OwnedFd,
    /// Kept open for both, so that neither side ever finds an end.
    go: OwnedFd,
    done: Pipe,
    heard: Vec<u8>,
    /// The input of the run under way, until it has opened it: without a writer it would wait.
    awaited: Option<OwnedFd>,
}

/// The streams of one run.
#[derive(Debug)]
pub(super) struct Streams {
    pub(super) stdout: Pipe,
    pub(super) stderr: Option<Pipe>,
    pub(super) input: Option<AsyncFd<OwnedFd>>,
    /// The other ends, until the interpreter has had time to open them.
    pub(super) held: Vec<OwnedFd>,
}

/// The end of a run, as its interpreter tells it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) run: u64,
    pub(super) code: i32,
    pub(super) cwd: String,
    pub(super) error: Vec<u8>,
    pub(super) exports: Vec<u8>,
}

/// What an interpreter says.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Begun,
    Done(Done),
}

impl Exchange {
    pub(super) fn new(state: Option<&[u8]>) -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let dir_flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let path = loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let path = format!("{PLACE}/.box-shell-{number}");
            // Entered by the guest, and listed by nobody else.
            match rustix::fs::mkdir(&path, Mode::from_raw_mode(0o711)) {
                Ok(()) => break path,
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        };
        let dir = rustix::fs::open(&path, dir_flags, Mode::empty())?;
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(0o711))?;
        make_fifo(&dir, "go")?;
        make_fifo(&dir, "done")?;
        let exchange = Self {
            path,
            go: open_fifo(&dir, "go", OFlags::RDWR)?,
            done: Pipe::over(open_fifo(&dir, "done", OFlags::RDWR)?)?,
            dir,
            heard: Vec::new(),
            awaited: None,
        };
        if let Some(state) = state {
            exchange.put("state", state)?;
        }
        Ok(exchange)
    }

    /// Makes the streams of a run.
    pub(super) fn streams(&mut self, stdin: Stdin, output: OutputMode) -> io::Result<Streams> {
        for name in ["in", "out", "err"] {
            self.remove(name)?;
        }
        let mut held = Vec::with_capacity(3);
        let dir = &self.dir;
        let mut reader = |name| {
            make_fifo(dir, name)?;
            let pipe = Pipe::over(open_fifo(dir, name, OFlags::RDONLY)?)?;
            held.push(open_fifo(dir, name, OFlags::WRONLY)?);
            io::Result::Ok(pipe)
        };
        let stdout = reader("out")?;
        let stderr = match output {
            OutputMode::Split => Some(reader("err")?),
            OutputMode::Merged => {
                rustix::fs::symlinkat("out", &self.dir, "err")?;
                None
            }
        };
        let input = match stdin {
            Stdin::Closed => {
                self.awaited = None;
                rustix::fs::symlinkat("/dev/null", &self.dir, "in")?;
                None
            }
            Stdin::Open => {
                make_fifo(&self.dir, "in")?;
                held.push(open_fifo(&self.dir, "in", OFlags::RDONLY)?);
                let writer = open_fifo(&self.dir, "in", OFlags::WRONLY)?;
                self.awaited = Some(writer.try_clone()?);
                Some(watched(writer)?)
            }
        };
        Ok(Streams {
            stdout,
            stderr,
            input,
            held,
        })
    }

    /// Writes a file for the interpreter to read.
    pub(super) fn put(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        // A new one: the guest may have put anything in its place.
        self.remove(name)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, name, flags, Mode::from_raw_mode(0o644))?;
        let mut rest = bytes;
        while !rest.is_empty() {
            let written = rustix::io::retry_on_intr(|| rustix::io::write(&file, rest))?;
            rest = &rest[written..];
        }
        Ok(())
    }

    /// Lets the run begin.
    pub(super) fn go(&self, run: u64, has_settings: bool) -> io::Result<()> {
        let how = if has_settings { "set" } else { "plain" };
        let stdin = if self.awaited.is_some() {
            "open"
        } else {
            "closed"
        };
        let line = format!("{run} {how} {stdin}\n");
        rustix::io::write(&self.go, line.as_bytes())?;
        Ok(())
    }

    /// The end of the run. May be dropped meanwhile. An error if what comes makes no sense.
    pub(super) async fn done(&mut self, run: u64) -> io::Result<Done> {
        loop {
            while let Some(done) = take_heard(&mut self.heard)? {
                match done {
                    Heard::Begun => self.awaited = None,
                    Heard::Done(done) if done.run == run => return Ok(done),
                    // Told twice, by an interpreter that was interrupted while it told it.
                    Heard::Done(_) => {}
                }
            }
            if self.heard.len() > DONE_BYTES {
                return Err(io::ErrorKind::InvalidData.into());
            }
            self.done.readable().await;
            let bytes = self.done.read(64 << 10);
            self.heard.extend_from_slice(&bytes);
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        for name in NAMES {
            let _ = self.remove(name);
        }
        let _ = rustix::fs::rmdir(&self.path);
    }
}

/// Takes the first that is whole out of what was heard.
fn take_heard(heard: &mut Vec<u8>) -> io::Result<Option<Heard>> {
    let mut ends = heard.iter().enumerate().filter(|(_, byte)| **byte == 0);
    let Some((end, _)) = ends.nth(4) else {
        return Ok(None);
    };
    let odd = || io::Error::from(io::ErrorKind::InvalidData);
    let mut fields = heard[..end].split(|byte| *byte == 0);
    let mut next = || fields.next().unwrap_or_default();
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let (run, code) = (text(next()), text(next()));
    if code == "begun" {
        heard.drain(..=end);
        return Ok(Some(Heard::Begun));
    }
    let done = Done {
        run: run.parse().map_err(|_| odd())?,
        code: code.parse().map_err(|_| odd())?,
        cwd: String::from_utf8_lossy(next()).into_owned(),
        error: next().to_vec(),
        exports: next().to_vec(),
    };
    heard.drain(..=end);
    Ok(Some(Heard::Done(done)))
}

fn make_fifo(dir: &OwnedFd, name: &str) -> io::Result<()> {
    rustix::fs::mknodat(dir, name, FileType::Fifo, Mode::from_raw_mode(0o666), 0)?;
    // Whatever the mask.
    rustix::fs::chmodat(dir, name, Mode::from_raw_mode(0o666), AtFlags::empty())?;
    Ok(())
}

/// Never waits, and never takes anything else for a pipe.
fn open_fifo(dir: &OwnedFd, name: &str, how: OFlags) -> io::Result<OwnedFd> {
    let flags = how | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(dir, name, flags, Mode::empty())?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
    if kind != FileType::Fifo {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_taken_when_it_is_whole() {
        let mut heard = b"7\x003\0/tmp\0\0export A='1\n'".to_vec();
        assert_eq!(take_heard(&mut heard).unwrap(), None);
        heard.extend_from_slice(b"\x008");
        let Some(Heard::Done(done)) = take_heard(&mut heard).unwrap() else {
            panic!("nothing was heard");
        };
        assert_eq!((done.run, done.code, &*done.cwd), (7, 3, "/tmp"));
        assert_eq!(done.exports, b"export A='1\n'");
        assert_eq!(heard, b"8", "the next one has begun");
        let mut begun = b"7\0begun\0\0\0\0".to_vec();
        assert_eq!(take_heard(&mut begun).unwrap(), Some(Heard::Begun));
        let mut odd = b"x\0y\0z\0\0\0".to_vec();
        assert!(take_heard(&mut odd).is_err());
    }
}
