//! Ratios of the results, and the bars that they must meet.

use std::{fmt::Write as _, fs, process::Command};

use crate::{
    contestant::Contestant,
    ours::Carrier,
    rounds::{Plan, Record},
    statistics::median,
};

/// A compared metric.
#[derive(Clone, Copy, Debug)]
enum Metric {
    Cpu64,
    PerSecond64,
    PerSecond1024,
    Cpu1024,
    Latency,
    Idle,
    Large,
}

impl Metric {
    /// Returns one value per round.
    fn values(self, record: &Record) -> Vec<f64> {
        let numbers = record.numbers.iter();
        match self {
            Self::Cpu64 => numbers.map(|round| round.at_64.cpu_us).collect(),
            Self::PerSecond64 => numbers.map(|round| round.at_64.per_second).collect(),
            Self::PerSecond1024 => numbers.map(|round| round.at_1024.per_second).collect(),
            Self::Cpu1024 => numbers.map(|round| round.at_1024.cpu_us).collect(),
            Self::Latency => numbers.map(|round| round.p50_us).collect(),
            Self::Idle => record.idle_bytes.clone(),
            Self::Large => record.large_ms.clone(),
        }
    }

    fn median(self, record: &Record) -> f64 {
        median(&mut self.values(record))
    }

    /// Formats a value for the table.
    fn show(self, value: f64) -> String {
        match self {
            Self::Cpu64 | Self::Cpu1024 | Self::Latency => format!("{value:.2} us"),
            Self::PerSecond64 | Self::PerSecond1024 => format!("{value:.0} /s"),
            Self::Idle => format!("{:.1} kB", value / 1e3),
            Self::Large => format!("{value:.0} ms"),
        }
    }
}

/// The bound of a ratio.
#[derive(Clone, Copy, Debug)]
enum Bound {
    AtMost { bar: f64, goal: f64 },
    AtLeast(f64),
}

impl Bound {
    fn wanted(self) -> String {
        match self {
            Self::AtMost { bar, goal } if goal < bar => format!("at most {bar}, goal {goal}"),
            Self::AtMost { bar, .. } => format!("at most {bar}"),
            Self::AtLeast(bar) => format!("at least {bar}"),
        }
    }

    fn verdict(self, value: f64) -> &'static str {
        match self {
            Self::AtMost { bar, goal } if value <= goal && goal < bar => "meets bar and goal",
            Self::AtMost { bar, .. } if value <= bar => "meets bar",
            Self::AtLeast(bar) if value >= bar => "meets bar",
            _ => "**misses bar**",
        }
    }
}

/// A performance target of our engine.
#[derive(Debug)]
struct Bar {
    what: &'static str,
    metric: Metric,
    ours: Carrier,
    /// The contestant to compare with; without one, the value itself is bounded.
    peer: Option<Contestant>,
    bound: Bound,
}

const fn at_most(bar: f64) -> Bound {
    Bound::AtMost { bar, goal: bar }
}

/// All performance targets, as the engine's issue states them.
const BARS: [Bar; 7] = [
    Bar {
        what: "CPU per call, 64 in flight, tcp",
        metric: Metric::Cpu64,
        ours: Carrier::Tcp,
        peer: Some(Contestant::MuxTcp),
        bound: Bound::AtMost {
            bar: 1.5,
            goal: 1.3,
        },
    },
    Bar {
        what: "calls per second, 1,024 in flight, tcp",
        metric: Metric::PerSecond1024,
        ours: Carrier::Tcp,
        peer: Some(Contestant::MuxTcp),
        bound: Bound::AtLeast(0.8),
    },
    Bar {
        what: "calls per second, 1,024 in flight, ws",
        metric: Metric::PerSecond1024,
        ours: Carrier::WebSocket,
        peer: Some(Contestant::Jsonrpsee),
        bound: Bound::AtLeast(2.0),
    },
    Bar {
        what: "calls per second, 1,024 in flight, tcp",
        metric: Metric::PerSecond1024,
        ours: Carrier::Tcp,
        peer: Some(Contestant::Tarpc),
        bound: Bound::AtLeast(2.0),
    },
    Bar {
        what: "p50 of a call, in process",
        metric: Metric::Latency,
        ours: Carrier::Queue,
        peer: Some(Contestant::MuxQueue),
        bound: at_most(2.0),
    },
    Bar {
        what: "server memory of an idle connection, bytes",
        metric: Metric::Idle,
        ours: Carrier::Tcp,
        peer: None,
        bound: at_most(16_000.0),
    },
    Bar {
        what: "echo of 15 MiB, tcp",
        metric: Metric::Large,
        ours: Carrier::Tcp,
        peer: Some(Contestant::MuxTcp),
        bound: at_most(1.5),
    },
];

/// Prints the date, the machine and the plan of the run.
pub(crate) fn header(plan: &Plan) {
    println!(
        "- date: {}",
        first_line_of(Command::new("date").args(["-u", "+%F"]))
    );
    println!("- machine: {}", machine());
    println!(
        "- command: `box-bench rpc --rounds {} --seconds {}`, `measured` profile",
        plan.rounds,
        plan.load.as_secs_f64()
    );
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split_whitespace().next().unwrap_or("unknown");
    print!("- load average before the run: {load}");
    if load.parse().is_ok_and(|load: f64| load > 0.5) {
        print!("; the machine was busy: trust CPU per call before calls per second");
    }
    println!("\n");
}

