//! Boxes of an ordinary user have limits in a delegated cgroup (`Delegate=yes`).
//!
//! The limits require cgroup version 2 with controllers. With version 1, the tests only check that
//! the program moves its processes. `cargo xtask test` also runs them on a kernel with version 2.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::support::{ORDINARY_UID, PROGRAMS};
use box_test_wait::blocking::eventually;
use rustix::process::{Pid, Signal, kill_process};

/// A cgroup that belongs to the ordinary user. Dropping it ends its processes.
struct DelegatedCgroup(PathBuf);

impl DelegatedCgroup {
    fn new(name: &str) -> Self {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mut mounts = table.lines().filter(|line| line.contains(" - cgroup2 "));
        let top = Path::new(mounts.next().unwrap().split(' ').nth(4).unwrap());
        for controller in ["+cpu", "+memory", "+pids"] {
            let _ = fs::write(top.join("cgroup.subtree_control"), controller);
        }
        let path = top.join(format!("box-group-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        for file in [
            "",
            "cgroup.procs",
            "cgroup.threads",
            "cgroup.subtree_control",
        ] {
            std::os::unix::fs::chown(path.join(file), Some(ORDINARY_UID), Some(ORDINARY_UID))
                .unwrap();
        }
        Self(path)
    }

    fn limits(&self) -> bool {
        fs::read_to_string(self.0.join("cgroup.controllers"))
            .unwrap()
            .contains("memory")
    }

    fn pids(&self, group: &str) -> Vec<i32> {
        pids_of(&self.0.join(group))
    }

    /// The cgroup of the only box.
    fn box_group(&self) -> Option<PathBuf> {
        let inside = fs::read_dir(self.0.join("box"))
            .ok()?
            .flatten()
            .map(|entry| entry.path());
        let mut boxes = inside.filter(|path| {
            path.is_dir()
                && fs::read_to_string(path.join("cgroup.procs")).is_ok_and(|pids| !pids.is_empty())
        });
        boxes.next()
    }

    /// Ends all processes in the cgroup and below.
    fn clear(&self) {
        let below = |path: &Path| {
            let entries = fs::read_dir(path).into_iter().flatten().flatten();
            let paths = entries.map(|entry| entry.path());
            paths.filter(|path| path.is_dir()).collect::<Vec<_>>()
        };
        let mut groups = vec![self.0.clone()];
        let mut at = 0;
        while let Some(group) = groups.get(at) {
            groups.extend(below(&group.clone()));
            at += 1;
        }
        // Children first.
        for group in groups.iter().rev() {
            for pid in pids_of(group) {
                let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
            }
            let _ = fs::remove_dir(group);
        }
    }

    /// Starts a box with a long-running command from a process in this cgroup.
    fn start(&self, before: &str) -> Child {
        let text = format!(
            "echo $$ > '{}/cgroup.procs'; {before} exec setpriv --reuid {ORDINARY_UID} --regid {ORDINARY_UID} --clear-groups '{}' sleep 1000",
            self.0.display(),
            PROGRAMS.join("server").display(),
        );
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &text])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }
}

impl Drop for DelegatedCgroup {
    fn drop(&mut self) {
        let is_empty = || {
            self.clear();
            !self.0.exists()
        };
        if std::thread::panicking() {
            // A second panic would hide the first message.
            let _ = is_empty();
        } else {
            eventually("all processes end", is_empty);
        }
    }
}

fn pids_of(group: &Path) -> Vec<i32> {
    let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    pids.lines().map(|pid| pid.parse().unwrap()).collect()
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_program_alone_in_its_cgroup_moves_down_and_its_boxes_have_limits() {
    assert!(rustix::process::geteuid().is_root(), "requires root");
    let group = DelegatedCgroup::new("alone");
    let child = group.start("");
    eventually("a box runs", || group.box_group().is_some());
    assert_eq!(group.pids(""), Vec::<i32>::new());
    // The server's short-lived children also appear there for a moment.
    eventually("the program and its fork server", || {
        group.pids("box-host").len() == 2
    });
    let limited = group.box_group().unwrap().join("memory.max").exists();
    assert_eq!(limited, group.limits());
    end(child);
}

#[test]
fn processes_of_other_programs_are_not_moved() {
    assert!(rustix::process::geteuid().is_root(), "requires root");
    let group = DelegatedCgroup::new("shared");
    let mut child = group.start("sleep 1000 & echo $!;");
    let other = {
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.as_mut().unwrap());
        output.read_line(&mut line).unwrap();
        line.trim().parse::<i32>().unwrap()
    };
    eventually("a box runs", || group.box_group().is_some());
    let stay = group.pids("");
    for pid in [other, i32::try_from(child.id()).unwrap()] {
        assert!(stay.contains(&pid), "{pid} stays: {stay:?}");
    }
    assert_eq!(group.pids("box-host"), Vec::<i32>::new());
    assert!(!group.box_group().unwrap().join("memory.max").exists());
    end(child);
}
