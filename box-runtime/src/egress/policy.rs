//! Policy decisions about outgoing connections.
//!
//! The decision is pure and depends only on the dialled host, the port and the policies.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use box_protocol::{Host, HostName, NetworkPolicy, NetworkVerdict};
use box_sys::Verdict;

/// Reason for a refused or failed connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// A rule of the box denies the destination.
    Denied,
    /// No rule of the box allows the destination.
    Unlisted,
    /// A rule of the operator denies the destination.
    OperatorDenied,
    /// No rule of the operator allows the destination.
    OperatorUnlisted,
    /// The address is not public and not listed.
    NotPublic,
    /// The address belongs to this machine and is not listed.
    OwnMachine,
    /// The synthetic address was never assigned to a name.
    UnknownName,
    /// The destination is unknown or a loopback address.
    NotLeaving,
    /// The box has reached its connection limit.
    Connections,
    /// The box has reached its byte limit.
    Bytes,
    /// The name has no address.
    Unresolved,
    /// The remote host refused the connection.
    Refused,
    /// This machine has no route to the destination.
    NoRoute,
    /// The remote host did not answer.
    Unreachable,
    /// The program closed the connection during the dial.
    Gone,
    /// The proxy failed to connect.
    Proxy,
}

impl Refusal {
    /// Returns the verdict that the program receives.
    ///
    /// A policy refusal becomes "connection refused", because all programs understand that error.
    pub(super) fn verdict(self) -> Verdict {
        match self {
            Self::NoRoute => Verdict::NetworkUnreachable,
            Self::Unreachable | Self::Unresolved | Self::UnknownName => Verdict::HostUnreachable,
            _ => Verdict::Refused,
        }
    }

    /// Returns whether a policy or a limit caused the refusal.
    ///
    /// The program sees network failures in its own error codes.
    pub(super) fn is_decided(self) -> bool {
        matches!(
            self,
            Self::Denied
                | Self::Unlisted
                | Self::OperatorDenied
                | Self::OperatorUnlisted
                | Self::NotPublic
                | Self::OwnMachine
                | Self::Connections
                | Self::Bytes
                | Self::Proxy
        )
    }

    /// Returns the identifier of the reason.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Denied => "denied",
            Self::Unlisted => "unlisted",
            Self::OperatorDenied => "operator_denied",
            Self::OperatorUnlisted => "operator_unlisted",
            Self::NotPublic => "not_public",
            Self::OwnMachine => "own_machine",
            Self::UnknownName => "unknown_name",
            Self::NotLeaving => "not_leaving",
            Self::Connections => "limit_connections",
            Self::Bytes => "limit_bytes",
            Self::Unresolved => "unresolved",
            Self::Refused => "refused",
            Self::NoRoute => "no_route",
            Self::Unreachable => "unreachable",
            Self::Gone => "gone",
            Self::Proxy => "proxy",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Policies that must all permit a connection.
#[derive(Debug, Clone)]
pub(crate) struct Policies {
    /// Operator policy; only this one can permit non-public addresses.
    pub(crate) operator: Arc<NetworkPolicy>,
    /// Policy of the box.
    pub(crate) own: Arc<NetworkPolicy>,
}

impl Policies {
    /// Evaluates both policies, the operator policy first.
    fn check(&self, verdict: impl Fn(&NetworkPolicy) -> NetworkVerdict) -> Result<(), Refusal> {
        match verdict(&self.operator) {
            NetworkVerdict::Denied => return Err(Refusal::OperatorDenied),
            NetworkVerdict::Unlisted => return Err(Refusal::OperatorUnlisted),
            NetworkVerdict::Listed | NetworkVerdict::Open => {}
        }
        match verdict(&self.own) {
            NetworkVerdict::Denied => Err(Refusal::Denied),
            NetworkVerdict::Unlisted => Err(Refusal::Unlisted),
            NetworkVerdict::Listed | NetworkVerdict::Open => Ok(()),
        }
    }

    /// Checks whether the box may look up a name.
    ///
    /// At least one port of the name must be permitted.
    pub(crate) fn check_lookup(&self, name: &HostName) -> Result<(), Refusal> {
        self.check(|policy| policy.verdict_of_name(name))
    }

