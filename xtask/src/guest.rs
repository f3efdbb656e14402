//! Tests on a Debian kernel in an emulator, with this machine's root read-only.
//!
//! The kernel has only cgroups of version 2 and a complete packet filter, which the machine of a developer may lack.
//! The emulator interprets every instruction, because virtualisation needs a processor that permits it.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    Result,
    command::{self, Workspace},
    counts::{Counts, Runner},
    tools,
};

/// The programs that this step needs.
const PROGRAMS: [tools::Needed; 4] = [
    ("qemu-system-x86_64", "--version", "qemu-system-x86"),
    ("busybox", "true", "busybox-static"),
    ("modprobe", "--version", "kmod"),
    ("mkfs.ext4", "-V", "e2fsprogs"),
];

/// The test programs.
const UNITS: &str = "box_sys";
const SYS: &str = "sys";
const NATIVE: &str = "native";

/// The ignored test that needs a disk with quotas.
const QUOTAS: &str = "mounts::a_file_system_with_quotas_keeps_that_of_a_workspace";

/// The timeout of the guest in seconds; the tests take a hundred on an idle machine and several hundred beside other steps.
const SECONDS: &str = "2400";

/// The size of the guest's disk in bytes.
const DISK: u64 = 256 << 20;

/// The kernel modules that the guest needs to read this machine's files.
const MODULES: &str = "9p 9pnet_virtio virtio_pci virtio_blk";

