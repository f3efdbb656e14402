//! What the default workspace holds, and whether two sides see the same one.

use std::fs;
use std::io::{self, Read as _};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use box_protocol::actions::{
    StorageDirectory, SystemProbeParams, SystemProbeResult, SystemStorageResult,
};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Invalid};
use box_tree::{Found, Then};
use rustix::fs::{FileType, Mode, OFlags};
use sha2::{Digest as _, Sha256};

use crate::service::{BoxService, blocking};

/// The parts of a workspace that are told apart.
const PARTS: [&str; 3] = ["mcp", "inbox", "outbox"];

/// Whose directories they are.
const SCOPE: &str = "runtime_host";

/// The most bytes of a marker.
const MARKER_BYTES: u64 = 1024;

impl BoxService {
    /// How much room the default workspace takes, in all and by its parts. Paths are told relative to
    /// it. Nothing if there is none, or if it is not on this machine.
    pub async fn storage(&self) -> Result<SystemStorageResult, BoxError> {
        let Some(root) = self.own_workspace() else {
            return Ok(SystemStorageResult::default());
        };
        let most = self.rules().config.max_workspace_entries;
        blocking(move || Ok(measure(&root, most))).await
    }

    /// Reads a marker file of the default workspace, never through a link.
    pub async fn probe(&self, params: SystemProbeParams) -> Result<SystemProbeResult, BoxError> {
        let name = params.name;
        let plain = !name.is_empty()
            && name.len() <= 255
            && !name.contains(['/', '\0'])
            && name != "."
            && name != "..";
        if !plain {
            return Err(
                Invalid::new("name", "must be the name of a file, without a directory").into(),
            );
        }
        let Some(root) = self.own_workspace() else {
            return Err(unreadable("there is no workspace that could be shared"));
        };
        blocking(move || read_marker(&root, &name)).await
    }

    fn own_workspace(&self) -> Option<PathBuf> {
        let rules = self.rules();
        let policy = &rules.policy;
        policy
            .default_host_workspace
            .clone()
            .filter(|_| policy.shared_filesystem)
    }
}

fn unreadable(why: &str) -> BoxError {
    BoxError::unavailable(format!("the marker cannot be read: {why}"))
        .with_detail(&Detail::about(Subject::Readiness))
}

fn read_marker(root: &Path, name: &str) -> Result<SystemProbeResult, BoxError> {
    let path = root.join(name);
    // Non-blocking, so that a pipe put in the marker's place cannot hold us up.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let descriptor = rustix::fs::open(&path, flags, Mode::empty());
    let file = fs::File::from(descriptor.map_err(|_| unreadable("it is not there, or is a link"))?);
    let metadata = file
        .metadata()
        .map_err(|_| unreadable("it cannot be looked at"))?;
    if !metadata.is_file() {
        return Err(unreadable("it is no file"));
    }
    let mut content = Vec::new();
    let read = file.take(MARKER_BYTES + 1).read_to_end(&mut content);
    read.map_err(|_| unreadable("reading it fails"))?;
    let size = content.len() as u64;
    if size == 0 || size > MARKER_BYTES {
        return Err(unreadable(&format!(
            "it must have 1 to {MARKER_BYTES} bytes"
        )));
    }
    let sha256 = format!("{:x}", Sha256::digest(&content));
    Ok(SystemProbeResult { sha256, size })
}

