//! Encodes netlink messages. No external program is needed.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, socket_with,
};

/// Length of a message header.
const HEADER: usize = 16;
/// Type of the kernel's reply, which begins with an error number.
#[expect(clippy::cast_possible_truncation, reason = "2")]
const ACK: u16 = libc::NLMSG_ERROR as u16;
/// Alignment of messages and attributes.
const ALIGNMENT: usize = 4;

/// Flag of an attribute that contains attributes.
const NESTED: u16 = 1 << 15;

/// Netlink family of a message.
#[derive(Debug, Clone, Copy)]
pub(super) enum Family {
    /// Links, addresses and routes.
    Route,
    /// Packet filter rules.
    Filter,
}

impl Family {
    fn protocol(self) -> Option<Protocol> {
        match self {
            Self::Route => None,
            Self::Filter => Some(netlink::NETFILTER),
        }
    }
}

/// Messages that are sent together.
#[derive(Debug, Default)]
pub(super) struct Batch {
    bytes: Bytes,
    count: u32,
    acks: usize,
}

impl Batch {
    /// Adds a message that creates an object and is acknowledged.
    pub(super) fn request(&mut self, kind: u16, body: impl FnOnce(&mut Bytes)) {
        // Append: the kernel evaluates rules in the order of their creation.
        let flags = libc::NLM_F_CREATE | libc::NLM_F_APPEND | libc::NLM_F_ACK;
        self.acks += 1;
        self.add(kind, flags, body);
    }

    /// Adds a message that is not acknowledged.
    pub(super) fn control(&mut self, kind: u16, body: impl FnOnce(&mut Bytes)) {
        self.add(kind, 0, body);
    }

    fn add(&mut self, kind: u16, flags: libc::c_int, body: impl FnOnce(&mut Bytes)) {
        let start = self.bytes.0.len();
        self.count += 1;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "flags are low bits"
        )]
        let flags = (flags | libc::NLM_F_REQUEST) as u16;
        self.bytes.put(&[0; 4]);
        self.bytes.put(&kind.to_ne_bytes());
        self.bytes.put(&flags.to_ne_bytes());
        self.bytes.put(&self.count.to_ne_bytes());
        self.bytes.put(&[0; 4]);
        body(&mut self.bytes);
        let length = self.bytes.0.len() - start;
        #[expect(clippy::cast_possible_truncation, reason = "a few hundred bytes")]
        let length = (length as u32).to_ne_bytes();
        self.bytes.0[start..start + 4].copy_from_slice(&length);
    }

    /// Sends the batch to this network namespace and waits for all acknowledgements.
    ///
    /// Returns the first error.
    pub(super) fn send(self, to: Family) -> io::Result<()> {
        self.send_over(&socket(to, SocketFlags::empty())?)
    }

    /// The same over an existing socket. Skips other messages.
    pub(super) fn send_over(self, socket: &OwnedFd) -> io::Result<()> {
        rustix::net::send(socket, self.bytes(), SendFlags::empty())?;
        let mut left = self.acks;
        while left > 0 {
            left = left.saturating_sub(acks(socket)?);
        }
        Ok(())
    }

    /// The encoded batch.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes.0
    }
}

/// Opens a netlink socket of this network namespace.
pub(super) fn socket(to: Family, flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    let family = AddressFamily::NETLINK;
    Ok(socket_with(family, SocketType::RAW, flags, to.protocol())?)
}

/// Reads one datagram and returns its number of acknowledgements.
///
/// The kernel has already replied when a send returns.
fn acks(socket: &OwnedFd) -> io::Result<usize> {
    let mut buffer = [0; 8192];
    let (length, _) = rustix::io::retry_on_intr(|| {
        rustix::net::recv(socket.as_fd(), &mut buffer[..], RecvFlags::DONTWAIT)
    })?;
    let (mut rest, mut count) = (&buffer[..length], 0);
    while let Some((kind, body)) = first(rest) {
        if kind == ACK {
            let code = body.first_chunk().ok_or(io::ErrorKind::InvalidData)?;
            let errno = i32::from_ne_bytes(*code);
            if errno != 0 {
                return Err(io::Error::from_raw_os_error(-errno));
            }
            count += 1;
        }
        let size = (HEADER + body.len()).next_multiple_of(ALIGNMENT);
        rest = &rest[size.min(rest.len())..];
    }
    Ok(count)
}

/// Type and body of the first message.
pub(super) fn first(bytes: &[u8]) -> Option<(u16, &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    let kind = rest.first_chunk().copied().map(u16::from_ne_bytes)?;
    let length = usize::try_from(u32::from_ne_bytes(*length)).ok()?;
    Some((kind, bytes.get(HEADER..length)?))
}

/// The complete attributes of a message.
pub(super) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (length, rest) = bytes.split_first_chunk()?;
        let length = usize::from(u16::from_ne_bytes(*length));
        let kind = rest.first_chunk().copied().map(u16::from_ne_bytes)?;
        let value = bytes.get(ALIGNMENT..length)?;
        bytes = bytes
            .get(length.next_multiple_of(ALIGNMENT)..)
            .unwrap_or(&[]);
        Some((kind & !NESTED, value))
    })
}

/// Body of a message.
#[derive(Debug, Default)]
pub(super) struct Bytes(Vec<u8>);

impl Bytes {
    /// Appends raw bytes.
    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Appends an attribute.
    pub(super) fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.within(kind, |bytes| bytes.put(value));
    }

    /// Appends an attribute with a string.
    pub(super) fn name(&mut self, kind: u16, name: &str) {
        self.within(kind, |bytes| {
            bytes.put(name.as_bytes());
            bytes.put(&[0]);
        });
    }

    /// Appends an attribute that contains attributes.
    pub(super) fn nest(&mut self, kind: u16, inner: impl FnOnce(&mut Self)) {
        self.within(kind | NESTED, inner);
    }

    fn within(&mut self, kind: u16, inner: impl FnOnce(&mut Self)) {
        let start = self.0.len();
        self.put(&[0; 2]);
        self.put(&kind.to_ne_bytes());
        inner(self);
        #[expect(clippy::cast_possible_truncation, reason = "a few hundred bytes")]
        let length = ((self.0.len() - start) as u16).to_ne_bytes();
        self.0[start..start + 2].copy_from_slice(&length);
        self.0.resize(self.0.len().next_multiple_of(ALIGNMENT), 0);
    }
}
