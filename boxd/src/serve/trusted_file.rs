//! Trusted files: only the server's user or root may own them or write to them.

use std::fs::{File, Metadata};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::Mode;

/// Reads a secret file; refuses one that another user owns or can access.
pub(super) fn read_secret(path: &Path) -> Result<Vec<u8>> {
    let mut file = File::open(path)?;
    // Check the open file, because the path may name another file by now.
    let meta = file.metadata()?;
    has_trusted_owner(&meta)?;
    ensure!(
        mode(&meta) & (Mode::RWXG | Mode::RWXO) == Mode::empty(),
        "accessible to other users; run chmod 600 on it"
    );
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Refuses a directory that another user owns or can write to.
fn check_directory(path: &Path) -> Result<()> {
    let meta = std::fs::metadata(path)?;
    has_trusted_owner(&meta)?;
    ensure!(
        mode(&meta) & (Mode::WGRP | Mode::WOTH) == Mode::empty(),
        "writable by other users; run chmod 700 on it"
    );
    Ok(())
}

fn mode(meta: &Metadata) -> Mode {
    Mode::from(meta.mode())
}

fn has_trusted_owner(meta: &Metadata) -> Result<()> {
    let (owner, me) = (meta.uid(), rustix::process::geteuid().as_raw());
    ensure!(
        owner == me || owner == 0,
        "owned by user {owner}, but the server runs as user {me}; chown it, or use another path"
    );
    Ok(())
}

/// Refuses a state directory that another user owns or can write to.
pub(super) fn check_state(path: &Path) -> Result<()> {
    check_directory(path).with_context(|| format!("state directory {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown};

    use super::*;

    fn allow(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn files_of_other_users_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("secret");
        std::fs::write(&file, "x").unwrap();
        allow(&file, 0o600);
        assert_eq!(read_secret(&file).unwrap(), b"x", "control");
        check_directory(directory.path()).unwrap();
        for mode in [0o640, 0o602] {
            allow(&file, mode);
            let error = read_secret(&file).unwrap_err().to_string();
            assert!(error.contains("chmod 600"), "{error}");
        }
        allow(&file, 0o600);
        allow(directory.path(), 0o770);
        let error = check_directory(directory.path()).unwrap_err().to_string();
        assert!(error.contains("chmod 700"), "{error}");
        allow(directory.path(), 0o700);
        if !rustix::process::geteuid().is_root() {
            // Only root can change the owner of a file.
            return;
        }
        chown(&file, Some(65534), None).unwrap();
        let error = read_secret(&file).unwrap_err().to_string();
        assert!(
            error.contains("owned by user 65534, but the server runs as user 0"),
            "{error}"
        );
        chown(directory.path(), Some(65534), None).unwrap();
        let error = check_directory(directory.path()).unwrap_err().to_string();
        assert!(error.contains("owned by user 65534"), "{error}");
    }
}
