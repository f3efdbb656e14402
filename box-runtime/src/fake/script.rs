//! What a fake does when it is asked something.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{AgentChunk, AgentCommand};
use box_protocol::{BoxError, Exit, ExitWhy};

use super::FOR_EVER;

/// What goes wrong with a start, a stop or a probe.
#[derive(Debug, Clone)]
pub enum Trouble {
    /// It takes this long, and then works.
    Slow(Duration),
    /// It never returns.
    Hang,
    /// It fails with this error.
    Fail(BoxError),
    /// It panics.
    Panic,
}

/// Lives through a trouble.
pub(super) async fn meet(trouble: Option<Trouble>, what: &str) -> Result<(), BoxError> {
    match trouble {
        None => Ok(()),
        Some(Trouble::Slow(time)) => {
            tokio::time::sleep(time).await;
            Ok(())
        }
        Some(Trouble::Hang) => {
            tokio::time::sleep(FOR_EVER).await;
            Ok(())
        }
        Some(Trouble::Fail(error)) => Err(error),
        Some(Trouble::Panic) => panic!("the fake was told to panic: {what}"),
    }
}

type Tamper = dyn Fn(AgentCommand) -> AgentCommand + Send + Sync;

/// What a fake agent does about one command: writes files, tells output, waits, ends.
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
    pub(super) dies: bool,
    pub(super) deaf: bool,
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
            dies: false,
            deaf: false,
            lingers: Duration::ZERO,
        }
    }
}

impl Reply {
    /// Tells this on standard output and returns 0 at once.
    pub fn stdout(stdout: impl Into<Vec<u8>>) -> Self {
        Self {
            stdout: stdout.into(),
            ..Self::default()
        }
    }

    /// Runs until it is killed.
    pub fn hang() -> Self {
        Self::default().takes(FOR_EVER)
    }

    /// Refuses to start the command.
    pub fn refuse(error: BoxError) -> Self {
        Self {
            refused: Some(error),
            ..Self::default()
        }
    }

    /// Tells this on standard error, too.
    pub fn stderr(mut self, stderr: impl Into<Vec<u8>>) -> Self {
        self.stderr = stderr.into();
        self
    }

    /// Returns this number.
    pub fn exit(mut self, code: i32) -> Self {
        self.exit = Exit::returned(code);
        self
    }

    /// Is ended by this signal.
    pub fn signal(mut self, signal: i32) -> Self {
        self.exit = Exit::by_signal(signal, ExitWhy::Signal);
        self
    }

    /// Takes this long, after its output.
    pub fn takes(mut self, time: Duration) -> Self {
        self.takes = time;
        self
    }

    /// Writes a file of so many bytes, at this path within the spec's host directory, if one is
    /// mounted there.
    pub fn writes(mut self, path: impl Into<String>, bytes: usize) -> Self {
        self.files.push((path.into(), bytes));
        self
    }

    /// Streams these chunks, whatever they say, where it would stream its output.
    pub fn chunks(mut self, chunks: Vec<AgentChunk>) -> Self {
        self.chunks = Some(chunks);
        self
    }

    /// Changes the agent's answer before it is sent: for agents that lie.
    pub fn tamper(
        mut self,
        tamper: impl Fn(AgentCommand) -> AgentCommand + Send + Sync + 'static,
    ) -> Self {
        self.tamper = Some(Arc::new(tamper));
        self
    }

    /// The agent's connection breaks when the command would have ended.
    pub fn dies(mut self) -> Self {
        self.dies = true;
        self
    }

    /// The agent does not end the command when its time is over.
    pub fn deaf(mut self) -> Self {
        self.deaf = true;
        self
    }

    /// Takes this long to be gone once it is killed.
    pub fn lingers(mut self, time: Duration) -> Self {
        self.lingers = time;
        self
    }
}
