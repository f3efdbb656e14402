//! Bytes from one connection to another and back, to the end of both.
//!
//! Small amounts are copied; a direction that moves much goes through a pipe, in which bytes change hands without being copied
//! into this process. So a short exchange costs no pipe, and a long one no copying.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::Shutdown;
use rustix::pipe::{PipeFlags, SpliceFlags};
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Bytes copied at once.
const COPIED: usize = 16 << 10;
/// As many full copies in succession make a direction one that moves much.
const MUCH: u32 = 4;
/// What a pipe may hold, if this process may ask for so much.
const PIPE: usize = 1 << 20;

/// Who is told of bytes that have arrived on the other side, and may say that it is enough.
pub(crate) trait Count: Sync {
    /// So many from the box.
    fn sent(&self, bytes: u64) -> io::Result<()>;
    /// So many to the box.
    fn received(&self, bytes: u64) -> io::Result<()>;
}

/// Moves bytes both ways until both sides have ended what they say. An error is a break, to be passed on as one.
pub(crate) async fn relay(near: &TcpStream, far: &TcpStream, count: &impl Count) -> io::Result<()> {
    let out = pump(near, far, |bytes| count.sent(bytes));
    let back = pump(far, near, |bytes| count.received(bytes));
    tokio::try_join!(out, back)?;
    Ok(())
}

async fn pump(
    from: &TcpStream,
    to: &TcpStream,
    moved: impl Fn(u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut full = 0;
    while full < MUCH {
        from.readable().await?;
        let (read, rest) = match copy(from, to) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            copied => copied?,
        };
        if read == 0 {
            return end(to);
        }
        write_all(to, &rest).await?;
        moved(read as u64)?;
        full = if read == COPIED { full + 1 } else { 0 };
    }
    through_pipe(from, to, moved).await
}

/// Reads once and writes once: how much was read, and what of it is still to be written. Not asynchronous, so that no
/// connection has a buffer that waits.
fn copy(from: &TcpStream, to: &TcpStream) -> io::Result<(usize, Vec<u8>)> {
    let mut buffer = [0; COPIED];
    let read = from.try_read(&mut buffer)?;
    let bytes = &buffer[..read];
    if bytes.is_empty() {
        return Ok((0, Vec::new()));
    }
    let written = match to.try_write(bytes) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        written => written?,
    };
    Ok((read, bytes[written..].to_vec()))
}

async fn write_all(to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        to.writable().await?;
        match to.try_write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            written => bytes = &bytes[written?..],
        }
    }
    Ok(())
}

async fn through_pipe(
    from: &TcpStream,
    to: &TcpStream,
    moved: impl Fn(u64) -> io::Result<()>,
) -> io::Result<()> {
    let (output, input) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // Less will do.
    let _ = rustix::pipe::fcntl_setpipe_size(&input, PIPE);
    loop {
        let held = from
            .async_io(Interest::READABLE, || splice(from, &input, PIPE))
            .await?;
        if held == 0 {
            return end(to);
        }
        let mut left = held;
        while left > 0 {
            // The pipe is not empty, so it is the other side that is waited for.
            left -= to
                .async_io(Interest::WRITABLE, || splice_out(&output, to, left))
                .await?;
        }
        moved(held as u64)?;
    }
}

fn splice(from: &TcpStream, pipe: &OwnedFd, most: usize) -> io::Result<usize> {
    let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
    Ok(rustix::pipe::splice(from, None, pipe, None, most, flags)?)
}

fn splice_out(pipe: &OwnedFd, to: &TcpStream, most: usize) -> io::Result<usize> {
    let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
    match rustix::pipe::splice(pipe, None, to, None, most, flags)? {
        0 => Err(io::ErrorKind::WriteZero.into()),
        moved => Ok(moved),
    }
}

/// Tells one side that the other has nothing more to say.
fn end(to: &TcpStream) -> io::Result<()> {
    match rustix::net::shutdown(to, Shutdown::Write) {
        // It has gone; what it said before is on its way.
        Ok(()) | Err(rustix::io::Errno::NOTCONN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Breaks a connection off, so that its other end learns that it was no orderly end.
pub(crate) fn reset(stream: TcpStream) {
    let now = Some(std::time::Duration::ZERO);
    let _ = rustix::net::sockopt::set_socket_linger(&stream, now);
    drop(stream);
}
