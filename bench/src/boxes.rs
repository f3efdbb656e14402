//! The cost of the runtime and the policy layer per call, and of a live box.
//!
//! The backend is scripted, so that the benchmark measures only Box.

#![allow(
    clippy::cast_precision_loss,
    reason = "counts of calls and bytes are far below 2^52"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use box_protocol::actions::{BoxExec, BoxExecParams};
use box_protocol::{BoxId, SpecDraft};
use box_rpc::{Caller, Codecs, Limits, Options, Peer, Router, Session};
use box_runtime::fake::FakeBackend;
use box_runtime::{BoxRuntime, RuntimeConfig};
use box_service::{BoxService, Query, ServiceConfig};
use box_transports::queue;
use serde_json::{Map, Value, json};

use crate::ours::{Echo, Echoer};
use crate::payload::Payload;
use crate::process::{self, Process};
use crate::statistics::median;

/// The number of calls per measurement of a sequence.
const CALLS: u64 = 3000;
/// The number of live boxes in the largest measurement.
const MANY: u64 = 10_000;

/// Creates two sessions joined by queues; the caller must keep both.
fn joined(router: Router) -> (Peer, (Session, Session)) {
    let (ours, theirs) = queue::pair(64);
    let options = || Options {
        limits: Limits::in_process(),
        ..Options::new(Caller::Local)
    };
    let server = Session::start(theirs, router, options());
    let client = Options {
        codecs: Codecs::JSON_RPC,
        ..options()
    };
    let client = Session::start(ours, Router::empty(), client);
    (client.peer(), (client, server))
}

fn runtime() -> BoxRuntime {
    let backend = FakeBackend::new();
    backend.forget_commands();
    let mut config = RuntimeConfig::with(backend);
    config.max_boxes = usize::try_from(MANY).unwrap_or(usize::MAX) + 10;
    config.idle_ttl = Duration::from_hours(1);
    BoxRuntime::start(config)
}

fn exec(number: u64) -> Result<BoxExecParams> {
    let spec = json!({"box_id": format!("s{number}"), "cmd": "true"});
    let spec: SpecDraft = serde_json::from_value(spec)?;
    Ok(serde_json::from_value(json!({ "spec": spec }))?)
}

/// Returns the microseconds per call of a sequence, as the median of ten parts.
async fn each<E: std::fmt::Debug>(mut call: impl AsyncFnMut(u64) -> Result<(), E>) -> Result<f64> {
    let mut parts = Vec::new();
    for part in 0..10 {
        let start = Instant::now();
        for number in 0..CALLS / 10 {
            let done = call(part * CALLS / 10 + number).await;
            done.map_err(|error| anyhow::anyhow!("{error:?}"))?;
        }
        parts.push(start.elapsed().as_secs_f64() * 1e6 / (CALLS as f64 / 10.0));
    }
    Ok(median(&mut parts))
}

/// Runs all measurements and prints the bars.
pub(crate) fn run(rounds: u32) -> Result<()> {
    process::runtime()?.block_on(async {
        crate::report::heading();
        against_an_echo(rounds).await?;
        with_many_boxes(rounds).await
    })
}

pub(crate) fn bar(
    name: &str,
    ours: &str,
    peer_text: &str,
    ratios: &mut [f64],
    most: f64,
    goal: Option<f64>,
) {
    let meets = |ratio: f64, bar: f64| ratio <= bar;
    row(
        [name, ours, peer_text],
        ratios,
        ("at most", most, goal),
        meets,
    );
}

/// Prints the bar of a value that should be large.
pub(crate) fn rate_bar(
    name: &str,
    ours: &str,
    peer_text: &str,
    ratios: &mut [f64],
    least: f64,
    goal: Option<f64>,
) {
    let meets = |ratio: f64, bar: f64| ratio >= bar;
    let wanted = ("at least", least, goal);
    row([name, ours, peer_text], ratios, wanted, meets);
}

fn row(
    [name, ours, peer_text]: [&str; 3],
    ratios: &mut [f64],
    (word, bar, goal): (&str, f64, Option<f64>),
    meets: impl Fn(f64, f64) -> bool,
) {
    let ratio = median(ratios);
    let lowest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = ratios.iter().copied().fold(0.0, f64::max);
    let wanted = goal.map_or_else(
        || format!("{word} {bar}"),
        |goal| format!("{word} {bar}, goal {goal}"),
    );
    let verdict = match goal {
        _ if !meets(ratio, bar) => "**misses bar**",
        Some(goal) if meets(ratio, goal) => "meets bar and goal",
        _ => "meets bar",
    };
    println!(
        "| {name} | {ours} | {peer_text} | {ratio:.2} ({lowest:.2} to {highest:.2}) | {wanted} | {verdict} |"
    );
}

