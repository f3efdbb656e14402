//! Times of two contestants that run in turn.

use std::time::Instant;

use crate::boxes::{bar, rate_bar};
use crate::statistics::median;

/// Times of Box and of a peer, in microseconds.
///
/// A ratio compares the medians of one round.
#[derive(Debug, Default)]
pub(crate) struct Pairs {
    ours: Vec<f64>,
    theirs: Vec<f64>,
    /// The medians of the rounds that have ended.
    medians: [Vec<f64>; 2],
    ratios: Vec<f64>,
}

impl Pairs {
    /// Adds the time since then to ours.
    pub(crate) fn ours(&mut self, begun: Instant) {
        self.ours.push(microseconds(begun));
    }

    /// Adds the time since then to that of the peer.
    pub(crate) fn theirs(&mut self, begun: Instant) {
        self.theirs.push(microseconds(begun));
    }

    /// Adds times of both, in milliseconds.
    pub(crate) fn add(&mut self, ours: &[f64], theirs: &[f64]) {
        self.ours.extend(ours.iter().map(|time| time * 1e3));
        self.theirs.extend(theirs.iter().map(|time| time * 1e3));
    }

    /// Ends a round.
    pub(crate) fn end_round(&mut self) {
        let (ours, theirs) = (median(&mut self.ours), median(&mut self.theirs));
        self.ratios.push(ours / theirs);
        self.medians[0].push(ours);
        self.medians[1].push(theirs);
        self.ours.clear();
        self.theirs.clear();
    }

    /// Prints the bar.
    pub(crate) fn print(mut self, name: &str, peer: &str, most: f64) {
        let [ours, theirs] = &mut self.medians;
        let ours = shown(median(ours));
        let beside = format!("{peer}: {}", shown(median(theirs)));
        bar(name, &ours, &beside, &mut self.ratios, most, None);
    }

    /// Prints the bar of the rate at which bytes were moved.
    pub(crate) fn print_rate(mut self, name: &str, peer: &str, bytes: usize, least: f64) {
        #[allow(clippy::cast_precision_loss, reason = "some megabytes")]
        let shown = |microseconds| format!("{:.0} MB/s", bytes as f64 / microseconds);
        let [ours, theirs] = &mut self.medians;
        let ours = shown(median(ours));
        let beside = format!("{peer}: {}", shown(median(theirs)));
        for ratio in &mut self.ratios {
            *ratio = 1.0 / *ratio;
        }
        rate_bar(name, &ours, &beside, &mut self.ratios, least, None);
    }
}

fn microseconds(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e6
}

fn shown(microseconds: f64) -> String {
    if microseconds < 1e5 {
        format!("{microseconds:.0} us")
    } else {
        format!("{:.0} ms", microseconds / 1e3)
    }
}
