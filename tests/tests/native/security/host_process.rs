//! A runtime in a separate process, which the test can give things to leak, count, and kill.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use box_protocol::BoxExecutionResult;
use box_tests::machine::{Machine, PROGRAM};
use serde_json::{Value, json};

/// The process, which is killed on drop.
pub(super) struct HostProcess {
    child: Child,
    ask: ChildStdin,
    stdout_lines: BufReader<ChildStdout>,
    /// The cgroup parent of its boxes.
    pub(super) parent: String,
}

impl HostProcess {
    /// Starts a runtime with boxes like the machine's and with these environment variables.
    pub(super) fn start(machine: &Machine, env: &[(&str, &str)]) -> Self {
        Self::start_with(machine, env, None)
    }

    /// As [`Self::start`], with a directory for the disk data of boxes.
    pub(super) fn start_with(
        machine: &Machine,
        env: &[(&str, &str)],
        state: Option<&std::path::Path>,
    ) -> Self {
        let parent = machine.config().cgroup_parent;
        let how = json!({"user": machine.user(), "parent": parent, "state": state});
        let mut child = Command::new(&*PROGRAM)
            .args(["hold", &how.to_string()])
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            ask: child.stdin.take().unwrap(),
            stdout_lines: BufReader::new(child.stdout.take().unwrap()),
            child,
            parent,
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn call(&mut self, what: &Value) -> Value {
        writeln!(self.ask, "{what}").unwrap();
        let mut line = String::new();
        self.stdout_lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// Runs a command in one of its boxes.
    pub(super) fn exec(&mut self, spec: &Value) -> BoxExecutionResult {
        let result = self.call(&json!({"exec": {"spec": spec}}));
        serde_json::from_value(result.clone()).unwrap_or_else(|_| panic!("{result}"))
    }

    /// Deletes one of its boxes.
    pub(super) fn delete(&mut self, session: &str) {
        let asked = json!({"box_id": session, "force": true});
        assert_eq!(self.call(&json!({"delete": asked})), json!("deleted"));
    }

    /// The number of its descriptors.
    pub(super) fn descriptors(&self) -> usize {
        let all = std::fs::read_dir(format!("/proc/{}/fd", self.pid()));
        all.unwrap().count()
    }

    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
