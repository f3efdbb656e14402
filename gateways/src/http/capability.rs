//! Capabilities: signatures that give access to one part of one box, without a token.
//!
//! The path segment of a box contains one, as in `ID~SIGNATURE`, for clients that cannot send a header. Clients that
//! can send it in the header of their protocol. A signature contains its expiry and scope, and a MAC over these and the
//! box's unique id. It is therefore valid until the box is deleted, and not for a later box of the same name.

use std::fmt;
use std::num::NonZeroU16;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use box_protocol::{BoxInfo, UnixMs};
use hmac::{Hmac, Mac as _};
use percent_encoding::percent_decode_str;
use sha2::Sha256;

/// The length of a key: one block of the hash.
pub const KEY_BYTES: usize = 64;

/// The length of the truncated MAC: with the claim it fills 44 base64 characters exactly.
const MAC_BYTES: usize = 22;

/// The length of the claim: expiry, scope number and port.
const CLAIM_BYTES: usize = 8 + 1 + 2;

/// The length of a signature in base64.
const ENCODED_CHARS: usize = (CLAIM_BYTES + MAC_BYTES) / 3 * 4;

/// What a signature gives access to; each kind of access has its own number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// One port, over HTTP.
    Port(NonZeroU16),
    /// All ports, over HTTP.
    Ports,
    /// The commands and files of the box, in OpenSandbox's protocol.
    Execd,
    /// The network policy of the box, in OpenSandbox's protocol.
    Egress,
    /// The commands and files of the box, in the protocol of AIO.
    Aio,
    /// The commands and files of the box, in E2B's protocol.
    E2b,
    /// The download of one file: its path.
    Download(&'a str),
    /// The upload of one file: its path.
    Upload(&'a str),
}

impl<'a> Scope<'a> {
    fn bytes(self) -> [u8; 3] {
        let (number, port) = match self {
            Self::Port(port) => (1, port.get()),
            Self::Execd => (2, 0),
            Self::Egress => (3, 0),
            Self::Aio => (5, 0),
            Self::E2b => (6, 0),
            Self::Download(_) => (8, 0),
            Self::Upload(_) => (9, 0),
            Self::Ports => (10, 0),
        };
        let [high, low] = port.to_be_bytes();
        [number, high, low]
    }

    /// Returns the file that the MAC covers.
    fn path(self) -> Option<&'a str> {
        match self {
            Self::Download(path) | Self::Upload(path) => Some(path),
            _ => None,
        }
    }
}

/// A box as a path segment names it.
#[derive(Debug, PartialEq, Eq)]
pub struct BoxSegment {
    /// The id of the box.
    pub id: String,
    /// The text after the id, if it has the form of a signature.
    pub signature: Option<Signature>,
}

impl BoxSegment {
    /// Parses a segment; returns `None` if it is not UTF-8.
    pub fn read(segment: &str) -> Option<Self> {
        let text = percent_decode_str(segment).decode_utf8().ok()?;
        if let Some((id, encoded)) = text.rsplit_once('~')
            && let Some(signature) = Signature::read(encoded)
        {
            let (id, signature) = (id.to_owned(), Some(signature));
            return Some(Self { id, signature });
        }
        let id = text.into_owned();
        Some(Self {
            id,
            signature: None,
        })
    }
}

/// A signature that is not verified yet.
#[derive(PartialEq, Eq)]
pub struct Signature([u8; CLAIM_BYTES + MAC_BYTES]);

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Signature(…)")
    }
}

impl Signature {
    /// Parses the text of a header; returns `None` if it has not the form of a signature.
    pub fn read(encoded: &str) -> Option<Self> {
        if encoded.len() != ENCODED_CHARS {
            return None;
        }
        let bytes = URL_SAFE_NO_PAD.decode(encoded).ok()?;
        bytes.try_into().ok().map(Self)
    }
}

/// The key that signs and verifies URLs.
#[derive(Clone)]
pub struct SigningKey([u8; KEY_BYTES]);

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningKey(…)")
    }
}

impl SigningKey {
    /// Creates a key from random bytes.
    pub fn new(bytes: [u8; KEY_BYTES]) -> Self {
        Self(bytes)
    }

    /// Creates a signature for a box, valid until the expiry, if any.
    pub fn sign(&self, to: &BoxInfo, scope: Scope<'_>, until: Option<UnixMs>) -> String {
        let claim = claim(scope, until.map_or(0, |until| until.0));
        let mac = self.mac(to, &claim, scope).finalize().into_bytes();
        let mut bytes = claim.to_vec();
        bytes.extend(&mac[..MAC_BYTES]);
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// Returns whether a signature gives this access to a box now.
    pub fn permits(
        &self,
        signature: &Signature,
        of: &BoxInfo,
        scope: Scope<'_>,
        now: UnixMs,
    ) -> bool {
        let (claim_bytes, mac) = signature.0.split_at(CLAIM_BYTES);
        let mut until = [0; 8];
        until.copy_from_slice(&claim_bytes[..8]);
        let until = u64::from_be_bytes(until);
        let is_unexpired = until == 0 || now.0 < until;
        // The comparison takes constant time.
        let is_authentic = self.mac(of, claim_bytes, scope);
        let is_authentic = is_authentic.verify_truncated_left(mac).is_ok();
        // A runtime that gives boxes no unique id would make them all the same.
        let is_named = !of.unique_id.is_empty();
        is_authentic && is_unexpired && is_named && claim_bytes[8..] == scope.bytes()
    }

    fn mac(&self, of: &BoxInfo, claim: &[u8], scope: Scope<'_>) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new((&self.0).into());
        mac.update(b"boxd url 2");
        mac.update(claim);
        mac.update(of.unique_id.as_bytes());
        if let Some(path) = scope.path() {
            // No id contains NUL, so the id ends here.
            mac.update(b"\0");
            mac.update(path.as_bytes());
        }
        mac
    }
}

fn claim(scope: Scope<'_>, until: u64) -> [u8; CLAIM_BYTES] {
    let mut claim = [0; CLAIM_BYTES];
    claim[..8].copy_from_slice(&until.to_be_bytes());
    claim[8..].copy_from_slice(&scope.bytes());
    claim
}

#[cfg(test)]
mod tests {
    use super::*;