/// Prints the medians, then the bars.
pub(crate) fn tables(records: &[Record]) {
    print!("{}", medians(records));
    let bars = bars(records);
    if !bars.is_empty() {
        print!("\n{bars}");
    }
}

fn medians(records: &[Record]) -> String {
    let mux = find(records, Contestant::MuxTcp);
    let mut table = String::from(
        "| contestant (medians) | p50 | /s @64 | CPU @64 | x mux | /s @1024 | share of mux | CPU @1024 | 15 MiB (best) | idle connection |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    for record in records {
        let show = |metric: Metric| metric.show(metric.median(record));
        let against_mux = |metric: Metric| {
            mux.and_then(|mux| ratios(metric, record, mux)).map_or_else(
                || "-".to_owned(),
                |mut ratios| format!("{:.2}", median(&mut ratios)),
            )
        };
        let idle = if record.idle_bytes.is_empty() {
            "-".to_owned()
        } else {
            show(Metric::Idle)
        };
        let _ = writeln!(
            table,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} ({:.0}) | {idle} |",
            record.contestant.title(),
            show(Metric::Latency),
            show(Metric::PerSecond64),
            show(Metric::Cpu64),
            against_mux(Metric::Cpu64),
            show(Metric::PerSecond1024),
            against_mux(Metric::PerSecond1024),
            show(Metric::Cpu1024),
            show(Metric::Large),
            record.large_best_ms,
        );
    }
    table
}

/// Prints the heading of a table of bars.
pub(crate) fn heading() {
    println!("| measure | ours | peer | ratio (lowest to highest round) | bar | verdict |");
    println!("|---|---|---|---|---|---|");
}

fn bars(records: &[Record]) -> String {
    let rows: String = BARS.iter().filter_map(|bar| row(bar, records)).collect();
    if rows.is_empty() {
        return rows;
    }
    let head = "| measure | ours | peer | ratio (lowest to highest round) | bar | verdict |\n|---|---|---|---|---|---|\n";
    format!("{head}{rows}")
}

/// Returns a row, or `None` if one of the two contestants did not take part.
fn row(bar: &Bar, records: &[Record]) -> Option<String> {
    let ours = find(records, Contestant::Ours(bar.ours))?;
    let (mut values, peer) = match bar.peer {
        Some(peer) => {
            let peer = find(records, peer)?;
            let shown = bar.metric.show(bar.metric.median(peer));
            let peer_text = format!("{}: {shown}", peer.contestant.title());
            (ratios(bar.metric, ours, peer)?, peer_text)
        }
        None => (bar.metric.values(ours), "-".to_owned()),
    };
    let middle = median(&mut values);
    let (low, high) = (values.first()?, values.last()?);
    let digits = if bar.peer.is_some() { 2 } else { 0 };
    Some(format!(
        "| {} | {} | {peer} | {middle:.digits$} ({low:.digits$} to {high:.digits$}) | {} | {} |\n",
        bar.what,
        bar.metric.show(bar.metric.median(ours)),
        bar.bound.wanted(),
        bar.bound.verdict(middle),
    ))
}

/// Returns the ratio of each round, which noise in both values does not change.
fn ratios(metric: Metric, record: &Record, reference: &Record) -> Option<Vec<f64>> {
    let (values, references) = (metric.values(record), metric.values(reference));
    let ratios: Vec<f64> = values
        .iter()
        .zip(&references)
        .map(|(value, other)| value / other)
        .collect();
    (!ratios.is_empty()).then_some(ratios)
}

fn find(records: &[Record], contestant: Contestant) -> Option<&Record> {
    records
        .iter()
        .find(|record| record.contestant == contestant)
}

fn machine() -> String {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown processor", |(_, model)| model);
    let count = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{count} x {model}, Linux {}", kernel.trim())
}

fn first_line_of(command: &mut Command) -> String {
    let output = command
        .output()
        .map(|output| output.stdout)
        .unwrap_or_default();
    String::from_utf8_lossy(&output).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::{Bound, at_most};

    #[test]
    fn a_bound_holds_up_to_and_with_its_bar() {
        assert_eq!(at_most(2.0).verdict(2.0), "meets bar");
        assert_eq!(at_most(2.0).verdict(2.01), "**misses bar**");
        assert_eq!(Bound::AtLeast(0.8).verdict(0.8), "meets bar");
        assert_eq!(Bound::AtLeast(0.8).verdict(0.79), "**misses bar**");
    }

    #[test]
    fn a_goal_is_told_apart_from_its_bar() {
        let bound = Bound::AtMost {
            bar: 1.5,
            goal: 1.3,
        };
        assert_eq!(bound.verdict(1.3), "meets bar and goal");
        assert_eq!(bound.verdict(1.4), "meets bar");
    }
}
