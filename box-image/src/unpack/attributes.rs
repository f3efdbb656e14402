//! Extended attributes of entries.

use std::os::fd::OwnedFd;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

/// Attributes of users that a kernel interprets when the tree becomes part of an overlay.
const OVERLAY: &str = "user.overlay.";

/// Sets the attributes of users, and returns how many attributes were dropped.
///
/// `security.capability` would give programs rights, and `trusted.*` belongs to the host's kernel.
pub(super) fn set(file: &OwnedFd, attributes: &[(String, Vec<u8>)]) -> Result<u64, Errno> {
    let mut dropped = 0;
    for (name, value) in attributes {
        let kept = name.starts_with("user.") && !name.starts_with(OVERLAY) && !name.contains('\0');
        if !kept {
            dropped += 1;
            continue;
        }
        match rustix::fs::fsetxattr(file, name.as_str(), value, XattrFlags::empty()) {
            Ok(()) => {}
            // The disk has no attributes, or not as many.
            Err(Errno::OPNOTSUPP | Errno::NOSPC | Errno::TOOBIG | Errno::RANGE | Errno::PERM) => {
                dropped += 1;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(dropped)
}
