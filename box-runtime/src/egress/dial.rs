//! Dialling: from a permitted host to a connection, or to a refusal.
//!
//! The dialer resolves a name once, checks every address against the policies, and connects to one
//! of the permitted addresses. It never resolves a second time between check and connect.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use box_protocol::{Host, HostName, NetworkPolicy};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::config::{EgressConfig, Proxy};
use super::policy::{Policies, Refusal, is_public};

/// Limit of concurrent lookups, each of which blocks a thread.
const LOOKUPS: usize = 64;
/// Limit of concurrent lookups per box.
const LOOKUPS_PER_BOX: usize = 8;
/// Time limit of a lookup.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a connection attempt to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Time limit of a proxy's response to `CONNECT`.
const PROXY_TIMEOUT: Duration = Duration::from_secs(30);
/// Limit of addresses tried per name.
const ADDRESSES_PER_NAME: usize = 8;
/// Longest accepted response head of a proxy.
const PROXY_HEAD_BYTES: usize = 8 << 10;

/// Dialer shared by all boxes.
#[derive(Debug)]
pub(crate) struct Dialer {
    pub(crate) config: EgressConfig,
    /// Operator policy, which may change.
    policy: RwLock<Arc<NetworkPolicy>>,
    lookups: Arc<Semaphore>,
}

/// Lookup permits of one box, limited so that other boxes can make progress.
#[derive(Debug, Clone)]
pub(crate) struct LookupPermits(Arc<Semaphore>);

impl LookupPermits {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(LOOKUPS_PER_BOX)))
    }

    /// Takes all permits, as lookups that never finish do.
    #[cfg(test)]
    pub(super) async fn take_all(&self) -> impl Sized {
        let all = u32::try_from(LOOKUPS_PER_BOX).unwrap_or(u32::MAX);
        Arc::clone(&self.0).acquire_many_owned(all).await
    }
}

/// Established connection and its actual address.
#[derive(Debug)]
pub(crate) struct Dialled {
    pub(crate) stream: TcpStream,
    /// Remote address; unknown if a proxy resolved the name.
    pub(crate) address: Option<IpAddr>,
}

impl Dialer {
    pub(crate) fn new(config: EgressConfig) -> Self {
        Self {
            policy: RwLock::new(Arc::new(config.policy.clone())),
            config,
            lookups: Arc::new(Semaphore::new(LOOKUPS)),
        }
    }

    /// Returns the policies that apply to a box with this policy.
    pub(crate) fn policies(&self, own: &Arc<NetworkPolicy>) -> Policies {
        let operator = self.policy.read().unwrap_or_else(PoisonError::into_inner);
        Policies {
            operator: Arc::clone(&operator),
            own: Arc::clone(own),
        }
    }

    /// Replaces the operator policy for future connections.
    pub(crate) fn set_policy(&self, policy: NetworkPolicy) {
        let mut operator = self.policy.write().unwrap_or_else(PoisonError::into_inner);
        *operator = Arc::new(policy);
    }

    /// Connects to a host, if the policies permit it.
    pub(crate) async fn dial(
        &self,
        permits: &LookupPermits,
        policies: &Policies,
        host: &Host,
        port: u16,
    ) -> Result<Dialled, Refusal> {
        policies.check_dial(host, port)?;
        let proxy = self.config.proxy.as_ref();
        if let Some(proxy) = proxy.filter(|proxy| proxy.is_for(host, port)) {
            let stream = proxy.connect(host, port).await.ok_or(Refusal::Proxy)?;
            return Ok(Dialled {
                stream,
                address: None,
            });
        }
        let permitted = self.choose(permits, policies, host, port).await?;
        let mut refusal = Refusal::NoRoute;
        for address in permitted {
            let connecting = connect(SocketAddr::new(address, port));
            let connected = timeout(CONNECT_TIMEOUT, connecting).await;
            match connected.unwrap_or_else(|late| Err(late.into())) {
                Ok(stream) => {
                    return Ok(Dialled {
                        stream,
                        address: Some(address),
                    });
                }
                Err(error) => refusal = more_informative(refusal, error.kind()),
            }
        }
        Err(refusal)
    }

    /// Resolves a host and returns the addresses that the policies permit.
    pub(super) async fn choose(
        &self,
        permits: &LookupPermits,
        policies: &Policies,
        host: &Host,
        port: u16,
    ) -> Result<Vec<IpAddr>, Refusal> {
        policies.check_dial(host, port)?;
        let found = match host {
            Host::Address(address) => vec![*address],
            Host::Name(name) => self.look_up(permits, name).await.unwrap_or_default(),
        };
        let mut refusal = Refusal::Unresolved;
        let mut permitted = Vec::new();
        for address in found {
            match check_candidate(policies, address, port) {
                Ok(()) => permitted.push(address),
                Err(why) => refusal = why,
            }
        }
        permitted.truncate(ADDRESSES_PER_NAME);
        if permitted.is_empty() {
            Err(refusal)
        } else {
            Ok(permitted)
        }
    }