/// The guest's first process, which switches to this machine's root.
const FIRST: &str = r"#!/bin/busybox sh
for module in /modules/*; do
    /bin/busybox insmod $module
done
/bin/busybox mount -t 9p -o trans=virtio,ro,version=9p2000.L,msize=500000,cache=loose root /root
/bin/busybox mount -t devtmpfs dev /root/dev
exec /bin/busybox switch_root /root ";

/// The guest's init script on this machine's root.
///
/// Temporary files are in `/dev`, which the guest mounts itself: any other directory might hide the test programs.
const INIT: &str = r"#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR=/dev/shm
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /dev/pts /dev/shm /dev/disk
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
for module in ext4 quota_v2 overlay nft_chain_nat nft_redir nft_reject_inet nft_queue nfnetlink_queue; do
    modprobe --dirname '{kernel}' $module
done
mount -t ext4 -o prjquota /dev/vda /dev/disk
chmod 1777 /dev/disk
echo guest: $(uname -sr), cgroup controllers: $(cat /sys/fs/cgroup/cgroup.controllers)
";

/// Powers the guest off; otherwise it would run until the timeout.
const END: &str = "echo o > /proc/sysrq-trigger\nsleep 60\n";

/// The options of each test program.
const OPTIONS: &str = "--test-threads 1 --color never";

/// Turns a run without tests into a failure.
const THERE: &str = "sed 's/ 0 passed; 0 failed/ 0 passed; 1 failed/'";

/// Runs the rest of a line as an unprivileged user in a delegated cgroup.
const AS_USER: &str = r"mkdir -p /sys/fs/cgroup/user/own
for file in . cgroup.procs cgroup.threads cgroup.subtree_control own own/cgroup.procs; do
    chown 65534:65534 /sys/fs/cgroup/user/$file
done
echo '+cpu +memory +pids' > /sys/fs/cgroup/cgroup.subtree_control
echo $$ > /sys/fs/cgroup/user/own/cgroup.procs
export BOX_SYS_TEST_PROGRAMS=$(echo /dev/shm/box-sys-tests-0-*)
setpriv --reuid 65534 --regid 65534 --clear-groups";

/// Boots the guest, runs the tests in it, and adds their counts.
pub(crate) fn check(workspace: &Workspace, target: &Path, counts: &mut Counts) -> Result {
    tools::programs(workspace, &PROGRAMS)?;
    let folder = target.join("guest");
    fs::create_dir_all(&folder)?;
    let init = folder.join("init");
    let programs = Programs::build(workspace)?;
    let (units, sys, native) = (
        programs.path(UNITS)?,
        programs.path(SYS)?,
        programs.path(NATIVE)?,
    );
    let runs = format!(
        "{units} {OPTIONS} network:: | {THERE}\n\
         {sys} {OPTIONS} limits:: | {THERE}\n\
         {sys} {OPTIONS} delegated_cgroups:: | {THERE}\n\
         cp {sys} /dev/shm/sys\n\
         {AS_USER} /dev/shm/sys {OPTIONS} limits:: | {THERE}\n\
         TMPDIR=/dev/disk {native} {OPTIONS} --exact --ignored {QUOTAS} | {THERE}\n"
    );
    let kernel = Kernel::get(workspace, &folder)?;
    let first = INIT.replace("{kernel}", &kernel.files.display().to_string());
    executable(&init, &format!("{first}{runs}{END}"))?;
    kernel.root_of(workspace, &folder, &init)?;
    disk(workspace, &folder)?;

    let mut found = Counts::default();
    let mut guest = kernel.boot(workspace, &folder);
    command::counted(&mut guest, Runner::Libtest, &mut found)?;
    counts.add(found);
    // The guest powers off regardless of the test results, so its exit status has no meaning.
    if found.failed > 0 || found.passed == 0 || found.reports < 5 {
        return Err(format!("the guest's tests: {found}").into());
    }
    println!("guest: {found}");
    Ok(())
}

/// The test programs of the workspace, as cargo reports them.
///
/// The step builds all of them, as the tests do: for a selection, cargo would choose other features and rebuild the
/// dependencies.
struct Programs(Vec<Value>);

impl Programs {
    fn build(workspace: &Workspace) -> Result<Self> {
        let build =
            "test --workspace --all-targets --no-run --message-format json-render-diagnostics";
        let messages = command::output(&mut workspace.cargo(build))?;
        let messages = messages
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        Ok(Self(messages.collect()))
    }

    /// Returns the path of a test program, quoted for a shell.
    fn path(&self, name: &str) -> Result<String> {
        let tests = self.0.iter().filter(|message| {
            message["target"]["name"] == name && message["profile"]["test"] == true
        });
        let mut paths = tests.filter_map(|message| message["executable"].as_str());
        let path = paths.next();
        Ok(path
            .map(|path| format!("'{path}'"))
            .ok_or_else(|| format!("cargo built no test program `{name}`"))?)
    }
}

/// Creates an empty disk with a file system that supports project quotas.
fn disk(workspace: &Workspace, folder: &Path) -> Result {
    let path = folder.join("disk");
    fs::File::create(&path)?.set_len(DISK)?;
    let mut make = workspace.program("mkfs.ext4", "-q -O quota,project -E quotatype=prjquota");
    command::status(make.arg(path))
}

/// A kernel and its modules, from a package that is unpacked and not installed.
struct Kernel {
    files: PathBuf,
    version: String,
}

impl Kernel {
    fn get(workspace: &Workspace, folder: &Path) -> Result<Self> {
        let depends =
            command::output(&mut workspace.program("apt-cache", "depends linux-image-amd64"))?;
        let package = depends
            .lines()
            .find_map(|line| line.trim().strip_prefix("Depends: "))
            .ok_or("there is no kernel among Debian's packages")?;
        let version = package.trim_start_matches("linux-image-").to_owned();
        let files = folder.join(package);
        let there = files.join("complete");
        if !there.is_file() {
            fs::create_dir_all(&files)?;
            let mut download = workspace.program("apt-get", "download -q");
            command::status(download.arg(package).current_dir(&files))?;
            for archive in fs::read_dir(&files)? {
                let mut unpack = workspace.program("dpkg-deb", "-x");
                command::status(unpack.arg(archive?.path()).arg(&files))?;
            }
            let mut index = workspace.program("depmod", "--basedir");
            command::status(index.arg(&files).arg(&version))?;
            fs::write(there, "")?;
        }
        Ok(Self { files, version })
    }

    /// Creates the guest's initial root: a shell, kernel modules and the init script.
    fn root_of(&self, workspace: &Workspace, folder: &Path, init: &Path) -> Result {
        let root = folder.join("root");
        if root.exists() {
            fs::remove_dir_all(&root)?;
        }
        for name in ["bin", "modules", "root"] {
            fs::create_dir_all(root.join(name))?;
        }
        let busybox = command::output(workspace.program("sh", "-c").arg("command -v busybox"))?;
        fs::copy(busybox.trim(), root.join("bin/busybox"))?;
        let mut depends = workspace.program("modprobe", "--show-depends --all --set-version");
        depends.arg(&self.version).arg("--dirname").arg(&self.files);
        let depends = command::output(depends.args(MODULES.split(' ')))?;
        let mut modules: Vec<&str> = Vec::new();
        for line in depends.lines() {
            let module = line.trim().trim_start_matches("insmod ");
            if !modules.contains(&module) {
                modules.push(module);
            }
        }
        for (number, module) in modules.iter().enumerate() {
            fs::copy(module, root.join(format!("modules/{number:03}")))?;
        }
        executable(&root.join("init"), &format!("{FIRST}{}\n", init.display()))?;
        let pack = "find . | busybox cpio -o -H newc > ../root.cpio";
        command::status(workspace.program("sh", "-c").arg(pack).current_dir(&root))
    }

    fn boot(&self, workspace: &Workspace, folder: &Path) -> std::process::Command {
        let mut guest = workspace.program("timeout", "--signal KILL");
        guest.args([SECONDS, "qemu-system-x86_64"]);
        guest.args(
            "-accel tcg -cpu max -m 1G -nodefaults -nographic -no-reboot -serial stdio".split(' '),
        );
        let image = format!("boot/vmlinuz-{}", self.version);
        guest.arg("-kernel").arg(self.files.join(image));
        guest.arg("-initrd").arg(folder.join("root.cpio"));
        guest.args([
            "-append",
            "console=ttyS0 loglevel=0 panic=-1 cgroup_no_v1=all",
        ]);
        let tree = "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap";
        guest.args(["-virtfs", tree]);
        let disk = folder.join("disk");
        guest.args([
            "-drive",
            &format!("if=virtio,format=raw,file={}", disk.display()),
        ]);
        guest
    }
}

fn executable(path: &Path, script: &str) -> Result {
    fs::write(path, script)?;
    Ok(fs::set_permissions(
        path,
        fs::Permissions::from_mode(0o755),
    )?)
}
