//! An SDK in a Python process, which times calls on request.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::packages::{python, script};

/// A process with an SDK. It ends when it is dropped.
pub(super) struct Sdk {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Sdk {
    /// Starts the script of a suite with a server.
    pub(super) fn start(suite: &str, version: &str, url: &str) -> Result<Self> {
        let mut child = Command::new(python(suite, version)?)
            .arg(script("sdk", "client.py"))
            .args([suite, url])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let requests = child.stdin.take().context("no input")?;
        let answers = BufReader::new(child.stdout.take().context("no output")?);
        Ok(Self {
            child,
            requests,
            answers,
        })
    }

    /// Calls an action a number of times, and returns the milliseconds of each call.
    pub(super) fn times(&mut self, action: &str, count: usize) -> Result<Vec<f64>> {
        writeln!(self.requests, "{action} {count}")?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let words = line.split_whitespace();
        let times: Vec<f64> = words.map(str::parse).collect::<Result<_, _>>()?;
        ensure!(times.len() == count, "the client failed at {action}");
        Ok(times)
    }
}

impl Drop for Sdk {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