    /// Returns whether a name exists, or `None` if the lookup times out.
    ///
    /// For names that the proxy resolves, the answer is always `true`.
    pub(crate) async fn exists(&self, permits: &LookupPermits, name: &HostName) -> Option<bool> {
        let host = Host::Name(name.clone());
        let mut proxy = self.config.proxy.iter();
        if proxy.any(|proxy| !proxy.except.iter().any(|rule| rule.matches(&host, 443))) {
            return Some(true);
        }
        Some(!self.look_up(permits, name).await?.is_empty())
    }

    /// Resolves a name to distinct addresses in dial order.
    ///
    /// Returns `None` if the lookup times out.
    async fn look_up(&self, permits: &LookupPermits, name: &HostName) -> Option<Vec<IpAddr>> {
        if let Some(known) = self.config.hosts.get(name) {
            return Some(known.iter().map(IpAddr::to_canonical).collect());
        }
        // The thread owns the permits, because it outlives a caller that stops waiting. This bounds
        // the number of threads.
        let (own, all) = (Arc::clone(&permits.0), Arc::clone(&self.lookups));
        let name = name.clone();
        let lookup = async move {
            let acquired = (own.acquire_owned().await, all.acquire_owned().await);
            let blocking = tokio::task::spawn_blocking(move || {
                let found = system_lookup(&name);
                drop(acquired);
                found
            });
            blocking.await.ok()
        };
        let found = timeout(LOOKUP_TIMEOUT, lookup).await.ok()??;
        let mut found = found.unwrap_or_default();
        let mut seen = std::collections::HashSet::new();
        found.retain(|address| seen.insert(*address));
        Some(found)
    }
}

/// Connects to an address.
///
/// A nearby host has usually accepted before the wait starts, which saves a wakeup.
async fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = loop {
        match rustix::net::socket_with(family, SocketType::STREAM, flags, None) {
            // No packet has left the machine yet, so the dialer can retry within the same timeout.
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                tokio::time::sleep(super::RETRY).await;
            }
            socket => break socket?,
        }
    };
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    let mut polled = [PollFd::new(&socket, PollFlags::OUT)];
    let is_connected = rustix::event::poll(&mut polled, Some(&Timespec::default()))? > 0;
    let stream = TcpStream::from_std(socket.into())?;
    if !is_connected {
        stream.writable().await?;
    }
    match stream.take_error()? {
        Some(error) => Err(error),
        None => Ok(stream),
    }
}

/// Picks the more informative refusal after failed attempts on several addresses.
///
/// A refused connection outranks a timeout, and a timeout outranks a missing route.
fn more_informative(so_far: Refusal, error: io::ErrorKind) -> Refusal {
    match error {
        io::ErrorKind::ConnectionRefused => Refusal::Refused,
        io::ErrorKind::NetworkUnreachable => so_far,
        _ if so_far == Refusal::Refused => so_far,
        _ => Refusal::Unreachable,
    }
}

/// Resolves a name with the machine's hosts file, then its name servers.
///
/// The trailing dot prevents the resolver from appending a search domain.
fn system_lookup(name: &HostName) -> io::Result<Vec<IpAddr>> {
    let listed = std::fs::read_to_string("/etc/hosts").map(|text| in_hosts_file(&text, name));
    if let Ok(listed) = listed
        && !listed.is_empty()
    {
        return Ok(listed);
    }
    let found = (format!("{name}."), 0).to_socket_addrs()?;
    Ok(found.map(|address| address.ip().to_canonical()).collect())
}

fn in_hosts_file(hosts: &str, name: &HostName) -> Vec<IpAddr> {
    let of_line = |line: &str| {
        let line = line.split('#').next().unwrap_or_default();
        let mut words = line.split_whitespace();
        let address: IpAddr = words.next()?.parse().ok()?;
        let named = words.any(|word| HostName::new(word).is_ok_and(|word| word == *name));
        named.then(|| address.to_canonical())
    };
    hosts.lines().filter_map(of_line).collect()
}

