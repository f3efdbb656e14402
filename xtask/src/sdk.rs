//! Tests of our program with the unmodified packages of other protocols, from their registries.
//!
//! Each suite is a folder of `tests/sdk`. It runs once in each of its environments, which [`suites`](crate::suites) lists.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;

use crate::{
    Result,
    command::{self, Workspace},
    counts::{Counts, Runner},
    python,
    suites::{Environment, SUITES, Suite},
};

/// Returns the names of all suites.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    SUITES.iter().map(|suite| suite.name)
}

/// Builds the program and runs one suite.
pub(crate) fn build_and_check(
    workspace: &Workspace,
    target: &Path,
    name: &str,
    counts: &mut Counts,
) -> Result {
    command::status(&mut workspace.cargo("build --package boxd"))?;
    run(workspace, target, |suite| suite.name == name, counts)
}

/// Runs all suites.
///
/// The program is that of the last build. The whole test command has built it with the tests; a
/// build of `boxd` alone enables other features and compiles most crates again.
pub(crate) fn check(workspace: &Workspace, target: &Path, counts: &mut Counts) -> Result {
    run(workspace, target, |_| true, counts)
}

/// The number of suites that run at once. Their tests mostly wait, but each has a server and boxes.
const AT_ONCE: usize = 3;

/// Runs the chosen suites in all their environments, a few at once.
fn run(
    workspace: &Workspace,
    target: &Path,
    chosen: impl Fn(&Suite) -> bool,
    counts: &mut Counts,
) -> Result {
    let suites = SUITES.iter().filter(|suite| chosen(suite));
    let runs = suites.flat_map(|suite| suite.environments.iter().map(move |with| (suite, with)));
    let waiting = Mutex::new(runs.collect::<Vec<_>>().into_iter());
    let next = || waiting.lock().ok().and_then(|mut waiting| waiting.next());
    let worker = || {
        let mut ran = Vec::new();
        while let Some((suite, with)) = next() {
            let run = suite.run(workspace, target, with);
            ran.push(run.map_err(|error| format!("{} {}: {error}", suite.name, with.version)));
        }
        ran
    };
    let ran: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(worker)).collect();
        let ended = |worker: thread::ScopedJoinHandle<'_, Vec<_>>| {
            let ran = worker.join();
            ran.unwrap_or_else(|_| vec![Err("a suite was not waited for".to_owned())])
        };
        workers.into_iter().flat_map(ended).collect()
    });
    let mut failed = Vec::new();
    for ran in ran {
        match ran {
            Ok(found) => {
                counts.add(found);
                if found.failed > 0 {
                    failed.push(found.to_string());
                }
            }
            Err(error) => failed.push(error),
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(failed.join("\n").into())
}

impl Suite {
    /// Runs the suite in one environment, prints its output, and returns its counts.
    ///
    /// Failed tests run a second time, and those that pass then are printed as flaky.
    fn run(&self, workspace: &Workspace, target: &Path, with: &Environment) -> Result<Counts> {
        let folder = self.install(workspace, target, with)?;
        let run = |tests: &[String]| -> Result<(Counts, Vec<String>)> {
            let mut pytest = workspace.program(python_in(&folder), "-B -m pytest -q");
            let ran = pytest
                .args(tests)
                .env("BOXD", target.join("debug").join("boxd"))
                .env("NODE_PATH", folder.join("node_modules"))
                .output()?;
            let said = String::from_utf8_lossy(&ran.stdout);
            println!("{} {}:\n{}", self.name, with.version, said.trim_end());
            eprint!("{}", String::from_utf8_lossy(&ran.stderr));
            let mut found = Counts::default();
            said.lines()
                .for_each(|line| found.read(Runner::Pytest, line));
            if !ran.status.success() && found.failed == 0 {
                return Err(format!("the suite ended with {}", ran.status).into());
            }
            Ok((found, failed_tests(&said)))
        };
        let (mut found, failed) = run(&[format!("tests/sdk/{}/{}", self.name, with.file)])?;
        if found.passed == 0 {
            return Err("the suite ran no test".into());
        }
        if found.failed > 0 {
            let (again, still) = run(&failed)?;
            for test in failed.iter().filter(|test| !still.contains(test)) {
                println!("FLAKY {} {}: {test}", self.name, with.version);
            }
            found.passed += again.passed;
            found.failed = again.failed;
        }
        Ok(found)
    }

    /// Returns the folder of an environment, installed if needed.
    fn install(&self, workspace: &Workspace, target: &Path, with: &Environment) -> Result<PathBuf> {
        let folder = format!("{}-{}", self.name, with.version);
        let folder = target.join("tools").join(folder);
        let python = python_in(&folder);
        let requirements = format!("tests/sdk/{}/requirements.txt", self.name);
        let requirements = workspace.root().join(requirements);
        let (packages, bare) = (with.packages, with.without_dependencies);
        let node = with.node_packages;
        let wanted = fs::read_to_string(&requirements)?;
        let wanted = format!("{packages} {bare} {node}\n{wanted}{}", with.python);
        let stamp = folder.join("installed");
        if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
            return Ok(folder);
        }
        let interpreter = match with.python {
            "" => PathBuf::from("python3"),
            version => python::find(workspace, version)?,
        };
        let mut make = workspace.program(interpreter, "-m venv --clear");
        command::status(make.arg(&folder))?;
        let pip = |arguments: &str| {
            let arguments =
                format!("-m pip install --quiet --disable-pip-version-check {arguments}");
            workspace.program(&python, &arguments)
        };
        command::status(pip(packages).arg("--requirement").arg(&requirements))?;
        if !bare.is_empty() {
            command::status(&mut pip(&format!("--no-deps {bare}")))?;
        }
        if !node.is_empty() {
            let arguments = format!("install --no-audit --no-fund --silent {node} --prefix");
            command::status(workspace.program("npm", &arguments).arg(&folder))?;
        }
        fs::write(stamp, wanted)?;
        Ok(folder)
    }
}

/// Returns the tests that pytest's summary lists as failed.
fn failed_tests(said: &str) -> Vec<String> {
    let lines = said.lines().filter_map(|line| {
        let failed = line.strip_prefix("FAILED ");
        failed.or_else(|| line.strip_prefix("ERROR "))
    });
    let tests = lines.map(|line| line.split(" - ").next().unwrap_or(line));
    tests.map(str::to_owned).collect()
}

/// Returns the Python of an environment.
fn python_in(folder: &Path) -> PathBuf {
    folder.join("bin").join("python")
}

#[cfg(test)]
mod tests {
    use super::failed_tests;

    #[test]
    fn failed_tests_are_read_from_the_summary() {
        let said = "F.E\nSKIPPED [1] x.py:3: no\nFAILED tests/sdk/a/test_b.py::test_c[x-1] - assert 1 - 2\n\
                    ERROR tests/sdk/a/test_d.py::test_e\n1 failed, 1 error, 1 passed in 2.0s\n";
        let wanted = [
            "tests/sdk/a/test_b.py::test_c[x-1]",
            "tests/sdk/a/test_d.py::test_e",
        ];
        assert_eq!(failed_tests(said), wanted);
    }
}
