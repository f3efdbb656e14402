//! Real boxes beside a bare spawn of the same program and other isolation tools.
//!
//! `engines.rs` has the other tools. `crowd.rs` measures many boxes at once, `pool.rs` boxes of a pool, and `snapshots.rs`
//! snapshots and forks. A round runs all contestants in turn, many times, so that other load on the machine affects all of
//! them. A ratio compares the medians of one round.

mod crowd;
mod engines;
mod pool;
mod snapshots;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use box_catalog::Catalog;
use box_image::{ImportOptions, Limits as ImageLimits, Store};
use box_protocol::SpecDraft;
use box_protocol::actions::{AgentStart, AgentStartParams, BoxDeleteParams, BoxExecParams};
use box_rpc::{Codecs, Limits, Options, Router, Session};
use box_runtime::native::{NativeBackend, NativeConfig};
use box_runtime::{Backend as _, BoxRuntime, Caller, ImageRoot, RuntimeConfig, StartRequest};
use serde_json::json;
use tokio::sync::mpsc;
use uuid::Uuid;

use self::engines::{Engines, bubblewrap};
use self::snapshots::Stored;
use crate::boxes::bar;
use crate::debian;
use crate::pairs::Pairs;
use crate::process;
use crate::rounds::Plan;
use crate::statistics::median;

/// The number of runs of each contestant per round.
const RUNS: usize = 100;
/// Contestants that take hundreds of times as long run once per this many runs.
const SELDOM: usize = 20;
/// The number of idle boxes during the memory measurement.
const MANY: usize = 200;

/// Runs all measurements and prints the bars.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    let rounds = plan.rounds;
    let parts = plan
        .only
        .as_deref()
        .unwrap_or("speed,disk,image,pool,snapshot,fork,at-once,alive,memory");
    process::runtime()?.block_on(async {
        let bench = Bench::start(parts.contains("image")).await?;
        crate::report::heading();
        for part in parts.split(',') {
            match part {
                "speed" => bench.speed(rounds).await?,
                "disk" => bench.disk(rounds).await?,
                "image" => bench.image(rounds).await?,
                "pool" => bench.pool(rounds).await?,
                "snapshot" => Stored::start()?.snapshots(rounds).await?,
                "fork" => Stored::start()?.forks(rounds).await?,
                "at-once" => bench.at_once(rounds).await?,
                "alive" => bench.among_many(rounds).await?,
                "memory" => bench.memory().await?,
                _ => bail!("no part called {part}"),
            }
        }
        Ok(())
    })
}

struct Bench {
    engines: Engines,
    backend: NativeBackend,
    runtime: BoxRuntime,
    _store: tempfile::TempDir,
    _catalog: tempfile::TempDir,
}

/// Name of the image of the benchmark.
const IMAGE: &str = "bench";

/// Unpacks the Debian image, and returns its directory.
fn image(store: &Path) -> Result<PathBuf> {
    let store = Store::open(store, ImageLimits::default())?;
    let options = ImportOptions {
        name: Some("debian".parse()?),
        ..ImportOptions::default()
    };
    let image = store.import(&debian::layout()?, &options)?;
    Ok(store.rootfs(&image.digest).canonicalize()?)
}

impl Bench {
    async fn start(has_image: bool) -> Result<Self> {
        let mut config = NativeConfig::this_program()?;
        config.cgroup_parent = format!("box-bench-{}", std::process::id());
        let store = tempfile::tempdir()?;
        if has_image {
            let root = ImageRoot::new(image(store.path())?);
            config.images.insert(IMAGE.into(), root);
        }
        let backend = NativeBackend::new(config);
        let mut config = RuntimeConfig::with(backend.clone());
        config.max_boxes = MANY + 10;
        let catalog = tempfile::tempdir()?;
        let items = Catalog::open(catalog.path(), box_catalog::Limits::default())?;
        config.catalog = Some(Arc::new(items));
        let runtime = BoxRuntime::start(config);
        let health = runtime.health().await;
        ensure!(
            health.available,
            "no boxes here: missing {:?}",
            health.missing
        );
        println!("missing on this machine: {:?}\n", health.missing);
        Ok(Self {
            engines: Engines::start()?,
            backend,
            runtime,
            _store: store,
            _catalog: catalog,
        })
    }

