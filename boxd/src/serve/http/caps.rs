//! Capabilities: the part of a box's path that is a credential, as in `ID~CAP`.
//!
//! They serve clients that cannot send a header. A capability holds its expiry and scope, and a MAC over these, the
//! box's unique id and its creation time. It is therefore not valid for a later box of the same name. The key is kept
//! in the state directory, so that addresses remain valid after a restart.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::num::NonZeroU16;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use box_protocol::{BoxInfo, UnixMs};
use hmac::{Hmac, Mac as _};
use percent_encoding::percent_decode_str;
use sha2::Sha256;

use crate::serve::owned::read_secret;

/// The name of the key file in a state directory.
const FILE: &str = "url.key";

/// The length of the key: one block of the hash.
const KEY_BYTES: usize = 64;

/// The length of the truncated MAC: with the claim it fills 44 letters exactly.
const MAC_BYTES: usize = 22;

/// The length of the claim: expiry, scope number and port.
const CLAIM_BYTES: usize = 8 + 1 + 2;

/// The number of letters of a capability.
const LETTERS: usize = (CLAIM_BYTES + MAC_BYTES) / 3 * 4;

/// What a capability gives access to; each kind of access has its own number.
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
pub(super) struct Named {
    pub(super) id: String,
    /// The text after the id, if it has the form of a capability.
    pub(super) cap: Option<Cap>,
}

impl Named {
    /// Parses a segment; returns `None` if it is not UTF-8.
    pub(super) fn read(segment: &str) -> Option<Self> {
        let text = percent_decode_str(segment).decode_utf8().ok()?;
        if let Some((id, letters)) = text.rsplit_once('~')
            && let Some(cap) = Cap::read(letters)
        {
            let (id, cap) = (id.to_owned(), Some(cap));
            return Some(Self { id, cap });
        }
        let id = text.into_owned();
        Some(Self { id, cap: None })
    }
}

/// A capability that is not verified yet.
#[derive(PartialEq, Eq)]
pub(super) struct Cap([u8; CLAIM_BYTES + MAC_BYTES]);

impl fmt::Debug for Cap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cap(…)")
    }
}

impl Cap {
    fn read(letters: &str) -> Option<Self> {
        if letters.len() != LETTERS {
            return None;
        }
        let bytes = URL_SAFE_NO_PAD.decode(letters).ok()?;
        bytes.try_into().ok().map(Self)
    }
}

