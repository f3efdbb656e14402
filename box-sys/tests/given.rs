//! Groups that were given to an ordinary user, as a service manager does it (`Delegate=yes`): boxes have their limits there.
//!
//! The limits themselves need cgroups of version 2 with controllers. Where those are version 1's, it is still tested that the
//! processes make room; `cargo xtask test` runs this on a kernel of the other kind, too.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use support::{NOBODY, PROGRAMS, eventually};

/// A group of the ordinary user. What is in it ends with it, also when its test fails.
struct Given(PathBuf);

impl Given {
    fn new(name: &str) -> Self {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mut mounts = table.lines().filter(|line| line.contains(" - cgroup2 "));
        let top = Path::new(mounts.next().unwrap().split(' ').nth(4).unwrap());
        for controller in ["+cpu", "+memory", "+pids"] {
            let _ = fs::write(top.join("cgroup.subtree_control"), controller);
        }
        let path = top.join(format!("box-given-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        for file in [
            "",
            "cgroup.procs",
            "cgroup.threads",
            "cgroup.subtree_control",
        ] {
            std::os::unix::fs::chown(path.join(file), Some(NOBODY), Some(NOBODY)).unwrap();
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

    /// The group of the one box there is.
    fn boxed(&self) -> Option<PathBuf> {
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

    /// Ends everything that runs in it and below, boxes included.
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
        // What is below has to go first.
        for group in groups.iter().rev() {
            for pid in pids_of(group) {
                let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
            }
            let _ = fs::remove_dir(group);
        }
    }

    /// Starts a box with a command that goes on, from a process in this group.
    fn start(&self, before: &str) -> Child {
        let text = format!(
            "echo $$ > '{}/cgroup.procs'; {before} exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups '{}' sleep 1000",
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

impl Drop for Given {
    fn drop(&mut self) {
        let is_empty = || {
            self.clear();
            !self.0.exists()
        };
        if std::thread::panicking() {
            // A second panic would hide what the first one says.
            let _ = is_empty();
        } else {
            eventually("everybody leaves", is_empty);
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
fn a_program_alone_in_its_group_moves_down_and_its_boxes_have_limits() {
    assert!(rustix::process::geteuid().is_root(), "gives a group away");
    let given = Given::new("alone");
    let child = given.start("");
    eventually("a box is there", || given.boxed().is_some());
    assert_eq!(given.pids(""), Vec::<i32>::new());
    // What the server makes ahead of time, a child of its own makes, which is there for a moment.
    eventually("the program and its fork server", || {
        given.pids("box-host").len() == 2
    });
    let limited = given.boxed().unwrap().join("memory.max").exists();
    assert_eq!(limited, given.limits());
    end(child);
}

#[test]
fn processes_of_others_are_not_moved() {
    assert!(rustix::process::geteuid().is_root(), "gives a group away");
    let given = Given::new("shared");
    let mut child = given.start("sleep 1000 & echo $!;");
    let other = {
        let mut line = String::new();
        let mut said = BufReader::new(child.stdout.as_mut().unwrap());
        said.read_line(&mut line).unwrap();
        line.trim().parse::<i32>().unwrap()
    };
    eventually("a box is there", || given.boxed().is_some());
    let stay = given.pids("");
    for pid in [other, i32::try_from(child.id()).unwrap()] {
        assert!(stay.contains(&pid), "{pid} stays: {stay:?}");
    }
    assert_eq!(given.pids("box-host"), Vec::<i32>::new());
    assert!(!given.boxed().unwrap().join("memory.max").exists());
    end(child);
}
