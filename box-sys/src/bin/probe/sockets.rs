//! Fills sockets with unread data and with unaccepted connections.

use std::io::{self, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};

use libc::c_long;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{set_socket_recv_buffer_size, socket_recv_buffer_size};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

use super::call;

const LOCAL: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 0);
const MEGABYTE: u64 = 1 << 20;

/// Tries to enlarge a receive buffer. Returns 1 if it grew, otherwise 0.
pub(super) fn receive_buffer() -> io::Result<c_long> {
    let socket = UdpSocket::bind(LOCAL)?;
    // The kernel doubles the requested value, up to a maximum that may be the default. So request
    // the current size.
    let before = socket_recv_buffer_size(&socket)?;
    set_socket_recv_buffer_size(&socket, before)?;
    Ok(c_long::from(socket_recv_buffer_size(&socket)? != before))
}

/// Connects this many times to a listener that never accepts.
///
/// Returns the connections made.
pub(super) fn backlog(most: usize) -> io::Result<c_long> {
    let listener = TcpListener::bind(LOCAL)?;
    rustix::net::listen(&listener, 4096)?;
    let to = listener.local_addr()?;
    let mut all = Vec::new();
    for _ in 0..most {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
        match connect(&socket, &to) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => all.push(socket),
            Err(error) => return Err(error.into()),
        }
    }
    // On loopback, a connection succeeds at once, or only after a retry one second later.
    let mut connected = 0;
    for socket in &all {
        let mut fds = [PollFd::new(socket, PollFlags::OUT)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        connected += poll(&mut fds, Some(&now))?;
    }
    c_long::try_from(connected).map_err(io::Error::other)
}

/// Bytes in the buffers of a socket, received and unsent.
fn buffered(socket: BorrowedFd<'_>) -> io::Result<u64> {
    const SO_MEMINFO: c_long = 55;
    const RECEIVED: usize = 0;
    const QUEUED: usize = 5;
    let mut words = [0_u32; 9];
    let mut length: libc::socklen_t = 36;
    call(
        libc::SYS_getsockopt,
        [
            socket.as_raw_fd().into(),
            libc::SOL_SOCKET.into(),
            SO_MEMINFO,
            words.as_mut_ptr() as c_long,
            (&raw mut length) as c_long,
            0,
        ],
    )?;
    Ok(u64::from(words[RECEIVED]) + u64::from(words[QUEUED]))
}

fn megabytes(bytes: u64) -> io::Result<c_long> {
    c_long::try_from(bytes / MEGABYTE).map_err(io::Error::other)
}

/// Sends unread datagrams until this many megabytes are buffered or no more fit.
///
/// Returns the megabytes.
pub(super) fn fill_udp_buffers(most: u64) -> io::Result<c_long> {
    const REFUSED_MAX: u32 = 16;
    let sender = UdpSocket::bind(LOCAL)?;
    let message = vec![1_u8; 60_000];
    let (mut receivers, mut total, mut refused) = (Vec::new(), 0, 0);
    while total < most * MEGABYTE && refused < REFUSED_MAX && receivers.len() < 1000 {
        let receiver = UdpSocket::bind(LOCAL)?;
        for _ in 0..8 {
            let _ = sender.send_to(&message, receiver.local_addr()?);
        }
        let more = buffered(receiver.as_fd())?;
        refused = if more == 0 { refused + 1 } else { 0 };
        total += more;
        receivers.push(receiver);
    }
    megabytes(total)
}

/// The same with TCP connections.
pub(super) fn fill_tcp_buffers(most: u64) -> io::Result<c_long> {
    const CONNECTIONS_MAX: usize = 100;
    let listener = TcpListener::bind(LOCAL)?;
    let block = vec![1_u8; 256 << 10];
    let (mut all, mut total) = (Vec::new(), 0);
    while total < most * MEGABYTE && all.len() < 2 * CONNECTIONS_MAX {
        let mut near = TcpStream::connect(listener.local_addr()?)?;
        let (far, _) = listener.accept()?;
        near.set_nonblocking(true)?;
        loop {
            match near.write(&block) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        all.extend([near, far]);
        total = 0;
        for socket in &all {
            total += buffered(socket.as_fd())?;
        }
    }
    megabytes(total)
}
