//! Restrictions of a box that the host does not have.
//!
//! Each probe also runs outside as a control, where it must have another result.

use crate::support::{SERVERS, probe_outside};

const EPERM: i32 = libc::EPERM;
const ENOSYS: i32 = libc::ENOSYS;

/// Probe, argument, and the error in a box.
const REFUSED: &[(&str, &str, i32)] = &[
    ("unshare_user", "", EPERM),
    ("unshare_net", "", EPERM),
    ("clone_user", "", EPERM),
    ("clone3", "", ENOSYS),
    ("mount", "", EPERM),
    ("umount", "", EPERM),
    ("fsopen", "", EPERM),
    ("open_tree", "", EPERM),
    ("pivot_root", "", EPERM),
    ("chroot", "", EPERM),
    ("setns", "", EPERM),
    ("keyctl", "", EPERM),
    ("add_key", "", EPERM),
    ("request_key", "", EPERM),
    ("bpf", "", EPERM),
    ("perf_event_open", "", EPERM),
    ("io_uring_setup", "", EPERM),
    ("userfaultfd", "", EPERM),
    ("ptrace_init", "", EPERM),
    ("ptrace_me", "", EPERM),
    ("process_vm_readv", "", EPERM),
    ("pidfd_getfd", "", EPERM),
    ("prlimit_init", "", EPERM),
    ("setpriority_init", "", EPERM),
    ("setpriority_group", "", EPERM),
    ("ioprio_group", "", EPERM),
    ("affinity_init", "", EPERM),
    ("sync", "", EPERM),
    ("syncfs", "", EPERM),
    ("io_setup", "", ENOSYS),
    ("huge_mmap", "", EPERM),
    ("huge_memory_file", "", EPERM),
    ("huge_shared_memory", "", EPERM),
    ("memfd_secret", "", ENOSYS),
    ("seccomp_listener", "", libc::EINVAL),
    ("attach_filter", "", EPERM),
    ("whiteout", "/tmp/box-sys-probe-h", libc::EINVAL),
    ("init_module", "", EPERM),
    ("kexec_load", "", EPERM),
    ("reboot", "", EPERM),
    ("swapon", "", EPERM),
    ("quotactl", "", EPERM),
    ("sethostname", "", EPERM),
    ("open_by_handle_at", "", EPERM),
    ("personality", "", EPERM),
    ("setgroups_none", "", EPERM),
    ("openat2", "", ENOSYS),
    ("socket", "17", libc::EAFNOSUPPORT),
    ("socket", "38", libc::EAFNOSUPPORT),
    ("socket", "40", libc::EAFNOSUPPORT),
    ("socket_raw", "", EPERM),
    ("netlink", "12", libc::EPROTONOSUPPORT),
    ("tiocsti", "", EPERM),
    ("tiocsti_high_bits", "", EPERM),
    ("tioclinux", "", EPERM),
    ("make_setuid_chmod", "/tmp/box-sys-probe-a", EPERM),
    ("make_setuid_fchmodat2", "/tmp/box-sys-probe-b", EPERM),
    ("make_setuid_open", "/tmp/box-sys-probe-c", EPERM),
    ("make_setuid_mknod", "/tmp/box-sys-probe-d", EPERM),
    ("make_device", "/tmp/box-sys-probe-e", libc::EACCES),
    (
        "fallocate_keep_size",
        "/tmp/box-sys-probe-f",
        libc::EOPNOTSUPP,
    ),
    ("reserve_by_ioctl", "/tmp/box-sys-probe-g", EPERM),
];

const NO_CONTROL: &[&str] = &["mount", "umount", "setgroups_none", "ptrace_init", "sync"];

#[test]
fn denied_calls_return_the_errors_of_the_table() {
    for server in SERVERS.iter() {
        server.on_each_root(|plan| {
            let boxed = server.create_box(plan);
            for (name, argument, errno) in REFUSED {
                assert_eq!(
                    boxed.probe(name, argument),
                    format!("errno {errno}"),
                    "{} {:?} {name} {argument}",
                    server.name,
                    plan.guest
                );
            }
        });
    }
}

