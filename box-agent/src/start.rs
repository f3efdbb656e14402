//! Starting a process from the parameters of a command.

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
use crate::input::{InputTarget, set_size};
use crate::pipe::{Pipe, async_fd};

/// A process and the agent's ends of its pipes or its terminal.
pub(crate) struct Started {
    pub(crate) process: box_sys::Command,
    pub(crate) input: Option<InputTarget>,
    pub(crate) stdout: Option<Pipe>,
    pub(crate) stderr: Option<Pipe>,
}

/// How the standard streams of a process are connected.
#[derive(Clone, Copy)]
enum StdioKind {
    Pipes(Stdin, OutputMode),
    Terminal(TerminalSize),
}

/// The program, environment, directory and limits of a process.
struct ProcessSpec {
    argv: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    cwd: PathBuf,
    rlimits: Vec<(u32, u64)>,
}

/// Resource numbers of the file size limit and the data limit.
///
/// They are the same on every supported architecture.
const RLIMIT_FSIZE: u32 = 1;
const RLIMIT_DATA: u32 = 2;

/// The shells for a command text, in order of preference.
const SHELLS: [&str; 2] = ["/bin/bash", "/bin/sh"];

impl Agent {
    /// Starts a command, and first creates its directory if the caller requested that.
    pub(crate) async fn start(&self, params: AgentStartParams) -> Result<Started, BoxError> {
        self.files().check_user(params.user.as_deref())?;
        let connection = match params.pty {
            Some(size) => StdioKind::Terminal(size),
            None => StdioKind::Pipes(params.stdin, params.output),
        };
        let make_cwd = params.make_cwd;
        let spec = ProcessSpec::new(params);
        let error = match self.spawn(&spec, connection) {
            Ok(started) => return Ok(started),
            Err(error) => error,
        };
        // The error can be about the directory or about the program.
        if !is_path_error(&error) {
            return Err(start_error(&error, &spec));
        }
        if make_cwd {
            let cwd = spec.cwd.to_string_lossy().into_owned();
            self.files().make_dir(cwd).await?;
        } else {
            check_dir(&spec)?;
        }
        self.spawn(&spec, connection)
            .map_err(|error| start_error(&error, &spec))
    }

    fn spawn(&self, spec: &ProcessSpec, connection: StdioKind) -> io::Result<Started> {
        match connection {
            StdioKind::Pipes(stdin, output) => self.spawn_with_pipes(spec, stdin, output),
            StdioKind::Terminal(size) => self.spawn_in_terminal(spec, size),
        }
    }

    /// The terminal belongs to the box's devpts, so it ends with the box.
    fn spawn_in_terminal(&self, spec: &ProcessSpec, size: TerminalSize) -> io::Result<Started> {
        use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let terminal = openpt(flags)?;
        unlockpt(&terminal)?;
        set_size(&terminal, size)?;
        let inside = ioctl_tiocgptpeer(&terminal, flags)?;
        let process = self
            .init()
            .spawn(&spec.plan(Stdio::Terminal(inside.as_fd())))?;
        let (reader, writer) = (Pipe::from_fd(terminal.try_clone()?)?, async_fd(terminal)?);
        Ok(Started {
            process,
            input: Some(InputTarget::Terminal(writer)),
            stdout: Some(reader),
            stderr: None,
        })
    }

