//! Measures a cold box: create it, run `/bin/true`, end it, relative to `posix_spawn`.
//!
//! `cargo run --profile measured --example cold_start [ROUNDS [SPARES]]`. One loop runs both in
//! turn, so that other load of the host affects both. Prints medians and the memory of idle boxes.

use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

use box_sys::{
    ForkServer, Init, SandboxPlan, ServerConfig, SpawnPlan, Stdio, receive, send, socket_pair,
};

/// Number of idle boxes of the memory measurement.
const IDLE: u32 = 200;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    box_sys::serve_if_asked(|| Box::new(init));
    let rounds: usize = std::env::args().nth(1).map_or(Ok(300), |n| n.parse())?;
    let mut config = ServerConfig::default();
    if let Some(spares) = std::env::args().nth(2) {
        config.spares = spares.parse()?;
    }
    let server = ForkServer::start(&std::env::current_exe()?, &config)?;
    println!("{}", server.primitives());
    let workspace = std::env::temp_dir();
    let plan = SandboxPlan {
        mounts: vec![box_sys::Mount {
            source: box_sys::Source::Path(workspace.canonicalize()?),
            target: "/workspace".into(),
            writable: false,
            overlay: false,
        }],
        ..SandboxPlan::default()
    };
    let (mut spawn, mut cold, mut create, mut warm, mut end, mut cpu, mut first) =
        (vec![], vec![], vec![], vec![], vec![], vec![], vec![]);
    for _ in 0..rounds {
        let start = Instant::now();
        Command::new("/bin/true").status()?;
        spawn.push(start.elapsed());

        let start = Instant::now();
        let (near, far) = socket_pair()?;
        let sandbox = server.create(&plan, &[far.as_fd()], &[])?;
        drop(far);
        let made = start.elapsed();
        let used = sandbox.usage().cpu.unwrap_or_default();
        let start = start + (start.elapsed().saturating_sub(made));
        run(near.as_fd())?;
        let ran = start.elapsed();
        first.push(ran.saturating_sub(made));
        let again = Instant::now();
        run(near.as_fd())?;
        warm.push(again.elapsed());
        let before = Instant::now();
        sandbox.destroy()?;
        let destroyed = before.elapsed();
        cpu.push(used);
        create.push(made);
        end.push(destroyed);
        cold.push(ran + destroyed);
        std::thread::sleep(Duration::from_millis(2));
    }
    let (base, low) = median_and_p10(&mut spawn);
    println!(
        "{:<34} {:>7} {:>6} {:>7} {:>6}",
        "", "median", "ratio", "p10", "ratio"
    );
    for (name, times) in [
        ("posix_spawn /bin/true", &mut spawn),
        ("create", &mut create),
        ("  CPU time in the box", &mut cpu),
        ("run true (first)", &mut first),
        ("run true (again)", &mut warm),
        ("destroy", &mut end),
        ("cold box + true + destroy", &mut cold),
    ] {
        let (median, p10) = median_and_p10(times);
        println!(
            "{name:<34} {:>5}us {:>6.2} {:>5}us {:>6.2}",
            median.as_micros(),
            median.as_secs_f64() / base.as_secs_f64(),
            p10.as_micros(),
            p10.as_secs_f64() / low.as_secs_f64(),
        );
    }
    memory(&server)
}

fn memory(server: &ForkServer) -> Result<(), Box<dyn std::error::Error>> {
    let mut alive = Vec::new();
    for _ in 0..IDLE {
        let (near, far) = socket_pair()?;
        alive.push((
            server.create(&SandboxPlan::default(), &[far.as_fd()], &[])?,
            near,
        ));
    }
    // Only root can read the memory of init.
    match alive
        .iter()
        .map(|(sandbox, _)| pss(sandbox.pid()))
        .sum::<Option<u32>>()
    {
        Some(all) => println!("PSS of {IDLE} idle boxes, each {:>10} kB", all / IDLE),
        None => println!("PSS of {IDLE} idle boxes: only root may read it"),
    }
    for (sandbox, _) in alive {
        sandbox.destroy()?;
    }
    Ok(())
}

/// Proportional set size of a process in kilobytes.
fn pss(pid: i32) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn run(socket: std::os::fd::BorrowedFd<'_>) -> std::io::Result<()> {
    send(socket, b"run", &[])?;
    let mut answer = [0; 16];
    receive(socket, &mut answer)?;
    Ok(())
}

/// The median and the tenth percentile, which other load affects least.
fn median_and_p10(times: &mut [Duration]) -> (Duration, Duration) {
    times.sort_unstable();
    (times[times.len() / 2], times[times.len() / 10])
}

/// Runs `/bin/true` for each message.
fn init(mut init: Init) {
    let control = init.fds.pop();
    let mut buffer = [0; 16];
    let null = std::io::stdin();
    while let Some(socket) = &control
        && let Ok(Some(_)) = receive(socket.as_fd(), &mut buffer)
    {
        let stdio = Stdio::Fds {
            stdin: null.as_fd(),
            stdout: null.as_fd(),
            stderr: null.as_fd(),
        };
        let plan = SpawnPlan {
            argv: vec!["/bin/true".into()],
            env: vec![],
            cwd: "/".into(),
            stdio,
            rlimits: vec![],
        };
        if let Ok(command) = init.spawn(&plan) {
            let _ = rustix::process::waitpid(
                rustix::process::Pid::from_raw(command.pid),
                rustix::process::WaitOptions::empty(),
            );
            init.release_mark(&command);
        }
        let _ = send(socket.as_fd(), b"done", &[]);
    }
}
