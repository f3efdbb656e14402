//! `cargo xtask test`: the steps of CI, ordered to find mistakes early.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use crate::{
    Result, areas,
    background::BackgroundStep,
    command::{self, Workspace},
    counts::{Counts, Runner},
    hygiene,
    manifest::Manifest,
    release, sdk, tools, unused,
};

/// The results of the steps so far.
#[derive(Debug, Default)]
struct Done {
    counts: Counts,
    /// The name and duration of each step.
    times: Vec<(String, Duration)>,
}

/// Runs every step of CI and stops at the first that fails.
pub(crate) fn run(workspace: &Workspace) -> ExitCode {
    reported(|done| steps(workspace, done))
}

/// Runs the steps that take less than two minutes with a warm target folder.
///
/// They are format, hygiene, lints and quick tests.
pub(crate) fn quick(workspace: &Workspace) -> ExitCode {
    reported(|done| {
        let cargo = |arguments| command::status(&mut workspace.cargo(arguments));
        done.step("tools", |_| tools::components(workspace))?;
        done.step("format", |_| cargo("fmt --all --check"))?;
        done.step("hygiene", |_| hygiene::check(workspace.root()))?;
        done.step("clippy", |_| cargo(CLIPPY))?;
        let target = Manifest::read(workspace)?.target;
        done.step("quick tests", |counts| {
            areas::quick(workspace, &target, counts)
        })
    })
}

const CLIPPY: &str = "clippy --workspace --all-targets -- -D warnings";

/// Runs steps, then prints durations and counts, even after a failed test.
fn reported(steps: impl FnOnce(&mut Done) -> Result) -> ExitCode {
    let (mut done, begun) = (Done::default(), Instant::now());
    let mut code = ExitCode::SUCCESS;
    if let Err(error) = steps(&mut done) {
        eprintln!("xtask: {error}");
        code = ExitCode::FAILURE;
    }
    done.times.push(("in all".to_owned(), begun.elapsed()));
    println!("\n| step | seconds |\n|---|---|");
    for (name, time) in &done.times {
        println!("| {name} | {:.0} |", time.as_secs_f64());
    }
    println!();
    if done.counts.reports > 0 {
        println!("{}", done.counts);
    }
    code
}

fn steps(workspace: &Workspace, done: &mut Done) -> Result {
    let manifest = Manifest::read(workspace)?;
    let target = &manifest.target;
    // These steps first build a tool, each in a separate target folder.
    let dependencies = BackgroundStep::start(workspace, target, "dependencies")?;
    let runner = BackgroundStep::start(workspace, target, "runner")?;
    let checked = (|| {
        let ready = before_tests(workspace, &manifest, done);
        let runner = done.in_background("test runner", runner, None);
        ready.and(runner)?;
        let guest = BackgroundStep::start(workspace, target, "guest")?;
        let builds = BackgroundStep::start(workspace, target, "builds")?;
        let tested = with_programs(workspace, target, done);
        let guest = done.in_background("cgroups of version 2", guest, Some(Runner::Libtest));
        let builds = done.in_background("builds", builds, None);
        tested.and(guest).and(builds)
    })();
    let dependencies = done.in_background("dependencies", dependencies, None);
    checked.and(dependencies)
}

/// Runs the checks that execute none of our programs.
fn before_tests(workspace: &Workspace, manifest: &Manifest, done: &mut Done) -> Result {
    let cargo = |arguments| command::status(&mut workspace.cargo(arguments));
    done.step("tools", |_| tools::components(workspace))?;
    done.step("format", |_| cargo("fmt --all --check"))?;
    done.step("hygiene", |_| hygiene::check(workspace.root()))?;
    done.step("unused dependencies", |_| unused::check(manifest))?;
    done.step("clippy", |_| cargo(CLIPPY))?;
    done.step("documentation", |_| {
        let mut doc = workspace.cargo("doc --workspace --no-deps");
        command::status(doc.env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    done.step("build of the tests", |_| {
        cargo("test --workspace --all-targets --no-run")
    })
}

/// Runs the steps that execute our programs.
fn with_programs(workspace: &Workspace, target: &std::path::Path, done: &mut Done) -> Result {
    done.step("tests", |counts| {
        tools::programs(workspace, &tools::PROGRAMS)?;
        // A test that fails and then passes is listed as flaky.
        let all = "--workspace --all-targets --retries 1";
        areas::tests(workspace, target, all, &[], counts)
    })?;
    done.step("documentation tests", |counts| {
        let mut doc = workspace.cargo("test --workspace --doc");
        command::counted(&mut doc, Runner::Libtest, counts)
    })?;
    let fuzz = BackgroundStep::start(workspace, target, "fuzz")?;
    let rest = done
        .step("SDKs", |counts| sdk::check(workspace, target, counts))
        .and_then(|()| done.step("README", |_| release::readme_only(workspace, target)));
    let fuzz = done.in_background("fuzz", fuzz, None);
    rest.and(fuzz)
}

impl Done {
    fn step(&mut self, name: &str, run: impl FnOnce(&mut Counts) -> Result) -> Result {
        println!("==> {name}");
        let start = Instant::now();
        let result = run(&mut self.counts);
        self.ended(name, start.elapsed(), result)
    }

    /// Waits for a step that ran in parallel.
    fn in_background(
        &mut self,
        name: &str,
        step: BackgroundStep,
        runner: Option<Runner>,
    ) -> Result {
        println!("==> {name} (in the background)");
        let (time, result) = match step.finish(runner, &mut self.counts) {
            Ok(time) => (time, Ok(())),
            Err(error) => (Duration::ZERO, Err(error)),
        };
        self.ended(&format!("{name} (in the background)"), time, result)
    }

    fn ended(&mut self, name: &str, time: Duration, result: Result) -> Result {
        self.times.push((name.to_owned(), time));
        let seconds = time.as_secs_f64();
        match result {
            Ok(()) => {
                println!("<== {name}: ok, {seconds:.1} s");
                Ok(())
            }
            Err(error) => {
                let error = format!("step `{name}` FAILED after {seconds:.1} s: {error}");
                // The run reports an earlier failure at the end.
                println!("<== {error}");
                Err(error.into())
            }
        }
    }
}
