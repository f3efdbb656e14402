//! Tests of limits on a kernel that has cgroups of version 2 only, which a machine of another kind cannot show: User-mode
//! Linux, booted with this machine's root directory, read-only, as its own.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    Result,
    command::{self, Workspace},
    counts::{Counts, Runner},
};

/// The kernel, a plain program, and Debian's package of it.
const KERNEL: &str = "linux.uml";
const PACKAGE: &str = "user-mode-linux";

/// The tests, a program of `box-sys`.
const TESTS: &str = "limits";

/// Whoever hangs is ended after this many seconds; they take thirty on an idle machine.
const SECONDS: &str = "300";

/// The first process of the guest. `/dev` is of its own, so that is where temporary files go: any other directory of this
/// machine might hide the programs.
const INIT: &str = r#"#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR=/dev/shm
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
echo "guest: $(uname -sr), cgroup controllers: $(cat /sys/fs/cgroup/cgroup.controllers)"
"#;

/// Its last words: without them it would go on for ever.
const END: &str = "echo o > /proc/sysrq-trigger\nsleep 60\n";

/// Boots the guest, runs the tests in it, and adds what they report.
pub(crate) fn check(workspace: &Workspace, target: &Path, counts: &mut Counts) -> Result {
    install(workspace)?;
    let folder = target.join("guest");
    fs::create_dir_all(&folder)?;
    let init = folder.join("init");
    let tests = program(workspace)?;
    let run = format!("'{}' --test-threads 1 --color never", tests.display());
    fs::write(&init, format!("{INIT}{run}\n{END}"))?;
    command::status(workspace.program("chmod", "755").arg(&init))?;

    let mut found = Counts::default();
    command::counted(
        &mut boot(workspace, &folder, &init),
        Runner::Libtest,
        &mut found,
    )?;
    counts.add(found);
    // The guest powers itself off whatever its tests said, so its exit tells nothing.
    if found.failed > 0 || found.passed == 0 {
        return Err(format!("the guest's tests: {found}").into());
    }
    println!("guest: {found}");
    Ok(())
}

fn install(workspace: &Workspace) -> Result {
    let there = || command::succeeds(&mut workspace.program(KERNEL, "--version"));
    if there() {
        return Ok(());
    }
    if command::output(&mut workspace.program("id", "-u"))?.trim() != "0" {
        let missing = format!("`{KERNEL}` is not here; install the package {PACKAGE}");
        return Err(missing.into());
    }
    // Lists of packages that are older than the mirror name versions it has no more.
    for arguments in ["update -q", "install -qy --no-install-recommends"] {
        let mut apt = workspace.program("apt-get", arguments);
        if arguments.starts_with("install") {
            apt.arg(PACKAGE);
        }
        command::status(apt.env("DEBIAN_FRONTEND", "noninteractive"))?;
    }
    if there() {
        Ok(())
    } else {
        Err(format!("`{KERNEL}` does not run, though {PACKAGE} is installed").into())
    }
}

/// Builds the tests and says where they are.
fn program(workspace: &Workspace) -> Result<PathBuf> {
    let mut cargo = workspace.cargo("test --package box-sys --no-run --message-format json --test");
    let messages = command::output(cargo.arg(TESTS))?;
    let program = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == TESTS)
        .find_map(|message| Some(message["executable"].as_str()?.into()));
    Ok(program.ok_or_else(|| format!("cargo built no test program `{TESTS}`"))?)
}

fn boot(workspace: &Workspace, folder: &Path, init: &Path) -> std::process::Command {
    let mut guest = workspace.program("timeout", "--signal KILL");
    guest.args([SECONDS, KERNEL]).args([
        "mem=1G",
        "rootfstype=hostfs",
        "rootflags=/",
        "ro",
        "cgroup_no_v1=all",
        "con=null",
        "con0=null,fd:1",
        "quiet",
        "panic=-1",
    ]);
    guest.arg(format!("uml_dir={}", folder.display()));
    guest.arg(format!("init={}", init.display()));
    guest
}