    /// Creates a box, and connects to its agent.
    async fn made(&self) -> Result<(Uuid, Session)> {
        self.made_from(SpecDraft::new("bench")).await
    }

    /// Creates a box of this spec, and connects to its agent.
    async fn made_from(&self, draft: SpecDraft) -> Result<(Uuid, Session)> {
        let (id, spec) = (Uuid::now_v7(), draft.build()?);
        let started = self.backend.start(StartRequest::new(id, &spec)).await?;
        let options = Options {
            codecs: Codecs::JSON_RPC,
            limits: Limits::in_process(),
            ..Options::client()
        };
        Ok((
            id,
            Session::start_boxed(started.connection, Router::empty(), options),
        ))
    }

    /// Runs `/bin/true` through an agent, as an argument list.
    async fn argv(agent: &Session, number: usize) -> Result<()> {
        let params: AgentStartParams = serde_json::from_value(json!({
            "command_id": format!("c{number}"), "program": {"argv": ["/bin/true"]}, "cwd": "/tmp",
            "env": {"PATH": "/usr/bin:/bin"}, "reply": {"collected": {"bytes": 1024}}, "slot": 0}))?;
        let told = agent.peer().call::<AgentStart>(&params).await?;
        ensure!(told.exit.and_then(|exit| exit.code) == Some(0), "{told:?}");
        Ok(())
    }

    /// Runs `/bin/true` through the runtime as an argument list, with its output.
    async fn words(&self, box_id: &str) -> Result<()> {
        let asked = json!({"box_id": box_id, "program": {"argv": ["/bin/true"]}, "cwd": "/tmp", "retain_ms": 0,
            "attach": {"view": "bytes"}});
        let (sender, mut chunks) = mpsc::channel(4);
        let caller = Caller::Local;
        let asked = serde_json::from_value(asked)?;
        let running = self.runtime.start_command(&caller, asked, Some(sender));
        let reading = async { while chunks.recv().await.is_some() {} };
        let (result, ()) = tokio::join!(running, reading);
        let exit = result?.info.exit;
        ensure!(exit.and_then(|exit| exit.code) == Some(0), "{exit:?}");
        Ok(())
    }

    /// Runs `true` through the runtime as a text, in a login shell.
    async fn exec(&self, box_id: &str) -> Result<()> {
        let asked: BoxExecParams =
            serde_json::from_value(json!({"spec": {"box_id": box_id, "cmd": "true"}}))?;
        let result = self.runtime.exec(&Caller::Local, asked).await?;
        ensure!(result.exit_code == Some(0), "{result:?}");
        Ok(())
    }

    async fn delete(&self, box_id: &str) -> Result<()> {
        let asked: BoxDeleteParams =
            serde_json::from_value(json!({"box_id": box_id, "force": true}))?;
        self.runtime.delete(&Caller::Local, asked).await?;
        Ok(())
    }

