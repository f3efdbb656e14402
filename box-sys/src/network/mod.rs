//! The network of a box: loopback only, or with egress.
//!
//! A box has a network namespace with only a loopback interface, so its packets reach no other
//! host. With egress, the packet filter redirects every outgoing TCP connection to a listening
//! socket in the namespace, and every DNS query to another. This module creates both sockets and
//! passes them to the runtime. The runtime accepts the connections and reads the original
//! destination from the kernel. No process of the box takes part, and none has privileges over the
//! namespace.
//!
//! If the kernel supports it, a queue holds the first packet of a connection until the runtime has
//! connected to the destination (`syn_queue.rs`). Programs then get the usual errors of failed
//! connections.
//!
//! `rules.rs` contains the packet filter, `netlink.rs` sends it to the kernel.

mod netlink;
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "constants of the kernel's headers fit their fields"
)]
mod rules;
mod syn_queue;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};
use serde::{Deserialize, Serialize};

use crate::error::{At, Error, Result};
use crate::plan::Network;
use crate::raw;
use netlink::{Batch, Bytes, Family};
use rules::QueueMethod;
pub use syn_queue::{FIRST_MARK, QueuedSyn, SynQueue, Verdict, socket_mark};

/// Source address of the box's connections, and its name server.
///
/// It is from a range that no network uses.
pub const OWN_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The same for IPv6.
pub const OWN_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xb0, 0, 0, 0, 0, 0, 1);

/// Port to which connections are redirected. Guests cannot bind ports below 1024.
const TCP_PORT: u16 = 1;
/// Port to which DNS queries are redirected.
pub(crate) const DNS_PORT: u16 = 53;

/// Backlog of the egress sockets.
const BACKLOG: libc::c_int = 1024;

/// Backlog limit of the guest's sockets.
///
/// No memory limit counts connections that are not accepted yet. This was the default of Linux for
/// twenty years.
const GUEST_BACKLOG: &str = "128";

const LOOPBACK_INDEX: u32 = 1;

/// A network namespace and its egress sockets.
#[derive(Debug)]
pub(crate) struct Net {
    pub(crate) namespace: OwnedFd,
    pub(crate) egress: Vec<OwnedFd>,
}

/// Moves this process into a new network namespace and returns its egress sockets.
pub(crate) fn enter_new(network: Network) -> Result<Vec<OwnedFd>> {
    raw::unshare(libc::CLONE_NEWNET).at("unshare the network namespace")?;
    if network == Network::Down {
        return Ok(Vec::new());
    }
    loopback_up().at("bring the loopback interface up")?;
    let egress = match network {
        // The usual reason is a kernel without the packet filter.
        Network::Egress => open_egress(true).map_err(|_| Error::Unavailable("network".into()))?,
        Network::Down | Network::Loopback => Vec::new(),
    };
    // After the egress sockets, which need a larger backlog. If the write fails, the host's limit
    // stays in force.
    let _ = std::fs::write("/proc/sys/net/core/somaxconn", GUEST_BACKLOG);
    Ok(egress)
}

fn loopback_up() -> io::Result<()> {
    let mut batch = Batch::default();
    batch.request(libc::RTM_NEWLINK, |body| {
        body.put(&[0; 4]);
        body.put(&LOOPBACK_INDEX.to_ne_bytes());
        // The flags and their mask.
        body.put(&libc::IFF_UP.to_ne_bytes());
        body.put(&libc::IFF_UP.to_ne_bytes());
    });
    batch.send(Family::Route)
}

fn open_egress(with_syn_queue: bool) -> io::Result<Vec<OwnedFd>> {
    address_and_route(OWN_V4.into())?;
    // On a host without IPv6, boxes have no IPv6 either.
    let v6 = address_and_route(OWN_V6.into()).is_ok();
    let syn_queue = with_syn_queue.then(queue_syns).flatten();
    if syn_queue.is_none() {
        rules::write(None)?;
    }
    let mut egress = listen_pair(Ipv4Addr::LOCALHOST.into())?;
    if v6 {
        egress.extend(listen_pair(Ipv6Addr::LOCALHOST.into())?);
    }
    egress.extend(syn_queue);
    Ok(egress)
}

