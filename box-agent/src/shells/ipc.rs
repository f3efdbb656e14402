//! The private directory through which the agent and an interpreter communicate.
//!
//! Everything in it is reached by name, so the interpreter holds no descriptor that the guest's code could close or
//! write to by accident:
//!
//! - `go`: one line per run: its number, and whether it has settings and input.
//! - `text`: the text to run, unless it fits into the line.
//! - `before`, `after`: the settings of the run.
//! - `state`: the exports of the previous interpreter.
//! - `in`, `out`, `err`: the streams of the current run, new ones for each run. The agent creates the output streams in
//!   advance.
//! - `done`: messages of five fields, each ended by a NUL: run number, exit code, directory, report, and exports. The
//!   code `begun` means that the run has opened its input. The code `exports` carries the exports of a shell after the
//!   end of the run, so that the reply does not wait for them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use box_protocol::actions::{OutputMode, Stdin};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

use super::display::RUN_BYTES;
use crate::pipe::{Pipe, async_fd};

/// The parent directory. Every command may write there, and each box has its own.
const PARENT_DIR: &str = "/tmp";

/// Maximum size of the exports that are kept for the next interpreter.
const EXPORTS_BYTES: usize = 1 << 20;

/// Maximum size of one message: displayed values, exports that are too large to keep, an error.
const DONE_BYTES: usize = RUN_BYTES + 3 * EXPORTS_BYTES;

/// Bytes of one read.
const DONE_READ: usize = 16 << 10;

const NAMES: [&str; 9] = [
    "go", "text", "before", "after", "state", "in", "out", "err", "done",
];

/// The directory. Dropping it removes the directory.
#[derive(Debug)]
pub(super) struct IpcDir {
    pub(super) path: String,
    dir: OwnedFd,
    /// Opened for reading and writing, so that neither side sees an end of file.
    go: OwnedFd,
    done: Pipe,
    buffer: Buffer,
    /// Keeps the input of the current run open for writing until the run opens it.
    ///
    /// Without a writer the run would block.
    input_writer: Option<OwnedFd>,
    /// The output pipes of the next run.
    prepared: Option<Output>,
    /// The exports of the last run that has reported them, until they are taken.
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
    /// The reading end of the input, until the interpreter has had time to open it.
    pub(super) input_reader: Option<OwnedFd>,
}

/// The end of a run as reported by its interpreter.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) run: u64,
    pub(super) code: i32,
    pub(super) cwd: String,
    /// The interpreter's report on the run, as JSON.
    pub(super) report: Vec<u8>,
}

/// A message of an interpreter.
#[derive(Debug, PartialEq, Eq)]
enum Message {
    InputOpened,
    Done(Done, Option<Vec<u8>>),
    Exports(Vec<u8>),
}

