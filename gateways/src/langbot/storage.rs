//! The storage use of a workspace, on the host and in its boxes.
//!
//! This module also verifies that LangBot and the gateway see the same directory.

use std::fs;
use std::io::{ErrorKind, Read as _};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{
    AttachOptions, CommandChunk, CommandStartParams, OnDisconnect, StreamName, View,
};
use box_protocol::{BoxError, BoxInfo, Program};
use box_service::blocking;
use box_sys::walk::{Found, Next};
use futures::future::join_all;
use rustix::fs::{FileType, Mode, OFlags};
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::Installation;
use super::actions::{Connection, Data, as_text, members};
use super::admission::{managed_root, tenants};
use super::context::Placement;
use super::errors::readiness;

/// The maximum number of entries that are counted per workspace.
const MAX_ENTRIES: u64 = 1_000_000;

/// The timeout of a measurement inside a box.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(15);

/// The prefix of a marker's name, followed by 32 hex digits.
const MARKER: &str = ".langbot-box-volume-probe-";

/// The maximum length of a marker.
const MARKER_BYTES: u64 = 1024;

/// The measured directories inside a box: the key and the path.
const BOX_DIRECTORIES: [(&str, &str); 3] = [
    ("session_workspaces", "/workspace"),
    ("session_caches", "/home/.cache"),
    ("session_temp", "/tmp"),
];

/// Prints each key, whether the directory exists, its kilobytes and its files.
const SCRIPT: &str = r#"measure() {
  if [ -e "$2" ]; then
    set -- "$1" "$2" $(du -sk "$2" 2>/dev/null)
    printf '%s\t1\t%s\t%s\n' "$1" "${3:-0}" "$(find "$2" -type f 2>/dev/null | wc -l)"
  else
    printf '%s\t0\t0\t0\n' "$1"
  fi
}"#;

pub(super) async fn analysis(
    installation: Arc<Installation>,
    placement: Arc<Placement>,
) -> Result<Value, BoxError> {
    let config = installation.config();
    let namespace = placement.namespace.clone();
    let host_usage = blocking(move || match managed_root(&config) {
        Ok(root) => Ok(measure_workspace(&tenants(&root)?.join(namespace))),
        Err(_) => Ok(Vec::new()),
    });
    let mut directories: Vec<Value> = host_usage
        .await?
        .iter()
        .map(|directory| json!(directory))
        .collect();
    let sessions = installation.sessions_of(&placement).await?;
    let reports = join_all(sessions.iter().map(|info| installation.measure(info))).await;
    let mut processes = Vec::new();
    for info in &sessions {
        processes.push(
            installation
                .processes_in(&info.box_id)
                .await
                .map_or(0, |found| found.len()),
        );
    }
    directories.extend(sum_usage(&sessions, &reports, &processes));
    let roots = directories
        .iter()
        .filter(|directory| directory["kind"] == "root");
    let size: u64 = roots
        .filter_map(|directory| directory["size_bytes"].as_u64())
        .sum();
    Ok(json!({
        "size_bytes": size,
        "directories": directories,
        "active_sessions": sessions.len(),
        "managed_processes": processes.iter().sum::<usize>(),
    }))
}

/// The measurements of a box: whether each directory exists, its bytes, its files.
type BoxUsage = [(bool, u64, u64); BOX_DIRECTORIES.len()];

impl Installation {
    /// Measures a box by a command inside it.
    async fn measure(&self, info: &BoxInfo) -> Option<BoxUsage> {
        let calls = BOX_DIRECTORIES.map(|(key, path)| format!("measure {key} {path}"));
        let program = Program::text(format!("{SCRIPT}\n{}", calls.join("\n"))).ok()?;
        let params = CommandStartParams {
            timeout_ms: u64::try_from(MEASURE_TIMEOUT.as_millis()).ok(),
            on_disconnect: OnDisconnect::Kill,
            retain_ms: Some(0),
            cwd: Some("/".to_owned()),
            attach: Some(AttachOptions {
                view: View::Text,
                ..AttachOptions::default()
            }),
            ..CommandStartParams::new(info.box_id.clone(), program)
        };
        let (sender, mut chunks) = mpsc::channel(4);
        let caller = self.caller();
        let run = self.runtime.start_command(&caller, params, Some(sender));
        let mut text = String::new();
        let collect = async {
            while let Some(chunk) = chunks.recv().await {
                if let CommandChunk::Text(chunk) = chunk
                    && chunk.stream == StreamName::Stdout
                {
                    text.push_str(&chunk.data);
                }
            }
        };
        let (ran, ()) = timeout(MEASURE_TIMEOUT, async { tokio::join!(run, collect) })
            .await
            .ok()?;
        ran.ok()?;
        Some(read_report(&text))
    }
}