#[test]
fn system_calls_return_other_results_outside_a_box() {
    let same: Vec<_> = REFUSED
        .iter()
        // These would change the host or need a terminal, so they have no control.
        .filter(|(name, ..)| !NO_CONTROL.contains(name))
        .filter(|(name, argument, errno)| probe_outside(name, argument) == format!("errno {errno}"))
        .map(|(name, argument, _)| format!("{name}{argument}"))
        .collect();
    for file in 'a'..='g' {
        let _ = std::fs::remove_file(format!("/tmp/box-sys-probe-{file}"));
    }
    // The kernel of this host also refuses these for root.
    let anyway = ["init_module", "kexec_load", "bpf", "reboot", "socket38"];
    let unexplained: Vec<_> = same
        .iter()
        .filter(|name| !anyway.contains(&name.as_str()))
        .collect();
    if rustix::process::geteuid().is_root() {
        assert!(unexplained.is_empty(), "no control for {unexplained:?}");
    }
}

#[test]
fn other_kernel_entries_are_killed() {
    for server in SERVERS.iter() {
        let boxed = server.create_box(&server.plan());
        #[cfg(target_arch = "x86_64")]
        {
            assert_eq!(boxed.probe("int80", ""), format!("signal {}", libc::SIGSYS));
            assert_eq!(boxed.probe("x32", ""), format!("signal {}", libc::SIGSYS));
            assert_ne!(
                probe_outside("int80", ""),
                format!("signal {}", libc::SIGSYS),
                "control"
            );
        }
        assert_eq!(boxed.probe("unknown", ""), format!("errno {ENOSYS}"));
        assert_eq!(
            boxed.probe("clone_plain", ""),
            "ok 0",
            "control: the probe itself works"
        );
        assert_eq!(boxed.probe("socket", "1"), "ok 3", "control");
    }
}

#[test]
fn commands_have_no_capabilities_no_new_privs_and_a_filter() {
    for server in SERVERS.iter() {
        server.on_each_root(|plan| {
            let boxed = server.create_box(plan);
            let status = boxed
                .sh("grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status | tr -d '\\t'")
                .out;
            let none = "0000000000000000";
            let expected = format!(
                "CapInh:{none}\nCapPrm:{none}\nCapEff:{none}\nCapBnd:{none}\nCapAmb:{none}\nNoNewPrivs:1\nSeccomp:2\n"
            );
            assert_eq!(status, expected, "{} {:?}", server.name, plan.guest);
        });
    }
}

#[test]
fn the_guest_cannot_access_init() {
    for server in SERVERS.iter() {
        server.on_each_root(|plan| {
            let boxed = server.create_box(plan);
            boxed.probe("kill_init", "");
            assert!(
                plan.guest.id == 0
                    || ["errno 1", "errno 22"].contains(&boxed.probe("setuid_root", "").as_str()),
                "the guest cannot take init's id"
            );
            let tries = [
                "head -c 1 PID/mem",
                "cat PID/environ",
                "ls PID/fd",
                "readlink PID/exe",
                "readlink PID/root",
                "cat PID/maps",
                "readlink PID/ns/user",
            ];
            for script in tries {
                assert_ne!(
                    boxed.sh(&script.replace("PID", "/proc/1")).code,
                    Some(0),
                    "{script}"
                );
                if script != "head -c 1 PID/mem" {
                    assert_eq!(
                        boxed.sh(&script.replace("PID", "/proc/self")).code,
                        Some(0),
                        "control: {script}"
                    );
                }
            }
            assert_eq!(boxed.run(&["true"]).code, Some(0), "init still runs");
        });
    }
}

