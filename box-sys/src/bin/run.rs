//! The smallest program that uses `box-sys`: runs one command in a box.
//!
//! `box-sys-run PROGRAM [ARGUMENT…]` exits like the command. Its init also serves the tests of this
//! crate, which send it the requests below.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use box_sys::{
    Command, ForkServer, Init, SandboxPlan, ServerConfig, SpawnPlan, Stdio, receive, send,
    socket_pair,
};
use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

/// Request to init.
///
/// `Run` carries three descriptors, or one terminal.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    Run {
        argv: Vec<String>,
        env: Vec<(String, String)>,
        cwd: PathBuf,
        rlimits: Vec<(u32, u64)>,
    },
    KillTree {
        pid: i32,
    },
}

/// Message of init.
#[derive(Debug, Serialize, Deserialize)]
enum Event {
    Started {
        pid: i32,
    },
    NotStarted {
        errno: i32,
    },
    Exited {
        pid: i32,
        code: Option<i32>,
        signal: Option<i32>,
    },
    Killed {
        count: usize,
    },
}

fn main() -> ExitCode {
    box_sys::serve_if_asked(|| Box::new(init));
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("box-sys-run: {error}");
            ExitCode::from(125)
        }
    }
}

fn run() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let argv: Vec<String> = std::env::args().skip(1).collect();
    if argv.is_empty() {
        println!("{}", box_sys::Primitives::probe());
        return Ok(ExitCode::SUCCESS);
    }
    // Not by its path: another test may have replaced the file.
    let server = ForkServer::start(
        Path::new("/proc/self/exe"),
        &ServerConfig {
            pool: 1,
            ..ServerConfig::default()
        },
    )?;
    let (near, far) = socket_pair()?;
    let sandbox = server.create(&SandboxPlan::default(), &[far.as_fd()], &[])?;
    drop(far);
    let env = vec![
        ("PATH".into(), "/usr/local/bin:/usr/bin:/bin".into()),
        ("HOME".into(), "/home/box".into()),
    ];
    let request = Request::Run {
        argv,
        env,
        cwd: "/tmp".into(),
        rlimits: Vec::new(),
    };
    let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    send(
        near.as_fd(),
        &serde_json::to_vec(&request)?,
        &[stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
    )?;
    let mut buffer = [0; 4096];
    let code = loop {
        let Some((length, _)) = receive(near.as_fd(), &mut buffer)? else {
            break 125;
        };
        match serde_json::from_slice(&buffer[..length])? {
            Event::NotStarted { errno } => {
                eprintln!("box-sys-run: {}", std::io::Error::from_raw_os_error(errno));
                break 127;
            }
            Event::Exited { code, signal, .. } => break code.unwrap_or(128 + signal.unwrap_or(0)),
            _ => {}
        }
    };
    sandbox.destroy()?;
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// The first process of the box.
fn init(mut init: Init) {
    // Without a connection, init exits, and the box ends.
    let _ = serve(&mut init);
}

fn serve(init: &mut Init) -> Option<()> {
    let control = init.fds.pop()?;
    let children = child_signal_fd()?;
    let mut commands: Vec<Command> = Vec::new();
    let mut buffer = vec![0; 65_536];
    loop {
        let mut fds = [
            PollFd::new(&control, PollFlags::IN),
            PollFd::new(&children, PollFlags::IN),
        ];
        rustix::io::retry_on_intr(|| poll(&mut fds, None)).ok()?;
        let (has_request, has_exit) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if has_exit {
            let mut record = [0_u8; 128];
            let _ = rustix::io::read(&children, &mut record);
            while let Some(exit) = init.reap() {
                // Orphans are reaped without an event.
                if let Some(place) = commands.iter().position(|command| command.pid == exit.pid) {
                    init.release_mark(&commands.remove(place));
                    send_event(
                        &control,
                        &Event::Exited {
                            pid: exit.pid,
                            code: exit.code,
                            signal: exit.signal,
                        },
                    )?;
                }
            }
        }
        if has_request {
            let (length, fds) = receive(control.as_fd(), &mut buffer).ok()??;
            let answer = match serde_json::from_slice(&buffer[..length]).ok()? {
                Request::Run {
                    argv,
                    env,
                    cwd,
                    rlimits,
                } => start(init, &mut commands, argv, env, cwd, rlimits, &fds)?,
                Request::KillTree { pid } => {
                    let command = commands.iter().find(|command| command.pid == pid);
                    Event::Killed {
                        count: command.map_or(0, |command| init.kill_tree(command)),
                    }
                }
            };
            send_event(&control, &answer)?;
        }
    }
}

fn start(
    init: &mut Init,
    commands: &mut Vec<Command>,
    argv: Vec<String>,
    env: Vec<(String, String)>,
    cwd: PathBuf,
    rlimits: Vec<(u32, u64)>,
    fds: &[OwnedFd],
) -> Option<Event> {
    let stdio = match fds {
        [stdin, stdout, stderr] => Stdio::Fds {
            stdin: stdin.as_fd(),
            stdout: stdout.as_fd(),
            stderr: stderr.as_fd(),
        },
        [terminal] => Stdio::Terminal(terminal.as_fd()),
        _ => return None,
    };
    let env = env
        .into_iter()
        .map(|(key, value)| (key.into(), value.into()))
        .collect();
    let plan = SpawnPlan {
        argv: argv.into_iter().map(OsString::from).collect(),
        env,
        cwd,
        stdio,
        rlimits,
    };
    Some(match init.spawn(&plan) {
        Ok(command) => {
            let pid = command.pid;
            commands.push(command);
            Event::Started { pid }
        }
        Err(error) => Event::NotStarted {
            errno: error.raw_os_error().unwrap_or(0),
        },
    })
}

fn send_event(control: &OwnedFd, event: &Event) -> Option<()> {
    send(control.as_fd(), &serde_json::to_vec(event).ok()?, &[]).ok()
}

/// A descriptor that reports `SIGCHLD`.
fn child_signal_fd() -> Option<OwnedFd> {
    box_sys::signal_fd(&[libc::SIGCHLD]).ok()
}
