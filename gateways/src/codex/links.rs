//! The attributes of files, and the symbolic links on the way to them.

use std::collections::BTreeMap;

use box_protocol::actions::{
    FileError, FileKind, FileOutcome, FileStat, FileStatInfo, FileStatParams,
};

use super::paths::FilePath;
use super::session::Place;
use super::wire::Fault;

/// The number of links on the way to one file; the kernel has the same limit.
const MAX_LINKS: usize = 40;

/// Returns the attributes of a path.
pub(super) async fn stat(
    place: &Place,
    path: &FilePath,
    follow: bool,
) -> Result<FileStatInfo, Fault> {
    let mut found = stat_all(place, vec![path.0.clone()], follow).await?;
    match found.remove(&path.0) {
        Some(outcome) => attributes(outcome),
        None => Err(Fault::internal("path: the box did not answer for it")),
    }
}

async fn stat_all(
    place: &Place,
    paths: Vec<String>,
    follow: bool,
) -> Result<BTreeMap<String, FileOutcome>, Fault> {
    let params = FileStatParams {
        follow,
        ..FileStatParams::new(place.open().await?, paths)
    };
    let found = place.target.forward::<FileStat>(&params).await;
    Ok(found.map_err(|error| Fault::of_file(&error))?.paths)
}

fn attributes(outcome: FileOutcome) -> Result<FileStatInfo, Fault> {
    match outcome {
        FileOutcome::Stat(stat) => Ok(stat),
        FileOutcome::Error(FileError { message, errno, .. }) => Err(match errno.as_deref() {
            Some("ENOENT") => Fault::not_found(message),
            Some("EACCES" | "EPERM" | "EINVAL" | "ELOOP") => Fault::invalid_request(message),
            _ => Fault::internal(message),
        }),
    }
}

/// Returns the attributes of the first link of a path, if it has one. Errors: no file has the path.
async fn first_link(place: &Place, path: &FilePath) -> Result<Option<FileStatInfo>, Fault> {
    let prefixes = path.prefixes();
    let mut found = stat_all(place, prefixes.clone(), false).await?;
    for prefix in &prefixes {
        let Some(outcome) = found.remove(prefix) else {
            continue;
        };
        let stat = attributes(outcome)?;
        if stat.kind == FileKind::Symlink {
            return Ok(Some(FileStatInfo {
                path: prefix.clone(),
                ..stat
            }));
        }
    }
    Ok(None)
}

/// Refuses a path with a symbolic link, unless the client lets links be followed. A missing file has none.
pub(super) async fn check(
    place: &Place,
    path: &FilePath,
    follow: Option<bool>,
) -> Result<(), Fault> {
    if follow.unwrap_or(true) {
        return Ok(());
    }
    match first_link(place, path).await {
        Ok(Some(link)) => {
            let rule = format!("path: {} is a symbolic link; set followSymlinks", link.path);
            Err(Fault::invalid_request(rule))
        }
        _ => Ok(()),
    }
}

/// Returns the path of a file without symbolic links.
pub(super) async fn resolve(place: &Place, path: &FilePath) -> Result<FilePath, Fault> {
    let mut path = path.clone();
    for _ in 0..=MAX_LINKS {
        let Some(link) = first_link(place, &path).await? else {
            return Ok(path);
        };
        let target = link.target.unwrap_or_default();
        let parent = link.path.rsplit_once('/').map_or("", |(parent, _)| parent);
        let rest = &path.0[link.path.len()..];
        let joined = if target.starts_with('/') {
            format!("{target}{rest}")
        } else {
            format!("{parent}/{target}{rest}")
        };
        path = FilePath::normalized(&joined);
    }
    let rule = format!("path: more than {MAX_LINKS} symbolic links; remove the loop");
    Err(Fault::invalid_request(rule))
}
