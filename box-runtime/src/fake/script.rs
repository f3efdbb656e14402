//! Scripted behaviour of a fake backend and its agents.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{AgentChunk, AgentCommand};
use box_protocol::{BoxError, Exit, ExitWhy};

use super::FOREVER;

/// Failure of a start, a stop or a probe.
#[derive(Debug, Clone)]
pub enum InjectedFault {
    /// The call succeeds after this time.
    Slow(Duration),
    /// The call never returns.
    Hang,
    /// The call fails with this error.
    Fail(BoxError),
    /// The call panics.
    Panic,
}

/// Applies a failure to the current call.
pub(super) async fn apply(trouble: Option<InjectedFault>, what: &str) -> Result<(), BoxError> {
    match trouble {
        None => Ok(()),
        Some(InjectedFault::Slow(time)) => {
            tokio::time::sleep(time).await;
            Ok(())
        }
        Some(InjectedFault::Hang) => {
            tokio::time::sleep(FOREVER).await;
            Ok(())
        }
        Some(InjectedFault::Fail(error)) => Err(error),
        Some(InjectedFault::Panic) => panic!("fake backend: scripted panic in {what}"),
    }
}

type Tamper = dyn Fn(AgentCommand) -> AgentCommand + Send + Sync;

/// Reply of a fake agent to a command: files, output, duration and exit.
#[derive(Clone)]
pub struct Reply {
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
    pub(super) exit: Exit,
    pub(super) takes: Duration,
    pub(super) files: Vec<(String, usize)>,
    pub(super) chunks: Option<Vec<AgentChunk>>,
    pub(super) tamper: Option<Arc<Tamper>>,
    pub(super) refused: Option<BoxError>,
    pub(super) disconnects: bool,
    pub(super) ignores_timeout: bool,
    pub(super) lingers: Duration,
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply")
            .field("exit", &self.exit)
            .field("takes", &self.takes)
            .finish_non_exhaustive()
    }
}

impl Default for Reply {
    fn default() -> Self {
        Self {
            stdout: Vec::new(),
            stderr: Vec::new(),
            exit: Exit::returned(0),
            takes: Duration::ZERO,
            files: Vec::new(),
            chunks: None,
            tamper: None,
            refused: None,
            disconnects: false,
            ignores_timeout: false,
            lingers: Duration::ZERO,
        }
    }
}

impl Reply {
    /// Creates a reply with this standard output and exit code 0, without delay.
    pub fn stdout(stdout: impl Into<Vec<u8>>) -> Self {
        Self {
            stdout: stdout.into(),
            ..Self::default()
        }
    }

    /// Creates a reply that runs until it is killed.
    pub fn hang() -> Self {
        Self::default().takes(FOREVER)
    }

    /// Creates a reply that refuses to start the command.
    pub fn refuse(error: BoxError) -> Self {
        Self {
            refused: Some(error),
            ..Self::default()
        }
    }

    /// Adds output on standard error.
    pub fn stderr(mut self, stderr: impl Into<Vec<u8>>) -> Self {
        self.stderr = stderr.into();
        self
    }

    /// Sets the exit code.
    pub fn exit(mut self, code: i32) -> Self {
        self.exit = Exit::returned(code);
        self
    }

    /// Sets the signal that ends the command.
    pub fn signal(mut self, signal: i32) -> Self {
        self.exit = Exit::by_signal(signal, ExitWhy::Signal);
        self
    }

    /// Sets the time between output and exit.
    pub fn takes(mut self, time: Duration) -> Self {
        self.takes = time;
        self
    }

    /// Writes a file of this size at a path within the spec's host directory.
    ///
    /// The reply writes only if the directory is mounted.
    pub fn writes(mut self, path: impl Into<String>, bytes: usize) -> Self {
        self.files.push((path.into(), bytes));
        self
    }

    /// Streams these chunks, valid or not, instead of the output.
    pub fn chunks(mut self, chunks: Vec<AgentChunk>) -> Self {
        self.chunks = Some(chunks);
        self
    }

    /// Modifies the agent's answer before it is sent, to simulate a malicious agent.
    pub fn tamper(
        mut self,
        tamper: impl Fn(AgentCommand) -> AgentCommand + Send + Sync + 'static,
    ) -> Self {
        self.tamper = Some(Arc::new(tamper));
        self
    }

    /// Breaks the agent's connection when the command would end.
    pub fn disconnects(mut self) -> Self {
        self.disconnects = true;
        self
    }

    /// Makes the agent ignore the timeout of the command.
    pub fn ignores_timeout(mut self) -> Self {
        self.ignores_timeout = true;
        self
    }

    /// Sets the time between a kill and the end of the command.
    pub fn lingers(mut self, time: Duration) -> Self {
        self.lingers = time;
        self
    }
}