    fn spawn_with_pipes(
        &self,
        spec: &ProcessSpec,
        stdin: Stdin,
        output: OutputMode,
    ) -> io::Result<Started> {
        // The agent's own standard input is the null device.
        let (input, writer) = match stdin {
            Stdin::Closed => (None, None),
            Stdin::Open => {
                let (read, write) = crate::pipe::for_guest()?;
                rustix::fs::fcntl_setfl(&write, OFlags::NONBLOCK)?;
                (Some(read), Some(InputTarget::Pipe(async_fd(write)?)))
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
        let plan = spec.plan(Stdio::Fds {
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

    /// Starts a process whose standard streams are the null device.
    fn spawn_without_io(&self, spec: &ProcessSpec) -> io::Result<box_sys::Command> {
        let null = rustix::stdio::stdin();
        self.init().spawn(&spec.plan(Stdio::Fds {
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
        let spec = ProcessSpec {
            argv: argv.into_iter().map(Into::into).collect(),
            env: env_pairs(env),
            cwd: cwd.into(),
            rlimits: file_bytes
                .map(|bytes| (RLIMIT_FSIZE, bytes))
                .into_iter()
                .collect(),
        };
        let error = match self.spawn_without_io(&spec) {
            Ok(process) => return Ok(process),
            Err(error) => error,
        };
        check_dir(&spec)?;
        Err(match errno(&error) {
            Some(Errno::NOENT) => BoxError::unsupported(
                "language: the box has no such interpreter; install it or choose another language",
            ),
            _ => start_error(&error, &spec),
        })
    }
}

impl ProcessSpec {
    fn new(params: AgentStartParams) -> Self {
        let argv: Vec<OsString> = match params.program {
            Program::Argv { 0: argv, .. } => argv.into_iter().map(Into::into).collect(),
            Program::Text { 0: text, .. } => {
                [default_shell().into(), "-c".into(), text.into()].into()
            }
        };
        let file_bytes = params.file_bytes.map(|bytes| (RLIMIT_FSIZE, bytes));
        let memory = params
            .memory_mb
            .map(|mb| (RLIMIT_DATA, mb.saturating_mul(1 << 20)));
        Self {
            argv,
            env: env_pairs(params.env),
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

fn env_pairs(env: Env) -> Vec<(OsString, OsString)> {
    let pairs = env.into_map().into_iter();
    pairs
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
}

/// The shell for a command text: bash, if the box has it.
fn default_shell() -> &'static str {
    let exists = |shell: &&&str| std::path::Path::new(shell).exists();
    SHELLS.iter().find(exists).copied().unwrap_or("sh")
}

fn errno(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw_os_error)
}

fn is_path_error(error: &io::Error) -> bool {
    matches!(
        errno(error),
        Some(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP | Errno::NAMETOOLONG)
    )
}

/// Returns an error if the directory does not exist.
///
/// Otherwise the error is about the program.
fn check_dir(spec: &ProcessSpec) -> Result<(), BoxError> {
    match std::fs::metadata(&spec.cwd) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(BoxError::validation("cwd: not a directory")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(BoxError::validation("cwd: no such directory"))
        }
        // The guest may have access where the agent has none.
        Err(_) => Ok(()),
    }
}

/// The error for a command that could not be started.
fn start_error(error: &io::Error, spec: &ProcessSpec) -> BoxError {
    use box_protocol::Code::{Internal, Unavailable, Validation};
    let program = spec
        .argv
        .first()
        .map(|name| name.to_string_lossy())
        .unwrap_or_default();
    let (code, name, why) = match errno(error) {
        Some(Errno::NOENT) => (Validation, "ENOENT", "not found"),
        Some(Errno::ACCESS) => (Validation, "EACCES", "permission denied"),
        Some(Errno::PERM) => (Validation, "EPERM", "permission denied"),
        Some(Errno::NOTDIR) => (Validation, "ENOTDIR", "not found"),
        Some(Errno::LOOP) => (Validation, "ELOOP", "too many symbolic links"),
        Some(Errno::NAMETOOLONG) => (Validation, "ENAMETOOLONG", "name too long"),
        Some(Errno::NOEXEC) => (Validation, "ENOEXEC", "not an executable for this machine"),
        Some(Errno::INVAL) => (Validation, "EINVAL", "not an executable for this machine"),
        Some(Errno::LIBBAD) => (Validation, "ELIBBAD", "its dynamic loader is broken"),
        Some(Errno::TXTBSY) => (
            Unavailable,
            "ETXTBSY",
            "the file is open for writing; retry later",
        ),
        Some(Errno::IO) => (Unavailable, "EIO", "read error on its disk"),
        Some(Errno::STALE) => (Unavailable, "ESTALE", "its file system is gone"),
        Some(Errno::TOOBIG) => (Validation, "E2BIG", "arguments and environment too long"),
        Some(Errno::AGAIN | Errno::NOMEM | Errno::MFILE | Errno::NFILE) => {
            return BoxError::capacity(
                "command: the box cannot start another process; end some or raise its limits",
            );
        }
        Some(Errno::TIMEDOUT) => {
            return BoxError::unavailable("command: killed before its program ran");
        }
        None if spec.cwd.as_os_str().as_encoded_bytes().contains(&0) => {
            return BoxError::validation("cwd: must not contain NUL");
        }
        other => {
            let number = other.map_or(0, Errno::raw_os_error);
            let why = format!("program: {program}: cannot be executed, errno {number}");
            return BoxError::new(Internal, why);
        }
    };
    BoxError::new(code, format!("program: {program}: {why}")).with_detail(&Detail {
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
    fn a_start_error_has_the_errno_and_the_code_of_its_cause() {
        let spec = ProcessSpec {
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
            let error = start_error(&errno.into(), &spec);
            let detail: Detail = error.detail().unwrap_or_default();
            assert_eq!((error.code(), detail.errno.as_deref()), (code, name));
        }
    }

    #[test]
    fn a_directory_with_nul_is_named() {
        let spec = ProcessSpec {
            argv: vec!["prog".into()],
            env: Vec::new(),
            cwd: "/\0".into(),
            rlimits: Vec::new(),
        };
        let error = start_error(&io::ErrorKind::InvalidInput.into(), &spec);
        assert_eq!(error.code(), Code::Validation);
        assert!(error.message().starts_with("cwd: "), "{error:?}");
    }
}