    fn box_info(id: &str) -> BoxInfo {
        serde_json::from_value(serde_json::json!({
            "box_id": "s", "backend_name": "native", "backend_id": "b", "unique_id": id, "image": "i", "network": "off",
            "host_path": null, "host_path_mode": "none", "mount_path": "/workspace", "cpus": 1.0, "memory_mb": 64,
            "pids_limit": 32, "read_only_rootfs": true, "persistent": false, "workspace_quota_mb": 0, "disk_mb": 0, "volumes": [],
            "created_at": 1000, "last_used_at": 1000, "state": "running",
        }))
        .unwrap()
    }

    fn port(number: u16) -> Scope<'static> {
        Scope::Port(NonZeroU16::new(number).unwrap())
    }

    fn signature(encoded: &str) -> Signature {
        let named = BoxSegment::read(&format!("b~{encoded}")).unwrap();
        assert_eq!(named.id, "b");
        named.signature.unwrap()
    }

    #[test]
    fn a_signature_permits_one_port_of_one_box_until_it_expires() {
        let key = SigningKey([7; KEY_BYTES]);
        let (ours, now) = (box_info("b"), UnixMs(5000));
        let encoded = key.sign(&ours, port(80), Some(UnixMs(6000)));
        assert_eq!(encoded.len(), ENCODED_CHARS);
        let permits = |key: &SigningKey, to: &BoxInfo, scope, now| {
            key.permits(&signature(&encoded), to, scope, now)
        };
        assert!(permits(&key, &ours, port(80), now));
        assert!(permits(&key, &ours, port(80), UnixMs(5999)));
        assert!(
            !permits(&key, &ours, port(80), UnixMs(6000)),
            "its time is over"
        );
        assert!(!permits(&key, &ours, port(81), now), "another port");
        assert!(!permits(&key, &box_info("c"), port(80), now), "another box");
        let unnamed = box_info("");
        let of_unnamed = signature(&key.sign(&unnamed, port(80), None));
        assert!(!key.permits(&of_unnamed, &unnamed, port(80), now));
        assert!(
            !permits(&SigningKey([8; KEY_BYTES]), &ours, port(80), now),
            "another server"
        );
        assert_eq!(format!("{key:?}"), "SigningKey(…)");
        let unlimited = key.sign(&ours, port(80), None);
        assert!(key.permits(&signature(&unlimited), &ours, port(80), UnixMs(u64::MAX)));
    }

    #[test]
    fn a_signature_permits_one_scope_only() {
        let key = SigningKey([7; KEY_BYTES]);
        let ours = box_info("b");
        let scopes = [
            port(80),
            Scope::Ports,
            Scope::Execd,
            Scope::Egress,
            Scope::Aio,
            Scope::E2b,
            Scope::Download("/a"),
            Scope::Download("/b"),
            Scope::Upload("/a"),
        ];
        for (at, scope) in scopes.into_iter().enumerate() {
            let signed = signature(&key.sign(&ours, scope, None));
            for (other_at, other) in scopes.into_iter().enumerate() {
                let permits = key.permits(&signed, &ours, other, UnixMs(5000));
                assert_eq!(permits, at == other_at, "{scope:?} {other:?}");
            }
        }
    }

    #[test]
    fn a_changed_signature_is_invalid() {
        let key = SigningKey([7; KEY_BYTES]);
        let ours = box_info("b");
        let encoded = key.sign(&ours, port(80), Some(UnixMs(6000)));
        for place in 0..encoded.len() {
            for other in ['A', 'B', '_'] {
                let mut changed: Vec<char> = encoded.chars().collect();
                if changed[place] == other {
                    continue;
                }
                changed[place] = other;
                let changed: String = changed.into_iter().collect();
                assert!(
                    !key.permits(&signature(&changed), &ours, port(80), UnixMs(5000)),
                    "{place}"
                );
            }
        }
    }

    #[test]
    fn a_segment_is_an_id_with_an_optional_signature() {
        let encoded = "A".repeat(ENCODED_CHARS);
        for (segment, id, has_cap) in [
            ("b", "b", false),
            ("b~x", "b~x", false),
            ("a%20b", "a b", false),
            (&*format!("b~{encoded}"), "b", true),
            (&format!("b%7E{encoded}"), "b", true),
            (&format!("b~c~{encoded}"), "b~c", true),
            (&format!("b~{encoded}A"), &format!("b~{encoded}A"), false),
        ] {
            let named = BoxSegment::read(segment).unwrap();
            assert_eq!(
                (named.id.as_str(), named.signature.is_some()),
                (id, has_cap),
                "{segment}"
            );
        }
        assert_eq!(BoxSegment::read("%ff"), None);
    }
}
