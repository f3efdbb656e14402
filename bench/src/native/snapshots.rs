//! Snapshots and forks beside cold boxes and `cp`.
//!
//! The runtime has a state directory on a disk, as that of `boxd serve`.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use box_catalog::Catalog;
use box_protocol::SpecDraft;
use box_protocol::actions::{
    BoxCreateParams, BoxDeleteParams, BoxForkParams, BoxSnapshotParams, BoxTransitionParams,
    TargetState,
};
use box_protocol::{BoxId, Name};
use box_runtime::native::{NativeBackend, NativeConfig};
use box_runtime::{BoxRuntime, Caller, RuntimeConfig};
use futures::future::try_join_all;
use serde_json::json;

use super::spawn;
use crate::boxes::rate_bar;
use crate::pairs::Pairs;
use crate::statistics::median;

/// Runs of each contestant per round that take milliseconds.
const RUNS: usize = 50;
/// Runs of each contestant per round that copy 100 MB.
const COPIES: usize = 3;
/// Forks of one call, and calls per round, of the sustained rate.
const FORKS: u32 = 50;
const CALLS: u32 = 10;
/// Disks are on a file system of the machine; `/tmp` is often in memory.
const DISK: &str = "/var/tmp";
const MEMORY: &str = "/dev/shm";

/// Writes 100 MB in 3000 files.
const HUNDRED_MEGABYTES: &str = "head -c 104857600 /dev/urandom | split -b 34953 -a 4 - ";

/// A runtime whose boxes can be stopped, snapshotted and forked.
pub(super) struct Stored {
    runtime: BoxRuntime,
    state: tempfile::TempDir,
}

impl Stored {
    pub(super) fn start() -> Result<Self> {
        let state = tempfile::tempdir_in(DISK)?;
        let mut native = NativeConfig::this_program()?;
        native.cgroup_parent = format!("box-bench-stored-{}", std::process::id());
        native.state_dir = Some(state.path().to_owned());
        let mut config = RuntimeConfig::with(NativeBackend::new(native));
        config.state_dir = Some(state.path().to_owned());
        config.max_boxes = 200;
        config.idle_ttl = Duration::from_hours(1);
        let items = Catalog::open(state.path(), box_catalog::Limits::default())?;
        config.catalog = Some(Arc::new(items));
        Ok(Self {
            runtime: BoxRuntime::start(config),
            state,
        })
    }

    /// Compares snapshots of a stopped box to cold boxes, and those of a running one to `cp`.
    pub(super) async fn snapshots(&self, rounds: u32) -> Result<()> {
        let name = "snapshot of a stopped box with 100 MB";
        let source = self
            .filled(SpecDraft::new("stopped"), HUNDRED_MEGABYTES)
            .await?;
        self.stop(&source).await?;
        let mut pairs = Pairs::default();
        for _ in 0..rounds {
            for _ in 0..RUNS {
                let begun = Instant::now();
                self.snapshot(&source).await?;
                pairs.ours(begun);
                self.delete_snapshot().await?;
                self.cold(&mut pairs).await?;
            }
            pairs.end_round();
        }
        pairs.print(name, "creation of a cold box", 1.0);
        self.delete(&source).await?;
        self.live(rounds).await
    }

    /// Compares a snapshot of a running box to `cp -a` of the same files.
    async fn live(&self, rounds: u32) -> Result<()> {
        let source = self
            .filled(SpecDraft::new("running"), HUNDRED_MEGABYTES)
            .await?;
        let copied = tempfile::tempdir_in(MEMORY)?;
        let fill = format!("{HUNDRED_MEGABYTES}{}/", copied.path().display());
        spawn(Command::new("sh").args(["-c", &fill]))?;
        let mut pairs = Pairs::default();
        for _ in 0..rounds {
            for _ in 0..COPIES {
                let begun = Instant::now();
                if let Err(error) = self.snapshot(&source).await {
                    println!("snapshots of running boxes are not measured: {error:#}");
                    return Ok(());
                }
                pairs.ours(begun);
                self.delete_snapshot().await?;
                let to = self.state.path().join("copy");
                let begun = Instant::now();
                copy(copied.path(), &to)?;
                pairs.theirs(begun);
                std::fs::remove_dir_all(&to)?;
            }
            pairs.end_round();
        }
        let name = "snapshot of a running box with 100 MB in memory";
        pairs.print(name, "cp -a of the same files", 1.2);
        self.delete(&source).await
    }

