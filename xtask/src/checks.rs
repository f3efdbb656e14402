//! `cargo xtask test`: what a change must pass, in the order that finds mistakes soonest.

use std::{process::ExitCode, time::Instant};

use crate::{
    Result,
    command::{self, Workspace},
    counts::{Counts, Runner},
    fuzz, guest, hygiene, langbot,
    manifest::Manifest,
    release, tools, unused,
};

/// Runs every step and stops at the first that fails. The counts come last, also after a failed test.
pub(crate) fn run(workspace: &Workspace) -> ExitCode {
    let mut counts = Counts::default();
    let mut code = ExitCode::SUCCESS;
    if let Err(error) = steps(workspace, &mut counts) {
        eprintln!("xtask: {error}");
        code = ExitCode::FAILURE;
    }
    if counts.reports > 0 {
        println!("{counts}");
    }
    code
}

fn steps(workspace: &Workspace, counts: &mut Counts) -> Result {
    let manifest = Manifest::read(workspace)?;
    let cargo = |arguments| command::status(&mut workspace.cargo(arguments));

    let deny = step("tools", || tools::install(workspace, &manifest.target))?;
    step("format", || cargo("fmt --all --check"))?;
    step("clippy", || {
        cargo("clippy --workspace --all-targets -- -D warnings")
    })?;
    step("documentation", || {
        let mut doc = workspace.cargo("doc --workspace --no-deps");
        command::status(doc.env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    step("dependencies", || deny.check(workspace))?;
    step("unused dependencies", || unused::check(&manifest))?;
    step("tests", || {
        let (runner, arguments) = if tools::has_nextest(workspace) {
            let arguments = "nextest run --workspace --no-fail-fast --no-tests=pass";
            (Runner::Nextest, arguments)
        } else {
            let arguments = "test --workspace --all-targets --no-fail-fast";
            (Runner::Libtest, arguments)
        };
        command::counted(&mut workspace.cargo(arguments), runner, counts)
    })?;
    step("documentation tests", || {
        let mut doc = workspace.cargo("test --workspace --doc");
        command::counted(&mut doc, Runner::Libtest, counts)
    })?;
    step("cgroups of version 2", || {
        guest::check(workspace, &manifest.target, counts)
    })?;
    step("LangBot", || {
        langbot::check(workspace, &manifest.target, counts)
    })?;
    step("README", || {
        release::readme_only(workspace, &manifest.target)
    })?;
    step("hygiene", || hygiene::check(workspace.root()))?;
    step("fuzz", || {
        fuzz::run(workspace, &manifest.target, fuzz::CI_RUNS)
    })
}

fn step<T>(name: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    println!("==> {name}");
    let start = Instant::now();
    let result = run();
    let seconds = start.elapsed().as_secs_f64();
    match result {
        Ok(value) => {
            println!("<== {name}: ok, {seconds:.1} s");
            Ok(value)
        }
        Err(error) => Err(format!("step `{name}` FAILED after {seconds:.1} s: {error}").into()),
    }
}
