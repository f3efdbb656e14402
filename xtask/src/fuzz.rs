//! Coverage-guided fuzzing with the stable toolchain, bounded in CI.

use std::fs;
use std::path::Path;

use crate::{
    Result,
    command::{self, Workspace},
};

/// The number of inputs in CI, for all targets together.
pub(crate) const CI_RUNS: u64 = 300_000;

/// The compiler flags that libFuzzer needs, as `cargo fuzz` passes them to nightly.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1";

/// The files with every message form of each codec.
const SHAPES: [&str; 2] = [
    "rpc/src/codec/shapes.txt",
    "gateways/src/langbot/codec/shapes.txt",
];

/// Longest time of one input, in seconds: a longer one is a hang.
const TIMEOUT: u32 = 120;

/// A program of `fuzz/`.
struct Target {
    name: &'static str,
    /// Its part of the inputs, in percent.
    share: u64,
    max_len: u32,
}

/// Every target. The shares are such that none takes much longer than the others.
const TARGETS: [Target; 6] = [
    target("decode", 40, 4096),
    target("frames", 15, 2048),
    target("dns", 30, 512),
    target("agent", 8, 4096),
    target("http", 6, 32 << 10),
    target("archives", 1, 16 << 10),
];

const fn target(name: &'static str, share: u64, max_len: u32) -> Target {
    Target {
        name,
        share,
        max_len,
    }
}

/// Runs every target, on that many inputs in all.
pub(crate) fn run(workspace: &Workspace, target: &Path, runs: u64) -> Result {
    let folder = target.join("fuzz");
    write_shapes(workspace, &folder.join("seeds-decode"))?;
    // With an explicit target, cargo does not apply the flags to build scripts.
    let host = "x86_64-unknown-linux-gnu";
    let mut cargo = workspace.cargo("build --quiet --release --manifest-path fuzz/Cargo.toml");
    cargo.args(["--target", host, "--target-dir"]).arg(&folder);
    command::status(cargo.env("RUSTFLAGS", COVERAGE))?;
    let programs = folder.join(host).join("release");
    for Target {
        name,
        share,
        max_len,
    } in TARGETS
    {
        let runs = (runs * share / 100).max(1);
        let found = folder.join(format!("corpus-{name}"));
        fs::create_dir_all(&found)?;
        let seeds = match name {
            "decode" => folder.join("seeds-decode"),
            _ => workspace.root().join("fuzz/corpus").join(name),
        };
        let mut fuzz = workspace.program(programs.join(name), "-seed=1 -verbosity=0");
        fuzz.arg(format!("-runs={runs}"))
            .arg(format!("-max_len={max_len}"))
            .arg(format!("-timeout={TIMEOUT}"))
            .arg(format!("-artifact_prefix={}/{name}-", folder.display()))
            .arg(&found)
            .arg(&seeds);
        command::status(&mut fuzz)?;
        println!("{name}: {runs} inputs");
    }
    Ok(())
}

/// Writes every message form of the codecs into a file.
fn write_shapes(workspace: &Workspace, seeds: &Path) -> Result {
    fs::create_dir_all(seeds)?;
    let mut shapes = String::new();
    for file in SHAPES {
        shapes += &fs::read_to_string(workspace.root().join(file))?;
    }
    let shapes = shapes.lines().filter_map(|line| line.strip_prefix("  {"));
    for (number, shape) in shapes.enumerate() {
        fs::write(seeds.join(number.to_string()), format!("{{{shape}"))?;
    }
    Ok(())
}