    /// Compares forks of a stopped box to cold boxes, and counts the forks in a second.
    pub(super) async fn forks(&self, rounds: u32) -> Result<()> {
        let large = SpecDraft::new("large").disk_mb(2 << 10);
        let fill = "head -c 1073741824 /dev/urandom | split -b 1000000 -a 4 - ";
        let large = self.filled(large, fill).await?;
        self.stop(&large).await?;
        let mut pairs = Pairs::default();
        for _ in 0..rounds {
            for _ in 0..RUNS {
                // The server prepares a spare between two boxes.
                tokio::time::sleep(Duration::from_millis(40)).await;
                let begun = Instant::now();
                let forks = self.fork(&large, 1).await?;
                pairs.ours(begun);
                for fork in &forks {
                    self.delete(fork).await?;
                }
                self.cold(&mut pairs).await?;
            }
            pairs.end_round();
        }
        let name = "fork of a stopped box with 1 GiB";
        pairs.print(name, "creation of a cold box", 2.0);
        self.delete(&large).await?;
        self.sustained(rounds).await
    }

    /// Counts forks and their ends in a second.
    async fn sustained(&self, rounds: u32) -> Result<()> {
        let fill = "head -c 1048576 /dev/urandom | split -b 10000 -a 4 - ";
        let small = self.filled(SpecDraft::new("small"), fill).await?;
        self.stop(&small).await?;
        let mut rates = Vec::new();
        for _ in 0..rounds {
            let begun = Instant::now();
            for _ in 0..CALLS {
                let forks = self.fork(&small, FORKS).await?;
                try_join_all(forks.iter().map(|fork| self.delete(fork))).await?;
            }
            rates.push(f64::from(FORKS * CALLS) / begun.elapsed().as_secs_f64());
        }
        self.delete(&small).await?;
        let mut ratios: Vec<f64> = rates.iter().map(|rate| rate / 100.0).collect();
        let ours = format!("{:.0} /s", median(&mut rates));
        let name = "forks of a stopped box and their ends, 100 /s = 1";
        rate_bar(name, &ours, "", &mut ratios, 1.0, None);
        Ok(())
    }

    /// Creates a box with files in its home; the command gets the prefix of their names.
    async fn filled(&self, spec: SpecDraft, command: &str) -> Result<BoxId> {
        let id = self.create(spec.clone()).await?;
        let mut spec = serde_json::to_value(spec)?;
        spec["cmd"] = json!(format!("mkdir ~/files && {command}~/files/"));
        spec["timeout_sec"] = json!(600);
        let asked = serde_json::from_value(json!({ "spec": spec }))?;
        let result = self.runtime.exec(&Caller::Local, asked).await?;
        ensure!(result.exit_code == Some(0), "{result:?}");
        Ok(id)
    }

    /// Measures the creation of a box with defaults.
    async fn cold(&self, pairs: &mut Pairs) -> Result<()> {
        tokio::time::sleep(Duration::from_millis(40)).await;
        let begun = Instant::now();
        let id = self.create(SpecDraft::new("cold")).await?;
        pairs.theirs(begun);
        self.delete(&id).await
    }

    async fn create(&self, spec: SpecDraft) -> Result<BoxId> {
        let asked = BoxCreateParams::new(spec);
        let created = self.runtime.create(&Caller::Local, asked).await?;
        Ok(created.info.box_id)
    }

    async fn stop(&self, id: &BoxId) -> Result<()> {
        let asked = BoxTransitionParams {
            box_id: id.clone(),
            to: TargetState::Stopped,
        };
        self.runtime.transition(&Caller::Local, asked).await?;
        Ok(())
    }

    async fn snapshot(&self, id: &BoxId) -> Result<()> {
        let asked = BoxSnapshotParams::new(id.clone(), Name::new("bench")?);
        self.runtime.snapshot(&Caller::Local, asked).await?;
        Ok(())
    }

    async fn delete_snapshot(&self) -> Result<()> {
        let item = serde_json::from_value(json!({"kind": "snapshot", "item": "bench"}))?;
        self.runtime.delete_item(&Caller::Local, item).await?;
        Ok(())
    }

    async fn fork(&self, id: &BoxId, count: u32) -> Result<Vec<BoxId>> {
        let mut asked = BoxForkParams::new(id.clone());
        asked.count = count;
        let forks = self.runtime.fork(&Caller::Local, asked).await?;
        Ok(forks.items.into_iter().map(|info| info.box_id).collect())
    }

    async fn delete(&self, id: &BoxId) -> Result<()> {
        let asked = BoxDeleteParams {
            box_id: id.clone(),
            force: true,
        };
        self.runtime.delete(&Caller::Local, asked).await?;
        Ok(())
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    spawn(Command::new("cp").arg("-a").arg(from).arg(to))
}
