//! Who is who in a box, for programs that ask: the five small files of `/etc` that differ from box to box.

use std::fmt::Write;
use std::io;
use std::os::fd::OwnedFd;

use crate::init::process_tree::MARKS;
use crate::mounts::make_file;
use crate::plan::{Guest, SandboxPlan};

/// The files. In `/etc` there are only links to them.
pub(crate) const FILES: &[&str] = &["passwd", "group", "hosts", "hostname", "resolv.conf"];

/// Whether a box's files are those of the default plan, which are made once for all.
pub(crate) fn is_default(plan: &SandboxPlan) -> bool {
    let default = SandboxPlan::default();
    plan.guest == default.guest && plan.hostname == default.hostname
}

/// Writes them into a directory.
pub(crate) fn write(dir: &OwnedFd, guest: &Guest, hostname: &str) -> io::Result<()> {
    let line = passwd_line(guest);
    let passwd =
        format!("root:x:0:0:root:/:/bin/false\n{line}nobody:x:65534:65534:nobody:/:/bin/false\n");
    make_file(dir, "passwd", passwd.as_bytes())?;
    make_file(dir, "group", group(guest).as_bytes())?;
    let hosts = format!("127.0.0.1 localhost {hostname}\n::1 localhost {hostname}\n");
    make_file(dir, "hosts", hosts.as_bytes())?;
    make_file(dir, "hostname", format!("{hostname}\n").as_bytes())?;
    make_file(dir, "resolv.conf", resolv_conf().as_bytes())
}

/// `/etc/resolv.conf`. Whatever it names is redirected; in a box without exits nobody is there.
pub(crate) fn resolv_conf() -> String {
    format!("nameserver {}\n", crate::network::OWN_V4)
}

/// The guest's line of `/etc/passwd`.
pub(crate) fn passwd_line(guest: &Guest) -> String {
    let Guest { name, home, id } = guest;
    format!("{name}:x:{id}:{id}::{}:/bin/sh\n", home.display())
}

/// `/etc/group`. Every mark of a command has a name: a group without one makes `groups` fail, which shells call at their start.
fn group(guest: &Guest) -> String {
    let mut text = format!(
        "root:x:0:\n{}:x:{}:\nnogroup:x:65534:\n",
        guest.name, guest.id
    );
    for mark in MARKS {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "command{mark}:x:{mark}:");
    }
    text
}
