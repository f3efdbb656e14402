//! Bytes from one connection to another and back, to the end of both.
//!
//! Small amounts are copied; a direction that moves much goes through a pipe, in which bytes change hands without being copied
//! into this process. So a short exchange costs no pipe, and a long one no copying.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{Shutdown, sockopt};
use rustix::pipe::{PipeFlags, SpliceFlags};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

/// Bytes copied at once.
const COPIED: usize = 16 << 10;
/// As many full copies in succession make a direction one that moves much.
const MUCH: u32 = 4;
/// What a large pipe may hold, if this process may ask for so much.
const PIPE: usize = 1 << 20;
/// Large pipes of one box: what is in a pipe is this machine's memory, and whoever does not read leaves it there. Further ones hold
/// what a pipe holds that nobody has asked about, 64 KiB.
pub(super) const LARGE_PIPES: usize = 16;

/// How long a side may be silent before it is asked whether it is there, how often then, and how often in vain. The kernel forgets
/// what it has redirected after a minute of silence, if one side has ended what it says.
const ASKED_AFTER: Duration = Duration::from_secs(30);
const ASKED_EVERY: Duration = Duration::from_secs(15);
const ASKED_TIMES: u32 = 4;

/// Who is told of bytes that have arrived on the other side, and may say that it is enough.
pub(crate) trait Count: Sync {
    /// Leave to have a large pipe.
    fn large_pipes(&self) -> &Semaphore;
    /// So many from the box.
    fn sent(&self, bytes: u64) -> io::Result<()>;
    /// So many to the box.
    fn received(&self, bytes: u64) -> io::Result<()>;
}

/// Moves bytes both ways until both sides have ended what they say. An error is a break, to be passed on as one.
///
/// A side that has ended what it says may still listen, for as long as it likes; one that is gone altogether says nothing of
/// that. So both are asked now and then whether they are there, and whoever is not is noticed while the other is waited for.
pub(crate) async fn relay(near: &TcpStream, far: &TcpStream, count: &impl Count) -> io::Result<()> {
    ask_now_and_then(near)?;
    ask_now_and_then(far)?;
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

fn ask_now_and_then(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, ASKED_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, ASKED_EVERY)?;
    Ok(sockopt::set_tcp_keepcnt(stream, ASKED_TIMES)?)
}

/// The error of a connection that is broken.
async fn broken(stream: &TcpStream) -> io::Error {
    if let Err(error) = stream.ready(Interest::ERROR).await {
        return error;
    }
    match stream.take_error() {
        Ok(Some(error)) | Err(error) => error,
        // Whoever reads or writes has it.
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
    through_pipe(from, to, large, moved).await
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
    large: &Semaphore,
    moved: impl Fn(u64) -> io::Result<()>,
) -> io::Result<()> {
    let (output, input) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let large = large.try_acquire();
    if large.is_ok() {
        // Less will do.
        let _ = rustix::pipe::fcntl_setpipe_size(&input, PIPE);
    }
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
    let now = Some(Duration::ZERO);
    let _ = sockopt::set_socket_linger(&stream, now);
    drop(stream);
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// Counts nothing, and has one large pipe.
    struct Nobody(Semaphore);

    impl Nobody {
        fn new() -> Self {
            Self(Semaphore::new(1))
        }
    }

    impl Count for Nobody {
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
    async fn who_has_said_all_may_listen_and_who_is_gone_is_noticed() {
        let ((mut guest, near), (far, mut host)) = (pair().await, pair().await);
        let relayed = tokio::spawn(async move { relay(&near, &far, &Nobody::new()).await });
        guest.write_all(b"question").await.unwrap();
        guest.shutdown().await.unwrap();
        let mut asked = String::new();
        host.read_to_string(&mut asked).await.unwrap();
        host.write_all(b"answer").await.unwrap();
        let mut answer = [0; 6];
        guest.read_exact(&mut answer).await.unwrap();
        assert_eq!((asked.as_str(), &answer), ("question", b"answer"));
        assert!(!relayed.is_finished(), "the host may say more");
        // As the kernel does for whoever is asked and is not there.
        reset(guest);
        assert!(relayed.await.unwrap().is_err());
        assert_eq!(host.read(&mut answer).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn much_goes_both_ways_although_there_is_one_large_pipe() {
        let ((guest, near), (far, host)) = (pair().await, pair().await);
        let count = std::sync::Arc::new(Nobody::new());
        let counted = std::sync::Arc::clone(&count);
        let relayed = tokio::spawn(async move { relay(&near, &far, &*counted).await });
        let much: Vec<u8> = (0..8 << 20)
            .map(|n| u8::try_from(n % 251).unwrap())
            .collect();
        let exchange = async |stream: TcpStream| {
            let (mut from, mut to) = stream.into_split();
            let mut got = vec![0; much.len()];
            let (sent, read) = tokio::join!(to.write_all(&much), from.read_exact(&mut got));
            sent.and(read.map(drop)).unwrap();
            assert!(got == much);
            assert_eq!(count.0.available_permits(), 0, "in use by one of both");
            (from, to)
        };
        drop(tokio::join!(exchange(guest), exchange(host)));
        relayed.await.unwrap().unwrap();
        assert_eq!(count.0.available_permits(), 1);
    }

    #[tokio::test]
    async fn both_sides_are_asked_whether_they_are_there() {
        let ((guest, near), (far, host)) = (pair().await, pair().await);
        drop((guest, host));
        relay(&near, &far, &Nobody::new()).await.unwrap();
        for stream in [&near, &far] {
            assert!(sockopt::socket_keepalive(stream).unwrap());
            assert_eq!(sockopt::tcp_keepidle(stream).unwrap(), ASKED_AFTER);
        }
    }
}