    async fn speed(&self, rounds: u32) -> Result<()> {
        let (_, warm) = self.made().await?;
        self.exec("warm").await?;
        let mut all: [Vec<f64>; NAMES.len()] = std::array::from_fn(|_| Vec::new());
        let mut medians: [Vec<f64>; NAMES.len()] = std::array::from_fn(|_| Vec::new());
        for round in 0..rounds as usize {
            all.iter_mut().for_each(Vec::clear);
            for run in 0..RUNS {
                let number = round * RUNS + run;
                let mut time = |at: usize, begun: Instant| {
                    all[at].push(begun.elapsed().as_secs_f64() * 1e6);
                };
                let begun = Instant::now();
                spawn(&mut Command::new("/bin/true"))?;
                time(TRUE, begun);
                let begun = Instant::now();
                spawn(Command::new("/bin/sh").args(["-lc", "true"]))?;
                time(SHELL, begun);
                if self.engines.bubblewrap {
                    let begun = Instant::now();
                    spawn(&mut bubblewrap())?;
                    time(BUBBLEWRAP, begun);
                }
                for (at, command) in self.seldom().into_iter().filter(|_| run % SELDOM == 0) {
                    let begun = Instant::now();
                    spawn(&mut { command })?;
                    time(at, begun);
                }
                let begun = Instant::now();
                Self::argv(&warm, number).await?;
                time(WARM_ARGV, begun);
                let begun = Instant::now();
                self.words("warm").await?;
                time(WARM_WORDS, begun);
                let begun = Instant::now();
                self.exec("warm").await?;
                time(WARM_EXEC, begun);
                let begun = Instant::now();
                let (id, agent) = self.made().await?;
                Self::argv(&agent, number).await?;
                self.backend.stop(id).await?;
                time(COLD_ARGV, begun);
                let begun = Instant::now();
                self.exec("cold").await?;
                self.delete("cold").await?;
                time(COLD_EXEC, begun);
            }
            for (all, medians) in all.iter_mut().zip(&mut medians) {
                if !all.is_empty() {
                    medians.push(median(all));
                }
            }
        }
        let show = |name: &str, ours: usize, beside: usize, most: f64| {
            let pairs = medians[ours].iter().zip(&medians[beside]);
            let mut ratios: Vec<f64> = pairs.map(|(ours, beside)| ours / beside).collect();
            if ratios.is_empty() {
                return;
            }
            let of = |at: usize| format!("{:.0} us", median(&mut medians[at].clone()));
            let beside = format!("{}: {}", NAMES[beside], of(beside));
            bar(name, &of(ours), &beside, &mut ratios, most, None);
        };
        let words = "warm exec of words, through the runtime";
        let cold = "cold box, words, end, by the backend";
        let text = "cold box, text, end, through the runtime";
        for (name, ours, beside, most) in [
            ("warm exec of words, by the agent", WARM_ARGV, TRUE, 1.5),
            (words, WARM_WORDS, TRUE, 1.5),
            (words, WARM_WORDS, EXEC, 1.0),
            (
                "warm exec of a text, through the runtime",
                WARM_EXEC,
                SHELL,
                1.5,
            ),
            (cold, COLD_ARGV, TRUE, 2.5),
            (cold, COLD_ARGV, BUBBLEWRAP, 1.0),
            (cold, COLD_ARGV, RUNC, 1.0),
            (cold, COLD_ARGV, DOCKER, 1.0),
            (text, COLD_EXEC, SHELL, 2.5),
        ] {
            show(name, ours, beside, most);
        }
        Ok(())
    }

    /// Compares a cold box with a disk to one without.
    async fn disk(&self, rounds: u32) -> Result<()> {
        let disk = SpecDraft::new("bench").disk_mb(10 << 10);
        let name = "cold box with a disk of 10 GiB, words, end";
        self.beside_a_plain_box(rounds, name, disk, 1.3).await
    }

    /// Compares a cold box on the Debian image to one on the host's directories, and to Docker.
    async fn image(&self, rounds: u32) -> Result<()> {
        let image = || SpecDraft::new("bench").image(IMAGE);
        let name = "cold box on a Debian image, words, end";
        self.beside_a_plain_box(rounds, name, image(), 1.1).await?;
        self.warm_image(rounds, image()).await?;
        if !self.engines.docker {
            return Ok(());
        }
        self.engines.load_debian()?;
        let mut pairs = Pairs::default();
        for _ in 0..rounds {
            for run in 0..RUNS / SELDOM {
                let begun = Instant::now();
                let (id, agent) = self.made_from(image()).await?;
                Self::argv(&agent, run).await?;
                self.backend.stop(id).await?;
                pairs.ours(begun);
                let begun = Instant::now();
                spawn(&mut self.engines.docker_run_debian())?;
                pairs.theirs(begun);
            }
            pairs.end_round();
        }
        pairs.print(name, "docker run of it", 1.0);
        Ok(())
    }

