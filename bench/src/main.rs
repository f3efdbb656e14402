//! Benchmarks of Box beside its peers and beside minimal programs, in one run.
//!
//! # Reading order
//! [`payload`] is the message that every contestant echoes, [`contestant`] the list of contestants, and [`peers`] and
//! [`ours`] serve and connect each one. [`driver`] loads one client, [`process`] starts servers and reads their
//! resource use, [`rounds`] runs the contestants in turn, [`pairs`] times two contestants, and [`report`] computes
//! ratios and compares them with the bars. [`boxes`] measures the runtime, [`native`] real boxes, [`plane`] output and
//! files in them, [`network`] their network, and [`images`] pulls.
//!
//! The others start the real program ([`boxd`]): [`stalled`] measures it with stalled clients ([`http_client`]),
//! [`langbot`] with LangBot's clients, and [`sdk`] with the SDKs of other protocols; [`packages`] finds their Python
//! packages.

mod boxd;
mod boxes;
mod contestant;
mod debian;
mod driver;
mod http_client;
mod images;
mod langbot;
mod native;
mod network;
mod ours;
mod packages;
mod pairs;
mod payload;
mod peers;
mod plane;
mod process;
mod report;
mod rounds;
mod sdk;
mod stalled;
mod statistics;

use std::{env, time::Duration};

use anyhow::{Context, Result, bail};

use contestant::Contestant;
use rounds::Plan;

const HELP: &str = "\
box-bench rpc [--rounds N] [--seconds S] [--only NAME,NAME]
    Calls per second, CPU per call, latency, memory and large messages of every contestant, as ratios.
    --rounds   how often each contestant runs; medians are reported (5)
    --seconds  how long each of its loads is measured (1)
    --only     a few contestants; bars that need others are left out
box-bench boxes [--rounds N]
    What runtime and policy add to a bare call, and what a live box costs, as ratios.
box-bench native [--rounds N] [--only PART,PART]
    Real boxes beside a bare spawn, bubblewrap, runc and Docker, as ratios; 64 at once, a thousand alive; and what
    an idle box costs; boxes of pools, snapshots and forks beside cold boxes. The parts: speed, disk, image, pool, snapshot,
    fork, at-once, alive, memory.
box-bench plane [--rounds N] [--only PART,PART]
    What is inside a box over a Unix socket: streams of output, first bytes, builtins of shells, files, commands that
    have ended; as ratios. The parts: streams, first-byte, builtins, files, ended.
box-bench network [--rounds N]
    The way out of a box beside loopback, a plain relay and a box without a network, as ratios.
box-bench images [--rounds N]
    Pulls of a Debian image beside skopeo and umoci, as ratios. Needs root on Debian to make the image.
box-bench stalled [--rounds N]
    The 99th percentile of a healthy client of boxd among a thousand that stall, beside the same client alone. Needs boxd, built
    beside this program.
box-bench langbot [--rounds N] [--only PART,PART]
    LangBot's clients on our runtime and on its own, as ratios. `cargo xtask test langbot` installs its packages; boxd is built
    beside this program. The parts: bare, client, start, large, exec.
box-bench sdk [--rounds N] [--only PART,PART]
    Our server through the SDKs of other protocols, beside a server that only answers, as ratios. `cargo xtask test SUITE`
    installs the packages of a suite; boxd is built beside this program. The parts: opensandbox, http, langsmith, aio,
    e2b.
box-bench server NAME
    One contestant's server; the benchmark starts it.
box-bench list
    The names of the contestants.";

fn main() -> Result<()> {
    box_sys::serve_if_asked(box_agent::prepare);
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["rpc", options @ ..] => rounds::run(&plan(options)?),
        ["boxes", options @ ..] => boxes::run(plan(options)?.rounds),
        ["native", options @ ..] => native::run(&plan(options)?),
        ["plane", options @ ..] => plane::run(&plan(options)?),
        ["network", options @ ..] => network::run(plan(options)?.rounds),
        ["network-client", what, to] => network::client(what, to),
        ["images", options @ ..] => images::run(plan(options)?.rounds),
        ["stalled", options @ ..] => stalled::run(plan(options)?.rounds),
        ["langbot", options @ ..] => langbot::run(&plan(options)?),
        ["langbot-server", name] => langbot::serve(name),
        ["sdk", options @ ..] => sdk::run(&plan(options)?),
        ["sdk-server"] => sdk::serve(),
        ["server", name] => serve(Contestant::named(name)?),
        ["list"] => {
            for contestant in Contestant::all() {
                println!("{:<12} {}", contestant.name(), contestant.title());
            }
            Ok(())
        }
        [] | ["help" | "--help" | "-h"] => {
            println!("{HELP}");
            Ok(())
        }
        _ => bail!("not understood: {}\n\n{HELP}", words.join(" ")),
    }
}

fn plan(options: &[&str]) -> Result<Plan> {
    let mut plan = Plan::default();
    for pair in options.chunks(2) {
        let [option, value] = pair else {
            bail!("{} needs a value\n\n{HELP}", pair.join(" "));
        };
        let wrong = || format!("{option} {value}");
        match *option {
            "--rounds" => plan.rounds = value.parse::<u32>().with_context(wrong)?.max(1),
            "--seconds" => {
                plan.load = Duration::try_from_secs_f64(value.parse().with_context(wrong)?)
                    .with_context(wrong)?;
            }
            "--only" => plan.only = Some((*value).to_owned()),
            _ => bail!("unknown option {option}\n\n{HELP}"),
        }
    }
    Ok(plan)
}

fn serve(contestant: Contestant) -> Result<()> {
    process::end_with_parent();
    process::raise_open_files()?;
    process::runtime()?.block_on(contestant.serve())
}
