//! Paths as they are asked for. No file is touched here.

use std::collections::BTreeMap;

use box_protocol::BoxError;

/// The longest path the kernel takes.
const PATH_BYTES: usize = 4095;

/// What paths that are not absolute stand for.
#[derive(Debug, Clone, Default)]
pub(super) struct Base {
    /// Variables, `HOME` among them.
    pub(super) env: BTreeMap<String, String>,
    /// Where relative paths begin.
    pub(super) cwd: String,
}

/// An absolute path, if this is one or may be made one.
pub(super) fn absolute(path: &str, expand: Option<&Base>) -> Result<String, BoxError> {
    let path = match expand {
        Some(base) => expanded(path, base)?,
        None => path.to_owned(),
    };
    let wrong = if path.is_empty() {
        "empty"
    } else if path.len() > PATH_BYTES {
        "too long"
    } else if path.contains('\0') {
        "holds a zero byte"
    } else if !path.starts_with('/') {
        "not absolute, and `expand` is not set"
    } else {
        return Ok(path);
    };
    Err(BoxError::validation(format!("path: {wrong}")))
}

fn expanded(path: &str, base: &Base) -> Result<String, BoxError> {
    let variable = |name: &str| {
        base.env
            .get(name)
            .ok_or_else(|| BoxError::validation(format!("path: no variable {name}")))
    };
    let (mut whole, mut rest) = (String::new(), path);
    if let Some(after) = path.strip_prefix('~')
        && (after.is_empty() || after.starts_with('/'))
    {
        whole.push_str(variable("HOME")?);
        rest = after;
    }
    while let Some((before, after)) = rest.split_once('$') {
        whole.push_str(before);
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
            whole.push('$');
        } else {
            whole.push_str(variable(name)?);
        }
        if whole.len() > PATH_BYTES {
            return Err(BoxError::validation("path: too long"));
        }
        rest = left;
    }
    whole.push_str(rest);
    if whole.is_empty() || whole.starts_with('/') {
        return Ok(whole);
    }
    Ok(format!("{}/{whole}", base.cwd.trim_end_matches('/')))
}

/// The directory of a path, and its last name; nothing if it has none that a file could have.
pub(super) fn split(path: &str) -> Option<(&str, &str)> {
    let (dir, name) = path.trim_end_matches('/').rsplit_once('/')?;
    let dir = if dir.is_empty() { "/" } else { dir };
    (!matches!(name, "" | "." | "..")).then_some((dir, name))
}

/// A path below a directory.
pub(super) fn join(dir: &str, name: &str) -> String {
    format!("{}/{name}", dir.trim_end_matches('/'))
}

/// Whether a path is that of a directory, or below it.
pub(super) fn is_within(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> Base {
        let env = [("HOME", "/home/box"), ("X", "x/y")];
        Base {
            env: env.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            cwd: "/base/".to_owned(),
        }
    }

    #[test]
    fn paths_are_absolute_or_expanded() {
        for (path, whole) in [
            ("/a/../b", "/a/../b"),
            ("~", "/home/box"),
            ("~/a", "/home/box/a"),
            ("a~/b", "/base/a~/b"),
            ("~else/a", "/base/~else/a"),
            ("$HOME/$X.txt", "/home/box/x/y.txt"),
            ("/${X}z", "/x/yz"),
            ("/a$", "/a$"),
        ] {
            assert_eq!(absolute(path, Some(&base())).unwrap(), whole);
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
