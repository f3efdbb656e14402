//! Boxes of a pool beside boxes that start for their caller.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use box_protocol::actions::BoxCreateParams;
use box_protocol::catalog::ItemContent;
use box_runtime::Caller;
use serde_json::{Value, json};

use super::{Bench, RUNS};
use crate::pairs::Pairs;

/// Number of boxes that wait in a pool.
const SIZE: u64 = 2;
/// Runs with a preparation, each of which takes 200 ms.
const PREPARED_RUNS: usize = 20;

impl Bench {
    /// Compares the creation of a box from a pool to that of a cold one, in turn.
    pub(super) async fn pool(&self, rounds: u32) -> Result<()> {
        let plain = json!({});
        let prepare = json!({"prepare": {"commands": [{"argv": ["sleep", "0.2"]}]}});
        let name = "creation of a box from a pool";
        self.pool_of(rounds, RUNS, name, &plain, 0.5).await?;
        let name = "creation of a box from a pool, prepared for 200 ms";
        self.pool_of(rounds, PREPARED_RUNS, name, &prepare, 0.1)
            .await
    }

    async fn pool_of(
        &self,
        rounds: u32,
        runs: usize,
        name: &str,
        spec: &Value,
        most: f64,
    ) -> Result<()> {
        let template = json!({"template": {"spec": spec}});
        self.put(json!({"name": "bench", "content": template}))
            .await?;
        let pool = json!({"pool": {"template": "bench", "size": SIZE}});
        self.put(json!({"name": "bench", "content": pool})).await?;
        let mut specs = [spec.clone(), json!({"pool": "bench"})];
        for spec in &mut specs {
            spec["box_id"] = json!("pooled");
        }
        let mut pairs = Pairs::default();
        for _ in 0..rounds {
            for _ in 0..runs {
                for (from_pool, spec) in specs.iter().enumerate() {
                    self.filled().await?;
                    // The server prepares a spare between two boxes.
                    tokio::time::sleep(Duration::from_millis(40)).await;
                    let asked = BoxCreateParams::new(serde_json::from_value(spec.clone())?);
                    let begun = Instant::now();
                    let made = self.runtime.create(&Caller::Local, asked).await?;
                    match from_pool {
                        0 => pairs.theirs(begun),
                        _ => pairs.ours(begun),
                    }
                    let info = made.info;
                    ensure!(
                        info.pool.is_some() == (from_pool == 1),
                        "{:?}",
                        info.pool_missed
                    );
                    self.words("pooled").await?;
                    self.delete("pooled").await?;
                }
            }
            pairs.end_round();
        }
        for kind in ["pool", "template"] {
            let item = serde_json::from_value(json!({"kind": kind, "item": "bench"}))?;
            self.runtime.delete_item(&Caller::Local, item).await?;
        }
        pairs.print(name, "cold box", most);
        Ok(())
    }

    async fn put(&self, item: Value) -> Result<()> {
        let item = serde_json::from_value(item)?;
        self.runtime.put_item(&Caller::Local, item).await?;
        Ok(())
    }

    /// Waits until the pool has all its boxes.
    async fn filled(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let item = serde_json::from_value(json!({"kind": "pool", "item": "bench"}))?;
            let item = self.runtime.item(&Caller::Local, item).await?;
            match item.content {
                ItemContent::Pool(pool) if pool.ready == SIZE => return Ok(()),
                _ if begun.elapsed() > Duration::from_mins(1) => {
                    bail!("the pool is not full: {:?}", item.reason)
                }
                _ => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }
}