impl IpcDir {
    pub(super) fn new(state: Option<&[u8]>) -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let dir_flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let path = loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let path = format!("{PARENT_DIR}/.box-shell-{number}");
            // The guest may enter the directory, but not list it.
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
        let ipc = Self {
            path,
            go: open_fifo(&dir, "go", OFlags::RDWR)?,
            done: Pipe::from_fd(open_fifo(&dir, "done", OFlags::RDWR)?)?,
            dir,
            buffer: Buffer::default(),
            input_writer: None,
            prepared: None,
            exports: None,
        };
        if let Some(state) = state {
            ipc.write_file("state", state)?;
        }
        Ok(ipc)
    }

    /// Creates the output pipes of the next run in advance, and removes the files of the last one.
    ///
    /// Its text and its variables may be secret.
    pub(super) fn prepare(&mut self, output: OutputMode) -> io::Result<()> {
        for name in ["in", "out", "err", "text", "before", "after"] {
            self.remove(name)?;
        }
        rustix::fs::symlinkat("/dev/null", &self.dir, "in")?;
        let dir = &self.dir;
        // Reading reports no end of file before the first writer has opened the pipe.
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
        self.prepared = Some(Output { stdout, stderr });
        Ok(())
    }

    /// The streams of a new run.
    pub(super) fn streams(&mut self, stdin: Stdin, output: OutputMode) -> io::Result<Streams> {
        if self.prepared.is_none() {
            self.prepare(output)?;
        }
        let prepared = self.prepared.take();
        let Output { stdout, stderr } = prepared.ok_or(io::ErrorKind::NotFound)?;
        self.input_writer = None;
        let mut input_reader = None;
        let input = match stdin {
            Stdin::Closed => None,
            Stdin::Open => {
                self.remove("in")?;
                make_fifo(&self.dir, "in")?;
                input_reader = Some(open_fifo(&self.dir, "in", OFlags::RDONLY)?);
                let writer = open_fifo(&self.dir, "in", OFlags::WRONLY)?;
                self.input_writer = Some(writer.try_clone()?);
                Some(async_fd(writer)?)
            }
        };
        Ok(Streams {
            stdout,
            stderr,
            input,
            input_reader,
        })
    }

    /// Writes a file for the interpreter to read.
    pub(super) fn write_file(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        // A new file each time: the guest may have replaced the old one.
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

    /// Whether the current run has input.
    pub(super) fn has_input(&self) -> bool {
        self.input_writer.is_some()
    }

    /// Starts the run.
    pub(super) fn send_line(&self, line: &str) -> io::Result<()> {
        rustix::io::write(&self.go, line.as_bytes())?;
        Ok(())
    }

    /// Returns whether the interpreter has read the line.
    pub(super) fn has_read_line(&self) -> bool {
        rustix::io::ioctl_fionread(&self.go).is_ok_and(|unread| unread == 0)
    }

    /// Waits for the end of the run.
    ///
    /// Cancel safe. Returns an error for an invalid message.
    pub(super) async fn wait_done(&mut self, run: u64) -> io::Result<Done> {
        loop {
            while let Some(message) = self.buffer.next_message()? {
                match message {
                    Message::InputOpened => self.input_writer = None,
                    Message::Exports(exports) => self.keep_exports(Some(exports)),
                    Message::Done(done, exports) if done.run == run => {
                        self.keep_exports(exports);
                        return Ok(done);
                    }
                    // An interpreter that was interrupted while it reported an end reports it twice.
                    Message::Done(..) => {}
                }
            }
            if self.buffer.is_full() {
                return Err(io::ErrorKind::InvalidData.into());
            }
            self.done.readable().await;
            let bytes = self.done.read(DONE_READ);
            self.buffer.push(&bytes);
        }
    }

    /// Keeps new exports. If they are too large, the previous ones stay.
    fn keep_exports(&mut self, exports: Option<Vec<u8>>) {
        let fitting = exports.filter(|exports| exports.len() <= EXPORTS_BYTES);
        self.exports = fitting.or(self.exports.take());
    }

    /// Takes the exports reported since the last call.
    ///
    /// If the interpreter has ended, the agent first reads its remaining messages.
    pub(super) fn exports(&mut self, has_ended: bool) -> Option<Vec<u8>> {
        while has_ended && !self.buffer.is_full() {
            let bytes = self.done.read_unpolled(DONE_READ);
            if bytes.is_empty() {
                break;
            }
            self.buffer.push(&bytes);
        }
        while let Ok(Some(message)) = self.buffer.next_message() {
            if let Message::Exports(exports) | Message::Done(_, Some(exports)) = message {
                self.keep_exports(Some(exports));
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

impl Drop for IpcDir {
    fn drop(&mut self) {
        for name in NAMES {
            let _ = self.remove(name);
        }
        let _ = rustix::fs::rmdir(&self.path);
    }
}

/// Received bytes that are not decoded yet.
#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    /// The number of complete fields.
    ///
    /// The buffer is scanned only when it has enough for a message.
    field_ends: usize,
}

/// Fields of a message.
const FIELDS: usize = 5;

impl Buffer {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.field_ends += bytes.split(|byte| *byte == 0).skip(1).count();
    }

    fn is_full(&self) -> bool {
        self.bytes.len() > DONE_BYTES
    }

    /// Takes the first complete message.
    fn next_message(&mut self) -> io::Result<Option<Message>> {
        if self.field_ends < FIELDS {
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
        let message = Message::decode(fields)?;
        self.bytes.drain(..taken);
        self.bytes.shrink_to(DONE_READ);
        self.field_ends -= FIELDS;
        Ok(Some(message))
    }
}

impl Message {
    fn decode([run, code, cwd, report, exports]: [&[u8]; FIELDS]) -> io::Result<Self> {
        let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
        match code {
            b"begun" => return Ok(Self::InputOpened),
            b"exports" => return Ok(Self::Exports(exports.to_vec())),
            _ => {}
        }
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let done = Done {
            run: text(run).parse().map_err(|_| invalid())?,
            code: text(code).parse().map_err(|_| invalid())?,
            cwd: text(cwd),
            report: report.to_vec(),
        };
        // A shell reports its exports later.
        let exports = Some(exports.to_vec()).filter(|exports| !exports.is_empty());
        Ok(Self::Done(done, exports))
    }
}

fn make_fifo(dir: &OwnedFd, name: &str) -> io::Result<()> {
    rustix::fs::mknodat(dir, name, FileType::Fifo, Mode::from_raw_mode(0o666), 0)?;
    // The umask must not apply.
    rustix::fs::chmodat(dir, name, Mode::from_raw_mode(0o666), AtFlags::empty())?;
    Ok(())
}

/// Opens a FIFO without blocking, and rejects any other kind of file.
fn open_fifo(dir: &OwnedFd, name: &str, mode: OFlags) -> io::Result<OwnedFd> {
    let flags = mode | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
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

    fn buffer(bytes: &[u8]) -> Buffer {
        let mut buffer = Buffer::default();
        buffer.push(bytes);
        buffer
    }

    #[test]
    fn a_message_is_decoded_when_it_is_complete() {
        let mut first = buffer(b"7\x003\0/tmp\0\0export A='1\n'");
        assert_eq!(first.next_message().unwrap(), None);
        first.push(b"\x008");
        let Some(Message::Done(done, exports)) = first.next_message().unwrap() else {
            panic!("no message");
        };
        assert_eq!((done.run, done.code, &*done.cwd), (7, 3, "/tmp"));
        assert_eq!(exports.unwrap(), b"export A='1\n'");
        assert_eq!(
            (&first.bytes[..], first.field_ends),
            (&b"8"[..], 0),
            "the next message has begun"
        );
        let mut later = buffer(b"7\x003\0/tmp\0\0\x007\0exports\0\0\0A=1\0");
        let Some(Message::Done(_, None)) = later.next_message().unwrap() else {
            panic!("the exports come later");
        };
        let exports = Message::Exports(b"A=1".to_vec());
        assert_eq!(later.next_message().unwrap(), Some(exports));
        let mut begun = buffer(b"7\0begun\0\0\0\0");
        assert_eq!(begun.next_message().unwrap(), Some(Message::InputOpened));
        let mut large = buffer(b"7\x003\0/tmp\0");
        large.push(&vec![b'x'; DONE_BYTES]);
        assert!(large.is_full());
        large.push(b"\0\0");
        assert!(large.next_message().unwrap().is_some());
        let kept = large.bytes.capacity();
        assert!(kept <= 2 * DONE_READ, "spare memory is freed: {kept}");
        assert!(buffer(b"x\0y\0z\0\0\0").next_message().is_err());
    }
}
