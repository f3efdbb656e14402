//! Tests of limits on a kernel that has cgroups of version 2 only, which a machine of another kind cannot show: User-mode
//! Linux, booted with this machine's root directory, read-only, as its own.

use std::{fs, path::Path};

use serde_json::Value;

use crate::{
    Result,
    command::{self, Workspace},
    counts::{Counts, Runner},
};

/// The kernel, a plain program.
const KERNEL: &str = "linux.uml";

/// What is needed, each with the argument that makes it do nothing, and Debian's package of it.
const PROGRAMS: [(&str, &str, &str); 3] = [
    (KERNEL, "--version", "user-mode-linux"),
    ("insmod", "--version", "kmod"),
    ("mkfs.ext4", "-V", "e2fsprogs"),
];

/// The test programs: package and name.
const LIMITS: (&str, &str) = ("box-sys", "limits");
const GIVEN: (&str, &str) = ("box-sys", "given");
const NATIVE: (&str, &str) = ("box-tests", "native");

/// The ignored test of the last one that needs a disk with quotas.
const QUOTAS: &str = "mounts::a_file_system_with_quotas_keeps_that_of_a_workspace";

/// Whoever hangs is ended after this many seconds; they take sixty on an idle machine.
const SECONDS: &str = "600";

/// Bytes of the guest's disk.
const DISK: u64 = 256 << 20;

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
for module in quota_tree quota_v2; do
    insmod /usr/lib/uml/modules/$(uname -r)/kernel/fs/quota/$module.ko
done
mkdir -p /dev/disk
mount -t ext4 -o prjquota /dev/ubda /dev/disk
chmod 1777 /dev/disk
echo "guest: $(uname -sr), cgroup controllers: $(cat /sys/fs/cgroup/cgroup.controllers)"
"#;

/// Its last words: without them it would go on for ever.
const END: &str = "echo o > /proc/sysrq-trigger\nsleep 60\n";

/// How each test program is run.
const OPTIONS: &str = "--test-threads 1 --color never";

/// Lets no test pass that is not there.
const THERE: &str = "sed 's/ 0 passed; 0 failed/ 0 passed; 1 failed/'";

/// Runs the rest of a line as an ordinary user that was given a group with every controller, in a group below that.
const AS_USER: &str = r"mkdir -p /sys/fs/cgroup/user/own
for file in . cgroup.procs cgroup.threads cgroup.subtree_control own own/cgroup.procs; do
    chown 65534:65534 /sys/fs/cgroup/user/$file
done
echo '+cpu +memory +pids' > /sys/fs/cgroup/cgroup.subtree_control
echo $$ > /sys/fs/cgroup/user/own/cgroup.procs
export BOX_SYS_TEST_PROGRAMS=/dev/shm/box-sys-tests-0
setpriv --reuid 65534 --regid 65534 --clear-groups";

/// Boots the guest, runs the tests in it, and adds what they report.
pub(crate) fn check(workspace: &Workspace, target: &Path, counts: &mut Counts) -> Result {
    install(workspace)?;
    let folder = target.join("guest");
    fs::create_dir_all(&folder)?;
    let init = folder.join("init");
    let (limits, given, native) = (
        program(workspace, LIMITS)?,
        program(workspace, GIVEN)?,
        program(workspace, NATIVE)?,
    );
    let runs = format!(
        "{limits} {OPTIONS}\n{given} {OPTIONS}\ncp {limits} /dev/shm/limits\n{AS_USER} /dev/shm/limits {OPTIONS}\n\
         TMPDIR=/dev/disk {native} {OPTIONS} --exact --ignored {QUOTAS} | {THERE}\n"
    );
    fs::write(&init, format!("{INIT}{runs}{END}"))?;
    disk(workspace, &folder)?;
    command::status(workspace.program("chmod", "755").arg(&init))?;

    let mut found = Counts::default();
    command::counted(
        &mut boot(workspace, &folder, &init),
        Runner::Libtest,
        &mut found,
    )?;
    counts.add(found);
    // The guest powers itself off whatever its tests said, so its exit tells nothing.
    if found.failed > 0 || found.passed == 0 || found.reports < 4 {
        return Err(format!("the guest's tests: {found}").into());
    }
    println!("guest: {found}");
    Ok(())
}

fn install(workspace: &Workspace) -> Result {
    let lacking = || {
        let there =
            |program, argument| command::succeeds(&mut workspace.program(program, argument));
        let lacking = PROGRAMS
            .into_iter()
            .filter(|(program, argument, _)| !there(*program, argument));
        lacking.map(|(_, _, package)| package).collect::<Vec<_>>()
    };
    let packages = lacking();
    if packages.is_empty() {
        return Ok(());
    }
    let root = command::output(&mut workspace.program("id", "-u"))?.trim() == "0";
    if root {
        // Lists of packages that are older than the mirror name versions it has no more.
        for arguments in ["update -q", "install -qy --no-install-recommends"] {
            let mut apt = workspace.program("apt-get", arguments);
            if arguments.starts_with("install") {
                apt.args(&packages);
            }
            command::status(apt.env("DEBIAN_FRONTEND", "noninteractive"))?;
        }
    }
    match lacking().as_slice() {
        [] => Ok(()),
        packages => Err(format!("missing packages: {}", packages.join(", ")).into()),
    }
}

/// Builds a test program and says where it is, quoted for a shell.
fn program(workspace: &Workspace, (package, name): (&str, &str)) -> Result<String> {
    let mut cargo = workspace.cargo("test --no-run --message-format json --package");
    let messages = command::output(cargo.args([package, "--test", name]))?;
    let program = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| Some(format!("'{}'", message["executable"].as_str()?)));
    Ok(program.ok_or_else(|| format!("cargo built no test program `{name}`"))?)
}

/// An empty disk of a file system that keeps quotas of projects.
fn disk(workspace: &Workspace, folder: &Path) -> Result {
    let path = folder.join("disk");
    fs::File::create(&path)?.set_len(DISK)?;
    let mut make = workspace.program("mkfs.ext4", "-q -O quota,project -E quotatype=prjquota");
    command::status(make.arg(path))
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
    guest.arg(format!("ubd0={}", folder.join("disk").display()));
    guest.arg(format!("uml_dir={}", folder.display()));
    guest.arg(format!("init={}", init.display()));
    guest
}
