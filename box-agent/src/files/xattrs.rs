//! Extended attributes of the namespace `user`.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd as _};

use box_protocol::{BoxError, Code};
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::error::PathContext;

/// The namespace in which a guest may set attributes.
const NAMESPACE: &str = "user.";

/// Maximum bytes of the names and values of one file. Many file systems accept no more.
const FILE_BYTES: usize = 4096;

/// Maximum bytes of a name, as in the kernel.
const NAME_BYTES: usize = 255;

/// Checks attributes of a request.
pub(super) fn check(xattrs: &BTreeMap<String, String>) -> Result<(), BoxError> {
    let invalid = |why: String| Err(BoxError::validation(format!("xattrs: {why}")));
    let max = NAME_BYTES - NAMESPACE.len();
    for name in xattrs.keys() {
        if name.is_empty() || name.len() > max || name.contains('\0') {
            return invalid(format!(
                "a name must have 1 to {max} bytes and no NUL; shorten it"
            ));
        }
    }
    let bytes = bytes(xattrs);
    if bytes > FILE_BYTES {
        return invalid(format!(
            "{bytes} bytes of names and values; at most {FILE_BYTES} are allowed"
        ));
    }
    Ok(())
}

/// Returns the bytes that count against the limits.
pub(super) fn bytes(xattrs: &BTreeMap<String, String>) -> usize {
    let each = xattrs.iter();
    each.map(|(name, value)| NAMESPACE.len() + name.len() + value.len())
        .sum()
}

/// Sets attributes of an open file.
pub(super) fn set(
    file: impl AsFd,
    xattrs: &BTreeMap<String, String>,
    path: &str,
) -> Result<(), BoxError> {
    for (name, value) in xattrs {
        let name = format!("{NAMESPACE}{name}");
        let set = rustix::fs::fsetxattr(&file, name, value.as_bytes(), XattrFlags::empty());
        if matches!(set, Err(Errno::OPNOTSUPP)) {
            let message =
                format!("xattrs: the file system of {path} has no extended attributes; omit them");
            return Err(BoxError::new(Code::Unsupported, message));
        }
        set.with_path(path)?;
    }
    Ok(())
}

/// Reads the attributes of a file; of an entry of a directory if `name` is not empty.
///
/// Without the right to read them, or with more than the limit, the file has none.
pub(super) fn read(dir: impl AsFd, name: &str) -> BTreeMap<String, String> {
    let mut path = format!("/proc/self/fd/{}", dir.as_fd().as_raw_fd());
    let mut names = [0; FILE_BYTES];
    // The path of a descriptor is a link, and that of an entry must not be one.
    let listed = if name.is_empty() {
        rustix::fs::listxattr(&path, &mut names)
    } else {
        path = format!("{path}/{name}");
        rustix::fs::llistxattr(&path, &mut names)
    };
    let Ok(length @ 1..) = listed else {
        return BTreeMap::new();
    };
    let mut found = BTreeMap::new();
    for full in names[..length].split(|byte| *byte == 0) {
        let Some(short) = std::str::from_utf8(full)
            .ok()
            .and_then(|full| full.strip_prefix(NAMESPACE))
        else {
            continue;
        };
        let mut value = [0; FILE_BYTES];
        let read = if name.is_empty() {
            rustix::fs::getxattr(&path, full, &mut value)
        } else {
            rustix::fs::lgetxattr(&path, full, &mut value)
        };
        let length = match read {
            Ok(length) => length,
            Err(Errno::RANGE) => return BTreeMap::new(),
            Err(_) => continue,
        };
        if let Ok(value) = std::str::from_utf8(&value[..length]) {
            found.insert(short.to_owned(), value.to_owned());
        }
    }
    if bytes(&found) > FILE_BYTES {
        return BTreeMap::new();
    }
    found
}