async fn against_an_echo(rounds: u32) -> Result<()> {
    let echo_router = Router::builder(Arc::new(Echoer)).on::<Echo>().build();
    let (echo, _echo) = joined(echo_router);
    let runtime = runtime();
    let (peer, _sessions) = joined(runtime.router());
    let service = BoxService::with_client(ServiceConfig::default(), peer)?;
    service.initialize().await?;
    let query = Query::new(1);
    let command: Map<String, Value> = json!({"command": "true"})
        .as_object()
        .cloned()
        .unwrap_or_default();
    let (mut ratios, mut ours, mut floor) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let bare =
            each(async |number| echo.call::<Echo>(&Payload::small(number)).await.map(drop)).await?;
        let full = each(async |_| {
            service
                .execute_tool(command.clone(), &query)
                .await
                .map(drop)
        })
        .await?;
        ratios.push(full / bare);
        ours.push(full);
        floor.push(bare);
    }
    let (ours, floor) = (median(&mut ours), median(&mut floor));
    let name = "exec through service, RPC, runtime and agent, one at a time";
    let peer_text = format!("bare RPC echo over the queue: {floor:.1} us");
    bar(
        name,
        &format!("{ours:.1} us"),
        &peer_text,
        &mut ratios,
        5.0,
        Some(3.0),
    );
    Ok(())
}

async fn with_many_boxes(rounds: u32) -> Result<()> {
    // The cost of one agent connection alone, with both ends in this process.
    let before = Process::own().resident_bytes()?;
    let connections: Vec<_> = (0..2000).map(|_| joined(Router::empty())).collect();
    tokio::task::yield_now().await;
    let connection = grown(before)? / 2000.0;
    drop(connections);
    tokio::time::sleep(Duration::from_millis(200)).await;

    let (few, many) = (runtime(), runtime());
    let (few_peer, _few) = joined(few.router());
    let (many_peer, _many) = joined(many.router());
    for number in 0..10 {
        few_peer.call::<BoxExec>(&exec(number)?).await?;
    }
    let before = Process::own().resident_bytes()?;
    for number in 0..MANY {
        many_peer.call::<BoxExec>(&exec(number)?).await?;
    }
    let of_box = grown(before)? / MANY as f64;
    let few_params: Vec<_> = (0..10).map(exec).collect::<Result<_>>()?;
    let many_params: Vec<_> = (0..MANY).map(exec).collect::<Result<_>>()?;
    let (mut ratios, mut small, mut large) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let ten = each(async |n| {
            few_peer
                .call::<BoxExec>(pick(&few_params, n))
                .await
                .map(drop)
        })
        .await?;
        let all = each(async |n| {
            many_peer
                .call::<BoxExec>(pick(&many_params, n))
                .await
                .map(drop)
        })
        .await?;
        ratios.push(all / ten);
        small.push(ten);
        large.push(all);
    }
    let found = BoxId::new("s1").ok().context("an id")?;
    anyhow::ensure!(many.get(&box_runtime::Caller::Local, &found).await.is_ok());
    let kilobytes = |bytes: f64| format!("{:.1} kB", bytes / 1000.0);
    let peer_text = format!(
        "of it, both ends of the agent connection: {}",
        kilobytes(connection)
    );
    bar(
        "a live box and its agent connection, 24 kB = 1",
        &kilobytes(of_box),
        &peer_text,
        &mut [of_box / 24_000.0],
        1.0,
        None,
    );
    let alone = (of_box - connection).max(0.0);
    bar(
        "a live box in the runtime, 8 kB = 1",
        &kilobytes(alone),
        "the difference of the two",
        &mut [alone / 8000.0],
        1.0,
        None,
    );
    let (small, large) = (median(&mut small), median(&mut large));
    bar(
        "exec with 10,000 live boxes",
        &format!("{large:.1} us"),
        &format!("with 10: {small:.1} us"),
        &mut ratios,
        1.5,
        None,
    );
    Ok(())
}

/// Picks boxes far apart, so that caches do not help.
fn pick<T>(all: &[T], number: u64) -> &T {
    let step = usize::try_from(number.wrapping_mul(7919)).unwrap_or(0);
    &all[step % all.len()]
}

fn grown(before: u64) -> Result<f64> {
    Ok(Process::own().resident_bytes()?.saturating_sub(before) as f64)
}
