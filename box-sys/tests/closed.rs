//! Fail closed: a machine that lacks what a box cannot be without makes none and says what it is; one that lacks what a box can be
//! without makes boxes that say so. Here each primitive is really taken away, one at a time: by a limit of an outer user namespace, or
//! by a filter under which the call that gives it fails.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use box_sys::{Error, ForkServer, SandboxPlan, ServerConfig, socket_pair};
use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, c_long, sock_filter};
use support::{PROGRAMS, SERVER, Talk, as_nobody};

/// Without boxes begun ahead: each is refused, or made, when it is asked for.
fn config() -> ServerConfig {
    ServerConfig {
        spares: 0,
        pool: 1,
        cgroup_parent: format!("box-closed-{}", std::process::id()),
        ..ServerConfig::default()
    }
}

/// Whether a server of this command makes a box in which a command runs; what that box goes without.
fn makes_boxes(command: Command) -> Result<Vec<String>, Error> {
    makes_box_with(command, "true").map(|(missing, _)| missing)
}

/// The same, with what a script prints in that box.
fn makes_box_with(command: Command, script: &str) -> Result<(Vec<String>, String), Error> {
    let server = ForkServer::start_command(command, &config())?;
    let (control, far) = socket_pair().unwrap();
    let sandbox = server.create(&SandboxPlan::default(), &[far.as_fd()], &[])?;
    let talk = Talk::new(control);
    assert_eq!(talk.sh("echo x > /tmp/x && cat /tmp/x").out, "x\n");
    assert_ne!(talk.sh("echo x > /usr/x").code, Some(0));
    let printed = talk.sh(script).out;
    let missing = sandbox.missing().to_vec();
    sandbox.destroy().unwrap();
    Ok((missing, printed))
}

/// What a server lacks that says so before it is asked for a box.
fn refused(command: Command) -> Vec<String> {
    match makes_boxes(command) {
        Err(Error::Unavailable(what)) => what.split(", ").map(str::to_owned).collect(),
        other => panic!("{other:?}"),
    }
}

/// The fork server as an ordinary user, in a user namespace in which `script` was run before.
fn in_namespace(script: &str) -> Command {
    let unshare = Path::new("/usr/bin/unshare");
    let mut command = if rustix::process::geteuid().is_root() {
        as_nobody(unshare)
    } else {
        Command::new(unshare)
    };
    command.args(["--user", "--map-root-user", "/bin/sh", "-c"]);
    command.arg(format!("set -e; {script}; exec \"$0\" \"$@\""));
    command.arg(PROGRAMS.join("server"));
    command
}

/// The fork server as root with all of root's ids, in a user namespace of its own where a script was run first: what is taken
/// away there is not taken from the machine.
fn in_roots_namespace(script: &str) -> Command {
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

/// The fork server as whoever runs the tests, under a filter in which `call` fails; only with this first argument, if one is given.
fn under_filter(call: c_long, first: Option<libc::c_int>, errno: i32) -> Command {
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
        instruction(load, 0, 0, 16),
        match first {
            Some(first) => instruction(equal, 0, 1, u32::try_from(first).unwrap()),
            None => instruction(BPF_JMP | libc::BPF_JA, 0, 0, 0),
        },
        instruction(BPF_RET | BPF_K, 0, 0, answer),
        instruction(BPF_RET | BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let mut command = Command::new(SERVER);
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
    // SAFETY: the program is as long as it says, and the kernel copies it.
    match unsafe { libc::prctl(libc::PR_SET_SECCOMP, 2, &raw const program) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[test]
fn without_one_kind_of_namespace_no_box_is_made() {
    let control = makes_boxes(in_namespace("true")).unwrap();
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
        let missing = refused(in_namespace(&limit));
        assert_eq!(missing, [format!("namespace.{name}")]);
    }
    if rustix::process::geteuid().is_root() {
        let control = makes_boxes(in_roots_namespace("true")).unwrap();
        assert!(!control.contains(&"two_uids".to_owned()), "{control:?}");
        for (file, name) in kinds.into_iter().chain([("user", "user")]) {
            let limit = format!("echo 0 > /proc/sys/user/max_{file}_namespaces");
            let missing = refused(in_roots_namespace(&limit));
            assert_eq!(missing, [format!("namespace.{name}")]);
        }
    }
}

#[test]
fn without_user_namespaces_an_ordinary_user_gets_no_box() {
    let missing = refused(in_namespace("echo 0 > /proc/sys/user/max_user_namespaces"));
    // The others come only together with it.
    assert_eq!(missing[0], "namespace.user", "{missing:?}");
    assert_eq!(missing.len(), 7, "{missing:?}");
}

#[test]
fn without_seccomp_no_box_is_made() {
    let none = under_filter(libc::SYS_seccomp, None, libc::ENOSYS);
    assert_eq!(refused(none), ["seccomp"]);
    // One that is there and cannot be used.
    let refuses = under_filter(
        libc::SYS_seccomp,
        Some(libc::SECCOMP_SET_MODE_FILTER.cast_signed()),
        libc::EPERM,
    );
    let error = makes_boxes(refuses).unwrap_err();
    assert!(error.to_string().contains("seccomp"), "{error}");
}

#[test]
fn without_no_new_privs_or_the_end_of_capabilities_no_box_is_made() {
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
        let error = makes_boxes(under_filter(call, first, libc::EPERM)).unwrap_err();
        assert!(error.to_string().contains(name), "{name}: {error}");
    }
}

#[test]
fn namespaces_that_can_be_made_but_not_entered_give_no_box() {
    for (call, first) in [
        (libc::SYS_setns, None),
        (libc::SYS_unshare, Some(libc::CLONE_NEWCGROUP)),
        (libc::SYS_unshare, Some(libc::CLONE_NEWNET)),
        (libc::SYS_pivot_root, None),
    ] {
        let error = makes_boxes(under_filter(call, first, libc::EPERM)).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EPERM), "{error}");
    }
    let missing = refused(under_filter(libc::SYS_clone3, None, libc::ENOSYS));
    assert_eq!(missing.len(), 7, "{missing:?}");
}

