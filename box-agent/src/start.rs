//! From the parameters of a command to a process.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use box_protocol::actions::{AgentStartParams, OutputMode, Stdin};
use box_protocol::{BoxError, Program};
use box_sys::{SpawnPlan, Stdio};
use rustix::io::Errno;

use crate::agent::Agent;
use crate::pipe::Pipe;

/// A process, and the agent's ends of its pipes.
pub(crate) struct Started {
    pub(crate) process: box_sys::Command,
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: Option<Pipe>,
    pub(crate) stderr: Option<Pipe>,
}

/// What to run, and where.
struct What {
    argv: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    cwd: PathBuf,
    rlimits: Vec<(u32, u64)>,
}

/// The number of the limit on the size of a file, the same on every machine.
const RLIMIT_FSIZE: u32 = 1;

impl Agent {
    /// Starts a command, in a directory that is made first if that was asked for.
    pub(crate) async fn start(&self, params: AgentStartParams) -> Result<Started, BoxError> {
        if params.pty.is_some() {
            return Err(BoxError::unsupported("pty: not served yet"));
        }
        self.check_user(params.user.as_deref())?;
        let (stdin, output) = (params.stdin, params.output);
        let make_cwd = params.make_cwd;
        let what = What::new(params);
        let error = match self.spawn(&what, stdin, output) {
            Ok(started) => return Ok(started),
            Err(error) => error,
        };
        // The error does not say whether it is about the directory or the program.
        if !is_about_a_path(&error) {
            return Err(refusal(&error, &what));
        }
        if make_cwd {
            self.make_dir(&what).await?;
        } else {
            check_dir(&what)?;
        }
        self.spawn(&what, stdin, output)
            .map_err(|error| refusal(&error, &what))
    }

    /// There are two users in a box, and one of them is this process.
    fn check_user(&self, user: Option<&str>) -> Result<(), BoxError> {
        let Some(user) = user else {
            return Ok(());
        };
        let init = self.init();
        let guest = &init.plan.guest;
        if user == guest.name || user.parse() == Ok(guest.id) {
            return Ok(());
        }
        Err(BoxError::denied("user: not a user of this box"))
    }

    fn spawn(&self, what: &What, stdin: Stdin, output: OutputMode) -> io::Result<Started> {
        // What it reads: the agent's own standard input, which is the null device, or a pipe that nobody writes to yet.
        let (input, writer) = match stdin {
            Stdin::Closed => (None, None),
            Stdin::Open => {
                let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
                (Some(read), Some(write))
            }
        };
        let (stdout, out) = Pipe::new()?;
        let (stderr, err) = match output {
            OutputMode::Split => {
                let (pipe, err) = Pipe::new()?;
                (Some(pipe), Some(err))
            }
            OutputMode::Merged => (None, None),
        };
        let plan = SpawnPlan {
            argv: what.argv.clone(),
            env: what.env.clone(),
            cwd: what.cwd.clone(),
            stdio: Stdio::Fds {
                stdin: input.as_ref().map_or(rustix::stdio::stdin(), AsFd::as_fd),
                stdout: out.as_fd(),
                stderr: err.as_ref().unwrap_or(&out).as_fd(),
            },
            rlimits: what.rlimits.clone(),
        };
        let process = self.init().spawn(&plan)?;
        Ok(Started {
            process,
            stdin: writer,
            stdout: Some(stdout),
            stderr,
        })
    }

    /// Makes the directory, as the guest: what the agent made would be the agent's.
    async fn make_dir(&self, what: &What) -> Result<(), BoxError> {
        let mkdir = What {
            argv: [
                "/bin/mkdir".into(),
                "-p".into(),
                "--".into(),
                what.cwd.clone().into(),
            ]
            .into(),
            env: Vec::new(),
            cwd: "/".into(),
            rlimits: Vec::new(),
        };
        let null = rustix::stdio::stdin();
        let plan = SpawnPlan {
            argv: mkdir.argv.clone(),
            env: Vec::new(),
            cwd: mkdir.cwd.clone(),
            stdio: Stdio::Fds {
                stdin: null,
                stdout: null,
                stderr: null,
            },
            rlimits: Vec::new(),
        };
        let process = self
            .init()
            .spawn(&plan)
            .map_err(|error| refusal(&error, &mkdir))?;
        let ended = self.end_of(&process).await;
        self.init().forget(&process);
        match ended {
            Ok(ended) if ended.code == Some(0) => Ok(()),
            _ => Err(BoxError::validation("cwd: not there, and cannot be made")),
        }
    }
}

impl What {
    fn new(params: AgentStartParams) -> Self {
        let argv: Vec<OsString> = match params.program {
            Program::Argv { 0: argv, .. } => argv.into_iter().map(Into::into).collect(),
            Program::Text { 0: text, .. } => ["sh".into(), "-c".into(), text.into()].into(),
        };
        let env = params.env.into_map().into_iter();
        let file_bytes = params.file_bytes.map(|bytes| (RLIMIT_FSIZE, bytes));
        Self {
            argv,
            env: env
                .map(|(name, value)| (name.into(), value.into()))
                .collect(),
            cwd: params.cwd.into(),
            rlimits: file_bytes.into_iter().collect(),
        }
    }
}

fn errno(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw_os_error)
}

fn is_about_a_path(error: &io::Error) -> bool {
    matches!(
        errno(error),
        Some(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP | Errno::NAMETOOLONG)
    )
}

/// Tells a directory that is not there from a program that is not.
fn check_dir(what: &What) -> Result<(), BoxError> {
    match std::fs::metadata(&what.cwd) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(BoxError::validation("cwd: not a directory")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(BoxError::validation("cwd: no such directory"))
        }
        // This process may not see what the guest may.
        Err(_) => Ok(()),
    }
}

/// Why a command was not started, in words for whoever asked for it.
fn refusal(error: &io::Error, what: &What) -> BoxError {
    let program = what
        .argv
        .first()
        .map(|name| name.to_string_lossy())
        .unwrap_or_default();
    match errno(error) {
        Some(Errno::NOENT) => BoxError::validation(format!("program: {program} is not there")),
        Some(Errno::ACCESS) => BoxError::validation(format!("program: {program} may not be run")),
        Some(Errno::TOOBIG) => {
            BoxError::validation("program: arguments and environment are too long")
        }
        Some(Errno::AGAIN | Errno::NOMEM | Errno::MFILE | Errno::NFILE) => {
            BoxError::capacity("the box has no room for another process")
        }
        _ => BoxError::validation(format!(
            "program: {program} cannot be run: {}",
            error.kind()
        )),
    }
}
