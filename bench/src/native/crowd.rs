//! Many boxes: 64 in flight, and one exec among a thousand boxes.

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use box_runtime::Backend as _;
use futures::{StreamExt as _, TryStreamExt as _, stream};

use super::engines::bubblewrap;
use super::{Bench, RUNS, spawn};
use crate::boxes::{bar, rate_bar};
use crate::process;
use crate::statistics::median;

/// The number of starts in flight.
const WIDTH: usize = 64;
/// The number of starts per measurement.
const STARTS: usize = 512;
/// The number of live boxes.
const ALIVE: usize = 1000;

impl Bench {
    /// Measures box starts with 64 in flight, beside bare spawns and bubblewrap.
    ///
    /// Each start creates a box, runs `/bin/true` and deletes the box.
    pub(super) async fn at_once(&self, rounds: u32) -> Result<()> {
        let (mut bare, mut wrapped, mut ours) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            bare.push(by_threads(|| Command::new("/bin/true"))?);
            if self.engines.bubblewrap {
                wrapped.push(by_threads(bubblewrap)?);
            }
            let begun = Instant::now();
            let boxes = stream::iter(0..STARTS).map(Ok).try_for_each_concurrent(
                WIDTH,
                async |number| -> Result<()> {
                    let (id, agent) = self.made().await?;
                    Self::argv(&agent, number).await?;
                    Ok(self.backend.stop(id).await?)
                },
            );
            boxes.await?;
            ours.push(rate(begun));
        }
        let show = |peer: &str, rates: &[f64], least, goal| {
            let pairs = ours.iter().zip(rates);
            let mut ratios: Vec<f64> = pairs.map(|(ours, theirs)| ours / theirs).collect();
            if ratios.is_empty() {
                return;
            }
            let of = |rates: &[f64]| format!("{:.0} /s", median(&mut rates.to_vec()));
            let name = format!("cold boxes, words, end, {WIDTH} at once");
            let beside = format!("{peer}, {WIDTH} at once: {}", of(rates));
            rate_bar(&name, &of(&ours), &beside, &mut ratios, least, Some(goal));
        };
        show("spawn of /bin/true", &bare, 0.2, 0.4);
        show("bubblewrap of /bin/true", &wrapped, 1.5, 3.0);
        Ok(())
    }

    /// Measures an exec in a running box, with one live box and with a thousand.
    pub(super) async fn among_many(&self, rounds: u32) -> Result<()> {
        // A thousand boxes need about five thousand descriptors.
        process::raise_open_files()?;
        let (mut alone, mut among) = (Vec::new(), Vec::new());
        for round in 0..rounds as usize {
            let first = self.made().await?;
            alone.push(self.warm(&first.1, 2 * round).await?);
            let others = stream::iter(1..ALIVE).map(|_| self.made());
            let others: Vec<_> = others.buffer_unordered(8).try_collect().await?;
            among.push(self.warm(&first.1, 2 * round + 1).await?);
            for (id, _) in others.iter().chain([&first]) {
                self.backend.stop(*id).await?;
            }
        }
        let pairs = among.iter().zip(&alone);
        let mut ratios: Vec<f64> = pairs.map(|(among, alone)| among / alone).collect();
        let of = |times: &[f64]| format!("{:.0} us", median(&mut times.to_vec()));
        let name = format!("warm exec of words, {ALIVE} boxes alive");
        let beside = format!("one box alive: {}", of(&alone));
        bar(&name, &of(&among), &beside, &mut ratios, 1.5, None);
        Ok(())
    }

    async fn warm(&self, agent: &box_rpc::Session, series: usize) -> Result<f64> {
        let mut times = Vec::with_capacity(RUNS);
        for run in 0..RUNS {
            let begun = Instant::now();
            Self::argv(agent, series * RUNS + run).await?;
            times.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        Ok(median(&mut times))
    }
}

/// Returns starts per second, with one start in flight per thread.
fn by_threads(command: impl Fn() -> Command + Sync) -> Result<f64> {
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        while next.fetch_add(1, Ordering::Relaxed) < STARTS {
            spawn(&mut command())?;
        }
        Ok(())
    };
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..WIDTH).map(|_| scope.spawn(work)).collect();
        let mut ends = threads.into_iter().map(|thread| thread.join().ok());
        ends.try_for_each(|end| end.context("a thread panicked")?)
    })?;
    Ok(rate(begun))
}

#[expect(clippy::cast_precision_loss, reason = "a small number")]
fn rate(begun: Instant) -> f64 {
    STARTS as f64 / begun.elapsed().as_secs_f64()
}
