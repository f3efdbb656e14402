//! Signed URLs: the path segment of a box contains a credential, as in `ID~SIGNATURE`.
//!
//! They serve clients that cannot send a header. A signature contains its expiry and scope, and a MAC over these, the
//! box's unique id and its creation time. It is therefore not valid for a later box of the same name. The key is stored
//! in the state directory, so that addresses remain valid after a restart.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::num::NonZeroU16;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use box_protocol::{BoxInfo, UnixMs};
use hmac::{Hmac, Mac as _};
use percent_encoding::percent_decode_str;
use sha2::Sha256;

use crate::serve::trusted_file::read_secret;

/// The name of the key file in a state directory.
const FILE: &str = "url.key";

/// The length of the key: one block of the hash.
const KEY_BYTES: usize = 64;

/// The length of the truncated MAC: with the claim it fills 44 base64 characters exactly.
const MAC_BYTES: usize = 22;

/// The length of the claim: expiry, scope number and port.
const CLAIM_BYTES: usize = 8 + 1 + 2;

/// The length of a signature in base64.
const ENCODED_CHARS: usize = (CLAIM_BYTES + MAC_BYTES) / 3 * 4;

/// What a signature gives access to; each kind of access has its own number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::serve) enum Scope {
    /// One port, over HTTP.
    Port(NonZeroU16),
}

impl Scope {
    fn bytes(self) -> [u8; 3] {
        let Self::Port(port) = self;
        let [high, low] = port.get().to_be_bytes();
        [1, high, low]
    }
}

/// A box as a path segment names it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BoxSegment {
    pub(super) id: String,
    /// The text after the id, if it has the form of a signature.
    pub(super) signature: Option<Signature>,
}

impl BoxSegment {
    /// Parses a segment; returns `None` if it is not UTF-8.
    pub(super) fn read(segment: &str) -> Option<Self> {
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
pub(super) struct Signature([u8; CLAIM_BYTES + MAC_BYTES]);

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Signature(…)")
    }
}

impl Signature {
    fn read(encoded: &str) -> Option<Self> {
        if encoded.len() != ENCODED_CHARS {
            return None;
        }
        let bytes = URL_SAFE_NO_PAD.decode(encoded).ok()?;
        bytes.try_into().ok().map(Self)
    }
}

/// The key that signs and verifies URLs.
#[derive(Clone)]
pub(crate) struct SigningKey([u8; KEY_BYTES]);

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningKey(…)")
    }
}

impl SigningKey {
    /// Reads the key of a state directory, or creates it.
    pub(in crate::serve) fn load_or_create(state: &Path) -> Result<Self> {
        let path = state.join(FILE);
        let display = path.display();
        let bytes = if path.try_exists()? {
            read_secret(&path).map_err(|error| {
                anyhow!(
                    "{display}: {error:#}; or remove it, which invalidates all shared addresses"
                )
            })?
        } else {
            create_key(&path).with_context(|| format!("cannot create {display}"))?
        };
        let key = bytes.try_into().ok();
        let key = key.with_context(|| {
            format!("{display}: expected {KEY_BYTES} bytes; remove it, which invalidates all shared addresses")
        })?;
        Ok(Self(key))
    }

    /// Creates a key that is not stored, for a port that shares no addresses.
    pub(crate) fn ephemeral() -> Result<Self> {
        random().map(Self)
    }

