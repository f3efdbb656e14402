//! Child's side: this process is the server, its parent the client.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
    },
    sync::atomic::{AtomicBool, Ordering},
};

use box_rpc::{Connection, ConnectionError, Limits, ReceiveHalf, SendHalf};
use rustix::{
    fs::{FileType, Mode, OFlags},
    net::AddressFamily,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{UnixStream, unix::pipe},
};

use super::thread_pipe::{ThreadReader, ThreadWriter};
use crate::{bytes::Probe, line::Line};

type Input = Box<dyn AsyncRead + Send + Unpin>;
type Output = Box<dyn AsyncWrite + Send + Unpin>;

/// The connection to the parent process.
pub struct ParentConnection(Line<Input, Output>);

impl std::fmt::Debug for ParentConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParentConnection").finish_non_exhaustive()
    }
}

impl Connection for ParentConnection {
    fn split(self: Box<Self>) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
        Box::new(self.0).split()
    }
}

/// Uses the standard streams of this process as a connection to its parent.
///
/// Works once and needs a tokio runtime. Every line counts as a message: the parent writes all of them, and gets an
/// error for an invalid one.
///
/// From then on, fd 0 reads nothing and fd 1 is standard error, for this process and all its children. No other code
/// can read or write a byte of the protocol.
pub fn serve(limits: &Limits) -> Result<ParentConnection, ConnectionError> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::SeqCst) {
        let reason = "standard streams: already in use";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, reason).into());
    }
    let (input, output) = take_descriptors()?;
    let probe = match kind_of(&output)? {
        Kind::Pipe | Kind::Socket => Probe::Poll(output.try_clone()?),
        Kind::Other => Probe::Never,
    };
    let line = Line::new(open_input(input)?, open_output(output)?, limits);
    Ok(ParentConnection(line.probed_by(probe)))
}

/// Moves the protocol to new descriptors and replaces the standard streams.
fn take_descriptors() -> io::Result<(OwnedFd, OwnedFd)> {
    // Above the standard streams, even if standard error is closed.
    let input = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let output = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    if rustix::stdio::dup2_stdout(rustix::stdio::stderr()).is_err() {
        rustix::stdio::dup2_stdout(&null)?;
    }
    Ok((input, output))
}

fn open_input(fd: OwnedFd) -> io::Result<Input> {
    Ok(match kind_of(&fd)? {
        Kind::Pipe => Box::new(pipe::Receiver::from_owned_fd(fd)?),
        Kind::Socket => Box::new(socket(fd)?),
        Kind::Other => Box::new(ThreadReader::start(File::from(fd))?),
    })
}

fn open_output(fd: OwnedFd) -> io::Result<Output> {
    Ok(match kind_of(&fd)? {
        Kind::Pipe => Box::new(pipe::Sender::from_owned_fd(fd)?),
        Kind::Socket => Box::new(socket(fd)?),
        Kind::Other => Box::new(ThreadWriter::start(File::from(fd))?),
    })
}

/// Kind of a descriptor, which decides how to wait for it.
enum Kind {
    /// A pipe, which most parents use.
    Pipe,
    /// A socket, which Node.js uses.
    Socket,
    /// A terminal, a file or a device: only a thread can wait for it.
    Other,
}

fn kind_of(fd: &OwnedFd) -> io::Result<Kind> {
    let stat = rustix::fs::fstat(fd)?;
    Ok(match FileType::from_raw_mode(stat.st_mode) {
        FileType::Fifo => Kind::Pipe,
        FileType::Socket if is_unix_stream(fd) => Kind::Socket,
        _ => Kind::Other,
    })
}

/// Whether it is a Unix stream socket; a thread handles any other family.
fn is_unix_stream(fd: impl AsFd) -> bool {
    let domain = rustix::net::sockopt::socket_domain(fd);
    matches!(domain, Ok(AddressFamily::UNIX))
}

fn socket(fd: OwnedFd) -> io::Result<UnixStream> {
    let stream = StdUnixStream::from(fd);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}
