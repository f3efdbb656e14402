//! The `COPY` step of a build, with the rules of a Dockerfile.

use box_protocol::Invalid;

use super::error::ApiError;
use super::spec::HOME;

/// Copies the files of an archive ($1) to their place.
///
/// $2 is a file or directory of the archive, $3 the place, $4 the mode of files and $5 that of directories. `tar` merges a
/// directory into an existing one. It replaces links to files, and `cp` would write through them. Not every `tar` has
/// the options that keep existing directories and links to them.
const SCRIPT: &str = r#"set -e -o pipefail
dir=$(mktemp -d); chmod 755 "$dir"; tar -xopf "$1" -C "$dir"; rm "$1"
from=$dir/$2 to=$3
if [ ! -e "$from" ] && [ ! -L "$from" ]; then echo "COPY: $2 does not exist" >&2; exit 1; fi
if [ -n "$4" ]; then
  shopt -s globstar dotglob nullglob
  for path in "$from" "$from"/**; do
    if [ -L "$path" ]; then continue; fi
    if [ -d "$path" ]; then chmod "$5" "$path"; else chmod "$4" "$path"; fi
  done
fi
if [ -d "$from" ] && [ ! -L "$from" ]; then
  keep=
  case $(tar --help 2>&1) in *--keep-directory-symlink*) keep="--keep-directory-symlink --no-overwrite-dir";; esac
  mkdir -p "$to"; tar -cf - -C "$from" . | tar -xopf - -C "$to" $keep
else
  case $to in */) mkdir -p "$to";; *) mkdir -p "$(dirname "$to")";; esac
  mv -f "$from" "$to"
fi
chmod -R u+rwx "$dir"; rm -rf "$dir""#;

/// Returns the words of the command that copies files out of an archive in the box.
///
/// The arguments of the step are the source, the target, the owner and the mode. A box has one user, so the owner has no
/// effect.
pub(super) fn command(archive: &str, args: &[String], cwd: &str) -> Result<Vec<String>, ApiError> {
    let arg = |at: usize| args.get(at).map(String::as_str).unwrap_or_default();
    let target = match arg(1).strip_prefix('~') {
        Some(rest) => format!("{HOME}{rest}"),
        None if arg(1).starts_with('/') => arg(1).to_owned(),
        None => format!("{cwd}/{}", arg(1)),
    };
    let (files, directories) = modes(arg(3))?;
    let words = [
        "/bin/bash",
        "-c",
        SCRIPT,
        "copy",
        archive,
        &source(arg(0)),
        &target,
        &files,
        &directories,
    ];
    Ok(words.map(str::to_owned).into())
}

/// Returns the file or directory of the archive that a pattern is about.
///
/// The client has applied the pattern, so the archive has only what matches. What matches is copied with the names below
/// the directory in front of the first part with a wildcard.
fn source(pattern: &str) -> String {
    let parts = pattern.split('/').filter(|part| !part.is_empty());
    let parts = parts.take_while(|part| !part.contains(['*', '?', '[', '{']));
    let source: Vec<&str> = parts.collect();
    if source.is_empty() {
        return ".".to_owned();
    }
    source.join("/")
}

/// Returns the modes of files and of directories, which stay usable for users that can read them.
fn modes(mode: &str) -> Result<(String, String), Invalid> {
    if mode.is_empty() {
        return Ok((String::new(), String::new()));
    }
    let bits = u32::from_str_radix(mode, 8).ok();
    let bits = bits.filter(|bits| *bits <= 0o7777).ok_or_else(|| {
        let rule = format!("the mode {mode:?} of COPY must be octal, such as 0755");
        Invalid::new("steps", rule)
    })?;
    let directories = bits | (bits & 0o444) >> 2;
    Ok((format!("{bits:04o}"), format!("{directories:04o}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_about_the_directory_in_front_of_it() {
        for (pattern, expected) in [
            ("a b.txt", "a b.txt"),
            ("folder/", "folder"),
            ("folder/*", "folder"),
            ("a/b/**/c?", "a/b"),
            ("*.txt", "."),
            (".", "."),
        ] {
            assert_eq!(source(pattern), expected, "{pattern}");
        }
    }

    #[test]
    fn directories_stay_usable() {
        let both = |files: &str, directories: &str| (files.to_owned(), directories.to_owned());
        assert_eq!(modes("0644").unwrap(), both("0644", "0755"));
        assert_eq!(modes("755").unwrap(), both("0755", "0755"));
        assert_eq!(modes("0600").unwrap(), both("0600", "0700"));
        assert_eq!(modes("").unwrap(), both("", ""));
        assert!(modes("rwx").is_err() && modes("77777").is_err());
    }
}