/// The kernel delivers a guest's signal to pid 1 only if pid 1 handles it.
#[test]
fn signals_and_affinity_do_not_reach_init_or_its_threads() {
    let caught = |status: &str| {
        let mask = status
            .lines()
            .find_map(|line| line.strip_prefix("SigCgt:"))
            .unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap()
    };
    let this = std::fs::read_to_string("/proc/self/status").unwrap();
    assert_ne!(
        caught(&this),
        0,
        "control: the standard library handles some"
    );
    let all = rustix::thread::sched_getaffinity(None).unwrap().count();
    for server in SERVERS.iter() {
        server.on_each_root(|plan| {
            let boxed = server.create_box(plan);
            let init = boxed.sh("cat /proc/1/status").out;
            assert_eq!(caught(&init), 0, "{}", server.name);
            let output = boxed.probe("signal_init", "2000");
            assert!(output.starts_with("ok "), "{}: {output}", server.name);
            let threads = boxed.sh("ls /proc/1/task").out;
            assert!(threads.lines().count() > 1, "control: {threads}");
            let chosen = || boxed.sh("grep -h Cpus_allowed: /proc/1/task/*/status").out;
            let before = chosen();
            for thread in threads.lines() {
                let output = boxed.probe("affinity", thread);
                // With one user id, the call succeeds without effect. For the main thread, every box
                // refuses it.
                let unchanged = !server.privileged() && thread != "1";
                let wanted = if unchanged {
                    format!("ok {all}")
                } else {
                    format!("errno {EPERM}")
                };
                assert_eq!(output, wanted, "{} {thread}", server.name);
            }
            assert_eq!(chosen(), before, "{}", server.name);
            assert_eq!(boxed.probe("affinity", "0"), "ok 1", "control");
            // Programs that pin threads by their ids continue, with or without effect.
            let pinned = boxed.sh("taskset -p ffffffff $$");
            assert_eq!(pinned.code, Some(0), "{}: {pinned:?}", server.name);
            assert_eq!(boxed.run(&["true"]).code, Some(0), "init still runs");
        });
    }
    assert_eq!(probe_outside("affinity", "0"), "ok 1", "control");
}

/// No memory limit counts these connections and buffers, so Box limits them itself.
#[test]
fn backlogs_and_receive_buffers_are_limited() {
    let most = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    if most.trim().parse::<u32>().unwrap() >= 300 {
        assert_eq!(probe_outside("backlog", "300"), "ok 300", "control");
    }
    assert_eq!(probe_outside("receive_buffer", ""), "ok 1", "control");
    for server in SERVERS.iter() {
        let boxed = server.create_box(&server.plan());
        // The kernel allows one more connection than the backlog.
        assert_eq!(boxed.probe("backlog", "300"), "ok 129", "{}", server.name);
        assert_eq!(boxed.probe("receive_buffer", ""), "ok 0");
    }
}

#[test]
fn the_network_has_only_loopback() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    assert_eq!(
        probe_outside("connect", &address),
        "ok 0",
        "control: the listener works"
    );
    for server in SERVERS.iter() {
        let boxed = server.create_box(&server.plan());
        assert_eq!(
            boxed.probe("connect", &address),
            format!("errno {}", libc::ECONNREFUSED)
        );
        assert_eq!(
            boxed.probe("connect", "10.1.2.3:80"),
            format!("errno {}", libc::ENETUNREACH)
        );
        let names = boxed
            .sh("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")
            .out;
        assert_eq!(names, "lo\n");
    }
}

#[test]
fn kernel_files_are_masked_and_settings_read_only() {
    for server in SERVERS.iter() {
        server.on_each_root(|plan| {
        let boxed = server.create_box(plan);
        for file in [
            "kallsyms",
            "keys",
            "cmdline",
            "config.gz",
            "kcore",
            "kmsg",
            "timer_list",
            "sysrq-trigger",
        ] {
            assert_eq!(
                boxed.sh(&format!("head -c 1 /proc/{file}")).out,
                "",
                "{file}"
            );
        }
        assert!(
            !boxed.sh("cat /proc/meminfo").out.is_empty(),
            "control: the rest is readable"
        );
        let open = "for f in $(find /proc/sys -type f 2>/dev/null); do (: >> $f) 2>/dev/null && echo $f; done; true";
        assert_eq!(boxed.sh(open).out, "", "{}", server.name);
        });
    }
}
