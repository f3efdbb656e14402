//! What a client asks about the box before it uses it.

use box_protocol::actions::{FileOutcome, FileStat, FileStatParams};
use serde_json::{Value, json};

use super::paths::uri_of;
use super::session::Place;
use super::wire::Fault;

/// The shells that Codex uses, best first. A box has at least the last.
const SHELLS: [(&str, &str); 3] = [
    ("bash", "/bin/bash"),
    ("zsh", "/bin/zsh"),
    ("sh", "/bin/sh"),
];

/// Describes the box: its shell and its workspace. A capability that is absent is not there.
pub(super) async fn info(place: &Place) -> Result<Value, Fault> {
    let box_id = place.open().await?;
    let info = place.target.get(&box_id).await?;
    let paths = SHELLS.map(|(_, path)| path.to_owned()).to_vec();
    let params = FileStatParams {
        follow: true,
        ..FileStatParams::new(box_id, paths)
    };
    let found = place.target.forward::<FileStat>(&params).await?.paths;
    let exists = |path: &str| matches!(found.get(path), Some(FileOutcome::Stat(_)));
    let shell = SHELLS.iter().find(|(_, path)| exists(path));
    let (name, path) = shell.unwrap_or(&SHELLS[SHELLS.len() - 1]);
    Ok(json!({
        "shell": {"name": name, "path": path}, "cwd": uri_of(&info.mount_path),
        "platformOs": "linux", "temporaryDirectories": [], "tempDir": uri_of("/tmp"), "capabilities": {},
    }))
}
