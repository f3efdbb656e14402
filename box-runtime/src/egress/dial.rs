//! From a host that may be dialled to a connection, or to why there is none.
//!
//! A name is looked up here and now; each address it turns out to have is asked about, and exactly one of those that may be
//! reached is dialled. There is no second look.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use box_protocol::{Host, HostName, NetworkPolicy};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::config::{EgressConfig, Proxy};
use super::policy::{Policies, Refusal, is_public};

/// Names that are looked up at once, each by a thread that waits.
const LOOKUPS: usize = 64;
/// As many of them may be of one box.
const LOOKUPS_OF_ONE: usize = 8;
/// How long a name may take to be found.
const LOOKUP: Duration = Duration::from_secs(10);
/// How long one address may take to answer.
const CONNECT: Duration = Duration::from_secs(15);
/// How long a proxy may take to say whether it will.
const PROXY: Duration = Duration::from_secs(30);
/// Addresses of one name that are tried.
const ADDRESSES: usize = 8;
/// The longest answer of a proxy, without what comes through it.
const ANSWER: usize = 8 << 10;

/// What dials for all boxes.
#[derive(Debug)]
pub(crate) struct Dialler {
    pub(crate) config: EgressConfig,
    /// The operator's, which may change.
    policy: RwLock<Arc<NetworkPolicy>>,
    lookups: Arc<Semaphore>,
}

/// Who asks for names: one box, which may have so many looked up at once that there is room for others.
#[derive(Debug, Clone)]
pub(crate) struct Asker(Arc<Semaphore>);

impl Asker {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(LOOKUPS_OF_ONE)))
    }

    /// Takes all its places, as names do that are not found.
    #[cfg(test)]
    pub(super) async fn fill(&self) -> impl Sized {
        let all = u32::try_from(LOOKUPS_OF_ONE).unwrap_or(u32::MAX);
        Arc::clone(&self.0).acquire_many_owned(all).await
    }
}

/// A connection, and to whom it turned out to be.
#[derive(Debug)]
pub(crate) struct Dialled {
    pub(crate) stream: TcpStream,
    /// Unless a proxy knows and we do not.
    pub(crate) address: Option<IpAddr>,
}

impl Dialler {
    pub(crate) fn new(config: EgressConfig) -> Self {
        Self {
            policy: RwLock::new(Arc::new(config.policy.clone())),
            config,
            lookups: Arc::new(Semaphore::new(LOOKUPS)),
        }
    }

    /// The policies that hold for a box with one of its own.
    pub(crate) fn policies(&self, own: &Arc<NetworkPolicy>) -> Policies {
        let operator = self.policy.read().unwrap_or_else(PoisonError::into_inner);
        Policies {
            operator: Arc::clone(&operator),
            own: Arc::clone(own),
        }
    }

    /// Changes the operator's policy, for connections to come.
    pub(crate) fn set_policy(&self, policy: NetworkPolicy) {
        let mut operator = self.policy.write().unwrap_or_else(PoisonError::into_inner);
        *operator = Arc::new(policy);
    }

    /// Connects to a host, if the policies let it.
    pub(crate) async fn dial(
        &self,
        asker: &Asker,
        policies: &Policies,
        host: &Host,
        port: u16,
    ) -> Result<Dialled, Refusal> {
        policies.may_dial(host, port)?;
        let proxy = self.config.proxy.as_ref();
        if let Some(proxy) = proxy.filter(|proxy| proxy.is_for(host, port)) {
            let stream = proxy.connect(host, port).await.ok_or(Refusal::Proxy)?;
            return Ok(Dialled {
                stream,
                address: None,
            });
        }
        let may = self.choose(asker, policies, host, port).await?;
        let mut refusal = Refusal::NoRoute;
        for address in may {
            let connecting = connect(SocketAddr::new(address, port));
            let connected = timeout(CONNECT, connecting).await;
            match connected.unwrap_or_else(|late| Err(late.into())) {
                Ok(stream) => {
                    return Ok(Dialled {
                        stream,
                        address: Some(address),
                    });
                }
                Err(error) => refusal = more_telling(refusal, error.kind()),
            }
        }
        Err(refusal)
    }

