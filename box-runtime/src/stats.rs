//! `box.stats`: the resource usage of a box, once or at intervals.

use std::time::Duration;

use box_protocol::actions::{AgentDisk, BoxStats, BoxStatsParams, BoxStatsResult};
use box_protocol::{BoxError, BoxSpec, HostPathMode};
use box_rpc::{Call, Empty, Handle, Peer};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, timeout};

use crate::box_actor::entry::BoxEntry;
use crate::handlers::streaming;
use crate::runtime::BoxRuntime;
use box_rpc::Caller;

/// Maximum time for the agent to count disk usage. Other values do not need it.
const DISK_TIMEOUT: Duration = Duration::from_millis(500);

/// Minimum interval between two results.
const MIN_INTERVAL: Duration = Duration::from_millis(20);

impl BoxRuntime {
    /// Returns the current resource usage of a box.
    ///
    /// With a channel for chunks and `every_ms`, the call repeats until it is dropped or the box
    /// stops running. The call does not count as activity of the box.
    pub async fn stats(
        &self,
        caller: &Caller,
        params: BoxStatsParams,
        chunks: Option<mpsc::Sender<BoxStatsResult>>,
    ) -> Result<BoxStatsResult, BoxError> {
        let entry = self.entry(caller, &params.box_id).await?;
        let every = params.every_ms.map(Duration::from_millis);
        let Some((every, chunks)) = every.zip(chunks) else {
            return measure(&entry).await;
        };
        let mut interval = tokio::time::interval(every.max(MIN_INTERVAL));
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            let now = measure(&entry).await?;
            if chunks.send(now).await.is_err() {
                return Err(BoxError::cancelled("the reader has disconnected"));
            }
        }
    }
}

async fn measure(entry: &BoxEntry) -> Result<BoxStatsResult, BoxError> {
    let (location, agent) = entry.wait_location().await?;
    let (received, sent) = entry.access.traffic();
    let used = location.backend.usage(location.id)?;
    let private_bytes = private_bytes(&agent, &used).await;
    let disk_bytes = workspace_bytes(&entry.spec, &used)
        .zip(private_bytes)
        .map(|(workspace, private)| workspace.saturating_add(private));
    // The traffic through the ports of the box, plus that of connections the box opened.
    Ok(BoxStatsResult {
        network_received_bytes: Some(received + used.network_received_bytes.unwrap_or(0)),
        network_sent_bytes: Some(sent + used.network_sent_bytes.unwrap_or(0)),
        disk_bytes,
        private_bytes,
        ..used
    })
}

/// Returns the bytes of the box's writable files on the host, if known.
///
/// The backend measures them if a quota is set. They are zero if the box cannot write to host
/// files.
fn workspace_bytes(spec: &BoxSpec, used: &BoxStatsResult) -> Option<u64> {
    let is_writable = spec.mounts_host_path() && spec.host_path_mode == HostPathMode::Rw;
    let unknown = is_writable || spec.file_bytes().is_some();
    used.disk_bytes.or((!unknown).then_some(0))
}

/// Returns the bytes of the private files, which the backend measures or the agent counts.
///
/// A count above the limit cannot be true and is ignored.
async fn private_bytes(agent: &Peer, used: &BoxStatsResult) -> Option<u64> {
    if used.private_bytes.is_some() {
        return used.private_bytes;
    }
    let answer = timeout(DISK_TIMEOUT, agent.call::<AgentDisk>(&Empty {})).await;
    let bytes = answer.ok()?.ok()?.private_bytes;
    let limit = used.private_limit_bytes.or(used.memory_limit_bytes);
    let is_possible = limit.is_none_or(|limit| bytes <= limit);
    is_possible.then_some(bytes)
}

streaming! {
    BoxStats: stats(BoxStatsParams) -> BoxStatsResult;
}