/// Checks whether the dialer may connect to an address.
///
/// An address of this machine must be listed even if it is public, because local services may trust
/// local clients.
fn check_candidate(policies: &Policies, address: IpAddr, port: u16) -> Result<(), Refusal> {
    policies.check_address(address, port)?;
    if is_public(address) && !policies.lists(address, port) && is_local(address) {
        return Err(Refusal::OwnMachine);
    }
    Ok(())
}

/// Returns whether an address belongs to this machine.
///
/// A socket can bind to such an address. Where the kernel permits a bind to any address, the source
/// address that it chooses for a connection decides.
fn is_local(address: IpAddr) -> bool {
    let (any, setting): (SocketAddr, _) = match address {
        IpAddr::V4(_) => ((Ipv4Addr::UNSPECIFIED, 0).into(), "ipv4"),
        IpAddr::V6(_) => ((Ipv6Addr::UNSPECIFIED, 0).into(), "ipv6"),
    };
    match UdpSocket::bind(SocketAddr::new(address, 0)) {
        Ok(_) => {}
        // Any other error does not show that the address is remote.
        Err(error) => return error.kind() != io::ErrorKind::AddrNotAvailable,
    }
    let setting = std::fs::read(format!("/proc/sys/net/{setting}/ip_nonlocal_bind"));
    if setting.is_ok_and(|value| value.starts_with(b"0")) {
        return true;
    }
    let from = || {
        let socket = UdpSocket::bind(any)?;
        // Connecting a UDP socket sends no packet.
        socket.connect(SocketAddr::new(address, 9))?;
        socket.local_addr()
    };
    from().is_ok_and(|from| from.ip() == address)
}

impl Proxy {
    fn is_for(&self, host: &Host, port: u16) -> bool {
        !self.except.iter().any(|rule| rule.matches(host, port))
    }

    /// Connects to a destination; `None` if it bypasses the proxy.
    pub(crate) async fn dial(&self, host: &str, port: u16) -> io::Result<Option<TcpStream>> {
        let host = host.parse().map_err(|_| io::ErrorKind::InvalidInput)?;
        if !self.is_for(&host, port) {
            return Ok(None);
        }
        let stream = self.connect(&host, port).await;
        Ok(Some(stream.ok_or(io::ErrorKind::ConnectionRefused)?))
    }

    async fn connect(&self, host: &Host, port: u16) -> Option<TcpStream> {
        timeout(PROXY_TIMEOUT, self.ask(host, port))
            .await
            .ok()?
            .ok()
    }

    async fn ask(&self, host: &Host, port: u16) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        let to = match host {
            Host::Address(address) => SocketAddr::new(*address, port).to_string(),
            Host::Name(name) => format!("{name}:{port}"),
        };
        let mut head = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n");
        if let Some(authorization) = &self.authorization {
            head.push_str("Proxy-Authorization: ");
            head.push_str(authorization);
            head.push_str("\r\n");
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes()).await?;
        if accepts(&head_of(&mut stream).await?) {
            Ok(stream)
        } else {
            Err(io::ErrorKind::ConnectionRefused.into())
        }
    }
}

/// Returns whether the head of a proxy's answer means a connection.
pub(crate) fn accepts(head: &[u8]) -> bool {
    let digit = |byte: &u8| byte.is_ascii_digit();
    let Some((version, rest)) = head.strip_prefix(b"HTTP/1.").and_then(<[u8]>::split_first) else {
        return false;
    };
    // The text after the status is optional, and so is the space before it.
    let [b' ', b'2', tens, ones, b' ' | b'\r' | b'\n', ..] = rest else {
        return false;
    };
    [version, tens, ones].into_iter().all(digit)
}

/// Reads up to and including the empty line, and no further.
pub(crate) async fn head_of(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() == PROXY_HEAD_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        head.push(stream.read_u8().await?);
    }
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_hosts_file_are_found_regardless_of_case() {
        let text = "127.0.0.1 localhost\n# 1.2.3.4 no\n10.1.2.3\tDB.example db # more.example\nbad ok.example\n::ffff:10.0.0.9 six";
        let find = |name: &str| in_hosts_file(text, &HostName::new(name).unwrap());
        assert_eq!(find("db.example"), ["10.1.2.3".parse::<IpAddr>().unwrap()]);
        assert_eq!(find("db"), find("db.example"));
        assert_eq!(find("six"), ["10.0.0.9".parse::<IpAddr>().unwrap()]);
        for none in ["no", "more.example", "ok.example", "example"] {
            assert!(find(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn addresses_of_this_machine_are_recognized() {
        assert!(is_local("127.0.0.1".parse().unwrap()));
        assert!(is_local("127.3.2.1".parse().unwrap()));
        assert!(!is_local("192.0.2.1".parse().unwrap()));
    }
}
