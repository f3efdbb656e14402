//! The smallest user of `box-sys`: a box, one command in it, and an end like the command's.
//!
//! `box-sys-run PROGRAM [ARGUMENT…]`. Its init also serves the tests of this crate, which speak to it by the few messages
//! below: starting commands with descriptors, killing them, hearing of their ends.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;

use box_sys::{
    Command, ForkServer, Init, SandboxPlan, ServerConfig, SpawnPlan, Stdio, receive, send,
    socket_pair,
};
use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

/// What init is asked.
///
/// `Run` comes with three descriptors, or with one that is a terminal.
#[derive(Debug, Serialize, Deserialize)]
enum Ask {
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

/// What init says.
#[derive(Debug, Serialize, Deserialize)]
enum Say {
    Started {
        pid: i32,
    },
    NotStarted {
        errno: i32,
    },
    Ended {
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
    let server = ForkServer::start(
        &std::env::current_exe()?,
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
    let ask = Ask::Run {
        argv,
        env,
        cwd: "/tmp".into(),
        rlimits: Vec::new(),
    };
    let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    send(
        near.as_fd(),
        &serde_json::to_vec(&ask)?,
        &[stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
    )?;
    let mut buffer = [0; 4096];
    let code = loop {
        let Some((length, _)) = receive(near.as_fd(), &mut buffer)? else {
            break 125;
        };
        match serde_json::from_slice(&buffer[..length])? {
            Say::NotStarted { errno } => {
                eprintln!("box-sys-run: {}", std::io::Error::from_raw_os_error(errno));
                break 127;
            }
            Say::Ended { code, signal, .. } => break code.unwrap_or(128 + signal.unwrap_or(0)),
            _ => {}
        }
    };
    sandbox.destroy()?;
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// The first process of the box.
fn init(mut init: Init) {
    // Without the way out there is nothing to do here; the box ends with this process.
    let _ = serve(&mut init);
}

fn serve(init: &mut Init) -> Option<()> {
    let control = init.fds.pop()?;
    let children = children_signal()?;
    let mut commands: Vec<Command> = Vec::new();
    let mut buffer = vec![0; 65_536];
    loop {
        let mut fds = [
            PollFd::new(&control, PollFlags::IN),
            PollFd::new(&children, PollFlags::IN),
        ];
        rustix::io::retry_on_intr(|| poll(&mut fds, None)).ok()?;
        let (asked, died) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if died {
            let mut record = [0_u8; 128];
            let _ = rustix::io::read(&children, &mut record);
            while let Some(ended) = init.reap() {
                // Orphans are reaped and not spoken of.
                if let Some(place) = commands.iter().position(|command| command.pid == ended.pid) {
                    init.forget(&commands.remove(place));
                    say(
                        &control,
                        &Say::Ended {
                            pid: ended.pid,
                            code: ended.code,
                            signal: ended.signal,
                        },
                    )?;
                }
            }
        }
        if asked {
            let (length, fds) = receive(control.as_fd(), &mut buffer).ok()??;
            let answer = match serde_json::from_slice(&buffer[..length]).ok()? {
                Ask::Run {
                    argv,
                    env,
                    cwd,
                    rlimits,
                } => start(init, &mut commands, argv, env, cwd, rlimits, &fds)?,
                Ask::KillTree { pid } => {
                    let command = commands.iter().find(|command| command.pid == pid);
                    Say::Killed {
                        count: command.map_or(0, |command| init.kill_tree(command)),
                    }
                }
            };
            say(&control, &answer)?;
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
) -> Option<Say> {
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
            Say::Started { pid }
        }
        Err(error) => Say::NotStarted {
            errno: error.raw_os_error().unwrap_or(0),
        },
    })
}

fn say(control: &OwnedFd, what: &Say) -> Option<()> {
    send(control.as_fd(), &serde_json::to_vec(what).ok()?, &[]).ok()
}

/// `SIGCHLD` as something to read.
fn children_signal() -> Option<OwnedFd> {
    box_sys::signal_fd(&[libc::SIGCHLD]).ok()
}
