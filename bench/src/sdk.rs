//! Our server through the SDKs of other protocols, beside a server that only answers.
//!
//! 1. [`client`]: an SDK in a Python process. The scripts are in `bench/sdk`.
//! 2. [`trivial`]: the server that answers at once.
//! 3. [`http`]: the CPU time of the server per exec, over HTTP and over RPC.
//! 4. This file: the bars.

mod client;
mod http;
mod trivial;

use std::time::Duration;

use anyhow::{Result, bail};

use self::client::Sdk;
pub(crate) use self::trivial::serve;
use crate::boxd::Boxd;
use crate::boxes::bar;
use crate::pairs::Pairs;
use crate::process::Server;
use crate::rounds::Plan;
use crate::statistics::median;

/// The number of calls per round; five rounds have 200.
const CALLS: usize = 40;
/// The number of calls to one server before the calls to the other.
const BATCH: usize = 10;
/// The calls of each client before the measurement.
const WARM_UP: usize = 3;

/// The bytes of streamed output, as `bench/sdk/langsmith.py` has them.
const STREAMED: usize = 8 << 20;
/// The runs of streamed output, and of a hundred boxes, per round.
const STREAMS: usize = 5;
const HUNDREDS: usize = 2;

/// The shells with work at once, as `bench/sdk/aio.py` has them.
const SHELLS: f64 = 16.0;
/// The number of idle boxes during the memory measurement.
const IDLE: usize = 40;
/// How long they are idle before it.
const REST: Duration = Duration::from_secs(1);

/// Runs all measurements and prints the bars.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    let parts = plan.only.as_deref();
    let parts = parts.unwrap_or("opensandbox,http,langsmith,aio,e2b");
    crate::report::heading();
    for part in parts.split(',') {
        match part {
            "opensandbox" => opensandbox(plan.rounds)?,
            "http" => http::run(plan.rounds)?,
            "langsmith" => langsmith(plan.rounds)?,
            "aio" => aio(plan.rounds)?,
            "e2b" => e2b(plan.rounds)?,
            _ => bail!("no part called {part}"),
        }
    }
    Ok(())
}

/// An SDK twice: a client of our server, and one of the trivial server.
struct Both {
    ours: Sdk,
    theirs: Sdk,
    server: Boxd,
    _trivial: Server,
}

impl Both {
    fn start(suite: &str, version: &str) -> Result<Self> {
        let (server, trivial) = (Boxd::start()?, Server::own(&["sdk-server"])?);
        let ours = format!("http://{}", server.http);
        Ok(Self {
            ours: Sdk::start(suite, version, &ours)?,
            theirs: Sdk::start(suite, version, trivial.address())?,
            server,
            _trivial: trivial,
        })
    }

    /// Calls an action once on both sides.
    fn prepare(&mut self, action: &str) -> Result<()> {
        self.ours.times(action, 1)?;
        self.theirs.times(action, 1)?;
        Ok(())
    }

    /// Times an action on both sides, in turn.
    fn compare(&mut self, action: &str, calls: usize, rounds: u32) -> Result<Pairs> {
        let warm_up = calls.min(WARM_UP);
        self.ours.times(action, warm_up)?;
        self.theirs.times(action, warm_up)?;
        let mut pairs = Pairs::default();
        for _ in 0..rounds {
            for begin in (0..calls).step_by(BATCH) {
                let count = BATCH.min(calls - begin);
                let ours = self.ours.times(action, count)?;
                pairs.add(&ours, &self.theirs.times(action, count)?);
            }
            pairs.end_round();
        }
        Ok(pairs)
    }
}

/// The name of the trivial server in the table.
const TRIVIAL: &str = "trivial server";

fn opensandbox(rounds: u32) -> Result<()> {
    let mut both = Both::start("opensandbox", "1.1.1")?;
    let created = both.compare("create", CALLS, rounds)?;
    created.print("OpenSandbox, create to first ping", TRIVIAL, 2.0);
    both.prepare("start")?;
    let ran = both.compare("run", CALLS, rounds)?;
    ran.print("OpenSandbox, run of `echo`", TRIVIAL, 1.5);
    Ok(())
}

fn langsmith(rounds: u32) -> Result<()> {
    let mut both = Both::start("langsmith", "0.14.17")?;
    both.prepare("start")?;
    let ran = both.compare("run", CALLS, rounds)?;
    ran.print("LangSmith, run of `true`", TRIVIAL, 1.5);
    let streamed = both.compare("stream", STREAMS, rounds)?;
    streamed.print_rate("LangSmith, 8 MiB of output", TRIVIAL, STREAMED, 0.7);
    Ok(())
}

fn e2b(rounds: u32) -> Result<()> {
    let mut both = Both::start("e2b", "2.63.0")?;
    let created = both.compare("create", CALLS, rounds)?;
    created.print("E2B, create to end of first command", TRIVIAL, 1.5);
    let hundred = both.compare("hundred", HUNDREDS, rounds)?;
    hundred.print("E2B, the same, a hundred at once", TRIVIAL, 3.0);
    Ok(())
}

fn aio(rounds: u32) -> Result<()> {
    let mut both = Both::start("aio", "0.0.30")?;
    let ran = both.compare("run", CALLS, rounds)?;
    ran.print("AIO, run of `true` in a new shell", TRIVIAL, 2.0);
    idle_box(&mut both)?;
    shells(&mut both.ours, rounds)
}

/// Measures the memory of the server and its boxes, before and after some boxes that are idle after one command.
fn idle_box(both: &mut Both) -> Result<()> {
    both.ours.times("idle", WARM_UP)?;
    let before = both.server.process().tree_bytes()?;
    both.ours.times("idle", IDLE)?;
    std::thread::sleep(REST);
    let grown = both.server.process().tree_bytes()?.saturating_sub(before);
    #[allow(clippy::cast_precision_loss, reason = "some megabytes")]
    let kilobytes = grown as f64 / IDLE as f64 / 1e3;
    let name = format!("AIO, memory of an idle box and its shell (PSS, {IDLE} more), 1 MB = 1");
    let ours = format!("{kilobytes:.0} kB");
    bar(&name, &ours, "", &mut [kilobytes / 1e3], 1.0, None);
    Ok(())
}

/// Measures loops in shells at once, beside their CPU time divided by the number of cores.
///
/// The work is the CPU time of the same loop in a process outside a box, alone. The same loops in processes outside a box
/// show what the machine can do.
fn shells(sdk: &mut Sdk, rounds: u32) -> Result<()> {
    sdk.times("start", 1)?;
    let (mut ours, mut floors, mut plain) = (Vec::new(), Vec::new(), Vec::new());
    let mut ratios = Vec::new();
    let cores = std::thread::available_parallelism()?.get();
    #[allow(clippy::cast_precision_loss, reason = "a number of cores")]
    let share = SHELLS / cores as f64;
    for _ in 0..rounds {
        let floor = median(&mut sdk.times("alone", WARM_UP)?) * share;
        let took = median(&mut sdk.times("shells", 1)?);
        plain.extend(sdk.times("plain", 1)?);
        ratios.push(took / floor);
        ours.push(took);
        floors.push(floor);
    }
    let beside = format!(
        "their CPU time / {cores} cores: {:.0} ms (16 processes without a box: {:.0} ms)",
        median(&mut floors),
        median(&mut plain)
    );
    let name = "AIO, 16 shells with 0.5 s of work each";
    let ours = format!("{:.0} ms", median(&mut ours));
    bar(name, &ours, &beside, &mut ratios, 1.2, None);
    Ok(())
}
