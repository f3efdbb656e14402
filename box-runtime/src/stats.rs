//! `box.stats`: what a box uses, told once or again and again.

use std::time::Duration;

use box_protocol::actions::{AgentDisk, BoxStats, BoxStatsParams, BoxStatsResult};
use box_protocol::{BoxError, BoxSpec, HostPathMode};
use box_rpc::{Call, Empty, Handle, Peer};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, timeout};

use crate::box_actor::entry::BoxEntry;
use crate::handlers::streamed;
use crate::runtime::BoxRuntime;
use box_rpc::Caller;

/// How long an agent may count. The other figures do not need it.
const PATIENCE: Duration = Duration::from_millis(500);

/// Figures are told no more often than this.
const OFTEN: Duration = Duration::from_millis(20);

impl BoxRuntime {
    /// What a box uses now. With a place for chunks and `every_ms` it goes on until it is dropped, or the box does not run any
    /// more. Neither counts as use.
    pub async fn stats(
        &self,
        caller: &Caller,
        params: BoxStatsParams,
        chunks: Option<mpsc::Sender<BoxStatsResult>>,
    ) -> Result<BoxStatsResult, BoxError> {
        let entry = self.entry(caller, &params.box_id).await?;
        let every = params.every_ms.map(Duration::from_millis);
        let Some((every, chunks)) = every.zip(chunks) else {
            return figures(&entry).await;
        };
        let mut interval = tokio::time::interval(every.max(OFTEN));
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            let now = figures(&entry).await?;
            if chunks.send(now).await.is_err() {
                return Err(BoxError::cancelled("nobody takes the figures"));
            }
        }
    }
}

async fn figures(entry: &BoxEntry) -> Result<BoxStatsResult, BoxError> {
    let (place, agent) = entry.place().await?;
    let (received, sent) = entry.access.traffic();
    let used = place.backend.usage(place.id)?;
    let disk_bytes = match workspace(&entry.spec, &used) {
        Some(workspace) => private(&agent, &used)
            .await
            .map(|bytes| bytes.saturating_add(workspace)),
        None => None,
    };
    // Over its ports, and by itself.
    Ok(BoxStatsResult {
        network_received_bytes: Some(received + used.network_received_bytes.unwrap_or(0)),
        network_sent_bytes: Some(sent + used.network_sent_bytes.unwrap_or(0)),
        disk_bytes,
        ..used
    })
}

/// Bytes of the box's own files outside of it, if that can be said: where there is a quota they are measured, and what it
/// cannot write to is not its own.
fn workspace(spec: &BoxSpec, used: &BoxStatsResult) -> Option<u64> {
    let written = spec.mounts_host_path() && spec.host_path_mode == HostPathMode::Rw;
    let unknown = written || spec.file_bytes().is_some();
    used.disk_bytes.or((!unknown).then_some(0))
}

/// Bytes of the files that only the box has, as its agent counts them. They are in memory, so they cannot be more than that.
async fn private(agent: &Peer, used: &BoxStatsResult) -> Option<u64> {
    let told = timeout(PATIENCE, agent.call::<AgentDisk>(&Empty {})).await;
    let bytes = told.ok()?.ok()?.private_bytes;
    let can_be = used.memory_limit_bytes.is_none_or(|limit| bytes <= limit);
    can_be.then_some(bytes)
}

impl Handle<BoxStats> for BoxRuntime {
    async fn handle(
        &self,
        params: BoxStatsParams,
        call: Call<BoxStats>,
    ) -> Result<BoxStatsResult, BoxError> {
        let caller = call.caller();
        streamed(call, |chunks| self.stats(&caller, params, chunks)).await
    }
}
