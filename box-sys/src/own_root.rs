//! A user namespace in which this process is root, and its user the only one.

use std::fs;

use crate::error::{At as _, Result};
use crate::raw;

/// Gives this process the rights over all files of its user and group, whatever their modes.
///
/// The process must have one thread. Root has these rights already.
pub fn own_all_files() -> Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    enter(0)
}

/// Enters new namespaces of these kinds, and a user namespace that owns them.
pub(crate) fn enter(kinds: libc::c_int) -> Result<()> {
    let (uid, gid) = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    raw::unshare(libc::CLONE_NEWUSER | kinds).at("unshare the user namespace")?;
    // The kernel requires this order: it refuses a group map (EPERM) while groups could still be
    // dropped.
    fs::write("/proc/self/setgroups", "deny").at("deny setgroups")?;
    fs::write("/proc/self/uid_map", format!("0 {uid} 1")).at("map the user")?;
    fs::write("/proc/self/gid_map", format!("0 {gid} 1")).at("map the group")
}
