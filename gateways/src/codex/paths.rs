//! URIs of files: `file:///path`, percent-encoded.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// The characters that a path of a URI does not hold.
const ENCODED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'\\')
    .add(b'`')
    .add(b'{')
    .add(b'}');

/// An absolute path in the box, without empty, `.` and `..` components.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FilePath(pub(super) String);

impl FilePath {
    /// Parses a URI.
    fn of_uri(uri: &str) -> Result<Self, String> {
        let rest = uri.strip_prefix("file:").ok_or_else(|| {
            format!("{uri:?} is not a file URI; send file:///path, an absolute path of the box")
        })?;
        let path = match rest.strip_prefix("//") {
            Some(rest) => rest.strip_prefix("localhost").unwrap_or(rest),
            None => rest,
        };
        if !(path.is_empty() || path.starts_with('/')) {
            return Err(format!(
                "{uri:?} names a host or a relative path; send file:///path"
            ));
        }
        if path.contains(['?', '#']) {
            return Err(format!("{uri:?} has a query or a fragment; encode ? and #"));
        }
        let decoded = percent_decode_str(path).decode_utf8();
        let decoded = decoded.map_err(|_| format!("{uri:?} is not UTF-8; rename the file"))?;
        if decoded.contains('\0') {
            return Err(format!("{uri:?} contains NUL; no file has such a name"));
        }
        Ok(Self::normalized(&decoded))
    }

    /// Removes empty, `.` and `..` components of an absolute path.
    pub(super) fn normalized(path: &str) -> Self {
        let mut parts = Vec::new();
        for part in path.split('/') {
            match part {
                "" | "." => {}
                ".." => drop(parts.pop()),
                part => parts.push(part),
            }
        }
        Self(format!("/{}", parts.join("/")))
    }

    /// Returns the path and the directories above it, from the top.
    pub(super) fn prefixes(&self) -> Vec<String> {
        let ends = self.0.match_indices('/').skip(1).map(|(index, _)| index);
        let ends = ends.chain((self.0.len() > 1).then_some(self.0.len()));
        ends.map(|end| self.0[..end].to_owned()).collect()
    }
}

/// Returns the URI of a path in the box.
pub(super) fn uri_of(path: &str) -> String {
    format!("file://{}", utf8_percent_encode(path, ENCODED))
}

impl<'de> Deserialize<'de> for FilePath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let uri = String::deserialize(deserializer)?;
        Self::of_uri(&uri).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_and_paths_match() {
        for (uri, path) in [
            ("file:///a/b%20c", "/a/b c"),
            ("file:///a/./../b//c/", "/b/c"),
            ("file://localhost/a", "/a"),
            ("file:///../..", "/"),
            ("file:", "/"),
            ("file:///%C3%A4%25%3F%23", "/ä%?#"),
        ] {
            let read = FilePath::of_uri(uri).unwrap();
            assert_eq!(read.0, path);
            assert_eq!(FilePath::of_uri(&uri_of(path)).unwrap(), read, "{path}");
        }
        for bad in [
            "/a",
            "",
            "a",
            "http://x/y",
            "file://host/a",
            "file:a",
            "file:///%00",
            "file:///%ff",
            "file:///a?b",
        ] {
            assert!(FilePath::of_uri(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn prefixes_lead_to_the_path() {
        let prefixes = |uri| FilePath::of_uri(uri).unwrap().prefixes();
        assert_eq!(prefixes("file:///a/b"), ["/a", "/a/b"]);
        assert_eq!(prefixes("file:///"), [""; 0]);
    }
}
