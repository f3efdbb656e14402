//! Requested paths. This module touches no files.

use std::collections::BTreeMap;

use box_protocol::BoxError;

/// Maximum length of a path in the kernel.
const PATH_BYTES: usize = 4095;

/// The base for expanding paths.
#[derive(Debug, Clone, Default)]
pub(super) struct PathBase {
    /// The environment variables, including `HOME`.
    pub(super) env: BTreeMap<String, String>,
    /// The directory of relative paths.
    pub(super) cwd: String,
}

/// Validates an absolute path, after expanding it if a base is given.
pub(super) fn absolute(path: &str, expand: Option<&PathBase>) -> Result<String, BoxError> {
    let path = match expand {
        Some(base) => expand_path(path, base)?,
        None => path.to_owned(),
    };
    let problem = if path.is_empty() {
        "empty"
    } else if path.len() > PATH_BYTES {
        "longer than 4095 bytes"
    } else if path.contains('\0') {
        "contains a zero byte"
    } else if !path.starts_with('/') {
        "not absolute; use an absolute path or set expand"
    } else {
        return Ok(path);
    };
    Err(BoxError::validation(format!("path: {problem}")))
}

fn expand_path(path: &str, base: &PathBase) -> Result<String, BoxError> {
    let variable = |name: &str| {
        base.env
            .get(name)
            .ok_or_else(|| BoxError::validation(format!("path: variable {name} is not set")))
    };
    let (mut expanded, mut rest) = (String::new(), path);
    if let Some(after) = path.strip_prefix('~')
        && (after.is_empty() || after.starts_with('/'))
    {
        expanded.push_str(variable("HOME")?);
        rest = after;
    }
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        let (name, left) = if let Some(braced) = after.strip_prefix('{') {
            braced
                .split_once('}')
                .ok_or_else(|| BoxError::validation("path: `${` without `}`"))?
        } else {
            let is_part = |char: char| char.is_ascii_alphanumeric() || char == '_';
            let end = after.find(|char| !is_part(char)).unwrap_or(after.len());
            after.split_at(end)
        };
        if name.is_empty() {
            expanded.push('$');
        } else {
            expanded.push_str(variable(name)?);
        }
        if expanded.len() > PATH_BYTES {
            return Err(BoxError::validation("path: longer than 4095 bytes"));
        }
        rest = left;
    }
    expanded.push_str(rest);
    if expanded.is_empty() || expanded.starts_with('/') {
        return Ok(expanded);
    }
    Ok(format!("{}/{expanded}", base.cwd.trim_end_matches('/')))
}

/// Splits a path into its directory and its last name.
///
/// `None` if the last name cannot be a file's.
pub(super) fn split(path: &str) -> Option<(&str, &str)> {
    let (dir, name) = path.trim_end_matches('/').rsplit_once('/')?;
    let dir = if dir.is_empty() { "/" } else { dir };
    (!matches!(name, "" | "." | "..")).then_some((dir, name))
}

/// A path below a directory.
pub(super) fn join(dir: &str, name: &str) -> String {
    format!("{}/{name}", dir.trim_end_matches('/'))
}

/// Whether a path is a directory or below it.
pub(super) fn is_within(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> PathBase {
        let env = [("HOME", "/home/box"), ("X", "x/y")];
        PathBase {
            env: env.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            cwd: "/base/".to_owned(),
        }
    }

    #[test]
    fn paths_are_absolute_or_expanded() {
        for (path, expanded) in [
            ("/a/../b", "/a/../b"),
            ("~", "/home/box"),
            ("~/a", "/home/box/a"),
            ("a~/b", "/base/a~/b"),
            ("~else/a", "/base/~else/a"),
            ("$HOME/$X.txt", "/home/box/x/y.txt"),
            ("/${X}z", "/x/yz"),
            ("/a$", "/a$"),
        ] {
            assert_eq!(absolute(path, Some(&base())).unwrap(), expanded);
        }
        for path in ["$NONE/a", "${X", "", "/a\0b"] {
            assert!(absolute(path, Some(&base())).is_err(), "{path}");
        }
        for path in ["a", "~", "$HOME", "", &"/a".repeat(2048)] {
            assert!(absolute(path, None).is_err(), "{path}");
        }
        assert_eq!(absolute("/$HOME", None).unwrap(), "/$HOME");
    }

    #[test]
    fn a_path_has_a_directory_and_a_name() {
        assert_eq!(split("/a/b"), Some(("/a", "b")));
        assert_eq!(split("/a//"), Some(("/", "a")));
        assert_eq!(split("/a/b/../c/"), Some(("/a/b/..", "c")));
        for none in ["/", "//", "/a/..", "/a/.", ""] {
            assert_eq!(split(none), None, "{none}");
        }
        assert_eq!(
            (join("/", "a"), join("/a/", "b")),
            ("/a".into(), "/a/b".into())
        );
    }
}