fn measure(root: &Path, most_entries: u64) -> SystemStorageResult {
    let mut parts = PARTS.map(|part| StorageDirectory {
        key: part.to_owned(),
        path: part.to_owned(),
        kind: "detail".to_owned(),
        scope: SCOPE.to_owned(),
        parent_key: Some("workspace".to_owned()),
        ..StorageDirectory::default()
    });
    let mut rest = StorageDirectory {
        key: "workspace".to_owned(),
        path: ".".to_owned(),
        kind: "root".to_owned(),
        scope: SCOPE.to_owned(),
        ..StorageDirectory::default()
    };
    match box_tree::open(root) {
        Ok(root) => {
            rest.exists = true;
            count(&root, &mut parts, &mut rest, most_entries);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(_) => rest.error_count = 1,
    }
    for part in &parts {
        rest.size_bytes += part.size_bytes;
        rest.file_count += part.file_count;
        rest.error_count += part.error_count;
    }
    SystemStorageResult {
        size_bytes: rest.size_bytes,
        directories: std::iter::once(rest).chain(parts).collect(),
    }
}

/// Counts what is below `root`, by its parts and the rest. Links are counted, never followed; what cannot be looked at, or is
/// beyond the last entry `left`, counts as an error.
fn count(
    root: &OwnedFd,
    parts: &mut [StorageDirectory],
    rest: &mut StorageDirectory,
    mut left: u64,
) {
    // Where the walk is: in which part, if in any.
    let mut within = None;
    let walked = box_tree::walk(root, |found| {
        let Found::Entry(entry) = found else {
            let of = within.and_then(|part: usize| parts.get_mut(part));
            of.unwrap_or(rest).error_count += 1;
            return ControlFlow::Continue(Then::Pass);
        };
        let is_directory = entry.kind() == FileType::Directory;
        if entry.depth == 0 {
            let is_it = |part: &StorageDirectory| part.key.as_bytes() == entry.name.to_bytes();
            within = parts.iter().position(is_it).filter(|_| is_directory);
        }
        let is_part = entry.depth == 0 && within.is_some();
        let of = within.and_then(|part| parts.get_mut(part)).unwrap_or(rest);
        if left == 0 {
            of.error_count += 1;
            return ControlFlow::Break(());
        }
        left -= 1;
        of.exists |= is_part;
        if !is_directory {
            of.file_count += 1;
        }
        if entry.kind() == FileType::RegularFile {
            of.size_bytes = of.size_bytes.saturating_add(entry.content_bytes());
        }
        ControlFlow::Continue(Then::Enter)
    });
    // What there was no room for has been counted as such.
    let (ControlFlow::Break(()) | ControlFlow::Continue(())) = walked;
}

#[cfg(test)]
mod tests {
    use super::*;
    use box_protocol::Code;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_workspace_is_the_sum_of_its_parts_and_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("inbox/deep")).unwrap();
        fs::write(dir.path().join("inbox/deep/a"), [0; 100]).unwrap();
        fs::write(dir.path().join("b"), [0; 30]).unwrap();
        symlink("/", dir.path().join("everything")).unwrap();
        let told = measure(dir.path(), 1000);
        let find = |key: &str| {
            told.directories
                .iter()
                .find(|directory| directory.key == key)
                .unwrap()
        };
        assert_eq!(told.size_bytes, 130);
        assert_eq!(
            (find("workspace").size_bytes, find("workspace").file_count),
            (130, 3)
        );
        assert_eq!(
            (find("inbox").size_bytes, find("inbox").exists),
            (100, true)
        );
        assert_eq!(
            (find("outbox").exists, find("outbox").parent_key.as_deref()),
            (false, Some("workspace"))
        );
        assert!(
            told.directories
                .iter()
                .all(|directory| directory.error_count == 0)
        );
        assert!(
            told.directories
                .iter()
                .all(|directory| !directory.path.starts_with('/')),
            "no host path is told"
        );
        let cut = measure(dir.path(), 1);
        assert!(
            cut.directories
                .iter()
                .any(|directory| directory.error_count > 0),
            "what was not counted is said"
        );
    }

    #[test]
    fn a_marker_is_read_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("marker"), "abc").unwrap();
        let read = read_marker(dir.path(), "marker").unwrap();
        assert_eq!(read.size, 3);
        assert_eq!(
            read.sha256,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        fs::write(dir.path().join("empty"), "").unwrap();
        fs::write(dir.path().join("large"), [0; 1025]).unwrap();
        fs::create_dir(dir.path().join("directory")).unwrap();
        symlink(dir.path().join("marker"), dir.path().join("link")).unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            Mode::RWXU,
            0,
        )
        .unwrap();
        for name in ["empty", "large", "directory", "link", "pipe", "absent"] {
            let error = read_marker(dir.path(), name).unwrap_err();
            assert_eq!(error.code(), Code::Unavailable, "{name}");
            let host = dir.path().display().to_string();
            assert!(!error.message().contains(&host), "{error}");
        }
    }
}
