//! Rules for the text of paths. This module does not access a file system.

use crate::invalid::Invalid;

const INSIDE: &str = "must be an absolute path inside the sandbox";

/// Maximum length of a path that the kernel accepts.
const PATH_BYTES: usize = 4096;

fn check_length(field: &'static str, path: &str) -> Result<(), Invalid> {
    if path.len() > PATH_BYTES {
        return Err(Invalid::new(field, "must not be longer than 4096 bytes"));
    }
    Ok(())
}

/// Validates an absolute path inside the box, trims it and removes trailing slashes.
pub fn inside(field: &'static str, path: &str) -> Result<String, Invalid> {
    let path = path.trim();
    if !path.starts_with('/') || path.contains('\0') {
        return Err(Invalid::new(field, INSIDE));
    }
    check_length(field, path)?;
    let bare = path.trim_end_matches('/');
    Ok(if bare.is_empty() { "/" } else { bare }.to_owned())
}

/// Validates an absolute host path, which may be a Windows path, and trims it.
pub(crate) fn of_host(field: &'static str, path: &str) -> Result<String, Invalid> {
    let path = path.trim();
    let drive =
        matches!(path.as_bytes(), [letter, b':', b'/' | b'\\', ..] if letter.is_ascii_alphabetic());
    if !(path.starts_with('/') || path.starts_with(r"\\") || drive) || path.contains('\0') {
        return Err(Invalid::new(field, "must be an absolute host path"));
    }
    check_length(field, path)?;
    Ok(path.to_owned())
}

/// Whether the path has no empty, `.` or `..` component and no trailing slash.
pub(crate) fn is_normalized(path: &str) -> bool {
    path == "/"
        || path
            .strip_prefix('/')
            .is_some_and(|rest| rest.split('/').all(|part| !matches!(part, "" | "." | "..")))
}

/// Whether `path` is `root` or below it, compared by components.
pub(crate) fn is_under(path: &str, root: &str) -> bool {
    parts(path).starts_with(&parts(root))
}

fn parts(path: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inside_is_trimmed_and_absolute() {
        assert_eq!(inside("workdir", " /a/b// ").unwrap(), "/a/b");
        assert_eq!(inside("workdir", "//").unwrap(), "/");
        for bad in ["", "a/b", "./a", "C:/a", "/a\0"] {
            let text = inside("workdir", bad).unwrap_err().to_string();
            assert_eq!(text, "workdir: must be an absolute path inside the sandbox");
        }
    }

    #[test]
    fn host_paths_of_both_kinds() {
        for good in ["/home/user", r"C:\data", "c:/data", r"\\server\share"] {
            assert_eq!(of_host("host_path", &format!(" {good} ")).unwrap(), good);
        }
        for bad in ["", "home", "C:data", "1:/x", r"\x", "/a\0b"] {
            let text = of_host("host_path", bad).unwrap_err().to_string();
            assert_eq!(text, "host_path: must be an absolute host path");
        }
    }

    #[test]
    fn is_under_compares_components() {
        for (path, root) in [
            ("/w", "/w"),
            ("/w/a", "/w"),
            ("/w//a/.", "/w/"),
            ("/x", "/"),
            ("/a/../w/b", "/w"),
        ] {
            assert!(is_under(path, root), "{path} {root}");
        }
        for (path, root) in [
            ("/workspace2", "/workspace"),
            ("/", "/w"),
            ("/w/../etc", "/w"),
            ("/w/a/../..", "/w"),
        ] {
            assert!(!is_under(path, root), "{path} {root}");
        }
    }

    #[test]
    fn a_normalized_path_has_no_dot_components() {
        assert!(is_normalized("/") && is_normalized("/a/b"));
        for bad in ["", "a", "/a/", "//a", "/a/./b", "/a/..", "/a//b"] {
            assert!(!is_normalized(bad), "{bad}");
        }
    }
}