/// Writes rules with a SYN queue, if the kernel supports it. Returns its socket.
fn queue_syns() -> Option<OwnedFd> {
    const METHODS: [QueueMethod; 2] = [QueueMethod::Expression, QueueMethod::Target];
    /// The method that worked last. For an unknown one, the kernel searches a module, which takes
    /// milliseconds.
    static KNOWN: AtomicUsize = AtomicUsize::new(0);
    let syn_queue = syn_queue::create().ok()?;
    let first = KNOWN.load(Ordering::Relaxed);
    let mut order = (first..METHODS.len()).chain(0..first);
    // The kernel applies all rules or none.
    let works = order.find(|&method| rules::write(Some(METHODS[method])).is_ok())?;
    KNOWN.store(works, Ordering::Relaxed);
    Some(syn_queue)
}

/// Adds an address and a default route to the loopback interface.
fn address_and_route(own: IpAddr) -> io::Result<()> {
    let (family, bits) = match own {
        IpAddr::V4(_) => (AddressFamily::INET, 32),
        IpAddr::V6(_) => (AddressFamily::INET6, 128),
    };
    let [family, _] = family.as_raw().to_le_bytes();
    let attribute = |body: &mut Bytes, kind: u16| match own {
        IpAddr::V4(address) => body.attribute(kind, &address.octets()),
        IpAddr::V6(address) => body.attribute(kind, &address.octets()),
    };
    let mut batch = Batch::default();
    batch.request(libc::RTM_NEWADDR, |body| {
        body.put(&[family, bits, 0, 0]);
        body.put(&LOOPBACK_INDEX.to_ne_bytes());
        attribute(body, libc::IFA_LOCAL);
        attribute(body, libc::IFA_ADDRESS);
        body.attribute(libc::IFA_FLAGS, &libc::IFA_F_NODAD.to_ne_bytes());
    });
    batch.request(libc::RTM_NEWROUTE, |body| {
        // A local route: with a plain route to loopback, the kernel refuses all of IPv6, and IPv4
        // senders get no unreachable errors.
        let (table, kind) = (libc::RT_TABLE_LOCAL, libc::RTN_LOCAL);
        let scope = match own {
            IpAddr::V4(_) => libc::RT_SCOPE_HOST,
            IpAddr::V6(_) => libc::RT_SCOPE_UNIVERSE,
        };
        body.put(&[family, 0, 0, 0, table, libc::RTPROT_BOOT, scope, kind]);
        body.put(&[0; 4]);
        body.attribute(libc::RTA_OIF, &LOOPBACK_INDEX.to_ne_bytes());
        attribute(body, libc::RTA_PREFSRC);
    });
    batch.send(Family::Route)
}