#[test]
fn without_landlock_boxes_are_made_and_say_so() {
    let landlock = "landlock".to_owned();
    let call = libc::SYS_landlock_create_ruleset;
    let without = makes_boxes(under_filter(call, None, libc::ENOSYS)).unwrap();
    assert!(without.contains(&landlock), "{without:?}");
    // A call that every box can do without.
    let control = makes_boxes(under_filter(libc::SYS_acct, None, libc::ENOSYS)).unwrap();
    let machine_has_it = box_sys::Primitives::probe().landlock > 0;
    assert_eq!(!control.contains(&landlock), machine_has_it, "control");
}

#[test]
fn without_cgroups_boxes_are_made_and_say_so() {
    let all = ["cpu", "memory", "pids", "cpu_usage", "freeze"].map(|name| format!("cgroup.{name}"));
    let hidden = "mount -t tmpfs none /sys/fs/cgroup";
    let mut command = in_namespace(hidden);
    if rustix::process::geteuid().is_root() {
        command = Command::new("/usr/bin/unshare");
        command.args(["--mount", "/bin/sh", "-c"]);
        command.arg(format!("set -e; {hidden}; exec \"$0\" \"$@\""));
        command.arg(PROGRAMS.join("server"));
        let control = makes_boxes(Command::new(SERVER)).unwrap();
        assert!(!all.iter().all(|name| control.contains(name)), "control");
    }
    let missing = makes_boxes(command).unwrap();
    for name in all {
        assert!(missing.contains(&name), "{name}: {missing:?}");
    }
}

/// The fork server as an ordinary user and, if that runs these tests, as root, where a script has mounted something; and whether it is
/// the former.
fn after_mounting(script: &str) -> Vec<(bool, Command)> {
    let unshare = Path::new("/usr/bin/unshare");
    let root = rustix::process::geteuid().is_root();
    let mut ordinary = if root {
        as_nobody(unshare)
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

/// A server and what looks at the machine without one find the same, whatever is mounted below the system directories.
#[test]
fn boxes_without_overlays_of_all_system_directories_are_made_and_say_so() {
    const LOOK: &str = "cat /usr/local/share/made /usr/bin/factor 2>/dev/null | head -c 5";
    // What is mounted; whether root and an ordinary user can make overlays then; and what a box sees there. The kernel makes no layer
    // for an ordinary user of a directory with a mount in it, because that user could look behind the mount.
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
        // As many overlays as the kernel puts on each other.
        (
            "mount -t tmpfs none /mnt; while mount -t overlay none -o lowerdir=/usr:/mnt /usr 2> /dev/null; do :; done",
            [false, false],
            "\x7fELF",
        ),
    ];
    for (script, overlaid, sees) in cases {
        let commands = after_mounting(script).into_iter();
        for ((ordinary, command), (_, mut looking)) in commands.zip(after_mounting(script)) {
            let overlaid = overlaid[usize::from(ordinary)];
            let (missing, printed) = makes_box_with(command, LOOK).unwrap();
            assert!(printed.starts_with(sees), "{script}: {printed:?}");
            let lacks = missing.iter().any(|name| name == "overlay");
            assert_eq!(
                lacks, !overlaid,
                "{script}: ordinary {ordinary}: {missing:?}"
            );
            let said = String::from_utf8(looking.output().unwrap().stdout).unwrap();
            let (_, named) = said.trim().split_once("missing: ").unwrap();
            let named = named.split(", ").any(|name| name == "overlay");
            assert_eq!(named, lacks, "{script}: {said}");
        }
    }
}
