//! The SYN queue of a box: holds the first packet of each outgoing connection.
//!
//! The runtime can connect to the destination before the program in the box gets a result. The
//! program then gets the same result: a connection, `ECONNREFUSED`, `EHOSTUNREACH` or
//! `ENETUNREACH`. The runtime's decision is the mark of the packet. The rules evaluate it when the
//! packet passes them again (`rules.rs`). The accepted socket keeps the mark, so the runtime can
//! match it with its own connection.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_recv_buffer_size_force};
use rustix::net::{RecvFlags, SendFlags, SocketFlags};

use super::netlink::{self, Batch, Bytes, Family};
use crate::raw;

/// Number of the queue. A network has one.
pub(super) const QUEUE: u16 = 0;
/// Most packets in the queue.
///
/// The kernel drops further ones, and the sender retries after a second.
const QUEUED_MAX: u32 = 1024;
/// Receive buffer of the socket.
const BUFFER: usize = 1 << 20;
/// Bytes of a packet that the kernel copies: addresses and ports.
const COPY_BYTES: u32 = 64;

/// Marks for failed connections.
///
/// A packet without a decision has no mark, and a guest cannot set one.
pub(super) const REFUSED: u32 = 1;
pub(super) const HOST_UNREACHABLE: u32 = 2;
pub(super) const NETWORK_UNREACHABLE: u32 = 3;
/// First mark of an allowed connection.
pub const FIRST_MARK: u32 = 16;

/// Constants of `linux/netfilter/nfnetlink_queue.h`, which libc does not define.
mod nfq {
    pub(super) const MSG_PACKET: u16 = 0;
    pub(super) const MSG_VERDICT: u16 = 1;
    pub(super) const MSG_CONFIG: u16 = 2;
    pub(super) const MSG_VERDICT_BATCH: u16 = 3;
    pub(super) const CFG_CMD: u16 = 1;
    pub(super) const CFG_PARAMS: u16 = 2;
    pub(super) const CFG_QUEUE_MAXLEN: u16 = 3;
    pub(super) const CFG_MASK: u16 = 4;
    pub(super) const CFG_FLAGS: u16 = 5;
    pub(super) const CFG_F_GSO: u32 = 1 << 2;
    pub(super) const CMD_BIND: u8 = 1;
    pub(super) const COPY_PACKET: u8 = 2;
    pub(super) const PACKET_HDR: u16 = 1;
    pub(super) const VERDICT_HDR: u16 = 2;
    pub(super) const MARK: u16 = 3;
    pub(super) const PAYLOAD: u16 = 10;
}

/// Settings of the network namespace.
///
/// Accepted sockets keep the mark of their packet. The host's rate limit does not apply to
/// unreachable messages.
const SETTINGS: [(&str, &str); 2] = [
    ("/proc/sys/net/ipv4/tcp_fwmark_accept", "1"),
    ("/proc/sys/net/ipv4/icmp_ratemask", "0"),
];

/// Creates the SYN queue of this network namespace and returns its socket.
pub(super) fn create() -> io::Result<OwnedFd> {
    for (setting, value) in SETTINGS {
        std::fs::write(setting, value)?;
    }
    let socket = netlink::socket(Family::Filter, SocketFlags::NONBLOCK)?;
    // Without root, the buffer is limited by the host's setting.
    let _ = set_socket_recv_buffer_size_force(&socket, BUFFER)
        .or_else(|_| set_socket_recv_buffer_size(&socket, BUFFER));
    // The kernel drops packets that do not fit the buffer, and senders retry. Do not report that as
    // an error.
    let option = libc::NETLINK_NO_ENOBUFS;
    raw::set_option(socket.as_fd(), libc::SOL_NETLINK, option, 1)?;
    let mut batch = Batch::default();
    batch.request(message(nfq::MSG_CONFIG), |body| {
        queue(body);
        body.attribute(nfq::CFG_CMD, &[nfq::CMD_BIND, 0, 0, 0]);
    });
    batch.request(message(nfq::MSG_CONFIG), copy_config);
    batch.request(message(nfq::MSG_CONFIG), |body| {
        queue(body);
        body.attribute(nfq::CFG_QUEUE_MAXLEN, &QUEUED_MAX.to_be_bytes());
        // Leave checksums to be completed by the kernel, as for all local packets. The kernel would
        // verify a completed checksum before it sends an unreachable message, and find it wrong.
        for attribute in [nfq::CFG_MASK, nfq::CFG_FLAGS] {
            body.attribute(attribute, &nfq::CFG_F_GSO.to_be_bytes());
        }
    });
    batch.send_over(&socket)?;
    Ok(socket)
}

fn message(kind: u16) -> u16 {
    #[expect(clippy::cast_possible_truncation, reason = "a small number")]
    let subsystem = libc::NFNL_SUBSYS_QUEUE as u16;
    (subsystem << 8) | kind
}

fn queue(body: &mut Bytes) {
    body.put(&[0, 0]);
    body.put(&QUEUE.to_be_bytes());
}

fn copy_config(body: &mut Bytes) {
    queue(body);
    let mut copied = COPY_BYTES.to_be_bytes().to_vec();
    copied.push(nfq::COPY_PACKET);
    body.attribute(nfq::CFG_PARAMS, &copied);
}

/// Receives the first packet of each connection and decides about it.
///
/// It is non-blocking.
#[derive(Debug)]
pub struct SynQueue(OwnedFd);

/// The first packet of a connection that waits for a decision.
#[derive(Debug)]
pub struct QueuedSyn {
    /// Destination of the connection.
    pub to: SocketAddr,
    id: u32,
}

