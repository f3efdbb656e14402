//! A box runs commands: their output, their ends, who they are and what they see.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::os::fd::AsFd as _;

use box_sys::{Guest, SandboxPlan};
use support::{MACHINES, Output};

#[test]
fn a_command_runs_and_its_output_comes_back() {
    for machine in MACHINES.iter() {
        let boxed = machine.boxed(&SandboxPlan::default());
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
fn ends_are_told_apart() {
    for machine in MACHINES.iter() {
        let boxed = machine.boxed(&SandboxPlan::default());
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
fn the_guest_is_who_the_plan_says() {
    for machine in MACHINES.iter() {
        let guest = Guest {
            name: "ada".into(),
            home: "/home/user".into(),
            id: 1234,
        };
        let boxed = machine.boxed(&SandboxPlan {
            guest,
            hostname: "lovelace".into(),
            ..SandboxPlan::default()
        });
        let said = boxed.sh("id -u; id -g; id -un; hostname; echo ~ada; touch /home/user/x && stat -c %U /home/user/x; id -G");
        assert_eq!(
            said.out.lines().take(6).collect::<Vec<_>>(),
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
        // The middle number is as the server's user namespace counts: the ordinary user's server is 0 to itself.
        assert_eq!(
            map,
            if machine.privileged() {
                ["0", "1000000", "65536"]
            } else {
                ["1234", "0", "1"]
            }
        );
    }
}

#[test]
fn nothing_of_the_machine_is_visible_but_its_programs() {
    for machine in MACHINES.iter() {
        let boxed = machine.boxed(&SandboxPlan::default());
        for path in [
            "/root",
            "/etc/shadow",
            "/etc/machine-id",
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
            "control: what is there is seen"
        );
        let dev = boxed.sh("ls /dev").out;
        assert_eq!(
            dev.split_whitespace().collect::<Vec<_>>().join(" "),
            "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
        );
    }
}

#[test]
fn a_command_gets_its_three_descriptors_and_an_empty_environment() {
    for machine in MACHINES.iter() {
        let boxed = machine.boxed(&SandboxPlan::default());
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
            "init tells no path of the machine"
        );
    }
}

#[test]
fn a_terminal_works_and_nobody_types_into_it() {
    use std::os::fd::AsFd;
    for machine in MACHINES.iter() {
        let boxed = machine.boxed(&machine.plan());
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
        assert_eq!(boxed.ended(pid), (Some(0), None));
        let mut buffer = [0; 256];
        let length = rustix::io::read(&pty, &mut buffer).unwrap();
        assert_eq!(
            String::from_utf8_lossy(&buffer[..length]).trim(),
            format!("errno {}", libc::EPERM)
        );
    }
}

/// What it stops is a command that is being started, while init is held by it.
#[test]
fn a_guest_that_stops_whoever_is_born_does_not_stop_init() {
    for machine in MACHINES.iter() {
        let boxed = machine.boxed(&machine.plan());
        let null = std::fs::File::open("/dev/null").unwrap();
        let said = tempfile::NamedTempFile::new().unwrap();
        let heard = || std::fs::read_to_string(said.path()).unwrap();
        let fds = [null.as_fd(), said.as_file().as_fd(), null.as_fd()];
        let stopper = boxed.start(&["/probe/probe", "stopper"], &fds).unwrap();
        support::eventually("it waits", || heard().contains("ready"));
        let fds = [null.as_fd(), null.as_fd(), null.as_fd()];
        for _ in 0..40 {
            // An init that was stopped as well would not answer within the limit of whoever asks.
            match boxed.start(&["true"], &fds) {
                Ok(pid) => {
                    boxed.kill_tree(pid);
                    boxed.ended(pid);
                }
                // Stopped as often as it was let go on.
                Err(errno) => assert_eq!(errno, i64::from(libc::ETIMEDOUT)),
            }
        }
        boxed.kill_tree(stopper);
        boxed.ended(stopper);
        assert!(heard().contains("stopped"), "control");
    }
}
