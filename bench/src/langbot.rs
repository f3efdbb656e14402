//! LangBot on our runtime and on its own, with the same clients in one run.
//!
//! 1. [`servers`]: our gateway over the fake backend, a minimal server, the real programs.
//! 2. [`client`]: a minimal client. LangBot's own client is `bench/langbot/client.py`.
//! 3. This file: the bars.

mod client;
mod servers;

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

pub(crate) use self::servers::serve;
use self::servers::{LARGE, LARGE_BYTES, Piped, ours, python, script, theirs};
use crate::boxd;
use crate::boxes::{bar, rate_bar};
use crate::process::{self, Process};
use crate::rounds::Plan;
use crate::statistics::median;

/// The minimal client's calls per round, to our server and to LangBot's.
const OUR_CALLS: u64 = 20_000;
const THEIR_CALLS: u64 = 1_000;
const AT_ONCE: u64 = 64;
/// The number of answers of 100 kB, and of commands, per round.
const LARGE_CALLS: usize = 20;
const EXECS: usize = 60;

/// Runs all measurements and prints the bars.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    let parts = plan
        .only
        .as_deref()
        .unwrap_or("bare,client,start,large,exec");
    crate::report::heading();
    for part in parts.split(',') {
        match part {
            "bare" => bare(plan.rounds)?,
            "client" => unmodified_client(plan.rounds)?,
            "start" => start(plan.rounds)?,
            "large" => large(plan.rounds)?,
            "exec" => exec(plan.rounds)?,
            _ => bail!("no part called {part}"),
        }
    }
    Ok(())
}

/// Pairs of results, ours and theirs, as ratios and medians.
#[derive(Default)]
struct Pairs {
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

impl Pairs {
    fn add(&mut self, ours: f64, theirs: f64) {
        self.ours.push(ours);
        self.theirs.push(theirs);
    }

    fn ratios(&self) -> Vec<f64> {
        self.ours
            .iter()
            .zip(&self.theirs)
            .map(|(ours, theirs)| ours / theirs)
            .collect()
    }

    fn shown(&mut self, unit: &str, digits: usize) -> (String, String) {
        let show = |value: f64| format!("{value:.digits$} {unit}");
        (show(median(&mut self.ours)), show(median(&mut self.theirs)))
    }
}

/// Measures the minimal client with both servers over their fake backends.
fn bare(rounds: u32) -> Result<()> {
    let (ours, theirs) = (ours("gateway-websocket")?, theirs()?);
    for (name, action, data) in [
        ("ping", "__ping", json!({})),
        ("exec", "box_exec", client::spec("true")),
    ] {
        let mut pairs = Pairs::default();
        for _ in 0..rounds {
            process::runtime()?.block_on(async {
                let our_rate =
                    client::rate(ours.address(), action, &data, OUR_CALLS, AT_ONCE).await?;
                let their_rate =
                    client::rate(theirs.address(), action, &data, THEIR_CALLS, AT_ONCE).await?;
                pairs.add(our_rate, their_rate);
                anyhow::Ok(())
            })?;
        }
        let (our, their) = pairs.shown("/s", 0);
        let name = format!("bare client, {name}, 64 at once, fake backend");
        rate_bar(
            &name,
            &our,
            &format!("LangBot's server: {their}"),
            &mut pairs.ratios(),
            20.0,
            None,
        );
    }
    Ok(())
}

/// Measures LangBot's client with our gateway and with the minimal server.
///
/// The results of LangBot's own server are printed for reference.
fn unmodified_client(rounds: u32) -> Result<()> {
    let servers = [ours("gateway-websocket")?, ours("trivial")?, theirs()?];
    for what in ["ping", "exec"] {
        let (mut alone, mut together) = (Pairs::default(), Pairs::default());
        let (mut theirs_alone, mut theirs_together) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let mut found = Vec::new();
            for server in &servers {
                let output = Command::new(python()?)
                    .arg(script("client.py"))
                    .args([server.address(), what])
                    .output()?;
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                let numbers: Vec<f64> = text
                    .split_whitespace()
                    .filter_map(|word| word.parse().ok())
                    .collect();
                ensure!(
                    numbers.len() == 2,
                    "the client failed: {}",
                    String::from_utf8_lossy(&output.stderr)
                );
                found.push((numbers[0], numbers[1]));
            }
            alone.add(found[0].0, found[1].0);
            together.add(found[0].1, found[1].1);
            theirs_alone.push(found[2].0);
            theirs_together.push(found[2].1);
        }
        for (how, pairs, theirs) in [
            ("alone", &mut alone, &mut theirs_alone),
            ("64 at once", &mut together, &mut theirs_together),
        ] {
            let (our, trivial) = pairs.shown("ms", 3);
            let beside = format!(
                "trivial server: {trivial} (LangBot's: {:.3} ms)",
                median(theirs)
            );
            let name = format!("LangBot's client, {what}, {how}, fake backend");
            bar(&name, &our, &beside, &mut pairs.ratios(), 1.3, None);
        }
    }
    Ok(())
}

