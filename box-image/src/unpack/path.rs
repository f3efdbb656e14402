//! Paths of entries: names joined by single slashes, relative to the root.

use crate::archive::bad_at;
use crate::error::{Error, Result};
use crate::limits::{PATH_BYTES, PATH_DEPTH};

/// Prefix of a name that hides another.
pub(super) const WHITEOUT: &[u8] = b".wh.";
/// Name behind the prefix that hides everything of earlier layers.
pub(super) const OPAQUE: &[u8] = b".wh..opq";
const NAME_BYTES: usize = 255;

/// Validates a path; the result is empty for the root.
///
/// A leading slash is ignored, as other programs do. Names that lead upwards are refused.
pub(super) fn clean(path: &[u8]) -> Result<Vec<u8>> {
    if path.len() > PATH_BYTES {
        return Err(Error::too_large("layer", "path_bytes", PATH_BYTES as u64));
    }
    let mut clean = Vec::with_capacity(path.len());
    let mut depth = 0;
    for name in path.split(|c| *c == b'/') {
        match name {
            b"" | b"." => continue,
            b".." => return Err(bad_at("has a path that leads outside", path)),
            _ if name.contains(&0) => return Err(bad_at("has an invalid name", path)),
            _ if name.len() > NAME_BYTES => {
                return Err(Error::too_large("layer", "name_bytes", NAME_BYTES as u64));
            }
            _ => {}
        }
        depth += 1;
        if depth > PATH_DEPTH {
            return Err(Error::too_large("layer", "path_depth", PATH_DEPTH as u64));
        }
        if !clean.is_empty() {
            clean.push(b'/');
        }
        clean.extend_from_slice(name);
    }
    Ok(clean)
}

/// Splits a path into its directory and its name; `None` for the root.
pub(super) fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.is_empty() {
        return None;
    }
    Some(match path.iter().rposition(|c| *c == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (&[], path),
    })
}

/// Returns the last name of a path.
pub(super) fn last(path: &[u8]) -> &[u8] {
    split(path).map_or(path, |(_, name)| name)
}

/// Joins a directory and a name.
pub(super) fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() {
        return name.to_vec();
    }
    [directory, b"/", name].concat()
}

/// Returns the ends of a path's directories and of the path itself.
pub(super) fn ends(path: &[u8]) -> impl Iterator<Item = usize> + '_ {
    let slashes = path.iter().enumerate().filter(|(_, c)| **c == b'/');
    let ends = slashes.map(|(at, _)| at);
    ends.chain((!path.is_empty()).then_some(path.len()))
}

/// Returns whether a name of a path is a whiteout.
pub(super) fn is_whiteout(path: &[u8]) -> bool {
    path.split(|c| *c == b'/')
        .any(|name| name.starts_with(WHITEOUT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_within_the_root() {
        for (path, cleaned) in [
            ("a/b", "a/b"),
            ("./a//b/", "a/b"),
            ("/a", "a"),
            ("./", ""),
            ("/", ""),
            ("..a/b..", "..a/b.."),
        ] {
            assert_eq!(clean(path.as_bytes()).unwrap(), cleaned.as_bytes());
        }
        for path in ["..", "a/..", "../a", "/../a", "a/../../b", "a\0b"] {
            assert!(clean(path.as_bytes()).is_err(), "{path}");
        }
        assert!(clean(&b"a/".repeat(PATH_DEPTH)).is_ok());
        for path in [
            b"a/".repeat(PATH_DEPTH + 1),
            vec![b'a'; 256],
            b"aa/".repeat(1366),
        ] {
            assert_eq!(clean(&path).unwrap_err().code(), box_rpc::Code::TooLarge);
        }
    }

    #[test]
    fn a_path_is_split_at_each_slash() {
        assert_eq!(ends(b"a/b/c").collect::<Vec<_>>(), [1, 3, 5]);
        assert_eq!(ends(b"").count(), 0);
        assert_eq!(split(b"a/b"), Some((&b"a"[..], &b"b"[..])));
        assert_eq!(split(b"a"), Some((&b""[..], &b"a"[..])));
        assert_eq!(split(b""), None);
        assert!(is_whiteout(b"a/.wh.b/c") && !is_whiteout(b"a/b.wh."));
    }
}
