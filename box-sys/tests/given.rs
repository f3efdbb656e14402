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
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use support::{NOBODY, PROGRAMS, eventually};

/// A group of the ordinary user.
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

    fn pids(&self, group: &str) -> Vec<String> {
        let pids = fs::read_to_string(self.0.join(group).join("cgroup.procs")).unwrap_or_default();
        pids.lines().map(str::to_owned).collect()
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
            .spawn()
            .unwrap()
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        eventually("everybody leaves", || {
            for group in ["box", "box-host", ""] {
                let path = self.0.join(group);
                for inner in fs::read_dir(&path).into_iter().flatten().flatten() {
                    let _ = fs::remove_dir(inner.path());
                }
                let _ = fs::remove_dir(path);
            }
            !self.0.exists()
        });
    }
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
    assert_eq!(given.pids(""), Vec::<String>::new());
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
    let child = given.start("sleep 1000 &");
    eventually("a box is there", || given.boxed().is_some());
    assert_eq!(given.pids("").len(), 3, "all of them stay");
    assert!(!given.boxed().unwrap().join("memory.max").exists());
    for pid in given.pids("") {
        if pid != child.id().to_string() {
            let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
    }
    end(child);
}
