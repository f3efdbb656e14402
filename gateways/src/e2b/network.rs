//! Network rules of requests.
//!
//! In this protocol `allowOut` wins over `denyOut`; in a policy `deny` wins. Lists that mean the same in both are
//! translated, others are refused.

use std::net::IpAddr;

use box_protocol::{Invalid, NetworkDefault, NetworkPolicy, NetworkRule};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use super::error::ApiError;

/// The network of a request.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct NetworkRequest {
    #[serde(deserialize_with = "or_null")]
    pub(super) allow_out: Vec<String>,
    #[serde(deserialize_with = "or_null")]
    pub(super) deny_out: Vec<String>,
    pub(super) allow_public_traffic: Option<bool>,
    rules: Option<Value>,
    egress_proxy: Option<Value>,
    mask_request_host: Option<Value>,
    https_ports: Option<Value>,
    dns_servers: Option<Value>,
}

/// Reads a list; `null` is an empty one.
fn or_null<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// A member counts as absent if it is empty.
fn is_set(value: Option<&Value>) -> bool {
    value.is_some_and(|value| match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(members) => !members.is_empty(),
        Value::String(text) => !text.is_empty(),
        Value::Bool(_) | Value::Number(_) => true,
    })
}

impl NetworkRequest {
    /// Returns the policy, with access to public addresses unless `internet` is `false`.
    pub(super) fn policy(&self, internet: bool) -> Result<NetworkPolicy, ApiError> {
        for (name, value) in [
            ("rules", &self.rules),
            ("egressProxy", &self.egress_proxy),
            ("maskRequestHost", &self.mask_request_host),
            ("httpsPorts", &self.https_ports),
            ("dnsServers", &self.dns_servers),
        ] {
            if is_set(value.as_ref()) {
                let message = format!("network.{name}: not supported by this server; omit it");
                return Err(ApiError::unsupported(message));
            }
        }
        let mut denies_all = !internet;
        let mut deny = Vec::new();
        let mut denied = Vec::new();
        for text in &self.deny_out {
            let range = Range::parse(text).ok_or_else(|| {
                Invalid::new("denyOut", format!("{text:?} must be an address or a range"))
            })?;
            if range.is_all() {
                denies_all = true;
                continue;
            }
            deny.push(rule("denyOut", text)?);
            denied.push((text, range));
        }
        let mut allow = Vec::new();
        for text in &self.allow_out {
            let range = Range::parse(text);
            let inside = denied
                .iter()
                .find(|(_, denied)| range.is_some_and(|range| range.overlaps(denied)));
            if let Some((denied, _)) = inside {
                let problem =
                    format!("{text} overlaps denyOut {denied}; use ranges that do not overlap");
                return Err(Invalid::new("allowOut", problem).into());
            }
            if range.is_some_and(Range::is_all) {
                denies_all = false;
                continue;
            }
            allow.push(rule("allowOut", text)?);
        }
        Ok(NetworkPolicy {
            allow: (!allow.is_empty() || denies_all).then_some(allow),
            deny,
            default: Some(if denies_all {
                NetworkDefault::Deny
            } else {
                NetworkDefault::Allow
            }),
        })
    }

    /// Returns the rules for the record of the box.
    pub(super) fn kept(&self, internet: bool) -> Map<String, Value> {
        let mut kept = Map::new();
        for (name, list) in [("allowOut", &self.allow_out), ("denyOut", &self.deny_out)] {
            if !list.is_empty() {
                kept.insert(name.to_owned(), json!(list));
            }
        }
        if !internet {
            kept.insert("allowInternetAccess".to_owned(), json!(false));
        }
        kept
    }
}

fn rule(field: &'static str, text: &str) -> Result<NetworkRule, Invalid> {
    let parsed = text.parse::<NetworkRule>();
    parsed.map_err(|invalid| Invalid::new(field, format!("{text:?} {}", invalid.rule())))
}

/// Addresses with the same first bits.
#[derive(Debug, Clone, Copy)]
struct Range {
    start: u128,
    bits: u32,
    is_v4: bool,
}

impl Range {
    fn parse(text: &str) -> Option<Self> {
        let (address, bits) = text.split_once('/').unwrap_or((text, ""));
        let address: IpAddr = address.parse().ok()?;
        let (start, width, is_v4) = match address {
            IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, 32, true),
            IpAddr::V6(address) => (address.to_bits(), 128, false),
        };
        let bits = if bits.is_empty() {
            width
        } else {
            bits.parse().ok()?
        };
        (bits <= width).then_some(Self { start, bits, is_v4 })
    }

    fn is_all(self) -> bool {
        self.bits == 0
    }

    fn overlaps(self, other: &Self) -> bool {
        let common = self.bits.min(other.bits);
        let differs = self.start ^ other.start;
        self.is_v4 == other.is_v4 && (common == 0 || differs.leading_zeros() >= common)
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use box_protocol::{Host, NetworkVerdict};

    use super::*;

    fn request(body: Value) -> NetworkRequest {
        serde_json::from_value(body).unwrap()
    }

    fn verdict(policy: &NetworkPolicy, host: &str) -> NetworkVerdict {
        policy.verdict(&host.parse::<Host>().unwrap(), 443)
    }

    #[test]
    fn listed_hosts_are_allowed_although_all_are_denied() {
        let only = request(
            json!({"allowOut": ["pypi.org", "*.b.example", "1.1.1.1"], "denyOut": ["0.0.0.0/0"]}),
        );
        let policy = only.policy(true).unwrap();
        for host in ["pypi.org", "a.b.example", "1.1.1.1"] {
            assert_eq!(verdict(&policy, host), NetworkVerdict::Listed, "{host}");
        }
        assert_eq!(verdict(&policy, "8.8.8.8"), NetworkVerdict::Unlisted);
        let none = NetworkRequest::default().policy(false).unwrap();
        assert_eq!(verdict(&none, "pypi.org"), NetworkVerdict::Unlisted);
        let open = NetworkRequest::default().policy(true).unwrap();
        assert_eq!(verdict(&open, "pypi.org"), NetworkVerdict::Open);
        let some = request(json!({"denyOut": ["8.8.8.0/24"]}))
            .policy(true)
            .unwrap();
        assert_eq!(verdict(&some, "8.8.8.8"), NetworkVerdict::Denied);
        assert_eq!(verdict(&some, "1.1.1.1"), NetworkVerdict::Open);
    }

    #[test]
    fn lists_that_would_mean_something_else_are_refused() {
        for (body, status) in [
            (
                json!({"allowOut": ["8.8.8.8"], "denyOut": ["8.8.8.0/24"]}),
                400,
            ),
            (
                json!({"allowOut": ["8.0.0.0/8"], "denyOut": ["8.8.8.8"]}),
                400,
            ),
            (json!({"denyOut": ["evil.example"]}), 400),
            (json!({"allowOut": ["bad host"]}), 400),
            (json!({"rules": {"a": []}}), 501),
            (json!({"egressProxy": {"address": "x"}}), 501),
        ] {
            let error = request(body.clone()).policy(true).unwrap_err();
            assert_eq!(
                error.status(),
                StatusCode::from_u16(status).unwrap(),
                "{body}"
            );
        }
        assert!(
            request(json!({"rules": {}, "egressProxy": null, "allowOut": null}))
                .policy(true)
                .is_ok()
        );
    }
}
