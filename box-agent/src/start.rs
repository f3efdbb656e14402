//! From the parameters of a command to a process.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

use box_protocol::actions::{AgentStartParams, OutputMode, Stdin, TerminalSize};
use box_protocol::error::Detail;
use box_protocol::{BoxError, Env, Program};
use box_sys::{SpawnPlan, Stdio};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::agent::Agent;
use crate::input::{Way, set_size};
use crate::pipe::{Pipe, watched};

/// A process, and the agent's ends of its pipes or its terminal.
pub(crate) struct Started {
    pub(crate) process: box_sys::Command,
    pub(crate) input: Option<Way>,
    pub(crate) stdout: Option<Pipe>,
    pub(crate) stderr: Option<Pipe>,
}

/// What it is joined to.
#[derive(Clone, Copy)]
enum Joined {
    Pipes(Stdin, OutputMode),
    Terminal(TerminalSize),
}

/// What to run, and where.
struct What {
    argv: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    cwd: PathBuf,
    rlimits: Vec<(u32, u64)>,
}

/// The numbers of limits, the same on every machine: on the size of a file, and on the memory of a process.
const RLIMIT_FSIZE: u32 = 1;
const RLIMIT_DATA: u32 = 2;

/// The shells that run a text, the better one first.
const SHELLS: [&str; 2] = ["/bin/bash", "/bin/sh"];

impl Agent {
    /// Starts a command, in a directory that is made first if that was asked for.
    pub(crate) async fn start(&self, params: AgentStartParams) -> Result<Started, BoxError> {
        self.files().check_user(params.user.as_deref())?;
        let joined = match params.pty {
            Some(size) => Joined::Terminal(size),
            None => Joined::Pipes(params.stdin, params.output),
        };
        let make_cwd = params.make_cwd;
        let what = What::new(params);
        let error = match self.spawn(&what, joined) {
            Ok(started) => return Ok(started),
            Err(error) => error,
        };
        // The error does not say whether it is about the directory or the program.
        if !is_about_a_path(&error) {
            return Err(refusal(&error, &what));
        }
        if make_cwd {
            let cwd = what.cwd.to_string_lossy().into_owned();
            self.files().make_dir(cwd).await?;
        } else {
            check_dir(&what)?;
        }
        self.spawn(&what, joined)
            .map_err(|error| refusal(&error, &what))
    }

    fn spawn(&self, what: &What, joined: Joined) -> io::Result<Started> {
        match joined {
            Joined::Pipes(stdin, output) => self.spawn_with_pipes(what, stdin, output),
            Joined::Terminal(size) => self.spawn_in_terminal(what, size),
        }
    }

    /// The terminal is the box's own, so it goes with the box.
    fn spawn_in_terminal(&self, what: &What, size: TerminalSize) -> io::Result<Started> {
        use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let terminal = openpt(flags)?;
        unlockpt(&terminal)?;
        set_size(&terminal, size)?;
        let inside = ioctl_tiocgptpeer(&terminal, flags)?;
        let process = self
            .init()
            .spawn(&what.plan(Stdio::Terminal(inside.as_fd())))?;
        let (reader, writer) = (Pipe::over(terminal.try_clone()?)?, watched(terminal)?);
        Ok(Started {
            process,
            input: Some(Way::Terminal(writer)),
            stdout: Some(reader),
            stderr: None,
        })
    }

    fn spawn_with_pipes(
        &self,
        what: &What,
        stdin: Stdin,
        output: OutputMode,
    ) -> io::Result<Started> {
        // What it reads: the agent's own standard input, which is the null device, or a pipe that nobody writes to yet.
        let (input, writer) = match stdin {
            Stdin::Closed => (None, None),
            Stdin::Open => {
                let (read, write) = crate::pipe::for_guest()?;
                rustix::fs::fcntl_setfl(&write, OFlags::NONBLOCK)?;
                (Some(read), Some(Way::Pipe(watched(write)?)))
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
        let plan = what.plan(Stdio::Fds {
            stdin: input.as_ref().map_or(rustix::stdio::stdin(), AsFd::as_fd),
            stdout: out.as_fd(),
            stderr: err.as_ref().unwrap_or(&out).as_fd(),
        });
        let process = self.init().spawn(&plan)?;
        Ok(Started {
            process,
            input: writer,
            stdout: Some(stdout),
            stderr,
        })
    }

    /// Starts something that reads and writes nothing.
    fn spawn_alone(&self, what: &What) -> io::Result<box_sys::Command> {
        let null = rustix::stdio::stdin();
        self.init().spawn(&what.plan(Stdio::Fds {
            stdin: null,
            stdout: null,
            stderr: null,
        }))
    }

    /// Starts the interpreter of a shell.
    pub(crate) fn start_interpreter(
        &self,
        argv: Vec<String>,
        env: Env,
        cwd: &str,
    ) -> Result<box_sys::Command, BoxError> {
        let file_bytes = self.files().file_bytes();
        let what = What {
            argv: argv.into_iter().map(Into::into).collect(),
            env: pairs(env),
            cwd: cwd.into(),
            rlimits: file_bytes
                .map(|bytes| (RLIMIT_FSIZE, bytes))
                .into_iter()
                .collect(),
        };
        let error = match self.spawn_alone(&what) {
            Ok(process) => return Ok(process),
            Err(error) => error,
        };
        check_dir(&what)?;
        Err(match errno(&error) {
            Some(Errno::NOENT) => BoxError::unsupported("the box has no such interpreter"),
            _ => refusal(&error, &what),
        })
    }
}

impl What {
    fn new(params: AgentStartParams) -> Self {
        let argv: Vec<OsString> = match params.program {
            Program::Argv { 0: argv, .. } => argv.into_iter().map(Into::into).collect(),
            Program::Text { 0: text, .. } => [shell().into(), "-c".into(), text.into()].into(),
        };
        let file_bytes = params.file_bytes.map(|bytes| (RLIMIT_FSIZE, bytes));
        let memory = params
            .memory_mb
            .map(|mb| (RLIMIT_DATA, mb.saturating_mul(1 << 20)));
        Self {
            argv,
            env: pairs(params.env),
            cwd: params.cwd.into(),
            rlimits: file_bytes.into_iter().chain(memory).collect(),
        }
    }

    fn plan<'a>(&self, stdio: Stdio<'a>) -> SpawnPlan<'a> {
        SpawnPlan {
            argv: self.argv.clone(),
            env: self.env.clone(),
            cwd: self.cwd.clone(),
            stdio,
            rlimits: self.rlimits.clone(),
        }
    }
}

