//! Tests of the path from a DNS query to the dialled address, without sockets.
//!
//! DNS parsing, name table, policies and lookups are the production code.

use std::net::IpAddr;
use std::sync::Arc;

use box_protocol::{Host, HostName, NetworkPolicy};

use super::config::EgressConfig;
use super::dial::{Dialer, LookupPermits};
use super::policy::{Policies, Refusal};
use super::{FakeIps, dns};

fn policy(json: &str) -> Arc<NetworkPolicy> {
    Arc::new(serde_json::from_str(json).unwrap())
}

fn open() -> Arc<NetworkPolicy> {
    policy("{}")
}

/// Creates a dialer with these static names.
fn dialer(operator: &NetworkPolicy, hosts: &[(&str, &[&str])]) -> Dialer {
    let mut config = EgressConfig {
        policy: operator.clone(),
        ..EgressConfig::default()
    };
    for (name, addresses) in hosts {
        let addresses = addresses.iter().map(|address| address.parse().unwrap());
        config
            .hosts
            .insert(HostName::new(name).unwrap(), addresses.collect());
    }
    Dialer::new(config)
}

async fn dialled(dialer: &Dialer, host: &str, port: u16) -> Result<Vec<IpAddr>, Refusal> {
    let host: Host = host.parse().unwrap();
    dialer
        .choose(
            &LookupPermits::new(),
            &dialer.policies(&open()),
            &host,
            port,
        )
        .await
}

fn addresses(list: &[&str]) -> Vec<IpAddr> {
    list.iter()
        .map(|address| address.parse().unwrap())
        .collect()
}

