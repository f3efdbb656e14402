//! Hosts without a required primitive create no box and name the primitive.
//!
//! Hosts without an optional primitive create boxes that report it as missing. The tests remove
//! each primitive with a limit of an outer user namespace, or with a filter under which its system
//! call fails.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::support::{InitClient, PROGRAMS, RUN_PROGRAM, TestServer, as_ordinary_user};
use box_sys::{Error, ForkServer, SandboxPlan, ServerConfig, socket_pair};
use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, c_long, sock_filter};

/// Without spares, so that each box is created on request.
fn config() -> ServerConfig {
    ServerConfig {
        spares: 0,
        pool: 1,
        cgroup_parent: format!("box-closed-{}", std::process::id()),
        ..ServerConfig::default()
    }
}

/// Creates a box and runs a command in it. Returns the missing primitives.
fn try_create(command: Command) -> Result<Vec<String>, Error> {
    create_and_run(command, "true").map(|(missing, _)| missing)
}

/// The same, and also returns the output of a script in the box.
fn create_and_run(command: Command, script: &str) -> Result<(Vec<String>, String), Error> {
    let server = ForkServer::start_command(command, &config())?;
    let (control, far) = socket_pair().unwrap();
    let sandbox = server.create(&SandboxPlan::default(), &[far.as_fd()], &[])?;
    let client = InitClient::new(control);
    assert_eq!(client.sh("echo x > /tmp/x && cat /tmp/x").out, "x\n");
    assert_ne!(client.sh("echo x > /usr/x").code, Some(0));
    let printed = client.sh(script).out;
    let missing = sandbox.missing().to_vec();
    sandbox.destroy().unwrap();
    Ok((missing, printed))
}

/// The primitives that a server names when it refuses to start.
fn missing_at_start(command: Command) -> Vec<String> {
    match try_create(command) {
        Err(Error::Unavailable(what)) => what.split(", ").map(str::to_owned).collect(),
        other => panic!("{other:?}"),
    }
}

/// The fork server as an ordinary user, in a user namespace where `script` has run.
fn in_namespace(script: &str) -> Command {
    let unshare = Path::new("/usr/bin/unshare");
    let mut command = if rustix::process::geteuid().is_root() {
        as_ordinary_user(unshare)
    } else {
        Command::new(unshare)
    };
    command.args(["--user", "--map-root-user", "/bin/sh", "-c"]);
    command.arg(format!("set -e; {script}; exec \"$0\" \"$@\""));
    command.arg(PROGRAMS.join("server"));
    command
}

/// The fork server as root, in a user namespace where a script has run.
///
/// The limits of that namespace do not affect the host.
fn in_namespace_of_root(script: &str) -> Command {
    const ENTER: &str = r#"set -e
/usr/bin/unshare --user sleep 60 &
while [ "$(readlink /proc/$!/ns/user)" = "$(readlink /proc/self/ns/user)" ]; do sleep 0.01; done
echo '0 0 4294967295' > /proc/$!/uid_map
echo '0 0 4294967295' > /proc/$!/gid_map
exec nsenter --user --target $! /bin/sh -c "set -e; kill $!; $1"'; exec "$0" "$@"' "$0" "$2""#;
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", ENTER])
        .arg(PROGRAMS.join("server"))
        .arg(script);
    command
}

/// The fork server as the current user, under a filter in which `call` fails.
///
/// If `first` is given, it fails only with this first argument.
fn under_filter(call: c_long, first: Option<libc::c_int>, errno: i32) -> Command {
    let first = first.map(|first| (0, first));
    filtered(Command::new(RUN_PROGRAM), call, first, errno)
}

