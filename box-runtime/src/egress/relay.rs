//! Byte relay between two TCP connections, in both directions, until both end.
//!
//! The relay copies small amounts through a buffer. A direction that moves a lot of data switches
//! to `splice` through a pipe, which does not copy into this process. A short exchange therefore
//! needs no pipe, and a long one needs no copying.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{Shutdown, sockopt};
use rustix::pipe::{PipeFlags, SpliceFlags};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

/// Bytes read by one copy.
const COPY_BYTES: usize = 16 << 10;
/// Number of consecutive full copies after which a direction switches to a pipe.
const FULL_COPIES: u32 = 4;
/// Requested capacity of a large pipe, if the kernel grants it.
const PIPE_BYTES: usize = 1 << 20;
/// Limit of large pipes per box.
///
/// Data in a pipe occupies host memory until the peer reads it. Further pipes keep the kernel's
/// default capacity of 64 KiB.
pub(super) const LARGE_PIPES: usize = 16;

/// TCP keepalive settings: idle time, probe interval and probe count.
///
/// The kernel drops a redirected connection from its tracking table after a minute of silence if
/// one side has shut down its sending half.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
const KEEPALIVE_PROBES: u32 = 4;

/// Receiver of byte counts. It can end the relay by returning an error.
pub(crate) trait Count: Sync {
    /// Permits for large pipes.
    fn large_pipes(&self) -> &Semaphore;
    /// Counts bytes sent by the box.
    fn sent(&self, bytes: u64) -> io::Result<()>;
    /// Counts bytes received by the box.
    fn received(&self, bytes: u64) -> io::Result<()>;
}

/// Relays bytes in both directions until both sides have shut down.
///
/// An error means a broken connection, and the caller must reset the other side.
///
/// A side that has shut down its sending half may still read for any length of time. A side that
/// has vanished sends nothing, so keepalive probes detect it while the relay waits for the other
/// side.
pub(crate) async fn relay(near: &TcpStream, far: &TcpStream, count: &impl Count) -> io::Result<()> {
    enable_keepalive(near)?;
    enable_keepalive(far)?;
    let both = async {
        let large = count.large_pipes();
        let out = pump(near, far, large, |bytes| count.sent(bytes));
        let back = pump(far, near, large, |bytes| count.received(bytes));
        tokio::try_join!(out, back)
    };
    tokio::select! {
        biased;
        ended = both => ended.map(drop),
        error = broken(near) => Err(error),
        error = broken(far) => Err(error),
    }
}

fn enable_keepalive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    Ok(sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?)
}

/// Waits for a connection to break and returns its error.
async fn broken(stream: &TcpStream) -> io::Error {
    if let Err(error) = stream.ready(Interest::ERROR).await {
        return error;
    }
    match stream.take_error() {
        Ok(Some(error)) | Err(error) => error,
        // A concurrent read or write has already consumed the error.
        Ok(None) => io::ErrorKind::ConnectionReset.into(),
    }
}