    /// Creates a signature for a box, valid until the expiry, if any.
    pub(in crate::serve) fn sign(
        &self,
        to: &BoxInfo,
        scope: Scope,
        until: Option<UnixMs>,
    ) -> String {
        let claim = claim(scope, until.map_or(0, |until| until.0));
        let mac = self.mac(to, &claim).finalize().into_bytes();
        let mut bytes = claim.to_vec();
        bytes.extend(&mac[..MAC_BYTES]);
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// Returns whether a signature gives this access to a box now.
    pub(super) fn permits(
        &self,
        signature: &Signature,
        of: &BoxInfo,
        scope: Scope,
        now: UnixMs,
    ) -> bool {
        let (claim_bytes, mac) = signature.0.split_at(CLAIM_BYTES);
        let mut until = [0; 8];
        until.copy_from_slice(&claim_bytes[..8]);
        let until = u64::from_be_bytes(until);
        let is_unexpired = until == 0 || now.0 < until;
        // The comparison takes constant time.
        let is_authentic = self.mac(of, claim_bytes).verify_truncated_left(mac).is_ok();
        is_authentic && is_unexpired && claim_bytes[8..] == scope.bytes()
    }

    fn mac(&self, of: &BoxInfo, claim: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new((&self.0).into());
        mac.update(b"boxd url 1");
        mac.update(claim);
        mac.update(&of.created_at.0.to_be_bytes());
        // Last, because it is the only field of variable length.
        mac.update(of.backend_id.as_bytes());
        mac
    }
}

fn claim(scope: Scope, until: u64) -> [u8; CLAIM_BYTES] {
    let mut claim = [0; CLAIM_BYTES];
    claim[..8].copy_from_slice(&until.to_be_bytes());
    claim[8..].copy_from_slice(&scope.bytes());
    claim
}

/// Returns random bytes for a new key.
fn random() -> Result<[u8; KEY_BYTES]> {
    let mut key = [0; KEY_BYTES];
    let mut filled = 0;
    while filled < KEY_BYTES {
        filled +=
            rustix::rand::getrandom(&mut key[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(key)
}

/// Creates the key file atomically: the file is complete or does not exist.
fn create_key(path: &Path) -> Result<Vec<u8>> {
    let key = random()?.to_vec();
    let part = path.with_extension("part");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&part)?;
    file.write_all(&key)?;
    file.sync_all()?;
    fs::rename(part, path)?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    fn box_info(id: &str, created_at: u64) -> BoxInfo {
        serde_json::from_value(serde_json::json!({
            "box_id": "s", "backend_name": "native", "backend_id": id, "image": "i", "network": "off",
            "host_path": null, "host_path_mode": "none", "mount_path": "/workspace", "cpus": 1.0, "memory_mb": 64,
            "pids_limit": 32, "read_only_rootfs": true, "persistent": false, "workspace_quota_mb": 0, "disk_mb": 0, "volumes": [],
            "created_at": created_at, "last_used_at": created_at,
            "state": "running",
        }))
        .unwrap()
    }

    fn port(number: u16) -> Scope {
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
        let (ours, now) = (box_info("b", 1000), UnixMs(5000));
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
        assert!(
            !permits(&key, &box_info("c", 1000), port(80), now),
            "another box"
        );
        assert!(
            !permits(&key, &box_info("b", 1001), port(80), now),
            "a later one of that name"
        );
        assert!(
            !permits(&SigningKey([8; KEY_BYTES]), &ours, port(80), now),
            "another server"
        );
        let unlimited = key.sign(&ours, port(80), None);
        assert!(key.permits(&signature(&unlimited), &ours, port(80), UnixMs(u64::MAX)));
    }

    #[test]
    fn a_changed_signature_is_invalid() {
        let key = SigningKey([7; KEY_BYTES]);
        let ours = box_info("b", 1000);
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

    #[test]
    fn a_key_is_created_once_and_private() {
        let state = tempfile::tempdir().unwrap();
        let key = SigningKey::load_or_create(state.path()).unwrap();
        assert_eq!(key.0, SigningKey::load_or_create(state.path()).unwrap().0);
        assert_ne!(key.0, [0; KEY_BYTES]);
        let path = state.path().join(FILE);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(format!("{key:?}"), "SigningKey(…)");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = format!(
            "{:#}",
            SigningKey::load_or_create(state.path()).unwrap_err()
        );
        assert!(error.contains("chmod 600"), "{error}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "short").unwrap();
        assert!(SigningKey::load_or_create(state.path()).is_err());
    }
}
