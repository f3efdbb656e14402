//! Commands in a box: output, exits, identity, and what they can see.

use std::os::fd::AsFd as _;
use std::time::Instant;

use crate::support::{Output, SERVERS};
use box_sys::{Guest, SandboxPlan};
use box_test_wait::LONG;

#[test]
fn a_command_runs_and_its_output_is_returned() {
    for server in SERVERS.iter() {
        let boxed = server.create_box(&SandboxPlan::default());
        assert_eq!(
            boxed.run(&["true"]),
            Output {
                code: Some(0),
                ..Output::default()
            }
        );
        let echo = boxed.sh("echo out; echo err >&2");
        assert_eq!((echo.out.as_str(), echo.err.as_str()), ("out\n", "err\n"));
    }
}

#[test]
fn exit_codes_signals_and_start_errors_are_distinguished() {
    for server in SERVERS.iter() {
        let boxed = server.create_box(&SandboxPlan::default());
        assert_eq!(boxed.sh("exit 7").code, Some(7));
        assert_eq!(boxed.sh("kill -9 $$").signal, Some(9));
        let fds = std::fs::File::open("/dev/null").unwrap();
        let fds = [std::os::fd::AsFd::as_fd(&fds); 3];
        assert_eq!(
            boxed.start(&["no-such-program"], &fds),
            Err(libc::ENOENT.into())
        );
        assert_eq!(boxed.start(&["/etc/hosts"], &fds), Err(libc::EACCES.into()));
    }
}

#[test]
fn the_guest_has_the_identity_of_the_plan() {
    for server in SERVERS.iter() {
        let guest = Guest {
            name: "ada".into(),
            home: "/home/user".into(),
            id: 1234,
            group: 1234,
        };
        let boxed = server.create_box(&SandboxPlan {
            guest,
            hostname: "lovelace".into(),
            ..SandboxPlan::default()
        });
        let output = boxed.sh("id -u; id -g; id -un; hostname; echo ~ada; touch /home/user/x && stat -c %U /home/user/x; id -G");
        assert_eq!(
            output.out.lines().take(6).collect::<Vec<_>>(),
            ["1234", "1234", "ada", "lovelace", "/home/user", "ada"]
        );
        let groups = boxed.sh("groups");
        assert_eq!(
            (groups.code, groups.err.as_str()),
            (Some(0), ""),
            "every group has a name"
        );
        let map = boxed.sh("cat /proc/self/uid_map").out;
        let map: Vec<&str> = map.split_whitespace().collect();
        // The second number is an id of the server's user namespace, which is 0 for an ordinary
        // user.
        assert_eq!(
            map,
            if server.privileged() {
                ["0", "1000000", "65536"]
            } else {
                ["1234", "0", "1"]
            }
        );
    }
}

#[test]
fn only_the_programs_of_the_host_are_visible() {
    for server in SERVERS.iter() {
        let boxed = server.create_box(&SandboxPlan::default());
        for path in [
            "/root",
            "/etc/shadow",
            "/etc/server-id",
            "/sys",
            "/boot",
            "/mnt",
            "/srv",
            "/var/log",
            "/var/lib",
            "/opt",
            "/dev/kvm",
            "/run/lock",
        ] {
            assert_ne!(boxed.run(&["test", "-e", path]).code, Some(0), "{path}");
        }
        assert_eq!(boxed.sh("ls /home").out, "box\n");
        assert_eq!(
            boxed.run(&["test", "-e", "/usr/bin/env"]).code,
            Some(0),
            "control: existing files are visible"
        );
        let dev = boxed.sh("ls /dev").out;
        assert_eq!(
            dev.split_whitespace().collect::<Vec<_>>().join(" "),
            "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
        );
    }
}

#[test]
fn a_command_has_three_descriptors_and_no_environment_of_the_host() {
    for server in SERVERS.iter() {
        let boxed = server.create_box(&SandboxPlan::default());
        assert_eq!(
            boxed.sh("ls /proc/self/fd | tr '\\n' ' '").out.trim(),
            "0 1 2 3",
            "ls itself opens one"
        );
        let env = boxed.run(&["env"]).out;
        for line in env.lines() {
            assert!(
                ["PATH=", "HOME="]
                    .iter()
                    .any(|known| line.starts_with(known)),
                "{line}"
            );
        }
        assert_eq!(boxed.sh("cat /proc/1/environ").out, "");
        assert!(
            !boxed.sh("cat /proc/1/cmdline").out.contains('/'),
            "init shows no path of the host"
        );
    }
}

#[test]
fn a_terminal_works_and_rejects_injected_input() {
    use std::os::fd::AsFd;
    for server in SERVERS.iter() {
        let boxed = server.create_box(&server.plan());
        let pty =
            rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY)
                .unwrap();
        rustix::pty::unlockpt(&pty).unwrap();
        let flags = rustix::pty::OpenptFlags::RDWR
            | rustix::pty::OpenptFlags::NOCTTY
            | rustix::pty::OpenptFlags::CLOEXEC;
        let user = rustix::pty::ioctl_tiocgptpeer(&pty, flags).unwrap();
        let pid = boxed
            .start(
                &["/bin/sh", "-c", "test -t 0 && exec /probe/probe tiocsti"],
                &[user.as_fd()],
            )
            .unwrap();
        assert_eq!(boxed.wait_exit(pid), (Some(0), None));
        let mut buffer = [0; 256];
        let length = rustix::io::read(&pty, &mut buffer).unwrap();
        assert_eq!(
            String::from_utf8_lossy(&buffer[..length]).trim(),
            format!("errno {}", libc::EPERM)
        );
    }
}

/// The guest stops a command during its start, while init is suspended.
#[test]
fn a_guest_that_stops_new_processes_does_not_block_init() {
    for server in SERVERS.iter() {
        let boxed = server.create_box(&server.plan());
        let null = std::fs::File::open("/dev/null").unwrap();
        let output = tempfile::NamedTempFile::new().unwrap();
        let written = || std::fs::read_to_string(output.path()).unwrap();
        let fds = [null.as_fd(), output.as_file().as_fd(), null.as_fd()];
        let stopper = boxed
            .start(&["/probe/probe", "stop_new_processes"], &fds)
            .unwrap();
        box_test_wait::blocking::eventually("the probe is ready", || written().contains("ready"));
        let fds = [null.as_fd(), null.as_fd(), null.as_fd()];
        let (begun, mut starts) = (Instant::now(), 0);
        // On a busy machine the probe finds few of the new processes.
        while starts < 40 || !written().contains("stopped") {
            assert!(begun.elapsed() < LONG, "control: no process was stopped");
            starts += 1;
            // A blocked init would exceed the receive timeout of the test.
            match boxed.start(&["true"], &fds) {
                Ok(pid) => {
                    boxed.kill_tree(pid);
                    boxed.wait_exit(pid);
                }
                // The watchdog resumed the process too often and killed it.
                Err(errno) => assert_eq!(errno, i64::from(libc::ETIMEDOUT)),
            }
        }
        boxed.kill_tree(stopper);
        boxed.wait_exit(stopper);
    }
}
