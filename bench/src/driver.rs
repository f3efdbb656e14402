//! The load on one connection: tasks in a closed loop, one call at a time each.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use tokio::task::JoinSet;

use crate::{
    contestant::{Client, Use},
    payload::Payload,
    process::{Meter, Process},
    rounds::Numbers,
    statistics::median,
};

/// The duration of a load, and the server process to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) duration: Duration,
    /// The server's process; `None` if both ends are in this process.
    pub(crate) server: Option<Process>,
}

/// The result of a closed loop.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flow {
    pub(crate) per_second: f64,
    /// The processor time of both ends per call.
    pub(crate) cpu_us: f64,
}

/// All loads of one round, over one connection.
#[derive(Debug)]
pub(crate) struct Measure(pub(crate) Load);

impl Use for Measure {
    type Output = Numbers;

    async fn run<C, F>(self, connect: impl Fn() -> F) -> Result<Numbers>
    where
        C: Client,
        F: Future<Output = Result<C>>,
    {
        let client = connect().await?;
        Ok(Numbers {
            p50_us: latency(&client, self.0.duration / 2).await?,
            at_64: flow(&client, 64, self.0).await?,
            at_1024: flow(&client, 1024, self.0).await?,
        })
    }
}

/// Echoes one large message several times; returns each duration in milliseconds.
#[derive(Debug)]
pub(crate) struct Large {
    pub(crate) bytes: usize,
    pub(crate) times: usize,
}

impl Use for Large {
    type Output = Vec<f64>;

    async fn run<C, F>(self, connect: impl Fn() -> F) -> Result<Vec<f64>>
    where
        C: Client,
        F: Future<Output = Result<C>>,
    {
        let client = connect().await?;
        let mut milliseconds = Vec::with_capacity(self.times);
        // The first echo grows every buffer and is not counted.
        for time in 0..=self.times {
            let payload = Payload::large(self.bytes);
            let start = Instant::now();
            let answer = client.echo(payload).await?;
            let elapsed = start.elapsed();
            ensure!(answer.command.len() == self.bytes, "the echo lost bytes");
            if time > 0 {
                milliseconds.push(elapsed.as_secs_f64() * 1e3);
            }
        }
        Ok(milliseconds)
    }
}

/// Opens connections with one call each; returns the server's growth for one.
#[derive(Debug)]
pub(crate) struct Idle {
    pub(crate) connections: u32,
    pub(crate) server: Process,
}

impl Use for Idle {
    type Output = f64;

    async fn run<C, F>(self, connect: impl Fn() -> F) -> Result<f64>
    where
        C: Client,
        F: Future<Output = Result<C>>,
    {
        // Exclude the one-time cost of the first connections.
        let mut clients = Vec::new();
        open(&connect, self.connections / 20, &mut clients).await?;
        let before = settled(self.server).await?;
        open(&connect, self.connections, &mut clients).await?;
        let after = settled(self.server).await?;
        drop(clients);
        let grown = u32::try_from(after.saturating_sub(before))?;
        Ok(f64::from(grown) / f64::from(self.connections))
    }
}

async fn open<C, F>(connect: &impl Fn() -> F, count: u32, clients: &mut Vec<C>) -> Result<()>
where
    C: Client,
    F: Future<Output = Result<C>>,
{
    for number in 0..count {
        let client = connect().await?;
        client.echo(Payload::small(u64::from(number))).await?;
        clients.push(client);
    }
    Ok(())
}

async fn settled(server: Process) -> Result<u64> {
    tokio::time::sleep(Duration::from_millis(500)).await;
    server.resident_bytes()
}

async fn latency<C: Client>(client: &C, duration: Duration) -> Result<f64> {
    let warm_up = Instant::now();
    let mut number = 0;
    while warm_up.elapsed() < duration / 5 {
        checked_echo(client, number).await?;
        number += 1;
    }
    let mut microseconds = Vec::new();
    let begin = Instant::now();
    while begin.elapsed() < duration {
        let start = Instant::now();
        checked_echo(client, number).await?;
        microseconds.push(start.elapsed().as_secs_f64() * 1e6);
        number += 1;
    }
    Ok(median(&mut microseconds))
}

async fn flow<C: Client>(client: &C, in_flight: u64, load: Load) -> Result<Flow> {
    let stop = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for task in 0..in_flight {
        let (client, stop, done) = (client.clone(), Arc::clone(&stop), Arc::clone(&done));
        tasks.spawn(async move {
            let mut number = task;
            while !stop.load(Ordering::Relaxed) {
                checked_echo(&client, number).await?;
                done.fetch_add(1, Ordering::Relaxed);
                number += in_flight;
            }
            anyhow::Ok(())
        });
    }
    tokio::time::sleep(load.duration / 4).await;
    let meter = Meter::start(load.server)?;
    let (before, start) = (done.load(Ordering::Relaxed), Instant::now());
    tokio::time::sleep(load.duration).await;
    let (after, elapsed) = (done.load(Ordering::Relaxed), start.elapsed());
    let cpu = meter.spent()?;
    stop.store(true, Ordering::Relaxed);
    while let Some(task) = tasks.join_next().await {
        task??;
    }
    let calls = f64::from(u32::try_from(after - before)?);
    ensure!(calls > 0.0, "no call was answered in {elapsed:?}");
    Ok(Flow {
        per_second: calls / elapsed.as_secs_f64(),
        cpu_us: cpu.as_secs_f64() * 1e6 / calls,
    })
}

async fn checked_echo<C: Client>(client: &C, number: u64) -> Result<()> {
    let answer = client.echo(Payload::small(number)).await?;
    ensure!(
        answer.number == number,
        "call {number} got the answer of {}",
        answer.number
    );
    Ok(())
}
