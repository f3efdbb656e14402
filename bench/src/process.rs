//! Servers as child processes, and their resource use as the kernel reports it.

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Read, Write},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::{Builder, Runtime};

/// Creates a runtime with one thread, to keep the scheduler out of the comparison.
pub(crate) fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// Raises the limit of open files to the hard limit, for idle connections.
pub(crate) fn raise_open_files() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    setrlimit(Resource::Nofile, raised).context("raising the limit of open files")
}

/// Prints the address of this server for the parent process.
pub(crate) fn announce(address: impl std::fmt::Display) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{address}")?;
    out.flush()
}

/// Ends this process when its parent ends for any reason.
pub(crate) fn end_with_parent() {
    thread::spawn(|| {
        let _ = io::stdin().lock().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
}

/// A server in a separate process, which ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// Starts this program with other arguments.
    pub(crate) fn own(arguments: &[&str]) -> Result<Self> {
        let program = env::current_exe().context("finding the benchmark's own program")?;
        let mut command = Command::new(program);
        command.args(arguments);
        Self::start(command)
    }

    /// Starts a program that prints its address.
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting a server")?;
        let mut address = String::new();
        let stdout = child.stdout.take().context("a server without output")?;
        BufReader::new(stdout).read_line(&mut address)?;
        let server = Self {
            child,
            address: address.trim().to_owned(),
        };
        ensure!(
            !server.address.is_empty(),
            "the server did not start: {command:?}"
        );
        Ok(server)
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn process(&self) -> Process {
        Process(self.child.id())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process with resource use that the kernel reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(u32);

impl Process {
    /// Returns the process with this pid.
    pub(crate) fn with_pid(pid: u32) -> Self {
        Self(pid)
    }

    pub(crate) fn own() -> Self {
        Self(std::process::id())
    }

    /// Returns the processor time of all threads, without that of children.
    pub(crate) fn cpu(self) -> Result<Duration> {
        let mut nanoseconds = 0;
        for thread in fs::read_dir(format!("/proc/{}/task", self.0))? {
            let text = fs::read_to_string(thread?.path().join("schedstat"))?;
            let first = text.split_whitespace().next().unwrap_or_default();
            nanoseconds += first.parse::<u64>().context("reading schedstat")?;
        }
        Ok(Duration::from_nanos(nanoseconds))
    }

    /// Returns the resident memory.
    ///
    /// `VmRSS` is not used, because the kernel lets it deviate by some hundred kilobytes.
    pub(crate) fn resident_bytes(self) -> Result<u64> {
        self.memory("Rss:")
    }

    /// Returns the resident memory with shared pages divided among their users.
    ///
    /// The values of several processes can be added.
    pub(crate) fn proportional_bytes(self) -> Result<u64> {
        self.memory("Pss:")
    }

    /// Returns the proportional memory of this process and all its descendants.
    pub(crate) fn tree_bytes(self) -> Result<u64> {
        let mut bytes = 0;
        let mut processes = vec![self];
        while let Some(process) = processes.pop() {
            match (process.proportional_bytes(), process.children()) {
                (Ok(own), Ok(children)) => {
                    bytes += own;
                    processes.extend(children);
                }
                // A descendant may end meanwhile.
                _ if process.0 != self.0 => {}
                (Err(error), _) | (_, Err(error)) => return Err(error),
            }
        }
        Ok(bytes)
    }

    /// Returns the children of all threads.
    fn children(self) -> Result<Vec<Self>> {
        let mut children = Vec::new();
        for thread in fs::read_dir(format!("/proc/{}/task", self.0))? {
            // A thread may end meanwhile.
            let text = fs::read_to_string(thread?.path().join("children")).unwrap_or_default();
            let pids = text.split_whitespace().filter_map(|pid| pid.parse().ok());
            children.extend(pids.map(Self));
        }
        Ok(children)
    }

    fn memory(self, name: &str) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.0))?;
        let kilobytes = text
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.split_whitespace().next())
            .with_context(|| format!("no {name} in smaps_rollup"))?;
        Ok(kilobytes.parse::<u64>()? * 1024)
    }
}

/// The processor time of this process and a server since a start time.
#[derive(Debug)]
pub(crate) struct Meter {
    server: Option<Process>,
    start: Duration,
}

impl Meter {
    pub(crate) fn start(server: Option<Process>) -> Result<Self> {
        let start = Self::total(server)?;
        Ok(Self { server, start })
    }

    pub(crate) fn spent(&self) -> Result<Duration> {
        Ok(Self::total(self.server)?.saturating_sub(self.start))
    }

    fn total(server: Option<Process>) -> Result<Duration> {
        let server = server.map_or(Ok(Duration::ZERO), Process::cpu)?;
        Ok(Process::own().cpu()? + server)
    }
}
