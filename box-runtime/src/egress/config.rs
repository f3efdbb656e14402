//! Settings of outgoing connections.

use std::collections::BTreeMap;
use std::net::IpAddr;

use box_protocol::{HostName, NetworkPolicy, NetworkRule};

/// Settings for the outgoing connections of boxes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EgressConfig {
    /// Destinations that boxes may connect to; a box's policy can only narrow it.
    ///
    /// Boxes reach non-public addresses only if this policy lists them.
    pub policy: NetworkPolicy,
    /// Static addresses of names, which take precedence over DNS.
    pub hosts: BTreeMap<HostName, Vec<IpAddr>>,
    /// HTTP proxy for outgoing connections.
    pub proxy: Option<Proxy>,
    /// Limit of concurrent connections per box.
    pub connections: usize,
    /// Limit of new connections per box and second; 0 is unlimited.
    ///
    /// Connections beyond the limit wait.
    pub connections_per_sec: u32,
    /// Limit of DNS queries per box and second; 0 is unlimited.
    ///
    /// Queries beyond the limit wait or are dropped.
    pub questions_per_sec: u32,
    /// Limit of bytes sent and received per box; 0 is unlimited.
    ///
    /// The count covers the lifetime of the box within this process.
    pub bytes: u64,
    /// Log every connection with its outcome.
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

/// HTTP proxy that supports `CONNECT`.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Proxy {
    /// Host name or address of the proxy.
    pub host: String,
    /// Port of the proxy.
    pub port: u16,
    /// Value of the `Proxy-Authorization` header.
    pub authorization: Option<String>,
    /// Destinations that bypass the proxy.
    pub except: Vec<NetworkRule>,
}

impl Proxy {
    /// Creates a proxy without authorization and without exceptions.
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
        // The output omits the authorization, which is a secret.
        write!(f, "Proxy({}:{})", self.host, self.port)
    }
}
