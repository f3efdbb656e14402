//! Network policies: hosts, rules that match them, and policies made of rules.
//!
//! Every host is parsed once into [`Host`]: a lower-case name without its trailing dot, or an
//! address. Rules, DNS queries of a box and connections all use it, therefore a host cannot mean
//! one thing to a rule and another to the connection.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::invalid::Invalid;

/// Maximum length of a host name, and of one of its labels.
const NAME_BYTES: usize = 253;
const LABEL_BYTES: usize = 63;

/// Maximum number of `allow` rules and of `deny` rules in a policy.
const RULES: usize = 1024;

const NAME_RULE: &str = "must be a DNS name: letters, digits, - and _, at most 63 bytes per label and 253 in total; use xn-- for international names";
const NUMBER_RULE: &str =
    "must be a DNS name or a complete IP address; use HOST, HOST:PORT or ADDRESS/BITS";
const PORT_RULE: &str = "must have a port, or a range such as 8000-8010, from 1 to 65535";
const RANGE_RULE: &str = "must have a prefix length of at most 32 (IPv4) or 128 (IPv6)";

/// A DNS name in lower case, without a trailing dot.
///
/// A text whose last label is a number (`127.1`, `0x7f.1`, `2130706433`) is not a name, because
/// some programs parse it as an address.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostName(Arc<str>);