fn pairs(env: Env) -> Vec<(OsString, OsString)> {
    let pairs = env.into_map().into_iter();
    pairs
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
}

/// The shell that runs a text: bash, where the box has one.
fn shell() -> &'static str {
    let there = |shell: &&&str| std::path::Path::new(shell).exists();
    SHELLS.iter().find(there).copied().unwrap_or("sh")
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
    use box_protocol::Code::{Internal, Unavailable, Validation};
    let program = what
        .argv
        .first()
        .map(|name| name.to_string_lossy())
        .unwrap_or_default();
    let (code, name, why) = match errno(error) {
        Some(Errno::NOENT) => (Validation, "ENOENT", "is not there"),
        Some(Errno::ACCESS) => (Validation, "EACCES", "may not be run"),
        Some(Errno::PERM) => (Validation, "EPERM", "may not be run"),
        Some(Errno::NOTDIR) => (Validation, "ENOTDIR", "is not there"),
        Some(Errno::LOOP) => (Validation, "ELOOP", "is behind too many links"),
        Some(Errno::NAMETOOLONG) => (Validation, "ENAMETOOLONG", "is too long a name"),
        Some(Errno::NOEXEC) => (Validation, "ENOEXEC", "is no program of this machine"),
        Some(Errno::INVAL) => (Validation, "EINVAL", "is no program of this machine"),
        Some(Errno::LIBBAD) => (Validation, "ELIBBAD", "needs a loader that is broken"),
        Some(Errno::TXTBSY) => (Unavailable, "ETXTBSY", "is being written"),
        Some(Errno::IO) => (Unavailable, "EIO", "cannot be read from its disk"),
        Some(Errno::STALE) => (Unavailable, "ESTALE", "is on a file system that has gone"),
        Some(Errno::TOOBIG) => (
            Validation,
            "E2BIG",
            "has too long arguments and environment",
        ),
        Some(Errno::AGAIN | Errno::NOMEM | Errno::MFILE | Errno::NFILE) => {
            return BoxError::capacity("the box has no room for another process");
        }
        Some(Errno::TIMEDOUT) => {
            return BoxError::unavailable("the command was stopped before its program ran");
        }
        other => {
            let number = other.map_or(0, Errno::raw_os_error);
            let why = format!("program: {program} cannot be run: error {number}");
            return BoxError::new(Internal, why);
        }
    };
    BoxError::new(code, format!("program: {program} {why}")).with_detail(&Detail {
        field: Some("program".to_owned()),
        errno: Some(name.to_owned()),
        ..Detail::default()
    })
}

#[cfg(test)]
mod tests {
    use box_protocol::Code;

    use super::*;

    #[test]
    fn a_refusal_keeps_its_reason_and_says_whether_it_may_pass() {
        let what = What {
            argv: vec!["prog".into()],
            env: Vec::new(),
            cwd: "/".into(),
            rlimits: Vec::new(),
        };
        for (errno, code, name) in [
            (Errno::NOENT, Code::Validation, Some("ENOENT")),
            (Errno::NOEXEC, Code::Validation, Some("ENOEXEC")),
            (Errno::LIBBAD, Code::Validation, Some("ELIBBAD")),
            (Errno::TXTBSY, Code::Unavailable, Some("ETXTBSY")),
            (Errno::IO, Code::Unavailable, Some("EIO")),
            (Errno::NOMEM, Code::Capacity, None),
            (Errno::BADF, Code::Internal, None),
        ] {
            let refused = refusal(&errno.into(), &what);
            let detail: Detail = refused.detail().unwrap_or_default();
            assert_eq!((refused.code(), detail.errno.as_deref()), (code, name));
        }
    }
}
