//! The attributes of files as clients see them, and the paths that clients send.

use std::collections::BTreeMap;

use box_protocol::BoxId;
use box_protocol::actions::{FileKind, FileOutcome, FileStat, FileStatInfo, FileStatParams};
use serde_json::{Value, json};

use super::error::EnvdError;
use super::spec::HOME;
use crate::http::context::Context;

/// Returns a path without `.`, `..` and empty parts. A relative path and `~` begin in the home directory of the user.
pub(super) fn absolute(path: &str, user: Option<&str>) -> String {
    let home = match user {
        None => HOME.to_owned(),
        Some(other) => format!("/home/{other}"),
    };
    let joined = match path.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{home}{rest}"),
        _ if path.starts_with('/') => path.to_owned(),
        _ => format!("{home}/{path}"),
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in joined.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

/// Returns the last part of a path.
pub(super) fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// Returns the attributes of one path.
pub(super) async fn stat(
    context: &Context,
    box_id: &BoxId,
    user: Option<&str>,
    path: &str,
    follow: bool,
) -> Result<FileStatInfo, EnvdError> {
    let mut found = stat_all(context, box_id, user, vec![path.to_owned()], follow).await?;
    match found.remove(path) {
        Some(FileOutcome::Stat(stat)) => Ok(stat),
        Some(FileOutcome::Error(error)) => {
            let code = match error.code {
                box_protocol::Code::NotFound => "not_found",
                box_protocol::Code::Denied => "permission_denied",
                _ => "invalid_argument",
            };
            Err(EnvdError::new(code, error.message))
        }
        None => Err(EnvdError::not_found(format!("path {path:?} not found"))),
    }
}

async fn stat_all(
    context: &Context,
    box_id: &BoxId,
    user: Option<&str>,
    paths: Vec<String>,
    follow: bool,
) -> Result<BTreeMap<String, FileOutcome>, EnvdError> {
    let params = FileStatParams {
        follow,
        user: user.map(str::to_owned),
        ..FileStatParams::new(box_id.clone(), paths)
    };
    let found = context.runtime();
    let found = found.forward::<FileStat>(&context.caller, &params).await?;
    Ok(found.paths)
}

/// Describes files. The type of a link is that of its target.
pub(super) async fn entries(
    context: &Context,
    box_id: &BoxId,
    user: Option<&str>,
    files: &[FileStatInfo],
) -> Result<Vec<Value>, EnvdError> {
    let links = files.iter().filter(|file| file.kind == FileKind::Symlink);
    let links: Vec<String> = links.map(|file| file.path.clone()).collect();
    let targets = if links.is_empty() {
        BTreeMap::new()
    } else {
        stat_all(context, box_id, user, links, true).await?
    };
    let described = files.iter().map(|file| {
        let kind = match targets.get(&file.path) {
            Some(FileOutcome::Stat(target)) => target.kind,
            _ => file.kind,
        };
        entry(file, kind)
    });
    Ok(described.collect())
}

/// Describes one file.
pub(super) async fn one_entry(
    context: &Context,
    box_id: &BoxId,
    user: Option<&str>,
    file: FileStatInfo,
) -> Result<Value, EnvdError> {
    let mut described = entries(context, box_id, user, &[file]).await?;
    Ok(described.pop().unwrap_or_default())
}

fn entry(file: &FileStatInfo, kind: FileKind) -> Value {
    let kind_name = match kind {
        FileKind::File => "FILE_TYPE_FILE",
        FileKind::Directory => "FILE_TYPE_DIRECTORY",
        FileKind::Symlink => "FILE_TYPE_SYMLINK",
        FileKind::Other => "FILE_TYPE_UNSPECIFIED",
    };
    let mut described = json!({
        "name": name_of(&file.path),
        "type": kind_name,
        "path": file.path,
        // A number of 64 bits is a string in the JSON of protocol buffers.
        "size": file.size.to_string(),
        "mode": file.mode & 0o7777,
        "permissions": permissions(file),
        "owner": file.owner,
        "group": file.group,
        "modifiedTime": file.modified_at.to_string(),
    });
    add_metadata(&mut described, file);
    if file.kind == FileKind::Symlink {
        described["isSymlink"] = json!(true);
        if let Some(target) = &file.target {
            let parent = file.path.rsplit_once('/').map_or("", |(parent, _)| parent);
            let target = if target.starts_with('/') {
                target.clone()
            } else {
                absolute(&format!("{parent}/{target}"), None)
            };
            described["symlinkTarget"] = json!(target);
        }
    }
    described
}

/// The beginning of the extended attributes that are metadata.
pub(super) const METADATA: &str = "e2b.";

/// Adds the metadata of a file, if it has any.
pub(super) fn add_metadata(described: &mut Value, file: &FileStatInfo) {
    let metadata = file.xattrs.iter().filter_map(|(name, value)| {
        let key = name.strip_prefix(METADATA)?;
        Some((key.to_owned(), value.clone()))
    });
    let metadata: BTreeMap<_, _> = metadata.collect();
    if !metadata.is_empty() {
        described["metadata"] = json!(metadata);
    }
}

/// Returns the permissions as `ls` shows them, with the mark of a link that Go has.
fn permissions(file: &FileStatInfo) -> String {
    let mark = match file.kind {
        FileKind::Directory => 'd',
        FileKind::Symlink => 'L',
        FileKind::File | FileKind::Other => '-',
    };
    let bits = (0..9).rev().zip("rwxrwxrwx".chars());
    let letters = bits.map(|(bit, letter)| {
        let is_set = file.mode >> bit & 1 == 1;
        if is_set { letter } else { '-' }
    });
    std::iter::once(mark).chain(letters).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_begin_in_the_home_directory() {
        for (path, expected) in [
            ("/a//b/./c/", "/a/b/c"),
            ("/a/../b", "/b"),
            ("/../..", "/"),
            ("a", "/home/user/a"),
            ("./a/../b", "/home/user/b"),
            ("~", "/home/user"),
            ("~/a", "/home/user/a"),
            ("~a", "/home/user/~a"),
            ("", "/home/user"),
            ("$HOME/a b", "/home/user/$HOME/a b"),
        ] {
            assert_eq!(absolute(path, None), expected, "{path}");
        }
        assert_eq!(absolute("a", Some("guest")), "/home/guest/a");
    }
}