fn read_report(text: &str) -> BoxUsage {
    let mut report = BoxUsage::default();
    for line in text.lines() {
        let fields: Vec<_> = line.split('\t').map(str::trim).collect();
        let [key, exists, kilobytes, files] = fields[..] else {
            continue;
        };
        let index = BOX_DIRECTORIES.iter().position(|(name, _)| *name == key);
        if let (Some(index), Ok(kilobytes), Ok(files)) =
            (index, kilobytes.parse::<u64>(), files.parse())
        {
            report[index] = (exists == "1", kilobytes.saturating_mul(1024), files);
        }
    }
    report
}

/// Sums the measurements of all boxes of a workspace.
///
/// A workspace directory on the host is measured there instead.
fn sum_usage(
    sessions: &[BoxInfo],
    reports: &[Option<BoxUsage>],
    processes: &[usize],
) -> Vec<Value> {
    if sessions.is_empty() {
        return Vec::new();
    }
    let mut totals = BoxUsage::default();
    let mut managed = (false, 0, 0);
    let (mut measured_boxes, mut errors, mut with_processes) = (0, 0, 0);
    let add = |sum: &mut (bool, u64, u64), more: (bool, u64, u64)| {
        *sum = (
            sum.0 || more.0,
            sum.1.saturating_add(more.1),
            sum.2.saturating_add(more.2),
        );
    };
    for ((info, report), processes) in sessions.iter().zip(reports).zip(processes) {
        let Some(report) = report else {
            errors += 1;
            continue;
        };
        measured_boxes += 1;
        let own_workspace = info.host_path.is_none();
        for (index, total) in totals.iter_mut().enumerate() {
            if index > 0 || own_workspace {
                add(total, report[index]);
            }
        }
        if *processes > 0 && own_workspace {
            with_processes += 1;
            add(&mut managed, report[0]);
        }
    }
    let entry = |key: &str, path: String, kind: &str, (exists, bytes, files): (bool, u64, u64)| {
        json!({
            "key": key,
            "path": path,
            "kind": kind,
            "exists": exists,
            "size_bytes": bytes,
            "file_count": files,
            "error_count": errors,
            "scope": "sandbox_sessions",
        })
    };
    let mut entries: Vec<_> = BOX_DIRECTORIES
        .iter()
        .zip(totals)
        .map(|((key, path), total)| {
            entry(
                key,
                format!("{path} ({measured_boxes} sandbox sessions)"),
                "root",
                total,
            )
        })
        .collect();
    if with_processes > 0 {
        let path = format!("/workspace ({with_processes} managed-process sessions)");
        let mut detail = entry("managed_process_workspaces", path, "detail", managed);
        detail["parent_key"] = BOX_DIRECTORIES[0].0.into();
        entries.push(detail);
    }
    entries
}

/// A directory of LangBot's storage analysis.
#[derive(Debug, Default, Serialize)]
struct StorageDirectory {
    key: &'static str,
    path: String,
    /// `root`, or `detail` for a part of a root.
    kind: &'static str,
    exists: bool,
    size_bytes: u64,
    file_count: u64,
    /// The number of entries that the runtime could not read.
    error_count: u64,
    scope: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_key: Option<&'static str>,
}

/// Measures a tenant's workspace on the host, and parts of it.
fn measure_workspace(workspace: &Path) -> Vec<StorageDirectory> {
    let mut remaining = MAX_ENTRIES;
    let parts = [("mcp", ".mcp"), ("inbox", "inbox"), ("outbox", "outbox")];
    let mut all = vec![StorageDirectory {
        key: "workspace",
        kind: "root",
        ..count_entries(workspace, &mut remaining)
    }];
    all.extend(parts.map(|(key, name)| StorageDirectory {
        key,
        kind: "detail",
        parent_key: Some("workspace"),
        ..count_entries(&workspace.join(name), &mut remaining)
    }));
    all
}

