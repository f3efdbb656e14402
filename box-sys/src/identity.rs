//! The five files of `/etc` that differ between boxes: users, groups and names.

use std::fmt::Write;
use std::io;
use std::os::fd::OwnedFd;

use crate::init::process_tree::MARKS;
use crate::mounts::create_file;
use crate::plan::{Guest, SandboxPlan};

/// File names. `/etc` contains links to them.
pub(crate) const FILES: &[&str] = &["passwd", "group", "hosts", "hostname", "resolv.conf"];

/// Whether the box uses the shared identity files of the default plan.
pub(crate) fn is_default(plan: &SandboxPlan) -> bool {
    let default = SandboxPlan::default();
    plan.guest == default.guest && plan.hostname == default.hostname
}

/// Writes the files into a directory.
pub(crate) fn write(dir: &OwnedFd, guest: &Guest, hostname: &str) -> io::Result<()> {
    let line = passwd_line(guest);
    let passwd =
        format!("root:x:0:0:root:/:/bin/false\n{line}nobody:x:65534:65534:nobody:/:/bin/false\n");
    create_file(dir, "passwd", passwd.as_bytes())?;
    create_file(dir, "group", group(guest).as_bytes())?;
    let hosts = format!("127.0.0.1 localhost {hostname}\n::1 localhost {hostname}\n");
    create_file(dir, "hosts", hosts.as_bytes())?;
    create_file(dir, "hostname", format!("{hostname}\n").as_bytes())?;
    create_file(dir, "resolv.conf", resolv_conf().as_bytes())
}

/// Content of `/etc/resolv.conf`.
///
/// The packet filter redirects DNS queries. In a box without egress no socket answers.
pub(crate) fn resolv_conf() -> String {
    format!("nameserver {}\n", crate::network::OWN_V4)
}

/// The guest's line in `/etc/passwd`.
pub(crate) fn passwd_line(guest: &Guest) -> String {
    let Guest {
        name,
        home,
        id,
        group,
    } = guest;
    format!("{name}:x:{id}:{group}::{}:/bin/sh\n", home.display())
}

/// Content of `/etc/group`, with a name for every command mark.
///
/// Shells call `groups` at start, and it fails for a group without a name.
fn group(guest: &Guest) -> String {
    let mut text = format!(
        "root:x:0:\n{}:x:{}:\nnogroup:x:65534:\n",
        guest.name, guest.group
    );
    for mark in MARKS {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "command{mark}:x:{mark}:");
    }
    text
}