    /// The addresses to dial for a host: what it turns out to have, without what may not be reached.
    pub(super) async fn choose(
        &self,
        asker: &Asker,
        policies: &Policies,
        host: &Host,
        port: u16,
    ) -> Result<Vec<IpAddr>, Refusal> {
        policies.may_dial(host, port)?;
        let found = match host {
            Host::Address(address) => vec![*address],
            Host::Name(name) => self.look_up(asker, name).await.unwrap_or_default(),
        };
        let mut refusal = Refusal::Unresolved;
        let mut may = Vec::new();
        for address in found {
            match admit(policies, address, port) {
                Ok(()) => may.push(address),
                Err(why) => refusal = why,
            }
        }
        may.truncate(ADDRESSES);
        if may.is_empty() {
            Err(refusal)
        } else {
            Ok(may)
        }
    }

    /// Whether there is anybody of a name; `None` if that takes too long to find out. A proxy that knows is not asked.
    pub(crate) async fn exists(&self, asker: &Asker, name: &HostName) -> Option<bool> {
        let host = Host::Name(name.clone());
        let mut proxy = self.config.proxy.iter();
        if proxy.any(|proxy| !proxy.except.iter().any(|rule| rule.matches(&host, 443))) {
            return Some(true);
        }
        Some(!self.look_up(asker, name).await?.is_empty())
    }

    /// The addresses of a name, each once, as they are dialled; `None` if that takes too long.
    async fn look_up(&self, asker: &Asker, name: &HostName) -> Option<Vec<IpAddr>> {
        if let Some(known) = self.config.hosts.get(name) {
            return Some(known.iter().map(IpAddr::to_canonical).collect());
        }
        // Held by the thread, which goes on when nobody waits any more: there are never more of them.
        let (own, all) = (Arc::clone(&asker.0), Arc::clone(&self.lookups));
        let name = name.clone();
        let looking = async move {
            let place = (own.acquire_owned().await, all.acquire_owned().await);
            let blocking = tokio::task::spawn_blocking(move || {
                let found = system_lookup(&name);
                drop(place);
                found
            });
            blocking.await.ok()
        };
        let found = timeout(LOOKUP, looking).await.ok()??;
        let mut found = found.unwrap_or_default();
        let mut seen = std::collections::HashSet::new();
        found.retain(|address| seen.insert(*address));
        Some(found)
    }
}

