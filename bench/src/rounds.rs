//! Rounds that run the contestants in turn, so that noise affects all of them.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::{
    contestant::Contestant,
    driver::{Flow, Idle, Large, Load},
    process::{self, Process, Server},
    report,
    statistics::median,
};

/// The selection of measurements to run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) rounds: u32,
    pub(crate) load: Duration,
    pub(crate) only: Option<String>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            rounds: 5,
            load: Duration::from_secs(1),
            only: None,
        }
    }
}

impl Plan {
    fn contestants(&self) -> Result<Vec<Contestant>> {
        match &self.only {
            Some(names) => names.split(',').map(Contestant::named).collect(),
            None => Ok(Contestant::all().collect()),
        }
    }
}

/// The results of one contestant in one round.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Numbers {
    pub(crate) p50_us: f64,
    pub(crate) at_64: Flow,
    pub(crate) at_1024: Flow,
}

/// All results of one contestant.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) contestant: Contestant,
    /// One entry per round.
    pub(crate) numbers: Vec<Numbers>,
    /// The median of each round, in milliseconds.
    pub(crate) large_ms: Vec<f64>,
    /// The best of all rounds, in milliseconds.
    pub(crate) large_best_ms: f64,
    /// The server's memory per idle connection; empty for contestants in process.
    pub(crate) idle_bytes: Vec<f64>,
}

/// The size of the large message, just below the limit of 16 MiB.
const LARGE: usize = 15 * 1024 * 1024;
const LARGE_TIMES: usize = 5;
const IDLE_CONNECTIONS: u32 = 2000;

/// Runs the plan and prints the tables.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    process::raise_open_files()?;
    report::header(plan);
    let mut records: Vec<Record> = plan.contestants()?.into_iter().map(Record::new).collect();
    let parts: [fn(&mut Record, Duration) -> Result<()>; 3] =
        [Record::load, Record::large, Record::idle];
    for round in 0..plan.rounds {
        for part in parts {
            for record in &mut records {
                part(record, plan.load)
                    .with_context(|| format!("contestant {}", record.contestant.name()))?;
            }
        }
        // Alternate the order: no contestant always runs first, and compared contestants stay adjacent.
        records.reverse();
        eprintln!("round {} of {} done", round + 1, plan.rounds);
    }
    if plan.rounds % 2 == 1 {
        records.reverse();
    }
    report::tables(&records);
    Ok(())
}

impl Record {
    fn new(contestant: Contestant) -> Self {
        Self {
            contestant,
            numbers: Vec::new(),
            large_ms: Vec::new(),
            large_best_ms: f64::INFINITY,
            idle_bytes: Vec::new(),
        }
    }

    fn load(&mut self, duration: Duration) -> Result<()> {
        let contestant = self.contestant;
        let numbers = with_server(contestant, async |address, server| {
            contestant.measure(address, Load { duration, server }).await
        })?;
        eprintln!(
            "{:<12} p50 {:>6.1} us, {:>7.0} /s and {:>5.2} us at 64, {:>7.0} /s and {:>5.2} us at 1024",
            contestant.name(),
            numbers.p50_us,
            numbers.at_64.per_second,
            numbers.at_64.cpu_us,
            numbers.at_1024.per_second,
            numbers.at_1024.cpu_us,
        );
        self.numbers.push(numbers);
        Ok(())
    }

    fn large(&mut self, _: Duration) -> Result<()> {
        let contestant = self.contestant;
        let mut large = with_server(contestant, async |address, _| {
            let large = Large {
                bytes: LARGE,
                times: LARGE_TIMES,
            };
            contestant.with(address, large).await
        })?;
        self.large_best_ms = large.iter().copied().fold(self.large_best_ms, f64::min);
        self.large_ms.push(median(&mut large));
        Ok(())
    }

    fn idle(&mut self, _: Duration) -> Result<()> {
        let contestant = self.contestant;
        let idle = with_server(contestant, async |address, server| {
            let Some(server) = server else {
                return Ok(None);
            };
            let idle = Idle {
                connections: IDLE_CONNECTIONS,
                server,
            };
            contestant.with(address, idle).await.map(Some)
        })?;
        self.idle_bytes.extend(idle);
        Ok(())
    }
}

/// Runs `work` on a separate runtime with a new server.
///
/// No contestant inherits the memory that another one has grown.
fn with_server<T>(
    contestant: Contestant,
    work: impl AsyncFnOnce(&str, Option<Process>) -> Result<T>,
) -> Result<T> {
    let server = if contestant.is_in_process() {
        None
    } else {
        Some(Server::own(&["server", contestant.name()])?)
    };
    let address = server.as_ref().map_or("", Server::address);
    let process = server.as_ref().map(Server::process);
    process::runtime()?.block_on(work(address, process))
}