async fn pump(
    from: &TcpStream,
    to: &TcpStream,
    large: &Semaphore,
    moved: impl Fn(u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut full = 0;
    while full < FULL_COPIES {
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
        full = if read == COPY_BYTES { full + 1 } else { 0 };
    }
    through_pipe(from, to, large, moved).await
}

/// Reads once and writes once; returns the bytes read and the unwritten rest.
///
/// The function is synchronous, so no connection holds a buffer while it waits.
fn copy(from: &TcpStream, to: &TcpStream) -> io::Result<(usize, Vec<u8>)> {
    let mut buffer = [0; COPY_BYTES];
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
    large: &Semaphore,
    moved: impl Fn(u64) -> io::Result<()>,
) -> io::Result<()> {
    let (output, input) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let large = large.try_acquire();
    if large.is_ok() {
        // A smaller pipe is sufficient.
        let _ = rustix::pipe::fcntl_setpipe_size(&input, PIPE_BYTES);
    }
    loop {
        let held = from
            .async_io(Interest::READABLE, || splice(from, &input, PIPE_BYTES))
            .await?;
        if held == 0 {
            return end(to);
        }
        let mut left = held;
        while left > 0 {
            // The pipe is not empty, so only the destination can block.
            left -= to
                .async_io(Interest::WRITABLE, || splice_out(&output, to, left))
                .await?;
        }
        moved(held as u64)?;
    }
}

fn splice(from: &TcpStream, pipe: &OwnedFd, max: usize) -> io::Result<usize> {
    let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
    Ok(rustix::pipe::splice(from, None, pipe, None, max, flags)?)
}

fn splice_out(pipe: &OwnedFd, to: &TcpStream, max: usize) -> io::Result<usize> {
    let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
    match rustix::pipe::splice(pipe, None, to, None, max, flags)? {
        0 => Err(io::ErrorKind::WriteZero.into()),
        moved => Ok(moved),
    }
}

/// Shuts down the sending half of a connection.
fn end(to: &TcpStream) -> io::Result<()> {
    match rustix::net::shutdown(to, Shutdown::Write) {
        // The peer has disconnected; the data it sent before is still in transit.
        Ok(()) | Err(rustix::io::Errno::NOTCONN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Resets a connection, so that the peer sees an abnormal end.
pub(crate) fn reset(stream: TcpStream) {
    let now = Some(Duration::ZERO);
    let _ = sockopt::set_socket_linger(&stream, now);
    drop(stream);
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// Byte counter that ignores the counts and permits one large pipe.
    struct Uncounted(Semaphore);

    impl Uncounted {
        fn new() -> Self {
            Self(Semaphore::new(1))
        }
    }

    impl Count for Uncounted {
        fn large_pipes(&self) -> &Semaphore {
            &self.0
        }

        fn sent(&self, _: u64) -> io::Result<()> {
            Ok(())
        }

        fn received(&self, _: u64) -> io::Result<()> {
            Ok(())
        }
    }

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap());
        let (one, other) = tokio::join!(one, listener.accept());
        (one.unwrap(), other.unwrap().0)
    }

    #[tokio::test]
    async fn a_half_closed_side_still_receives_and_a_reset_ends_the_relay() {
        let ((mut guest, near), (far, mut host)) = (pair().await, pair().await);
        let relayed = tokio::spawn(async move { relay(&near, &far, &Uncounted::new()).await });
        guest.write_all(b"question").await.unwrap();
        guest.shutdown().await.unwrap();
        let mut question = String::new();
        host.read_to_string(&mut question).await.unwrap();
        host.write_all(b"answer").await.unwrap();
        let mut answer = [0; 6];
        guest.read_exact(&mut answer).await.unwrap();
        assert_eq!((question.as_str(), &answer), ("question", b"answer"));
        assert!(!relayed.is_finished(), "the host may send more");
        // The kernel does the same to a peer that does not answer keepalive probes.
        reset(guest);
        assert!(relayed.await.unwrap().is_err());
        assert_eq!(host.read(&mut answer).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn large_transfers_in_both_directions_work_with_one_large_pipe() {
        let ((guest, near), (far, host)) = (pair().await, pair().await);
        let count = std::sync::Arc::new(Uncounted::new());
        let counted = std::sync::Arc::clone(&count);
        let relayed = tokio::spawn(async move { relay(&near, &far, &*counted).await });
        let data: Vec<u8> = (0..8 << 20)
            .map(|n| u8::try_from(n % 251).unwrap())
            .collect();
        let exchange = async |stream: TcpStream| {
            let (mut from, mut to) = stream.into_split();
            let mut got = vec![0; data.len()];
            let (sent, read) = tokio::join!(to.write_all(&data), from.read_exact(&mut got));
            sent.and(read.map(drop)).unwrap();
            assert!(got == data);
            assert_eq!(count.0.available_permits(), 0, "in use by one of both");
            (from, to)
        };
        drop(tokio::join!(exchange(guest), exchange(host)));
        relayed.await.unwrap().unwrap();
        assert_eq!(count.0.available_permits(), 1);
    }

    #[tokio::test]
    async fn both_sides_have_keepalive_probes() {
        let ((guest, near), (far, host)) = (pair().await, pair().await);
        drop((guest, host));
        relay(&near, &far, &Uncounted::new()).await.unwrap();
        for stream in [&near, &far] {
            assert!(sockopt::socket_keepalive(stream).unwrap());
            assert_eq!(sockopt::tcp_keepidle(stream).unwrap(), KEEPALIVE_IDLE);
        }
    }
}