#[tokio::test]
async fn the_addresses_of_a_name_are_checked_as_well_as_the_name() {
    let hosts: &[(&str, &[&str])] = &[
        ("good.test", &["93.184.216.34", "2606:2800::1"]),
        (
            "mixed.test",
            &[
                "127.0.0.1",
                "10.0.0.1",
                "93.184.216.34",
                "::ffff:192.168.0.1",
                "fd00::1",
                "169.254.169.254",
            ],
        ),
        (
            "evil.test",
            &[
                "127.0.0.1",
                "::1",
                "::ffff:127.0.0.1",
                "fe80::1",
                "64:ff9b::7f00:1",
            ],
        ),
        ("inner.test", &["10.1.2.3"]),
        ("empty.test", &[]),
    ];
    let of = dialer(&open(), hosts);
    assert_eq!(
        dialled(&of, "good.test", 443).await,
        Ok(addresses(&["93.184.216.34", "2606:2800::1"]))
    );
    assert_eq!(
        dialled(&of, "mixed.test", 443).await,
        Ok(addresses(&["93.184.216.34"]))
    );
    assert_eq!(
        dialled(&of, "evil.test", 443).await,
        Err(Refusal::NotPublic)
    );
    assert_eq!(
        dialled(&of, "empty.test", 443).await,
        Err(Refusal::Unresolved)
    );
    let listed = policy(r#"{"allow":["inner.test","10.1.2.3:443"]}"#);
    let of = dialer(&listed, hosts);
    assert_eq!(
        dialled(&of, "inner.test", 443).await,
        Ok(addresses(&["10.1.2.3"]))
    );
    assert_eq!(
        dialled(&of, "inner.test", 22).await,
        Err(Refusal::NotPublic),
        "another port"
    );
    assert_eq!(
        dialled(&of, "good.test", 443).await,
        Err(Refusal::OperatorUnlisted)
    );
    assert_eq!(
        dialled(&of, "10.1.2.3", 443).await,
        Ok(addresses(&["10.1.2.3"]))
    );
    let of = dialer(&policy(r#"{"allow":[]}"#), hosts);
    assert_eq!(
        dialled(&of, "good.test", 443).await,
        Err(Refusal::OperatorUnlisted),
        "an empty list permits no destination"
    );
    let of = dialer(&policy(r#"{"deny":["93.184.0.0/16"]}"#), hosts);
    assert_eq!(
        dialled(&of, "good.test", 443).await,
        Ok(addresses(&["2606:2800::1"])),
        "an address that is denied"
    );
}

#[tokio::test]
async fn a_name_with_a_new_address_is_checked_again() {
    let before = dialer(&open(), &[("turn.test", &["93.184.216.34"])]);
    assert!(dialled(&before, "turn.test", 80).await.is_ok());
    let after = dialer(&open(), &[("turn.test", &["127.0.0.1"])]);
    assert_eq!(
        dialled(&after, "turn.test", 80).await,
        Err(Refusal::NotPublic)
    );
}

/// Deterministic pseudo-random numbers.
struct Rng(u64);

impl Rng {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % end as u64).unwrap()
    }

    /// Generates a hostile name from parts of allowed names and invalid bytes.
    fn labels(&mut self) -> Vec<Vec<u8>> {
        const PARTS: [&[u8]; 16] = [
            b"ok",
            b"com",
            b"OK",
            b"Com",
            b"evil",
            b"a",
            b"sub",
            b"xn--ok-1",
            b"ok.com",
            b"ok\0",
            b"127",
            b"0x7f",
            b"1",
            b"\xff",
            b"ok-com",
            b"",
        ];
        let count = 1 + self.below(4);
        let mut labels = Vec::new();
        for _ in 0..count {
            let mut label = PARTS[self.below(PARTS.len() - 1)].to_vec();
            if self.below(8) == 0 {
                let index = self.below(label.len() + 1);
                label.insert(index, u8::try_from(self.below(256)).unwrap());
            }
            labels.push(label);
        }
        labels
    }
}

/// Evaluates the test's allow list on raw bytes, independently of the tested code.
fn expected_allowed(labels: &[Vec<u8>]) -> bool {
    let lower: Vec<Vec<u8>> = labels
        .iter()
        .map(|label| label.to_ascii_lowercase())
        .collect();
    let plain = |byte: &u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-' || *byte == b'_'
    };
    let names = lower
        .iter()
        .all(|label| !label.is_empty() && label.iter().all(plain));
    let ends = |tail: &[&[u8]]| {
        lower.len() >= tail.len()
            && lower[lower.len() - tail.len()..]
                .iter()
                .zip(tail)
                .all(|(one, other)| one == other)
    };
    // The list below allows `ok.com` itself and every name below `sub.ok.com`.
    names
        && ((lower.len() == 2 && ends(&[b"ok", b"com"]))
            || (lower.len() > 3 && ends(&[b"sub", b"ok", b"com"])))
}

#[test]
fn exactly_the_allowed_names_of_a_million_pass() {
    const NAMES: usize = 1_000_000;
    const BATCH: usize = 10_000;
    let policies = Policies {
        operator: policy(r#"{"allow":["OK.com.","*.sub.ok.com"]}"#),
        own: open(),
    };
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
    let (mut passed, mut names) = (0, FakeIps::default());
    for n in 0..NAMES {
        if n % BATCH == 0 {
            names = FakeIps::default();
        }
        let labels = rng.labels();
        let mut message = vec![0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in &labels {
            message.push(u8::try_from(label.len()).unwrap());
            message.extend(label);
        }
        message.extend([0, 0, 1, 0, 1]);
        let dns::Message::Query(question) = dns::parse(&message) else {
            panic!("{labels:?}");
        };
        let name = question
            .name
            .filter(|name| policies.check_lookup(name).is_ok());
        assert_eq!(name.is_some(), expected_allowed(&labels), "{labels:?}");
        let Some(name) = name else { continue };
        // The box's connection maps back to exactly this name, which is still allowed.
        let (v4, v6) = names.addresses_of(&name).unwrap();
        for address in [IpAddr::from(v4), IpAddr::from(v6)] {
            let host = names.host_at(address).unwrap();
            let expected: Vec<String> = labels
                .iter()
                .map(|label| String::from_utf8(label.to_ascii_lowercase()).unwrap())
                .collect();
            assert_eq!(host.to_string(), expected.join("."));
            assert_eq!(policies.check_dial(&host, 443), Ok(()));
        }
        passed += 1;
    }
    // Control: both outcomes occurred often.
    assert!((1000..NAMES / 2).contains(&passed), "{passed}");
}

#[tokio::test]
async fn slow_lookups_of_one_box_do_not_block_another() {
    let of = dialer(&open(), &[]);
    let (greedy, other) = (LookupPermits::new(), LookupPermits::new());
    // The hosts file contains this name, so the resolver sends no query.
    let name = HostName::new("localhost").unwrap();
    let taken = greedy.take_all().await;
    let waits = of.exists(&greedy, &name);
    let soon = std::time::Duration::from_millis(300);
    assert!(tokio::time::timeout(soon, waits).await.is_err());
    assert!(of.exists(&other, &name).await.is_some());
    drop(taken);
    assert!(of.exists(&greedy, &name).await.is_some());
}
