//! The passwords of registries, in one private file.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use box_image::Credentials;
use box_protocol::BoxError;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Maximum size of the file.
const FILE_BYTES: u64 = 1 << 20;

/// Version of the file.
const VERSION: u32 = 1;

/// User names and passwords by registry.
#[derive(Default, Clone, PartialEq, Eq)]
pub(super) struct Passwords(BTreeMap<String, Password>);

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Password {
    username: String,
    password: String,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    version: u32,
    registries: BTreeMap<String, Password>,
}

impl fmt::Debug for Passwords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Passwords {
    /// Reads the file; a missing one has no passwords.
    pub(super) fn read(path: &Path) -> Result<Self, BoxError> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            file => file.map_err(|error| failed("read", &error))?,
        };
        let mut text = Vec::new();
        let read = file.take(FILE_BYTES + 1).read_to_end(&mut text);
        read.map_err(|error| failed("read", &error))?;
        // Without the text of the parser, which may quote a password.
        let stored: Option<Stored> = serde_json::from_slice(&text).ok();
        let stored = stored.filter(|stored| stored.version == VERSION);
        let stored = stored.ok_or_else(|| {
            BoxError::internal(
                "registry: the stored passwords are damaged; remove the file and log in again",
            )
        })?;
        Ok(Self(stored.registries))
    }

    /// Replaces the file in one step.
    pub(super) fn write(&self, path: &Path) -> Result<(), BoxError> {
        let stored = Stored {
            version: VERSION,
            registries: self.0.clone(),
        };
        let text = serde_json::to_vec(&stored)
            .map_err(|_| BoxError::internal("registry: the passwords cannot be written"))?;
        if text.len() as u64 > FILE_BYTES {
            return Err(BoxError::capacity(format!(
                "registry: the stored passwords exceed {FILE_BYTES} bytes; log out of a registry"
            )));
        }
        replace(path, &text).map_err(|error| failed("write", &error))
    }

    pub(super) fn insert(&mut self, registry: String, username: String, password: String) {
        self.0.insert(registry, Password { username, password });
    }

    /// Removes the password of a registry; returns whether it had one.
    pub(super) fn remove(&mut self, registry: &str) -> bool {
        self.0.remove(registry).is_some()
    }

    /// Returns the passwords for a client of registries.
    pub(super) fn credentials(&self) -> HashMap<String, Credentials> {
        let one = |(registry, of): (&String, &Password)| {
            let credentials = Credentials::Basic {
                username: of.username.clone(),
                password: of.password.clone(),
            };
            (registry.clone(), credentials)
        };
        self.0.iter().map(one).collect()
    }
}

fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let parent = path.parent().unwrap_or(path);
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(parent)?;
    let draft = path.with_extension(format!("{}.new", Uuid::now_v7().simple()));
    let mut options = OpenOptions::new();
    let written = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&draft)
        .and_then(|mut file| {
            file.write_all(text)?;
            file.sync_all()?;
            std::fs::rename(&draft, path)
        });
    if written.is_err() {
        let _ = std::fs::remove_file(&draft);
    }
    written?;
    File::open(parent)?.sync_all()
}

fn failed(what: &str, error: &io::Error) -> BoxError {
    BoxError::internal(format!(
        "registry: the server cannot {what} the stored passwords: {}",
        error.kind()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn passwords_are_kept_in_a_private_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/registries.json");
        let mut passwords = Passwords::read(&path).unwrap();
        assert_eq!(passwords, Passwords::default());
        passwords.insert("ghcr.io".into(), "me".into(), "hunter2".into());
        passwords.write(&path).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let mut again = Passwords::read(&path).unwrap();
        assert_eq!(again, passwords);
        assert!(!format!("{again:?}").contains("hunter2"));
        assert!(again.remove("ghcr.io") && !again.remove("ghcr.io"));
        again.write(&path).unwrap();
        assert!(!std::fs::read_to_string(&path).unwrap().contains("hunter2"));
        let files = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(files, 1, "no draft is left behind");
        std::fs::write(&path, "hunter2").unwrap();
        let error = Passwords::read(&path).unwrap_err();
        assert!(error.message().contains("damaged") && !error.message().contains("hunter2"));
    }
}