    /// Compares a warm exec in a box of an image to one in a box with defaults, in turn.
    async fn warm_image(&self, rounds: u32, image: SpecDraft) -> Result<()> {
        let (plain_id, plain) = self.made().await?;
        let (image_id, image) = self.made_from(image).await?;
        let mut pairs = Pairs::default();
        for round in 0..rounds as usize {
            for run in 0..RUNS {
                let number = round * RUNS + run;
                let begun = Instant::now();
                Self::argv(&image, number).await?;
                pairs.ours(begun);
                let begun = Instant::now();
                Self::argv(&plain, number).await?;
                pairs.theirs(begun);
            }
            pairs.end_round();
        }
        pairs.print("warm exec on a Debian image", "on host directories", 1.1);
        self.backend.stop(plain_id).await?;
        Ok(self.backend.stop(image_id).await?)
    }

    /// Compares a cold box of a spec to one with defaults, in turn.
    async fn beside_a_plain_box(
        &self,
        rounds: u32,
        name: &str,
        other: SpecDraft,
        most: f64,
    ) -> Result<()> {
        let specs = [SpecDraft::new("bench"), other];
        // The first box of each kind only prepares the spares.
        for spec in &specs {
            let (id, _agent) = self.made_from(spec.clone()).await?;
            self.backend.stop(id).await?;
        }
        let mut pairs = Pairs::default();
        for _ in 0..rounds {
            for run in 0..RUNS {
                for (number, spec) in specs.iter().enumerate() {
                    // The server prepares a spare between two boxes.
                    tokio::time::sleep(Duration::from_millis(40)).await;
                    spawn(&mut Command::new("/bin/true"))?;
                    let begun = Instant::now();
                    let (id, agent) = self.made_from(spec.clone()).await?;
                    Self::argv(&agent, run).await?;
                    self.backend.stop(id).await?;
                    match number {
                        0 => pairs.theirs(begun),
                        _ => pairs.ours(begun),
                    }
                }
            }
            pairs.end_round();
        }
        pairs.print(name, "cold box with defaults", most);
        Ok(())
    }

    /// Returns the contestants that are too slow to run every time.
    fn seldom(&self) -> Vec<(usize, Command)> {
        let engines = &self.engines;
        let mut all = Vec::new();
        if engines.runc {
            all.push((RUNC, engines.runc()));
        }
        if engines.docker {
            all.push((DOCKER, engines.docker_run()));
            all.push((EXEC, engines.docker_exec()));
        }
        all
    }

    async fn memory(&self) -> Result<()> {
        let mut boxes = Vec::new();
        for number in 0..MANY {
            let (id, agent) = self.made().await?;
            Self::argv(&agent, number).await?;
            boxes.push((id, agent));
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        let mut sizes = Vec::new();
        for entry in std::fs::read_dir("/proc")?.flatten() {
            let comm = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            if comm.trim() == "box-init"
                && let Ok(size) = pss(&entry.path())
            {
                sizes.push(size);
            }
        }
        if sizes.len() < MANY {
            println!("\nThe memory of boxes is for root to read.");
            return Ok(());
        }
        let size = median(&mut sizes);
        let name = format!("memory of an idle box (PSS, {MANY} alive), 200 kB = 1");
        let ours = format!("{size:.0} kB");
        bar(&name, &ours, "", &mut [size / 200.0], 1.0, None);
        for (id, _) in boxes {
            self.backend.stop(id).await?;
        }
        Ok(())
    }
}

const TRUE: usize = 0;
const SHELL: usize = 1;
const BUBBLEWRAP: usize = 2;
const WARM_ARGV: usize = 3;
const WARM_EXEC: usize = 4;
const COLD_ARGV: usize = 5;
const COLD_EXEC: usize = 6;
const RUNC: usize = 7;
const DOCKER: usize = 8;
const EXEC: usize = 9;
const WARM_WORDS: usize = 10;
const NAMES: [&str; 11] = [
    "spawn of /bin/true",
    "spawn of sh -lc true",
    "bubblewrap of /bin/true",
    "",
    "",
    "",
    "",
    "runc run of /bin/true",
    "docker run of /bin/true",
    "docker exec of /bin/true",
    "",
];

/// Spawns a command and waits for it.
pub(crate) fn spawn(command: &mut Command) -> Result<()> {
    let command = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let status = command.status()?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}

/// Returns the proportional set size in kilobytes.
fn pss(process: &std::path::Path) -> Result<f64> {
    let rollup = std::fs::read_to_string(process.join("smaps_rollup"))?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("no Pss")?.parse()?)
}
