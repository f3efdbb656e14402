//! Steps that run in parallel with others, because they mostly wait.
//!
//! Each step is an area. Its output is printed when its turn comes.

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

/// An area that runs in parallel with other steps.
#[derive(Debug)]
pub(crate) struct BackgroundStep {
    area: &'static str,
    log: PathBuf,
    /// The result and the duration.
    ending: JoinHandle<std::result::Result<Duration, String>>,
}

impl BackgroundStep {
    /// Starts `cargo xtask test AREA`.
    pub(crate) fn start(workspace: &Workspace, target: &Path, area: &'static str) -> Result<Self> {
        let folder = target.join("background");
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

    /// Waits for the area, prints its output, and adds its test counts.
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