/// Creates the egress sockets of one address family.
fn listen_pair(at: IpAddr) -> io::Result<Vec<OwnedFd>> {
    let family = match at {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let tcp = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    rustix::net::bind(&tcp, &SocketAddr::new(at, TCP_PORT))?;
    rustix::net::listen(&tcp, BACKLOG)?;
    let dns = socket_with(family, SocketType::DGRAM, flags, Some(ipproto::UDP))?;
    rustix::net::bind(&dns, &SocketAddr::new(at, DNS_PORT))?;
    Ok(vec![tcp, dns])
}

/// The egress sockets of a box. They are non-blocking.
#[derive(Debug, Default)]
pub struct EgressSockets {
    /// Listeners for the box's connections.
    ///
    /// `SO_ORIGINAL_DST` is the destination of a connection, or the listener itself if the
    /// connection was not redirected.
    pub connections: Vec<TcpListener>,
    /// Sockets for the box's DNS queries.
    pub dns: Vec<UdpSocket>,
    /// Socket of the SYN queue, if any; see [`EgressSockets::take_syn_queue`].
    syn_queue: Option<OwnedFd>,
}

/// Kernel cookies that identify the egress sockets of a box until the host reboots.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressCookies(Vec<u64>);

impl EgressCookies {
    pub(crate) fn of(sockets: &[OwnedFd]) -> io::Result<Self> {
        let cookie = |socket| Ok(rustix::net::sockopt::socket_cookie(socket)?);
        sockets
            .iter()
            .map(cookie)
            .collect::<io::Result<_>>()
            .map(Self)
    }

    /// Selects the egress sockets among descriptors that a box's init sends.
    ///
    /// A guest may have compromised init, so all cookies must match.
    pub fn find(&self, handed: impl IntoIterator<Item = OwnedFd>) -> Option<EgressSockets> {
        let mut egress = Vec::new();
        let mut marks = self.0.iter();
        for fd in handed {
            let mark = marks.next()?;
            if rustix::net::sockopt::socket_cookie(&fd).ok()? != *mark {
                return None;
            }
            egress.push(fd);
        }
        (!egress.is_empty() && marks.next().is_none()).then(|| EgressSockets::of(egress))
    }
}

impl EgressSockets {
    /// Sorts the sockets, which are in pairs and may end with the SYN queue.
    pub(crate) fn of(mut sockets: Vec<OwnedFd>) -> Self {
        let mut egress = Self::default();
        if sockets.len() % 2 == 1 {
            egress.syn_queue = sockets.pop();
        }
        for (place, socket) in sockets.into_iter().enumerate() {
            if place % 2 == 0 {
                egress.connections.push(socket.into());
            } else {
                egress.dns.push(socket.into());
            }
        }
        egress
    }

    /// Takes the SYN queue, if any. Fails if this process cannot control it.
    pub fn take_syn_queue(&mut self) -> io::Result<Option<SynQueue>> {
        self.syn_queue.take().map(SynQueue::take_over).transpose()
    }
}

/// Whether boxes of this user can have egress, and whether they have a SYN queue.
///
/// A child process tests both.
pub(crate) fn available(privileged: bool) -> (bool, bool) {
    let with_user = if privileged { 0 } else { libc::CLONE_NEWUSER };
    let egress = |enough: fn(&EgressSockets) -> bool| {
        raw::try_in_child(move || {
            let unshared = raw::unshare(with_user);
            let made = unshared.is_ok().then(|| enter_new(Network::Egress));
            made.is_some_and(|made| made.is_ok_and(|made| enough(&EgressSockets::of(made))))
        })
    };
    (
        egress(|_| true),
        egress(|egress| egress.syn_queue.is_some()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outgoing_connections_arrive_at_the_egress_sockets_with_their_destination() {
        let succeeded = raw::try_in_child(|| {
            let attempt = || -> io::Result<bool> {
                let mut egress =
                    EgressSockets::of(enter_new(Network::Egress).map_err(io::Error::other)?);
                let mut checks = Vec::new();
                let syn_queue = egress.take_syn_queue()?.ok_or(io::ErrorKind::NotFound)?;
                let decide = |to: SocketAddr, verdict| {
                    let syn_queue = &syn_queue;
                    std::thread::scope(|scope| {
                        let connecting = scope.spawn(move || std::net::TcpStream::connect(to));
                        let queued = next(syn_queue)?;
                        assert_eq!(queued.to, to);
                        syn_queue.decide(&queued, verdict)?;
                        connecting.join().map_err(|_| io::ErrorKind::Other)?
                    })
                };
                for (listener, to) in egress
                    .connections
                    .iter()
                    .zip(["192.0.2.7:443", "[2001:db8::7]:443"])
                {
                    let to: SocketAddr = to.parse().map_err(io::Error::other)?;
                    for (verdict, expected) in [
                        (Verdict::Refused, libc::ECONNREFUSED),
                        (Verdict::HostUnreachable, libc::EHOSTUNREACH),
                        (Verdict::NetworkUnreachable, libc::ENETUNREACH),
                    ] {
                        let errno = decide(to, verdict)
                            .err()
                            .and_then(|error| error.raw_os_error());
                        checks.push(errno == Some(expected));
                    }
                    let _connection = decide(to, Verdict::Pass(4711))?;
                    let (accepted, _) = listener.accept()?;
                    checks.push(socket_mark(&accepted)? == 4711);
                    let was: SocketAddr = match to {
                        SocketAddr::V4(_) => {
                            rustix::net::sockopt::ip_original_dst(&accepted)?.into()
                        }
                        SocketAddr::V6(_) => {
                            rustix::net::sockopt::ipv6_original_dst(&accepted)?.into()
                        }
                    };
                    checks.push(was == to);
                }
                let resolver = UdpSocket::bind("0.0.0.0:0")?;
                resolver.send_to(b"who", "192.0.2.53:53")?;
                let mut buffer = [0; 16];
                let (length, from) = egress.dns[0].recv_from(&mut buffer)?;
                egress.dns[0].send_to(&buffer[..length], from)?;
                let (_, answered_by) = resolver.recv_from(&mut buffer)?;
                let other = resolver.send_to(b"x", "192.0.2.53:54");
                Ok(checks == [true; 10]
                    && answered_by.to_string() == "192.0.2.53:53"
                    && other.is_err_and(|error| error.raw_os_error() == Some(libc::EPERM)))
            };
            attempt().is_ok_and(|all| all)
        });
        assert!(succeeded);
    }

    #[test]
    fn without_a_syn_queue_a_connection_arrives_at_once() {
        let succeeded = raw::try_in_child(|| {
            let attempt = || -> io::Result<bool> {
                enter_new(Network::Loopback).map_err(io::Error::other)?;
                let mut egress = EgressSockets::of(open_egress(false)?);
                let to = SocketAddr::new([192, 0, 2, 7].into(), 443);
                let _connection = std::net::TcpStream::connect(to)?;
                let (accepted, _) = egress.connections[0].accept()?;
                let was: SocketAddr = rustix::net::sockopt::ip_original_dst(&accepted)?.into();
                Ok(was == to && socket_mark(&accepted)? == 0 && egress.take_syn_queue()?.is_none())
            };
            attempt().is_ok_and(|all| all)
        });
        assert!(succeeded);
    }

    #[test]
    fn a_new_reader_receives_queued_packets_again() {
        let succeeded = raw::try_in_child(|| {
            let attempt = || -> io::Result<bool> {
                let egress = enter_new(Network::Egress).map_err(io::Error::other)?;
                let copies = egress.iter().map(OwnedFd::try_clone);
                let copies = copies.collect::<io::Result<_>>()?;
                let first = EgressSockets::of(egress).take_syn_queue()?;
                let first = first.ok_or(io::ErrorKind::NotFound)?;
                let to = SocketAddr::new([192, 0, 2, 7].into(), 443);
                std::thread::scope(|scope| {
                    let connecting = scope.spawn(move || std::net::TcpStream::connect(to));
                    let queued = next(&first)?;
                    drop(first);
                    let second = EgressSockets::of(copies).take_syn_queue()?;
                    let second = second.ok_or(io::ErrorKind::NotFound)?;
                    let redelivered = next(&second)?;
                    // The second reader does not know this id.
                    second.decide(&queued, Verdict::NetworkUnreachable)?;
                    second.decide(&redelivered, Verdict::HostUnreachable)?;
                    let result = connecting.join().map_err(|_| io::ErrorKind::Other)?;
                    let errno = result.err().and_then(|error| error.raw_os_error());
                    Ok(redelivered.to == to && errno == Some(libc::EHOSTUNREACH))
                })
            };
            attempt().is_ok_and(|all| all)
        });
        assert!(succeeded);
    }

    #[test]
    fn a_syn_queue_with_unread_messages_can_be_taken_over() {
        let succeeded = raw::try_in_child(|| {
            let attempt = || -> io::Result<bool> {
                let egress = enter_new(Network::Egress).map_err(io::Error::other)?;
                let syn_queue = egress.last().ok_or(io::ErrorKind::NotFound)?;
                // The smallest possible buffer.
                rustix::net::sockopt::set_socket_recv_buffer_size(syn_queue, 1)?;
                let to = SocketAddr::new([192, 0, 2, 7].into(), 443);
                let mut connecting = Vec::new();
                for _ in 0..100 {
                    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                    let kind = SocketType::STREAM;
                    let socket = socket_with(AddressFamily::INET, kind, flags, None)?;
                    let _in_progress = rustix::net::connect(&socket, &to);
                    connecting.push(socket);
                }
                let taken = EgressSockets::of(egress).take_syn_queue()?;
                let queued = next(&taken.ok_or(io::ErrorKind::NotFound)?)?;
                Ok(queued.to == to)
            };
            attempt().is_ok_and(|all| all)
        });
        assert!(succeeded);
    }

    /// The next queued packet.
    fn next(syn_queue: &SynQueue) -> io::Result<QueuedSyn> {
        loop {
            match syn_queue.receive() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                queued => return queued,
            }
        }
    }

    #[test]
    fn only_the_original_egress_sockets_are_accepted() {
        let make = || -> Vec<OwnedFd> {
            let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
            let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
            vec![tcp.into(), udp.into()]
        };
        let (own, foreign) = (make(), make());
        let marks = EgressCookies::of(&own).unwrap();
        assert!(marks.find(foreign).is_none());
        assert!(marks.find(Vec::new()).is_none());
        let mut more = make();
        more.splice(0..0, own.iter().map(|fd| fd.try_clone().unwrap()));
        assert!(marks.find(more).is_none());
        assert!(marks.find(own).is_some());
        assert!(EgressCookies::default().find(Vec::new()).is_none());
    }
}
