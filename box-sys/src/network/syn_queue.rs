//! The gate of a box's network: the first packet of a connection that would leave it is held until somebody has decided.
//!
//! So whoever dials for the box can do so before its program is told anything, and what the program is told is what came of
//! it: a connection, `ECONNREFUSED`, `EHOSTUNREACH` or `ENETUNREACH`. The decision travels as the packet's mark, which the rules
//! look at when the packet goes round once more (`rules.rs`), and which the accepted socket keeps: it says whose it is.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_recv_buffer_size_force};
use rustix::net::{RecvFlags, SendFlags, SocketFlags};

use super::netlink::{self, Batch, Bytes, Family};
use crate::raw;

/// The one queue of a network.
pub(super) const QUEUE: u16 = 0;
/// Packets held at once. Beyond, they are dropped, and sent again by whoever connects after a second.
const QUEUED_MAX: u32 = 1024;
/// Bytes of messages about them that wait to be read.
const BUFFER: usize = 1 << 20;
/// As much of a packet is told: its addresses and ports.
const COPY_BYTES: u32 = 64;

/// Marks by which the rules know what was decided. A packet that nobody has decided about has none, and no guest may set one.
pub(super) const REFUSED: u32 = 1;
pub(super) const HOST_UNREACHABLE: u32 = 2;
pub(super) const NETWORK_UNREACHABLE: u32 = 3;
/// From here on marks mean: let it pass.
pub const FIRST_MARK: u32 = 16;

/// Names of `linux/netfilter/nfnetlink_queue.h`, which the C library's headers do not have.
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

/// Settings of this network namespace: sockets keep the marks of the packets they are accepted by, and word that somewhere cannot be
/// reached is not counted among what the machine may send of such in a second.
const SETTINGS: [(&str, &str); 2] = [
    ("/proc/sys/net/ipv4/tcp_fwmark_accept", "1"),
    ("/proc/sys/net/ipv4/icmp_ratemask", "0"),
];

/// Makes the gate of this network namespace, as a socket that decides about what the rules hold.
pub(super) fn make() -> io::Result<OwnedFd> {
    for (setting, value) in SETTINGS {
        std::fs::write(setting, value)?;
    }
    let socket = netlink::socket(Family::Filter, SocketFlags::NONBLOCK)?;
    // As much as there is must do for who is not root.
    let _ = set_socket_recv_buffer_size_force(&socket, BUFFER)
        .or_else(|_| set_socket_recv_buffer_size(&socket, BUFFER));
    // Packets that could not be told of are dropped and come again. Nobody has to hear of that, least of all instead of an answer.
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
        // Checksums are left to be done, as they are for every packet that goes nowhere else: one that is done is checked again
        // before its sender is told that it gets nowhere, and found wrong.
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

/// Who decides about connections out of a box. It does not block.
#[derive(Debug)]
pub struct SynQueue(OwnedFd);

/// The first packet of a connection, held until it is decided about.
#[derive(Debug)]
pub struct QueuedSyn {
    /// Where the connection is to go.
    pub to: SocketAddr,
    id: u32,
}

/// What becomes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It arrives at the exit, where [`mark_of`] tells this mark, which is at least [`FIRST_MARK`].
    Pass(u32),
    /// `ECONNREFUSED`.
    Refused,
    /// `EHOSTUNREACH`.
    HostUnreachable,
    /// `ENETUNREACH`.
    NetworkUnreachable,
}

impl SynQueue {
    /// Takes over the gate of a box, or says why this process cannot decide there. What was held for somebody else, and perhaps
    /// forgotten, is told again.
    pub(super) fn take_over(socket: OwnedFd) -> io::Result<Self> {
        // There must be room for the answer.
        while rustix::net::recv(&socket, &mut [0; 512][..], RecvFlags::DONTWAIT).is_ok() {}
        let mut same = Batch::default();
        same.request(message(nfq::MSG_CONFIG), copy_config);
        same.send_over(&socket)?;
        let syn_queue = Self(socket);
        // All there are: they are numbered from 1 on.
        syn_queue.send_verdict(nfq::MSG_VERDICT_BATCH, i32::MAX.cast_unsigned(), 0)?;
        Ok(syn_queue)
    }

    /// The next packet that is held.
    pub fn receive(&self) -> io::Result<QueuedSyn> {
        let mut buffer = [0; 512];
        loop {
            // Whether it waits is not left to the socket, of which the box's init has a copy.
            let received = rustix::net::recv(&self.0, &mut buffer[..], RecvFlags::DONTWAIT)?;
            // What is not about a packet says that one has gone meanwhile.
            match read(&buffer[..received.0]) {
                Some((id, Some(to))) => return Ok(QueuedSyn { to, id }),
                Some((id, None)) => self.send_verdict(nfq::MSG_VERDICT, id, REFUSED)?,
                None => {}
            }
        }
    }

    /// Decides about a packet. One that is there no more is none.
    pub fn decide(&self, syn: &QueuedSyn, verdict: Verdict) -> io::Result<()> {
        let mark = match verdict {
            Verdict::Pass(mark) => mark.max(FIRST_MARK),
            Verdict::Refused => REFUSED,
            Verdict::HostUnreachable => HOST_UNREACHABLE,
            Verdict::NetworkUnreachable => NETWORK_UNREACHABLE,
        };
        self.send_verdict(nfq::MSG_VERDICT, syn.id, mark)
    }

    /// Sends a packet, or all up to this one, through the rules once more, with this mark.
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

/// The mark that a connection passed the gate with; 0 if it passed none.
pub fn socket_mark(accepted: impl AsFd) -> io::Result<u32> {
    raw::socket_mark(accepted.as_fd())
}

/// What a message tells of a packet: its number, and where it goes.
fn read(bytes: &[u8]) -> Option<(u32, Option<SocketAddr>)> {
    let (kind, body) = netlink::first(bytes)?;
    if kind != message(nfq::MSG_PACKET) {
        return None;
    }
    let (mut id, mut to) = (None, None);
    // Behind four bytes that name the queue.
    for (kind, value) in netlink::attributes(body.get(4..)?) {
        match kind {
            nfq::PACKET_HDR => id = value.first_chunk().copied().map(u32::from_be_bytes),
            nfq::PAYLOAD => to = destination(value),
            _ => {}
        }
    }
    Some((id?, to))
}

/// Where a packet of TCP goes. Nowhere, if a program has put something of its own between the heads.
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
    fn a_packet_says_where_it_goes_unless_a_program_has_put_something_between() {
        let mut four = vec![0; 40];
        (four[0], four[9]) = (0x46, 6);
        four[16..20].copy_from_slice(&[192, 0, 2, 7]);
        // Behind four bytes of options.
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