/// Connects to an address. One that is near has answered by the time it can be waited for, and nobody is woken for it.
async fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = loop {
        match rustix::net::socket_with(family, SocketType::STREAM, flags, None) {
            // Nobody out there has said anything yet: whoever waits can wait for this, too.
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
    let mut answered = [PollFd::new(&socket, PollFlags::OUT)];
    let answered = rustix::event::poll(&mut answered, Some(&Timespec::default()))? > 0;
    let stream = TcpStream::from_std(socket.into())?;
    if !answered {
        stream.writable().await?;
    }
    match stream.take_error()? {
        Some(error) => Err(error),
        None => Ok(stream),
    }
}

/// What is said of a host none of whose addresses could be connected to: that somebody is there says more than that nobody
/// answers, and that more than that there is no way to one of them.
fn more_telling(so_far: Refusal, error: io::ErrorKind) -> Refusal {
    match error {
        io::ErrorKind::ConnectionRefused => Refusal::Refused,
        io::ErrorKind::NetworkUnreachable => so_far,
        _ if so_far == Refusal::Refused => so_far,
        _ => Refusal::Unreachable,
    }
}

/// Asks the machine for a name: its own list of hosts, then its name servers. With a dot at its end, so that what is looked up
/// is this name and no other that has it as its beginning.
fn system_lookup(name: &HostName) -> io::Result<Vec<IpAddr>> {
    let listed = std::fs::read_to_string("/etc/hosts").map(|text| listed(&text, name));
    if let Ok(listed) = listed
        && !listed.is_empty()
    {
        return Ok(listed);
    }
    let found = (format!("{name}."), 0).to_socket_addrs()?;
    Ok(found.map(|address| address.ip().to_canonical()).collect())
}

fn listed(hosts: &str, name: &HostName) -> Vec<IpAddr> {
    let of_line = |line: &str| {
        let line = line.split('#').next().unwrap_or_default();
        let mut words = line.split_whitespace();
        let address: IpAddr = words.next()?.parse().ok()?;
        let named = words.any(|word| HostName::new(word).is_ok_and(|word| word == *name));
        named.then(|| address.to_canonical())
    };
    hosts.lines().filter_map(of_line).collect()
}

/// Whether an address may be dialled. One of this machine may not, public or not, unless it is listed: what listens there may
/// trust whoever is on the machine.
fn admit(policies: &Policies, address: IpAddr, port: u16) -> Result<(), Refusal> {
    policies.may_reach(address, port)?;
    if is_public(address) && !policies.lists(address, port) && is_own(address) {
        return Err(Refusal::OwnMachine);
    }
    Ok(())
}

/// Whether an address is one of this machine's: a socket can be bound to it. Where the machine lets sockets be bound to any
/// address, it is one that would be talked to from itself.
fn is_own(address: IpAddr) -> bool {
    let (any, setting): (SocketAddr, _) = match address {
        IpAddr::V4(_) => ((Ipv4Addr::UNSPECIFIED, 0).into(), "ipv4"),
        IpAddr::V6(_) => ((Ipv6Addr::UNSPECIFIED, 0).into(), "ipv6"),
    };
    match UdpSocket::bind(SocketAddr::new(address, 0)) {
        Ok(_) => {}
        // Whatever else goes wrong says nothing of whose it is.
        Err(error) => return error.kind() != io::ErrorKind::AddrNotAvailable,
    }
    let setting = std::fs::read(format!("/proc/sys/net/{setting}/ip_nonlocal_bind"));
    if setting.is_ok_and(|value| value.starts_with(b"0")) {
        return true;
    }
    let from = || {
        let socket = UdpSocket::bind(any)?;
        // Sends nothing.
        socket.connect(SocketAddr::new(address, 9))?;
        socket.local_addr()
    };
    from().is_ok_and(|from| from.ip() == address)
}

impl Proxy {
    fn is_for(&self, host: &Host, port: u16) -> bool {
        !self.except.iter().any(|rule| rule.matches(host, port))
    }

    async fn connect(&self, host: &Host, port: u16) -> Option<TcpStream> {
        timeout(PROXY, self.ask(host, port)).await.ok()?.ok()
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
        let answer = head_of(&mut stream).await?;
        let mut words = answer.split(|byte| *byte == b' ');
        let is_http = words
            .next()
            .is_some_and(|word| word.starts_with(b"HTTP/1."));
        let is_good = words
            .next()
            .is_some_and(|word| word.starts_with(b"2") && word.len() == 3);
        if is_http && is_good {
            Ok(stream)
        } else {
            Err(io::ErrorKind::ConnectionRefused.into())
        }
    }
}

/// Reads up to the empty line, and nothing of what follows it.
async fn head_of(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() == ANSWER {
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
    fn names_of_the_machines_list_are_found_whatever_their_case() {
        let text = "127.0.0.1 localhost\n# 1.2.3.4 no\n10.1.2.3\tDB.example db # more.example\nbad ok.example\n::ffff:10.0.0.9 six";
        let find = |name: &str| listed(text, &HostName::new(name).unwrap());
        assert_eq!(find("db.example"), ["10.1.2.3".parse::<IpAddr>().unwrap()]);
        assert_eq!(find("db"), find("db.example"));
        assert_eq!(find("six"), ["10.0.0.9".parse::<IpAddr>().unwrap()]);
        for none in ["no", "more.example", "ok.example", "example"] {
            assert!(find(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn the_machines_own_addresses_are_known() {
        assert!(is_own("127.0.0.1".parse().unwrap()));
        assert!(is_own("127.3.2.1".parse().unwrap()));
        assert!(!is_own("192.0.2.1".parse().unwrap()));
    }
}
