//! Steps that run beside the others, because they wait a lot: each is an area, whose output is printed when its turn comes.

use std::{
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Stdio,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    Result,
    command::{self, Workspace},
    counts::{Counts, Runner},
};

/// An area that runs while other steps do.
#[derive(Debug)]
pub(crate) struct Beside {
    area: &'static str,
    log: PathBuf,
    /// How it ended, and how long it took.
    ending: JoinHandle<std::result::Result<Duration, String>>,
}

impl Beside {
    /// Starts `cargo xtask test AREA`.
    pub(crate) fn start(workspace: &Workspace, target: &Path, area: &'static str) -> Result<Self> {
        let folder = target.join("beside");
        fs::create_dir_all(&folder)?;
        let log = folder.join(area);
        let output = File::create(&log)?;
        let mut program = workspace.program(env::current_exe()?, &format!("test {area}"));
        program
            .env("CARGO_MANIFEST_DIR", workspace.root().join("xtask"))
            .stdin(Stdio::null())
            .stderr(output.try_clone()?)
            .stdout(output);
        let ending = thread::spawn(move || {
            let start = Instant::now();
            let status = command::status(&mut program);
            status
                .map(|()| start.elapsed())
                .map_err(|error| error.to_string())
        });
        Ok(Self { area, log, ending })
    }

    /// Waits for its end, prints what it has said, and adds what a test runner in it has reported.
    pub(crate) fn finish(self, runner: Option<Runner>, counts: &mut Counts) -> Result<Duration> {
        let ended = self.ending.join();
        let said = String::from_utf8_lossy(&fs::read(&self.log)?).into_owned();
        println!("{}", said.trim_end());
        if let Some(runner) = runner {
            let mut found = Counts::default();
            said.lines().for_each(|line| found.read(runner, line));
            counts.add(found);
            if found.reports == 0 {
                return Err(format!("`{}` reported no test counts", self.area).into());
            }
        }
        let ended = ended.map_err(|_| format!("`{}` was not waited for", self.area))?;
        Ok(ended?)
    }
}
