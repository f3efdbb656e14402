//! The key of signed URLs, stored so that addresses remain valid after a restart.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use box_gateways::http::capability::{KEY_BYTES, SigningKey};

use super::trusted_file::read_secret;

/// The name of the key file in a state directory.
const FILE: &str = "url.key";

/// Reads the key of a state directory, or creates it.
pub(super) fn load_or_create(state: &Path) -> Result<SigningKey> {
    let path = state.join(FILE);
    let display = path.display();
    let bytes = if path.try_exists()? {
        read_secret(&path).map_err(|error| {
            anyhow!("{display}: {error:#}; or remove it, which invalidates all shared addresses")
        })?
    } else {
        create(&path).with_context(|| format!("cannot create {display}"))?
    };
    let key = bytes.try_into().ok();
    let key = key.with_context(|| {
        format!("{display}: expected {KEY_BYTES} bytes; remove it, which invalidates all shared addresses")
    })?;
    Ok(SigningKey::new(key))
}

/// Creates a key that is not stored, for a port that shares no addresses.
pub(crate) fn ephemeral() -> Result<SigningKey> {
    random().map(SigningKey::new)
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
fn create(path: &Path) -> Result<Vec<u8>> {
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

    #[test]
    fn a_key_is_created_once_and_private() {
        let state = tempfile::tempdir().unwrap();
        load_or_create(state.path()).unwrap();
        let path = state.path().join(FILE);
        let key = fs::read(&path).unwrap();
        load_or_create(state.path()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), key);
        assert_ne!(key, [0; KEY_BYTES]);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = format!("{:#}", load_or_create(state.path()).unwrap_err());
        assert!(error.contains("chmod 600"), "{error}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "short").unwrap();
        assert!(load_or_create(state.path()).is_err());
    }
}
