//! The areas of `cargo xtask test AREA`: the tests of one crate or layer.

use std::path::Path;

use crate::{
    Result, builds,
    command::{self, Workspace},
    counts::{Counts, Runner},
    fuzz, guest, release, sdk, tools,
};

/// A name, and its arguments for `cargo nextest run`.
type Area = (&'static str, &'static [&'static str]);

/// Areas that the test runner runs.
const AREAS: &[Area] = &[
    ("rpc", &["-p box-rpc", "-p box-tests --test rpc"]),
    ("transports", &["-p box-transports"]),
    ("protocol", &["-p box-protocol --all-features"]),
    ("catalog", &["-p box-catalog"]),
    ("client", &["-p box-client", "-p box-tests --test client"]),
    ("image", &["-p box-image"]),
    ("sys", &["-p box-sys"]),
    ("agent", &["-p box-agent"]),
    ("runtime", &["-p box-runtime", "-p box-tests --test boxes"]),
    ("service", &["-p box-service"]),
    ("gateways", &["-p box-gateways"]),
    ("cli", &["-p boxd --bins --test cli"]),
    ("http", &["-p boxd --test http"]),
    (
        "native",
        &["-p box-tests --test native", "-p box-tests --test network"],
    ),
    ("wait", &["-p box-test-wait"]),
    ("xtask", &["-p xtask"]),
];

/// Areas whose tests need programs of Debian, as the suites of SDKs do.
const WITH_PROGRAMS: [&str; 3] = ["image", "cli", "native"];

/// Areas that need more than the test runner.
const STEPS: &[&str] = &[
    "guest",
    "fuzz",
    "readme",
    "dependencies",
    "builds",
    "runner",
];

/// The tests of `cargo xtask check`, which need seconds and no privilege.
///
/// One selection: with another set of packages, cargo enables other features and compiles the crates
/// again.
const QUICK: &str = "--workspace --lib --bins --test suite --test service --test rpc --test boxes";

/// Runs one area; a second argument filters tests by name.
pub(crate) fn run(workspace: &Workspace, target: &Path, area: &str, filter: &[String]) -> Result {
    let mut counts = Counts::default();
    if let Some((_, parts)) = AREAS.iter().find(|(name, _)| *name == area) {
        if WITH_PROGRAMS.contains(&area) {
            tools::programs(workspace, &tools::PROGRAMS)?;
        }
        for part in *parts {
            tests(workspace, target, part, filter, &mut counts)?;
        }
        println!("{counts}");
        return Ok(());
    }
    if !filter.is_empty() {
        return Err(format!("area `{area}`: no filter is possible; run it whole").into());
    }
    match area {
        suite if sdk::names().any(|name| name == suite) => {
            tools::programs(workspace, &tools::PROGRAMS)?;
            sdk::build_and_check(workspace, target, suite, &mut counts)
        }
        "guest" => guest::check(workspace, target, &mut counts),
        "fuzz" => fuzz::run(workspace, target, fuzz::CI_RUNS),
        "readme" => release::readme_only(workspace, target),
        "dependencies" => tools::check_dependencies(workspace, target),
        "builds" => builds::check(workspace, target),
        "runner" => tools::nextest(workspace, target).map(drop),
        "help" => {
            println!("{}", known());
            Ok(())
        }
        _ => Err(format!("area `{area}`: unknown; use one of {}", known()).into()),
    }
}

/// Returns the names of all areas.
fn known() -> String {
    let names = AREAS.iter().map(|(name, _)| *name);
    let names = names.chain(sdk::names());
    let names: Vec<_> = names.chain(STEPS.iter().copied()).collect();
    names.join(", ")
}

/// Runs the quick tests.
pub(crate) fn quick(workspace: &Workspace, target: &Path, counts: &mut Counts) -> Result {
    tests(workspace, target, QUICK, &[], counts)
}

/// Runs the tests that `part` selects.
pub(crate) fn tests(
    workspace: &Workspace,
    target: &Path,
    part: &str,
    filter: &[String],
    counts: &mut Counts,
) -> Result {
    let nextest = tools::nextest(workspace, target)?;
    let run = "nextest run --no-fail-fast --no-tests=pass";
    let mut nextest = workspace.program(nextest, run);
    nextest.args(part.split_whitespace()).args(filter);
    command::counted(&mut nextest, Runner::Nextest, counts)
}
