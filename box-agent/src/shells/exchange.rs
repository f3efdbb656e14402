//! The private directory over which an interpreter and the agent speak. Everything has a name in it, so that an interpreter
//! holds no descriptor that its guest could close or write to by accident:
//!
//! - `go`: a line for each run, its number and whether it has settings of its own and input; `text`: what to run, unless that
//!   is short enough for the line; `before`, `after`: those settings; `state`: the exports of the interpreter before this one.
//! - `in`, `out`, `err`: the streams of the run under way, new ones for each; those that output goes to are made ahead.
//! - `done`: the end of a run: its number, exit code, directory, error with what it has shown, and exports, each with a NUL at its end. Before that,
//!   with `begun` for the code, that a run has opened its input; after that, with `exports`, those of a shell, which nobody
//!   needs to wait for.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use box_protocol::actions::{OutputMode, Stdin};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

use crate::pipe::{Pipe, async_fd};

/// Where it is: every command may write there, and each box has its own.
const PLACE: &str = "/tmp";

/// The most that the end of a run may say.
const DONE_BYTES: usize = 4 << 20;

/// The most that the exports of one interpreter may be, to be kept for the next.
const EXPORTS_BYTES: usize = 1 << 20;

/// How much of it is read at once.
const DONE_READ: usize = 16 << 10;

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
    heard: Buffer,
    /// The input of the run under way, until it has opened it: without a writer it would wait.
    awaited: Option<OwnedFd>,
    /// Where the output of the next run goes.
    ready: Option<Output>,
    /// The exports of the last run that has told them, until they are taken.
    exports: Option<Vec<u8>>,
}

#[derive(Debug)]
struct Output {
    stdout: Pipe,
    stderr: Option<Pipe>,
}

/// The streams of one run.
#[derive(Debug)]
pub(super) struct Streams {
    pub(super) stdout: Pipe,
    pub(super) stderr: Option<Pipe>,
    pub(super) input: Option<AsyncFd<OwnedFd>>,
    /// The other end of the input, until the interpreter has had time to open it.
    pub(super) held: Option<OwnedFd>,
}

/// The end of a run, as its interpreter tells it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) run: u64,
    pub(super) code: i32,
    pub(super) cwd: String,
    /// What there is to say besides, as JSON.
    pub(super) besides: Vec<u8>,
}