/// A command under a filter in which `call` fails, if one of its arguments has this value.
fn filtered(
    mut command: Command,
    call: c_long,
    argument: Option<(u32, libc::c_int)>,
    errno: i32,
) -> Command {
    let (load, equal) = (BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K);
    let instruction = |code: u32, jt, jf, k| sock_filter {
        code: u16::try_from(code).unwrap(),
        jt,
        jf,
        k,
    };
    let number = u32::try_from(call).unwrap();
    let answer = libc::SECCOMP_RET_ERRNO | u32::try_from(errno).unwrap();
    let program = [
        instruction(load, 0, 0, 0),
        instruction(equal, 0, 3, number),
        instruction(load, 0, 0, 16 + 8 * argument.map_or(0, |(index, _)| index)),
        match argument {
            Some((_, value)) => instruction(equal, 0, 1, u32::try_from(value).unwrap()),
            None => instruction(BPF_JMP | libc::BPF_JA, 0, 0, 0),
        },
        instruction(BPF_RET | BPF_K, 0, 0, answer),
        instruction(BPF_RET | BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    // SAFETY: makes two system calls and allocates nothing.
    unsafe { command.pre_exec(move || load_filter(&program)) };
    command
}

fn load_filter(program: &[sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).unwrap_or(0),
        filter: program.as_ptr().cast_mut(),
    };
    if !rustix::process::geteuid().is_root() {
        rustix::thread::set_no_new_privs(true)?;
    }
    // SAFETY: the program has the given length, and the kernel copies it.
    match unsafe { libc::prctl(libc::PR_SET_SECCOMP, 2, &raw const program) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[test]
fn without_a_namespace_type_no_box_is_created() {
    let control = try_create(in_namespace("true")).unwrap();
    assert!(control.contains(&"two_uids".to_owned()), "{control:?}");
    let kinds = [
        ("pid", "pid"),
        ("mnt", "mount"),
        ("net", "net"),
        ("ipc", "ipc"),
        ("uts", "uts"),
        ("cgroup", "cgroup"),
    ];
    for (file, name) in kinds {
        let limit = format!("echo 0 > /proc/sys/user/max_{file}_namespaces");
        let missing = missing_at_start(in_namespace(&limit));
        assert_eq!(missing, [format!("namespace.{name}")]);
    }
    if rustix::process::geteuid().is_root() {
        let control = try_create(in_namespace_of_root("true")).unwrap();
        assert!(!control.contains(&"two_uids".to_owned()), "{control:?}");
        for (file, name) in kinds.into_iter().chain([("user", "user")]) {
            let limit = format!("echo 0 > /proc/sys/user/max_{file}_namespaces");
            let missing = missing_at_start(in_namespace_of_root(&limit));
            assert_eq!(missing, [format!("namespace.{name}")]);
        }
    }
}

#[test]
fn without_user_namespaces_an_ordinary_user_gets_no_box() {
    let missing = missing_at_start(in_namespace("echo 0 > /proc/sys/user/max_user_namespaces"));
    // The other namespaces require it.
    assert_eq!(missing[0], "namespace.user", "{missing:?}");
    assert_eq!(missing.len(), 7, "{missing:?}");
}

#[test]
fn without_seccomp_no_box_is_created() {
    let none = under_filter(libc::SYS_seccomp, None, libc::ENOSYS);
    assert_eq!(missing_at_start(none), ["seccomp"]);
    // A kernel with seccomp that refuses filters.
    let refuses = under_filter(
        libc::SYS_seccomp,
        Some(libc::SECCOMP_SET_MODE_FILTER.cast_signed()),
        libc::EPERM,
    );
    let error = try_create(refuses).unwrap_err();
    assert!(error.to_string().contains("seccomp"), "{error}");
}

#[test]
fn without_no_new_privs_or_capability_dropping_no_box_is_created() {
    let cases = [
        (
            libc::SYS_prctl,
            Some(libc::PR_SET_NO_NEW_PRIVS),
            "no_new_privs",
        ),
        (libc::SYS_prctl, Some(libc::PR_CAPBSET_DROP), "capabilities"),
        (libc::SYS_capset, None, "capabilities"),
    ];
    for (call, first, name) in cases {
        let error = try_create(under_filter(call, first, libc::EPERM)).unwrap_err();
        assert!(error.to_string().contains(name), "{name}: {error}");
    }
}

#[test]
fn namespaces_that_cannot_be_entered_create_no_box() {
    for (call, first) in [
        (libc::SYS_setns, None),
        (libc::SYS_unshare, Some(libc::CLONE_NEWCGROUP)),
        (libc::SYS_unshare, Some(libc::CLONE_NEWNET)),
        (libc::SYS_pivot_root, None),
    ] {
        let error = try_create(under_filter(call, first, libc::EPERM)).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EPERM), "{error}");
    }
    let missing = missing_at_start(under_filter(libc::SYS_clone3, None, libc::ENOSYS));
    assert_eq!(missing.len(), 7, "{missing:?}");
}

#[test]
fn without_landlock_boxes_report_it_as_missing() {
    let landlock = "landlock".to_owned();
    let call = libc::SYS_landlock_create_ruleset;
    let without = try_create(under_filter(call, None, libc::ENOSYS)).unwrap();
    assert!(without.contains(&landlock), "{without:?}");
    // No box needs this call.
    let control = try_create(under_filter(libc::SYS_acct, None, libc::ENOSYS)).unwrap();
    let host_has_landlock = box_sys::Primitives::probe().landlock > 0;
    assert_eq!(!control.contains(&landlock), host_has_landlock, "control");
}

#[test]
fn without_cgroups_boxes_report_them_as_missing() {
    let all = ["cpu", "memory", "pids", "cpu_usage", "freeze"].map(|name| format!("cgroup.{name}"));
    let hidden = "mount -t tmpfs none /sys/fs/cgroup";
    let mut command = in_namespace(hidden);
    if rustix::process::geteuid().is_root() {
        command = Command::new("/usr/bin/unshare");
        command.args(["--mount", "/bin/sh", "-c"]);
        command.arg(format!("set -e; {hidden}; exec \"$0\" \"$@\""));
        command.arg(PROGRAMS.join("server"));
        let control = try_create(Command::new(RUN_PROGRAM)).unwrap();
        assert!(!all.iter().all(|name| control.contains(name)), "control");
    }
    let missing = try_create(command).unwrap();
    for name in all {
        assert!(missing.contains(&name), "{name}: {missing:?}");
    }
}

/// Kernels before 6.15 take no layer of an overlay by its descriptor.
#[test]
fn without_layers_by_descriptor_boxes_have_images_and_snapshots() {
    /// `FSCONFIG_SET_FD`, the second argument of `fsconfig`.
    const BY_DESCRIPTOR: (u32, libc::c_int) = (1, 5);
    let program = PROGRAMS.join("server");
    let mut commands = vec![(Command::new(&program), "other")];
    if rustix::process::geteuid().is_root() {
        commands.push((as_ordinary_user(&program), "ordinary"));
    }
    for (command, name) in commands {
        let call = libc::SYS_fsconfig;
        let command = filtered(command, call, Some(BY_DESCRIPTOR), libc::EINVAL);
        let disks = tempfile::tempdir().unwrap();
        let with_spares = ServerConfig {
            spares: 1,
            disks: Some(disks.path().to_owned()),
            ..config()
        };
        let server = ForkServer::start_command(command, &with_spares).unwrap();
        let server = TestServer::new(name, server);
        crate::layers::check_files(&server);
        crate::layers::check_most(&server);
        if server.privileged() {
            crate::disk_layers::check_shared(&server, disks.path());
        }
        drop(server);
        crate::disks::no_loops(disks.path());
    }
}

/// The fork server after a script with mounts; `true` for an ordinary user.
///
/// The list has a second entry for root if root runs the tests.
fn after_mounting(script: &str) -> Vec<(bool, Command)> {
    let unshare = Path::new("/usr/bin/unshare");
    let root = rustix::process::geteuid().is_root();
    let mut ordinary = if root {
        as_ordinary_user(unshare)
    } else {
        Command::new(unshare)
    };
    ordinary.args(["--user", "--map-root-user"]);
    let mut commands = vec![(true, ordinary)];
    if root {
        commands.push((false, Command::new(unshare)));
    }
    for (_, command) in &mut commands {
        command.args(["--mount", "/bin/sh", "-c"]);
        command.arg(format!("set -e; {script}; exec \"$0\" \"$@\""));
        command.arg(PROGRAMS.join("server"));
    }
    commands
}

/// A server and a probe without a server get the same result.
#[test]
fn without_overlays_of_all_system_directories_boxes_report_it() {
    const SCRIPT: &str = "cat /usr/local/share/made /usr/bin/factor 2>/dev/null | head -c 5";
    // The mounts, whether root and an ordinary user can then create overlays, and what a box sees.
    // The kernel refuses an ordinary user a layer with a mount in it, because the user could see
    // the files below the mount.
    let cases = [
        ("true", [true, true], "\x7fELF"),
        (
            "mount -t tmpfs none /usr/local/share; echo made > /usr/local/share/made",
            [true, false],
            "made\n",
        ),
        (
            "mount -t tmpfs none /mnt; mkdir /mnt/d; echo made > /mnt/d/made; mount --bind /mnt/d /usr/local/share",
            [true, false],
            "made\n",
        ),
        (
            "mount -t tmpfs none /mnt; echo file > /mnt/f; mount --bind /mnt/f /usr/bin/factor",
            [false, false],
            "file\n",
        ),
        // As many stacked overlays as the kernel allows.
        (
            "mount -t tmpfs none /mnt; while mount -t overlay none -o lowerdir=/usr:/mnt /usr 2> /dev/null; do :; done",
            [false, false],
            "\x7fELF",
        ),
    ];
    for (script, overlaid, sees) in cases {
        let commands = after_mounting(script).into_iter();
        for ((ordinary, command), (_, mut probe)) in commands.zip(after_mounting(script)) {
            let overlaid = overlaid[usize::from(ordinary)];
            let (missing, printed) = create_and_run(command, SCRIPT).unwrap();
            assert!(printed.starts_with(sees), "{script}: {printed:?}");
            let lacks = missing.iter().any(|name| name == "overlay");
            assert_eq!(
                lacks, !overlaid,
                "{script}: ordinary {ordinary}: {missing:?}"
            );
            let output = String::from_utf8(probe.output().unwrap().stdout).unwrap();
            let (_, named) = output.trim().split_once("missing: ").unwrap();
            let named = named.split(", ").any(|name| name == "overlay");
            assert_eq!(named, lacks, "{script}: {output}");
        }
    }
}