/// Decision about a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Allow it.
    ///
    /// [`socket_mark`] of the accepted socket is this mark, at least [`FIRST_MARK`].
    Pass(u32),
    /// `ECONNREFUSED`.
    Refused,
    /// `EHOSTUNREACH`.
    HostUnreachable,
    /// `ENETUNREACH`.
    NetworkUnreachable,
}

impl SynQueue {
    /// Takes over the SYN queue of a box. Fails if this process cannot control it.
    ///
    /// The kernel delivers packets again that an earlier process had received.
    pub(super) fn take_over(socket: OwnedFd) -> io::Result<Self> {
        // Make room in the buffer for the reply.
        while rustix::net::recv(&socket, &mut [0; 512][..], RecvFlags::DONTWAIT).is_ok() {}
        let mut same = Batch::default();
        same.request(message(nfq::MSG_CONFIG), copy_config);
        same.send_over(&socket)?;
        let syn_queue = Self(socket);
        // All packets: their ids start at 1.
        syn_queue.send_verdict(nfq::MSG_VERDICT_BATCH, i32::MAX.cast_unsigned(), 0)?;
        Ok(syn_queue)
    }

    /// Receives the next queued packet.
    pub fn receive(&self) -> io::Result<QueuedSyn> {
        let mut buffer = [0; 512];
        loop {
            // `DONTWAIT`, because the box's init has a copy of the socket and can change its mode.
            let received = rustix::net::recv(&self.0, &mut buffer[..], RecvFlags::DONTWAIT)?;
            // Other messages report packets that are gone.
            match read(&buffer[..received.0]) {
                Some((id, Some(to))) => return Ok(QueuedSyn { to, id }),
                Some((id, None)) => self.send_verdict(nfq::MSG_VERDICT, id, REFUSED)?,
                None => {}
            }
        }
    }

    /// Decides about a packet. Has no effect if the packet is gone.
    pub fn decide(&self, syn: &QueuedSyn, verdict: Verdict) -> io::Result<()> {
        let mark = match verdict {
            Verdict::Pass(mark) => mark.max(FIRST_MARK),
            Verdict::Refused => REFUSED,
            Verdict::HostUnreachable => HOST_UNREACHABLE,
            Verdict::NetworkUnreachable => NETWORK_UNREACHABLE,
        };
        self.send_verdict(nfq::MSG_VERDICT, syn.id, mark)
    }

    /// Sends one packet, or all up to this id, through the rules again with a mark.
    fn send_verdict(&self, kind: u16, id: u32, mark: u32) -> io::Result<()> {
        let mut verdict = Batch::default();
        verdict.control(message(kind), |body| {
            queue(body);
            let words = [libc::NF_REPEAT.cast_unsigned(), id].map(u32::to_be_bytes);
            body.attribute(nfq::VERDICT_HDR, words.as_flattened());
            body.attribute(nfq::MARK, &mark.to_be_bytes());
        });
        rustix::net::send(&self.0, verdict.bytes(), SendFlags::DONTWAIT)?;
        Ok(())
    }
}

impl AsFd for SynQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for SynQueue {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// The mark of an accepted connection. 0 if it did not pass the SYN queue.
pub fn socket_mark(accepted: impl AsFd) -> io::Result<u32> {
    raw::socket_mark(accepted.as_fd())
}

/// Id and destination of a packet in a message.
fn read(bytes: &[u8]) -> Option<(u32, Option<SocketAddr>)> {
    let (kind, body) = netlink::first(bytes)?;
    if kind != message(nfq::MSG_PACKET) {
        return None;
    }
    let (mut id, mut to) = (None, None);
    // The first four bytes name the queue.
    for (kind, value) in netlink::attributes(body.get(4..)?) {
        match kind {
            nfq::PACKET_HDR => id = value.first_chunk().copied().map(u32::from_be_bytes),
            nfq::PAYLOAD => to = destination(value),
            _ => {}
        }
    }
    Some((id?, to))
}

/// Destination of a TCP packet. `None` if it has IPv6 extension headers.
fn destination(packet: &[u8]) -> Option<SocketAddr> {
    let first = *packet.first()?;
    let (address, inner, transport) = match first >> 4 {
        4 => {
            let octets: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
            let length = usize::from(first & 15) * 4;
            (Ipv4Addr::from(octets).into(), packet[9], length)
        }
        6 => {
            let octets: [u8; 16] = packet.get(24..40)?.try_into().ok()?;
            (Ipv6Addr::from(octets).into(), packet[6], 40)
        }
        _ => return None,
    };
    if i32::from(inner) != libc::IPPROTO_TCP {
        return None;
    }
    let port = packet.get(transport + 2..transport + 4)?.try_into().ok()?;
    Some(SocketAddr::new(address, u16::from_be_bytes(port)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_destination_is_parsed_unless_extension_headers_precede_it() {
        let mut four = vec![0; 40];
        (four[0], four[9]) = (0x46, 6);
        four[16..20].copy_from_slice(&[192, 0, 2, 7]);
        // After four bytes of options.
        four[26..28].copy_from_slice(&443_u16.to_be_bytes());
        assert_eq!(destination(&four), "192.0.2.7:443".parse().ok());
        let mut six = vec![0; 60];
        (six[0], six[6], six[24], six[39]) = (0x60, 6, 0xfd, 9);
        six[42..44].copy_from_slice(&80_u16.to_be_bytes());
        assert_eq!(destination(&six), "[fd00::9]:80".parse().ok());
        six[6] = 43;
        assert_eq!(destination(&six), None, "a routing header");
        for length in 0..44 {
            assert_eq!(destination(&six[..length]), None);
        }
    }
}