/// What an interpreter says.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Begun,
    Done(Done, Option<Vec<u8>>),
    Exports(Vec<u8>),
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
            done: Pipe::from_fd(open_fifo(&dir, "done", OFlags::RDWR)?)?,
            dir,
            heard: Buffer::default(),
            awaited: None,
            ready: None,
            exports: None,
        };
        if let Some(state) = state {
            exchange.put("state", state)?;
        }
        Ok(exchange)
    }

    /// Makes what output goes to in the next run, so that it need not wait for that.
    pub(super) fn prepare(&mut self, output: OutputMode) -> io::Result<()> {
        for name in ["in", "out", "err"] {
            self.remove(name)?;
        }
        rustix::fs::symlinkat("/dev/null", &self.dir, "in")?;
        let dir = &self.dir;
        // There is no end to be read before somebody has begun to write.
        let reader = |name| {
            make_fifo(dir, name)?;
            Pipe::from_fd(open_fifo(dir, name, OFlags::RDONLY)?)
        };
        let stdout = reader("out")?;
        let stderr = match output {
            OutputMode::Split => Some(reader("err")?),
            OutputMode::Merged => {
                rustix::fs::symlinkat("out", &self.dir, "err")?;
                None
            }
        };
        self.ready = Some(Output { stdout, stderr });
        Ok(())
    }

    /// The streams of a run.
    pub(super) fn streams(&mut self, stdin: Stdin, output: OutputMode) -> io::Result<Streams> {
        if self.ready.is_none() {
            self.prepare(output)?;
        }
        let ready = self.ready.take();
        let Output { stdout, stderr } = ready.ok_or(io::ErrorKind::NotFound)?;
        self.awaited = None;
        let mut held = None;
        let input = match stdin {
            Stdin::Closed => None,
            Stdin::Open => {
                self.remove("in")?;
                make_fifo(&self.dir, "in")?;
                held = Some(open_fifo(&self.dir, "in", OFlags::RDONLY)?);
                let writer = open_fifo(&self.dir, "in", OFlags::WRONLY)?;
                self.awaited = Some(writer.try_clone()?);
                Some(async_fd(writer)?)
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

    /// Whether the run under way has input.
    pub(super) fn has_input(&self) -> bool {
        self.awaited.is_some()
    }

    /// Lets the run begin.
    pub(super) fn go(&self, line: &str) -> io::Result<()> {
        rustix::io::write(&self.go, line.as_bytes())?;
        Ok(())
    }

    /// The end of the run. May be dropped meanwhile. An error if what comes makes no sense.
    pub(super) async fn done(&mut self, run: u64) -> io::Result<Done> {
        loop {
            while let Some(heard) = self.heard.take()? {
                match heard {
                    Heard::Begun => self.awaited = None,
                    Heard::Exports(exports) => self.learn(Some(exports)),
                    Heard::Done(done, exports) if done.run == run => {
                        self.learn(exports);
                        return Ok(done);
                    }
                    // Told twice, by an interpreter that was interrupted while it told it.
                    Heard::Done(..) => {}
                }
            }
            if self.heard.is_full() {
                return Err(io::ErrorKind::InvalidData.into());
            }
            self.done.readable().await;
            let bytes = self.done.read(DONE_READ);
            self.heard.add(&bytes);
        }
    }

    /// Too many are not kept: those before them stay.
    fn learn(&mut self, exports: Option<Vec<u8>>) {
        let fitting = exports.filter(|exports| exports.len() <= EXPORTS_BYTES);
        self.exports = fitting.or(self.exports.take());
    }

    /// The exports that were told since they were asked for last. Of an interpreter that has ended, all that it has told.
    pub(super) fn exports(&mut self, has_ended: bool) -> Option<Vec<u8>> {
        while has_ended && !self.heard.is_full() {
            let bytes = self.done.read_unpolled(DONE_READ);
            if bytes.is_empty() {
                break;
            }
            self.heard.add(&bytes);
        }
        while let Ok(Some(heard)) = self.heard.take() {
            if let Heard::Exports(exports) | Heard::Done(_, Some(exports)) = heard {
                self.learn(Some(exports));
            }
        }
        self.exports.take()
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

/// What was heard and not taken yet.
#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    /// The ends of fields in it: it is looked through only when there are enough.
    ends: usize,
}

/// Fields of all that is said.
const FIELDS: usize = 5;

impl Buffer {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.ends += bytes.split(|byte| *byte == 0).skip(1).count();
    }

    fn is_full(&self) -> bool {
        self.bytes.len() > DONE_BYTES
    }

    /// Takes the first that is whole.
    fn take(&mut self) -> io::Result<Option<Heard>> {
        if self.ends < FIELDS {
            return Ok(None);
        }
        let mut rest = &self.bytes[..];
        let mut fields = [&rest[..0]; FIELDS];
        for field in &mut fields {
            let end = rest.iter().position(|byte| *byte == 0);
            let (one, after) = rest.split_at(end.unwrap_or(rest.len()));
            (*field, rest) = (one, after.get(1..).unwrap_or_default());
        }
        let taken = self.bytes.len() - rest.len();
        let heard = Heard::read(fields)?;
        self.bytes.drain(..taken);
        self.bytes.shrink_to(DONE_READ);
        self.ends -= FIELDS;
        Ok(Some(heard))
    }
}

impl Heard {
    fn read([run, code, cwd, besides, exports]: [&[u8]; FIELDS]) -> io::Result<Self> {
        let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
        match code {
            b"begun" => return Ok(Self::Begun),
            b"exports" => return Ok(Self::Exports(exports.to_vec())),
            _ => {}
        }
        let odd = || io::Error::from(io::ErrorKind::InvalidData);
        let done = Done {
            run: text(run).parse().map_err(|_| odd())?,
            code: text(code).parse().map_err(|_| odd())?,
            cwd: text(cwd),
            besides: besides.to_vec(),
        };
        // A shell tells them later.
        let exports = Some(exports.to_vec()).filter(|exports| !exports.is_empty());
        Ok(Self::Done(done, exports))
    }
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

    fn heard(bytes: &[u8]) -> Buffer {
        let mut heard = Buffer::default();
        heard.add(bytes);
        heard
    }

    #[test]
    fn an_end_is_taken_when_it_is_whole() {
        let mut first = heard(b"7\x003\0/tmp\0\0export A='1\n'");
        assert_eq!(first.take().unwrap(), None);
        first.add(b"\x008");
        let Some(Heard::Done(done, exports)) = first.take().unwrap() else {
            panic!("nothing was heard");
        };
        assert_eq!((done.run, done.code, &*done.cwd), (7, 3, "/tmp"));
        assert_eq!(exports.unwrap(), b"export A='1\n'");
        assert_eq!(
            (&first.bytes[..], first.ends),
            (&b"8"[..], 0),
            "the next one has begun"
        );
        let mut later = heard(b"7\x003\0/tmp\0\0\x007\0exports\0\0\0A=1\0");
        let Some(Heard::Done(_, None)) = later.take().unwrap() else {
            panic!("the exports come later");
        };
        let exports = Heard::Exports(b"A=1".to_vec());
        assert_eq!(later.take().unwrap(), Some(exports));
        let mut begun = heard(b"7\0begun\0\0\0\0");
        assert_eq!(begun.take().unwrap(), Some(Heard::Begun));
        let mut large = heard(b"7\x003\0/tmp\0");
        large.add(&vec![b'x'; DONE_BYTES]);
        assert!(large.is_full());
        large.add(b"\0\0");
        assert!(large.take().unwrap().is_some());
        let kept = large.bytes.capacity();
        assert!(kept <= 2 * DONE_READ, "its memory is given back: {kept}");
        assert!(heard(b"x\0y\0z\0\0\0").take().is_err());
    }
}