fn our_program() -> Result<(std::path::PathBuf, Vec<OsString>)> {
    let port = free_port()?.to_string();
    let arguments = ["stdio", "--langbot", "--ws-control-port", &port].map(OsString::from);
    Ok((boxd::program()?, arguments.into()))
}

fn their_program() -> Result<(std::path::PathBuf, Vec<OsString>)> {
    let port = free_port()?.to_string();
    let arguments = [
        "-m",
        "langbot_plugin.cli.__init__",
        "box",
        "-s",
        "--ws-control-port",
        &port,
    ];
    Ok((python()?, arguments.map(OsString::from).into()))
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Measures the real programs from start to the first ping, and their memory then.
fn start(rounds: u32) -> Result<()> {
    let (mut time, mut memory) = (Pairs::default(), Pairs::default());
    for _ in 0..rounds {
        let measure = |(program, arguments): (std::path::PathBuf, Vec<OsString>)| {
            let begun = Instant::now();
            let mut server = Piped::start(&program, &arguments)?;
            server.ask("__ping", &json!({}))?;
            let took = begun.elapsed().as_secs_f64() * 1000.0;
            anyhow::Ok((took, megabytes(server.pid())?))
        };
        let (ours, theirs) = (measure(our_program()?)?, measure(their_program()?)?);
        time.add(ours.0, theirs.0);
        memory.add(ours.1, theirs.1);
    }
    let (our, their) = time.shown("ms", 1);
    bar(
        "start to first ping",
        &our,
        &format!("`lbp box -s`: {their}"),
        &mut time.ratios(),
        0.02,
        None,
    );
    let (our, their) = memory.shown("MB", 1);
    let beside = format!("`lbp box -s`: {their}");
    bar(
        "memory then, with children",
        &our,
        &beside,
        &mut memory.ratios(),
        0.2,
        None,
    );
    Ok(())
}

/// Returns the memory of a process and its children; shared pages count once.
fn megabytes(pid: u32) -> Result<f64> {
    let bytes = Process::with_pid(pid).tree_bytes()?;
    #[allow(clippy::cast_precision_loss, reason = "some megabytes")]
    let megabytes = bytes as f64 / 1e6;
    Ok(megabytes)
}

/// Returns the milliseconds per call, after a first call that creates the box.
fn timed(server: &mut Piped, cmd: &str, calls: usize, least: usize) -> Result<f64> {
    let data = client::spec(cmd);
    server.ask("box_exec", &data)?;
    let mut times = Vec::new();
    for _ in 0..calls {
        let begun = Instant::now();
        let bytes = server.ask("box_exec", &data)?;
        times.push(begun.elapsed().as_secs_f64() * 1000.0);
        ensure!(bytes >= least, "an answer of {bytes} bytes");
    }
    Ok(median(&mut times))
}

/// Measures 100 kB of output over pipes and the fake backends.
fn large(rounds: u32) -> Result<()> {
    let mut pairs = Pairs::default();
    let own = std::env::current_exe().context("finding the benchmark's own program")?;
    let mut ours = Piped::start(
        &own,
        &["langbot-server", "gateway-stdio"].map(OsString::from),
    )?;
    let theirs: [OsString; 2] = [script("server.py").into(), "stdio".into()];
    let mut theirs = Piped::start(&python()?, &theirs)?;
    for _ in 0..rounds {
        let our = timed(&mut ours, LARGE, LARGE_CALLS, LARGE_BYTES)?;
        pairs.add(our, timed(&mut theirs, LARGE, LARGE_CALLS, LARGE_BYTES)?);
    }
    let mut ratios: Vec<f64> = pairs
        .ratios()
        .into_iter()
        .map(|ratio| 1.0 / ratio)
        .collect();
    let (our, their) = pairs.shown("ms", 3);
    let beside = format!("LangBot's server: {their}");
    rate_bar(
        "100 kB of output over stdio, times faster",
        &our,
        &beside,
        &mut ratios,
        10.0,
        None,
    );
    Ok(())
}

/// Measures `true` in a real box, and in LangBot's backend without isolation.
///
/// Both are the real programs on pipes.
fn exec(rounds: u32) -> Result<()> {
    let mut pairs = Pairs::default();
    let start = |(program, arguments): (std::path::PathBuf, Vec<OsString>)| {
        Piped::start(Path::new(&program), &arguments)
    };
    let (mut ours, mut theirs) = (start(our_program()?)?, start(their_program()?)?);
    for _ in 0..rounds {
        let our = timed(&mut ours, "true", EXECS, 0)?;
        pairs.add(our, timed(&mut theirs, "true", EXECS, 0)?);
    }
    let (our, their) = pairs.shown("ms", 2);
    let beside = format!("LangBot's `host` backend, no isolation: {their}");
    bar(
        "exec of `true` in an isolated box",
        &our,
        &beside,
        &mut pairs.ratios(),
        1.0,
        None,
    );
    Ok(())
}