/// Counts the entries below a directory, at most `remaining`.
///
/// Symbolic links are counted and never followed. An unreadable entry counts as an error.
fn count_entries(root: &Path, remaining: &mut u64) -> StorageDirectory {
    let mut found = StorageDirectory {
        path: root.display().to_string(),
        scope: "runtime_host",
        ..StorageDirectory::default()
    };
    let root = match box_sys::walk::open(root) {
        Ok(root) => root,
        Err(error) => {
            let absent = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
            found.error_count = u64::from(!absent);
            return found;
        }
    };
    found.exists = true;
    let _ = box_sys::walk::walk(root, |entry| {
        let Found::Entry(entry) = entry else {
            found.error_count += 1;
            return ControlFlow::Continue(Next::Skip);
        };
        if *remaining == 0 {
            found.error_count += 1;
            return ControlFlow::Break(());
        }
        *remaining -= 1;
        if entry.kind() != FileType::Directory {
            found.size_bytes = found.size_bytes.saturating_add(entry.content_bytes());
            found.file_count += 1;
        }
        ControlFlow::Continue(Next::Descend)
    });
    found
}

/// Reads a marker that LangBot wrote, to verify that both see the same workspace.
pub(super) async fn verify(connection: Connection, data: Data) -> Result<Value, BoxError> {
    let name = members(&data)?
        .get("marker_name")
        .map(as_text)
        .unwrap_or_default();
    let name = name.trim().to_owned();
    let digits = name.strip_prefix(MARKER).unwrap_or_default();
    let hex = digits
        .bytes()
        .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    if digits.len() != 32 || !hex {
        return Err(readiness("Invalid Box shared Workspace probe basename"));
    }
    let config = connection.installation.config();
    blocking(move || {
        let (sha256, size) = read_marker(&managed_root(&config)?, &name)?;
        Ok(json!({"marker_name": name, "sha256": sha256, "size": size}))
    })
    .await
}

fn read_marker(root: &Path, name: &str) -> Result<(String, u64), BoxError> {
    let unreadable = || readiness("Box Runtime cannot read the Core shared Workspace probe");
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::open(root, flags | OFlags::DIRECTORY, Mode::empty())
        .map_err(|_| unreadable())?;
    // Non-blocking, so that a pipe in place of the marker cannot block the server.
    let marker = rustix::fs::openat(&directory, name, flags | OFlags::NONBLOCK, Mode::empty());
    let marker = fs::File::from(marker.map_err(|_| unreadable())?);
    let metadata = marker.metadata().map_err(|_| unreadable())?;
    if !metadata.is_file() {
        return Err(readiness(
            "Box shared Workspace probe is not a regular file",
        ));
    }
    if metadata.len() == 0 || metadata.len() > MARKER_BYTES {
        return Err(readiness("Box shared Workspace probe has an invalid size"));
    }
    let mut content = Vec::new();
    let read = marker.take(MARKER_BYTES + 1).read_to_end(&mut content);
    read.map_err(|_| unreadable())?;
    if content.len() as u64 != metadata.len() {
        return Err(readiness(
            "Box shared Workspace probe changed while being verified",
        ));
    }
    Ok((format!("{:x}", Sha256::digest(&content)), metadata.len()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_marker_must_be_a_small_regular_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("good"), "abc").unwrap();
        let (sha256, size) = read_marker(dir.path(), "good").unwrap();
        assert!(sha256.starts_with("ba7816bf") && size == 3);
        symlink("good", dir.path().join("link")).unwrap();
        fs::write(dir.path().join("empty"), "").unwrap();
        fs::write(dir.path().join("large"), vec![0; 1025]).unwrap();
        for bad in ["link", "empty", "large", "missing", "."] {
            assert!(read_marker(dir.path(), bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_workspace_is_measured_with_its_subdirectories() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("inbox/deep")).unwrap();
        fs::write(dir.path().join("inbox/deep/a"), vec![0; 10]).unwrap();
        fs::write(dir.path().join("b"), vec![0; 5]).unwrap();
        symlink("/", dir.path().join("everything")).unwrap();
        let found = measure_workspace(dir.path());
        let link = "/".len() as u64;
        assert_eq!((found[0].size_bytes, found[0].file_count), (15 + link, 3));
        let inbox = found.iter().find(|part| part.key == "inbox").unwrap();
        assert_eq!((inbox.size_bytes, inbox.exists), (10, true));
        assert!(!found.iter().find(|part| part.key == "mcp").unwrap().exists);
    }

    #[test]
    fn invalid_reports_of_boxes_are_ignored() {
        let report = read_report(
            "session_temp\t1\t4\t2\nnonsense\nsession_workspaces\t1\t-4\t2\nother\t1\t1\t1\n",
        );
        assert_eq!(report, [(false, 0, 0), (false, 0, 0), (true, 4096, 2)]);
    }
}