/// The key that signs and verifies capabilities.
#[derive(Clone)]
pub(crate) struct Key([u8; KEY_BYTES]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

impl Key {
    /// Reads the key of a state directory, or creates it.
    pub(in crate::serve) fn of(state: &Path) -> Result<Self> {
        let path = state.join(FILE);
        let shown = path.display();
        let bytes = if path.try_exists()? {
            read_secret(&path).with_context(|| {
                format!("{shown}, or remove it: every address that was handed out ends then")
            })?
        } else {
            make(&path).with_context(|| format!("cannot make {shown}"))?
        };
        let key = bytes.try_into().ok();
        let key = key.with_context(|| {
            format!("{shown} does not have {KEY_BYTES} bytes; remove it: every address that was handed out ends then")
        })?;
        Ok(Self(key))
    }

    /// Creates a key that is not stored, for a port that hands out no addresses.
    pub(crate) fn unkept() -> Result<Self> {
        random().map(Self)
    }

    /// Creates a capability for a box that is valid until the expiry, if any.
    pub(in crate::serve) fn grant(
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

    /// Returns whether a capability gives this access to a box now.
    pub(super) fn opens(&self, cap: &Cap, of: &BoxInfo, scope: Scope, now: UnixMs) -> bool {
        let (said, mac) = cap.0.split_at(CLAIM_BYTES);
        let mut until = [0; 8];
        until.copy_from_slice(&said[..8]);
        let until = u64::from_be_bytes(until);
        let holds = until == 0 || now.0 < until;
        // The comparison takes constant time.
        let genuine = self.mac(of, said).verify_truncated_left(mac).is_ok();
        genuine && holds && said[8..] == scope.bytes()
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
fn make(path: &Path) -> Result<Vec<u8>> {
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

    fn a_box(id: &str, created_at: u64) -> BoxInfo {
        serde_json::from_value(serde_json::json!({
            "box_id": "s", "backend_name": "native", "backend_id": id, "image": "i", "network": "off",
            "host_path": null, "host_path_mode": "none", "mount_path": "/workspace", "cpus": 1.0, "memory_mb": 64,
            "pids_limit": 32, "read_only_rootfs": true, "persistent": false, "workspace_quota_mb": 0,
            "created_at": created_at, "last_used_at": created_at,
            "state": "running",
        }))
        .unwrap()
    }

    fn port(number: u16) -> Scope {
        Scope::Port(NonZeroU16::new(number).unwrap())
    }

    fn cap(letters: &str) -> Cap {
        let named = Named::read(&format!("b~{letters}")).unwrap();
        assert_eq!(named.id, "b");
        named.cap.unwrap()
    }

    #[test]
    fn a_capability_opens_one_port_of_one_box_until_its_time() {
        let key = Key([7; KEY_BYTES]);
        let (ours, now) = (a_box("b", 1000), UnixMs(5000));
        let letters = key.grant(&ours, port(80), Some(UnixMs(6000)));
        assert_eq!(letters.len(), LETTERS);
        let opens = |key: &Key, to: &BoxInfo, scope, now| key.opens(&cap(&letters), to, scope, now);
        assert!(opens(&key, &ours, port(80), now));
        assert!(opens(&key, &ours, port(80), UnixMs(5999)));
        assert!(
            !opens(&key, &ours, port(80), UnixMs(6000)),
            "its time is over"
        );
        assert!(!opens(&key, &ours, port(81), now), "another port");
        assert!(
            !opens(&key, &a_box("c", 1000), port(80), now),
            "another box"
        );
        assert!(
            !opens(&key, &a_box("b", 1001), port(80), now),
            "a later one of that name"
        );
        assert!(
            !opens(&Key([8; KEY_BYTES]), &ours, port(80), now),
            "another server"
        );
        let for_ever = key.grant(&ours, port(80), None);
        assert!(key.opens(&cap(&for_ever), &ours, port(80), UnixMs(u64::MAX)));
    }

    #[test]
    fn no_letter_of_a_capability_can_be_another() {
        let key = Key([7; KEY_BYTES]);
        let ours = a_box("b", 1000);
        let letters = key.grant(&ours, port(80), Some(UnixMs(6000)));
        for place in 0..letters.len() {
            for other in ['A', 'B', '_'] {
                let mut changed: Vec<char> = letters.chars().collect();
                if changed[place] == other {
                    continue;
                }
                changed[place] = other;
                let changed: String = changed.into_iter().collect();
                assert!(
                    !key.opens(&cap(&changed), &ours, port(80), UnixMs(5000)),
                    "{place}"
                );
            }
        }
    }

    #[test]
    fn a_segment_is_an_id_or_an_id_and_a_capability() {
        let letters = "A".repeat(LETTERS);
        for (segment, id, has_cap) in [
            ("b", "b", false),
            ("b~x", "b~x", false),
            ("a%20b", "a b", false),
            (&*format!("b~{letters}"), "b", true),
            (&format!("b%7E{letters}"), "b", true),
            (&format!("b~c~{letters}"), "b~c", true),
            (&format!("b~{letters}A"), &format!("b~{letters}A"), false),
        ] {
            let named = Named::read(segment).unwrap();
            assert_eq!(
                (named.id.as_str(), named.cap.is_some()),
                (id, has_cap),
                "{segment}"
            );
        }
        assert_eq!(Named::read("%ff"), None);
    }

    #[test]
    fn a_key_is_made_once_for_its_owner_only() {
        let state = tempfile::tempdir().unwrap();
        let key = Key::of(state.path()).unwrap();
        assert_eq!(key.0, Key::of(state.path()).unwrap().0);
        assert_ne!(key.0, [0; KEY_BYTES]);
        let path = state.path().join(FILE);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(format!("{key:?}"), "Key(…)");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = format!("{:#}", Key::of(state.path()).unwrap_err());
        assert!(error.contains("chmod 600"), "{error}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "short").unwrap();
        assert!(Key::of(state.path()).is_err());
    }
}
