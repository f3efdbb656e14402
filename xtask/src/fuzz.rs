//! Coverage-guided fuzzing with the stable toolchain, bounded in CI.

use std::fs;
use std::path::Path;

use crate::{
    Result,
    command::{self, Workspace},
};

/// The number of inputs per target in CI.
pub(crate) const CI_RUNS: &str = "300000";

/// The compiler flags that libFuzzer needs, as `cargo fuzz` passes them to nightly.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1";

/// The files with every message form of each codec.
const SHAPES: [&str; 2] = [
    "rpc/src/codec/shapes.txt",
    "gateways/src/langbot/codec/shapes.txt",
];

/// Runs the decoder on that many inputs, derived from every message form.
pub(crate) fn run(workspace: &Workspace, target: &Path, runs: &str) -> Result {
    let folder = target.join("fuzz");
    let (corpus, seeds) = (folder.join("corpus-decode"), folder.join("seeds-decode"));
    fs::create_dir_all(&corpus)?;
    fs::create_dir_all(&seeds)?;
    let mut shapes = String::new();
    for file in SHAPES {
        shapes += &fs::read_to_string(workspace.root().join(file))?;
    }
    let shapes = shapes.lines().filter_map(|line| line.strip_prefix("  {"));
    for (number, shape) in shapes.enumerate() {
        fs::write(seeds.join(number.to_string()), format!("{{{shape}"))?;
    }
    // With an explicit target, cargo does not apply the flags to build scripts.
    let host = "x86_64-unknown-linux-gnu";
    let mut cargo =
        workspace.cargo("run --quiet --release --manifest-path fuzz/Cargo.toml --bin decode");
    cargo
        .args(["--target", host, "--target-dir"])
        .arg(&folder)
        .arg("--");
    cargo.args([
        &format!("-runs={runs}"),
        "-seed=1",
        "-max_len=4096",
        "-verbosity=0",
    ]);
    cargo
        .arg(format!("-artifact_prefix={}/", folder.display()))
        .arg(&corpus)
        .arg(&seeds);
    command::status(cargo.env("RUSTFLAGS", COVERAGE))?;
    println!("decode: {runs} inputs");
    Ok(())
}
