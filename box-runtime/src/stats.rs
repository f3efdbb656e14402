//! `box.stats`: the resource usage of a box, once or at intervals.

use std::time::Duration;

use box_protocol::actions::{AgentDisk, BoxStats, BoxStatsParams, BoxStatsResult};
use box_protocol::{BoxError, BoxSpec, HostPathMode, UnixMs};
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

/// Minimum time between two samples of the CPU time.
///
/// The clock of shorter ones is too coarse; they repeat the last result.
const CPU_INTERVAL: Duration = Duration::from_millis(50);

/// A sample of the CPU time of a box.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CpuSample {
    at: UnixMs,
    cpu_us: u64,
    percent: Option<f64>,
}

impl CpuSample {
    /// Returns the CPU use since the last sample, or since the creation of the box.
    fn next(&mut self, created_at: UnixMs, at: UnixMs, cpu_us: u64) -> f64 {
        // A sample from before a restart of the box says nothing about this instance.
        if self.at < created_at || self.cpu_us > cpu_us {
            *self = Self {
                at: created_at,
                ..Self::default()
            };
        }
        let elapsed = at.since(self.at);
        if let Some(percent) = self.percent.filter(|_| elapsed < CPU_INTERVAL) {
            return percent;
        }
        // A box uses CPU time while it starts, before it counts as created.
        let least = if self.percent.is_none() { 1000 } else { 1 };
        let elapsed = elapsed.max(Duration::from_millis(least));
        let used = Duration::from_micros(cpu_us - self.cpu_us);
        let percent = 100.0 * used.as_secs_f64() / elapsed.as_secs_f64();
        let percent = (percent * 100.0).round() / 100.0;
        *self = Self {
            at,
            cpu_us,
            percent: Some(percent),
        };
        percent
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
    let private_limit = used.private_limit_bytes;
    let disk_limit_bytes = workspace_limit(&entry.spec)
        .zip(private_limit)
        .map(|(workspace, private)| workspace.saturating_add(private));
    let (cpu_percent, cpus) = {
        let mut status = entry.status();
        let created_at = status.created_at;
        let percent = used
            .cpu_us
            .map(|cpu| status.cpu_sample.next(created_at, used.at, cpu));
        let is_limited = !status.facts.missing.iter().any(|what| what == "cgroup.cpu");
        (
            percent,
            is_limited.then_some(entry.spec.cpus).or_else(machine_cpus),
        )
    };
    // The traffic through the ports of the box, plus that of connections the box opened.
    Ok(BoxStatsResult {
        cpu_percent,
        cpus,
        disk_limit_bytes,
        network_received_bytes: Some(received + used.network_received_bytes.unwrap_or(0)),
        network_sent_bytes: Some(sent + used.network_sent_bytes.unwrap_or(0)),
        disk_bytes,
        private_bytes,
        ..used
    })
}

/// Returns the number of CPUs of the machine.
fn machine_cpus() -> Option<f64> {
    let count = std::thread::available_parallelism().ok()?.get();
    u32::try_from(count).ok().map(f64::from)
}

/// Returns the limit of the box's writable files on the host, if they have one.
fn workspace_limit(spec: &BoxSpec) -> Option<u64> {
    let is_writable = spec.mounts_host_path() && spec.host_path_mode == HostPathMode::Rw;
    match spec.workspace_quota_mb {
        0 => (!is_writable).then_some(0),
        megabytes => Some(megabytes.saturating_mul(1 << 20)),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_use_counts_from_the_last_sample_or_from_the_creation() {
        let mut sample = CpuSample::default();
        let mut next = |created: u64, at: u64, cpu: u64| {
            sample.next(UnixMs(created), UnixMs(at), cpu).to_string()
        };
        assert_eq!(next(1000, 3000, 1_000_000), "50", "since the creation");
        assert_eq!(next(1000, 4000, 3_000_000), "200", "since the last sample");
        assert_eq!(next(1000, 4001, 3_900_000), "200", "too soon");
        assert_eq!(next(1000, 5000, 3_000_000), "0");
        assert_eq!(next(6000, 7000, 100_000), "10", "a new instance");
        assert_eq!(next(6000, 6000, 200_000), "10", "a clock that went back");
    }
}