impl HostName {
    /// Parses a name, with or without a trailing dot.
    pub fn new(text: &str) -> Result<Self, Invalid> {
        let text = text.strip_suffix('.').unwrap_or(text);
        let sound = |label: &str| {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
            (1..=LABEL_BYTES).contains(&label.len()) && label.bytes().all(plain)
        };
        if text.len() > NAME_BYTES || !text.split('.').all(sound) {
            return Err(Invalid::new("host", NAME_RULE));
        }
        if text.rsplit('.').next().is_some_and(is_number) {
            return Err(Invalid::new("host", NUMBER_RULE));
        }
        Ok(Self(text.to_ascii_lowercase().into()))
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether some program would parse the label as a decimal, octal or hexadecimal number.
fn is_number(label: &str) -> bool {
    let digits = label.bytes().all(|byte| byte.is_ascii_digit());
    let hex = label
        .get(..2)
        .is_some_and(|start| start.eq_ignore_ascii_case("0x"))
        && label[2..].bytes().all(|byte| byte.is_ascii_hexdigit());
    digits || hex
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The host of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Host {
    /// A name, resolved when the box connects.
    Name(HostName),
    /// An address; an IPv4-mapped IPv6 address is stored as IPv4.
    Address(IpAddr),
}

impl Host {
    /// Creates a host from an address in canonical form.
    pub fn address(address: IpAddr) -> Self {
        Self::Address(address.to_canonical())
    }
}

impl FromStr for Host {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        match text.parse() {
            Ok(address) => Ok(Self::address(address)),
            Err(_) => HostName::new(text).map(Self::Name),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::Address(address) => address.fmt(f),
        }
    }
}

/// A rule: `HOST`, `HOST:PORT` or `HOST:PORT-PORT`.
///
/// The host is a name, `*.` and a name for all names below it, an address, an address range
/// (`10.0.0.0/8`), or `*` for all. An IPv6 address before a port is in brackets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkRule {
    hosts: Hosts,
    ports: (u16, u16),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Hosts {
    All,
    Name(HostName),
    Below(HostName),
    Range(IpAddr, u8),
}

impl NetworkRule {
    /// Whether the rule matches this host and port.
    pub fn matches(&self, host: &Host, port: u16) -> bool {
        let about = match (&self.hosts, host) {
            (Hosts::All, _) => true,
            (Hosts::Name(name), Host::Name(asked)) => name == asked,
            (Hosts::Below(name), Host::Name(asked)) => {
                let above = asked.as_str().strip_suffix(name.as_str());
                above.is_some_and(|above| above.len() > 1 && above.ends_with('.'))
            }
            (Hosts::Range(start, bits), Host::Address(asked)) => within(*start, *bits, *asked),
            _ => false,
        };
        about && (self.ports.0..=self.ports.1).contains(&port)
    }

    /// Whether the rule names an address or an address range.
    pub fn lists_addresses(&self) -> bool {
        matches!(self.hosts, Hosts::Range(..))
    }

    /// Whether the rule matches this name at some port.
    pub fn may_match(&self, name: &HostName) -> bool {
        self.matches(&Host::Name(name.clone()), self.ports.0)
    }
}

fn within(start: IpAddr, bits: u8, address: IpAddr) -> bool {
    match (start, address) {
        (IpAddr::V4(start), IpAddr::V4(address)) => {
            let differs = start.to_bits() ^ address.to_bits();
            differs.leading_zeros() >= u32::from(bits)
        }
        (IpAddr::V6(start), IpAddr::V6(address)) => {
            let differs = start.to_bits() ^ address.to_bits();
            differs.leading_zeros() >= u32::from(bits)
        }
        _ => false,
    }
}

impl FromStr for NetworkRule {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let (host, ports) = if let Some(rest) = text.strip_prefix('[') {
            let (host, rest) = rest
                .split_once(']')
                .ok_or_else(|| Invalid::new("rule", "must close its ["))?;
            match rest.strip_prefix(':') {
                Some(ports) => (host, Some(ports)),
                None if rest.is_empty() => (host, None),
                None => return Err(Invalid::new("rule", PORT_RULE)),
            }
        } else if text.matches(':').count() > 1 {
            (text, None)
        } else {
            text.split_once(':')
                .map_or((text, None), |(host, ports)| (host, Some(ports)))
        };
        Ok(Self {
            hosts: hosts(host)
                .map_err(|invalid| Invalid::new("rule", invalid.rule().to_owned()))?,
            ports: ports.map_or(Ok((0, u16::MAX)), port_range)?,
        })
    }
}

fn hosts(text: &str) -> Result<Hosts, Invalid> {
    if text == "*" {
        return Ok(Hosts::All);
    }
    if let Some(name) = text.strip_prefix("*.") {
        return HostName::new(name).map(Hosts::Below);
    }
    if let Some((start, bits)) = text.split_once('/') {
        let start: IpAddr = start
            .parse()
            .map_err(|_| Invalid::new("rule", NUMBER_RULE))?;
        let bits: u8 = bits.parse().map_err(|_| Invalid::new("rule", RANGE_RULE))?;
        return range(start, bits).ok_or_else(|| Invalid::new("rule", RANGE_RULE));
    }
    Ok(match text.parse()? {
        Host::Name(name) => Hosts::Name(name),
        Host::Address(address @ IpAddr::V4(_)) => Hosts::Range(address, 32),
        Host::Address(address @ IpAddr::V6(_)) => Hosts::Range(address, 128),
    })
}

/// Creates an address range; an IPv4-mapped IPv6 range becomes an IPv4 range.
fn range(start: IpAddr, bits: u8) -> Option<Hosts> {
    let mapped = |address: Ipv6Addr| address.to_ipv4_mapped();
    let (start, bits) = match start {
        IpAddr::V6(address) if mapped(address).is_some() && (96..=128).contains(&bits) => {
            (mapped(address)?.into(), bits - 96)
        }
        start => (start, bits),
    };
    let most = if start.is_ipv4() { 32 } else { 128 };
    (bits <= most).then_some(Hosts::Range(start, bits))
}

fn port_range(text: &str) -> Result<(u16, u16), Invalid> {
    let invalid = || Invalid::new("rule", PORT_RULE);
    let number = |text: &str| {
        let port = text
            .bytes()
            .all(|byte| byte.is_ascii_digit())
            .then(|| text.parse().ok());
        port.flatten().filter(|port| *port > 0).ok_or_else(invalid)
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (number(first)?, number(last)?);
    (first <= last).then_some((first, last)).ok_or_else(invalid)
}

impl fmt::Display for NetworkRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let any_port = self.ports == (0, u16::MAX);
        match &self.hosts {
            Hosts::All => f.write_str("*")?,
            Hosts::Name(name) => name.fmt(f)?,
            Hosts::Below(name) => write!(f, "*.{name}")?,
            Hosts::Range(start, bits) => {
                let whole = u32::from(*bits) == if start.is_ipv4() { 32 } else { 128 };
                let (open, close) = if start.is_ipv6() && !any_port {
                    ("[", "]")
                } else {
                    ("", "")
                };
                write!(f, "{open}{start}")?;
                if !whole {
                    write!(f, "/{bits}")?;
                }
                f.write_str(close)?;
            }
        }
        match self.ports {
            _ if any_port => Ok(()),
            (first, last) if first == last => write!(f, ":{first}"),
            (first, last) => write!(f, ":{first}-{last}"),
        }
    }
}

