//! Every setting of the way out.

use std::collections::BTreeMap;
use std::net::IpAddr;

use box_protocol::{HostName, NetworkPolicy, NetworkRule};

/// How boxes with a network reach out, and to whom.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EgressConfig {
    /// To whom boxes may connect at most; a box's own policy can only narrow it. Addresses that are not public are reached only
    /// if they are listed here.
    pub policy: NetworkPolicy,
    /// Addresses of names, before anybody else is asked for them.
    pub hosts: BTreeMap<HostName, Vec<IpAddr>>,
    /// Connect through this proxy.
    pub proxy: Option<Proxy>,
    /// Connections of one box at once.
    pub connections: usize,
    /// New connections of one box in a second; what comes faster waits. 0 is no limit.
    pub connections_per_sec: u32,
    /// Questions of one box for names in a second; what comes faster waits, or is lost. 0 is no limit.
    pub questions_per_sec: u32,
    /// Bytes that one box may send and receive together, as long as it lives and this process does. 0 is no limit.
    pub bytes: u64,
    /// Tell every connection in the log, with its end or why there was none.
    pub audit: bool,
}

impl Default for EgressConfig {
    fn default() -> Self {
        Self {
            policy: NetworkPolicy::default(),
            hosts: BTreeMap::new(),
            proxy: None,
            connections: 1024,
            connections_per_sec: 1000,
            questions_per_sec: 1000,
            bytes: 0,
            audit: false,
        }
    }
}

/// A proxy that is asked to `CONNECT`.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Proxy {
    /// Its name or address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// What it is told as `Proxy-Authorization`.
    pub authorization: Option<String>,
    /// Who is connected to without it.
    pub except: Vec<NetworkRule>,
}

impl Proxy {
    /// One that wants to know nothing and is asked for everything.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
            authorization: None,
            except: Vec::new(),
        }
    }
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Not what it is told.
        write!(f, "Proxy({}:{})", self.host, self.port)
    }
}