    /// Checks a host before its name is resolved.
    pub(crate) fn check_dial(&self, host: &Host, port: u16) -> Result<(), Refusal> {
        self.check(|policy| policy.verdict(host, port))?;
        match host {
            Host::Address(address) => self.check_public(*address, port),
            Host::Name(_) => Ok(()),
        }
    }

    /// Checks an address that a permitted name resolved to.
    pub(crate) fn check_address(&self, address: IpAddr, port: u16) -> Result<(), Refusal> {
        self.check(|policy| match policy.verdict_of_address(address, port) {
            NetworkVerdict::Denied => NetworkVerdict::Denied,
            // The policy lists the name, so the address needs no rule.
            _ => NetworkVerdict::Open,
        })?;
        self.check_public(address, port)
    }

    /// Returns whether the operator policy lists the address explicitly.
    pub(crate) fn lists(&self, address: IpAddr, port: u16) -> bool {
        self.operator.verdict_of_address(address, port) == NetworkVerdict::Listed
    }

    fn check_public(&self, address: IpAddr, port: u16) -> Result<(), Refusal> {
        if is_public(address) || self.lists(address, port) {
            Ok(())
        } else {
            Err(Refusal::NotPublic)
        }
    }
}

/// Returns whether an address is public.
///
/// Loopback, private, link-local, multicast, cloud metadata, documentation and reserved addresses
/// are not.
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let reserved = matches!(
        address.octets(),
        [0 | 10 | 127 | 224..=255, ..]
            | [100, 64..=127, ..]
            | [169, 254, ..]
            | [172, 16..=31, ..]
            | [192, 168, ..]
            | [192, 0, 0 | 2, _]
            | [192, 88, 99, _]
            | [198, 18 | 19, ..]
            | [198, 51, 100, _]
            | [203, 0, 113, _]
    );
    // The only cloud metadata address in public address space (Azure).
    !reserved && address != Ipv4Addr::new(168, 63, 129, 16)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let bits = address.segments();
    let [.., high, low] = bits;
    let [a, b] = high.to_be_bytes();
    let [c, d] = low.to_be_bytes();
    match bits {
        // For translated IPv4 addresses, the embedded address decides.
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => is_public_v4(Ipv4Addr::new(a, b, c, d)),
        [0x2002, high, low, ..] => {
            let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
            is_public_v4(Ipv4Addr::new(a, b, c, d))
        }
        // Tunnels, benchmarks, identifiers and documentation.
        [0x2001, second, ..] if second < 0x200 || second == 0xdb8 => false,
        [0x3fff, second, ..] if second < 0x1000 => false,
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_public_addresses_are_public() {
        for public in [
            "1.1.1.1",
            "8.8.8.8",
            "93.184.216.34",
            "172.15.0.1",
            "172.32.0.1",
            "100.63.0.1",
            "2606:4700::1",
            "64:ff9b::808:808",
        ] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        for other in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "127.9.9.9",
            "168.63.129.16",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.9.9",
            "198.51.100.1",
            "203.0.113.9",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:a00:1::",
            "3fff::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!is_public(other.parse().unwrap()), "{other}");
        }
    }

    fn policy(json: &str) -> NetworkPolicy {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn only_an_address_rule_of_the_operator_permits_non_public_addresses() {
        let (open, greedy) = (
            policy("{}"),
            policy(r#"{"allow":["*","10.0.0.0/8","ok.com"]}"#),
        );
        let private = "10.1.2.3".parse().unwrap();
        let of = |operator: &NetworkPolicy, own: &NetworkPolicy| Policies {
            operator: Arc::new(operator.clone()),
            own: Arc::new(own.clone()),
        };
        assert_eq!(
            of(&open, &greedy).check_address(private, 1),
            Err(Refusal::NotPublic)
        );
        assert_eq!(
            of(&open, &greedy).check_dial(&Host::address(private), 1),
            Err(Refusal::NotPublic)
        );
        assert_eq!(of(&greedy, &open).check_address(private, 1), Ok(()));
        let named = policy(r#"{"allow":["ok.com","*"]}"#);
        assert_eq!(
            of(&named, &open).check_address(private, 1),
            Err(Refusal::NotPublic)
        );
        let narrow = policy(r#"{"deny":["10.1.2.0/24"]}"#);
        assert_eq!(
            of(&greedy, &narrow).check_address(private, 1),
            Err(Refusal::Denied)
        );
    }
}