impl Serialize for NetworkRule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for NetworkRule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|invalid: Invalid| invalid.decoding())
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for NetworkRule {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "NetworkRule".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "HOST, HOST:PORT or HOST:PORT-PORT; the host is a name, `*.name`, an address, a range of addresses or `*`",
            "type": "string", "minLength": 1
        })
    }
}

/// What happens to a connection that no rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum NetworkDefault {
    /// Allow it if the destination is a public address.
    Allow,
    /// Block it.
    Deny,
}

/// The hosts that a box with network access may connect to. `deny` takes precedence over `allow`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct NetworkPolicy {
    /// Destinations to allow. An empty list allows none.
    #[cfg_attr(feature = "schema", schemars(length(max = 1024)))]
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "few_if_any"
    )]
    pub allow: Option<Vec<NetworkRule>>,
    /// Destinations to block.
    #[cfg_attr(feature = "schema", schemars(length(max = 1024)))]
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "few")]
    pub deny: Vec<NetworkRule>,
    /// What happens to a connection that no rule matches. If absent: `deny` with an `allow` list,
    /// `allow` without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default: Option<NetworkDefault>,
}

/// Decodes a list of rules, limited to [`RULES`].
fn few<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<NetworkRule>, D::Error> {
    let rules = Vec::deserialize(deserializer)?;
    if rules.len() > RULES {
        let rule = "must have at most 1024 allow and 1024 deny rules";
        return Err(Invalid::new("network_policy", rule).decoding());
    }
    Ok(rules)
}

fn few_if_any<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<NetworkRule>>, D::Error> {
    #[derive(Deserialize)]
    struct Few(#[serde(deserialize_with = "few")] Vec<NetworkRule>);
    let rules = Option::<Few>::deserialize(deserializer)?;
    Ok(rules.map(|Few(rules)| rules))
}

/// What one policy decides about a host and a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkVerdict {
    /// A `deny` rule matches.
    Denied,
    /// An `allow` rule matches.
    Listed,
    /// No rule matches, and the default is `allow`.
    Open,
    /// No rule matches, and the default is `deny`.
    Unlisted,
}

impl NetworkPolicy {
    /// Evaluates the policy for a host and a port.
    pub fn verdict(&self, host: &Host, port: u16) -> NetworkVerdict {
        self.verdict_if(|rule| rule.matches(host, port))
    }

    /// Evaluates the policy for a name: whether it allows the name at some port.
    pub fn verdict_of_name(&self, name: &HostName) -> NetworkVerdict {
        let everywhere = |rule: &NetworkRule| rule.ports == (0, u16::MAX) && rule.may_match(name);
        if self.deny.iter().any(everywhere) {
            return NetworkVerdict::Denied;
        }
        let may = |rule: &NetworkRule| rule.may_match(name);
        self.unless_denied(may)
    }

    /// Evaluates only the address rules, for an address that a name resolved to.
    pub fn verdict_of_address(&self, address: IpAddr, port: u16) -> NetworkVerdict {
        let host = Host::address(address);
        self.verdict_if(|rule| rule.lists_addresses() && rule.matches(&host, port))
    }

    fn verdict_if(&self, about: impl Fn(&NetworkRule) -> bool) -> NetworkVerdict {
        if self.deny.iter().any(&about) {
            return NetworkVerdict::Denied;
        }
        self.unless_denied(about)
    }

    fn unless_denied(&self, about: impl Fn(&NetworkRule) -> bool) -> NetworkVerdict {
        if self.allow.iter().flatten().any(about) {
            return NetworkVerdict::Listed;
        }
        let default = match &self.allow {
            Some(_) => NetworkDefault::Deny,
            None => NetworkDefault::Allow,
        };
        match self.default.unwrap_or(default) {
            NetworkDefault::Allow => NetworkVerdict::Open,
            NetworkDefault::Deny => NetworkVerdict::Unlisted,
        }
    }
}

#[cfg(test)]
mod tests;
