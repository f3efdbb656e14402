//! `stats`: resource usage of boxes, live.

use std::collections::HashMap;
use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use box_client::BoxClient;
use box_protocol::BoxState;
use box_protocol::actions::BoxStatsResult;
use serde_json::json;

use crate::args::{Cli, StatsArgs};
use crate::{boxes, connect, output};

/// The interval between two updates.
const INTERVAL: Duration = Duration::from_secs(1);

/// `boxd stats`.
pub(crate) async fn run(cli: &Cli, args: &StatsArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    // The CPU use counts from the sample before.
    sample(&client, &args.names).await?;
    let live = !args.once && !cli.json && std::io::stdout().is_terminal();
    loop {
        tokio::time::sleep(INTERVAL).await;
        let now = sample(&client, &args.names).await?;
        let text = table(&now);
        if !live {
            let all: HashMap<_, _> = now
                .iter()
                .map(|(name, stats)| (name, json!(stats)))
                .collect();
            output::print_or_json(cli.json, &text, &all)?;
            return Ok(ExitCode::SUCCESS);
        }
        // Move to the top and clear the screen below.
        output::print(&format!("\x1b[H\x1b[J{text}"))?;
    }
}

/// The usage of the given boxes, or of all; then skips a box that ends meanwhile, and shows no numbers of a failed one.
async fn sample(client: &BoxClient, args: &[String]) -> Result<Vec<(String, BoxStatsResult)>> {
    let mut found = Vec::new();
    let mut names = args.to_vec();
    if args.is_empty() {
        for info in boxes::list_all(client).await? {
            let name = info.box_id.to_string();
            match info.state {
                BoxState::Failed | BoxState::Unreachable => {
                    found.push((name, BoxStatsResult::default()));
                }
                _ => names.push(name),
            }
        }
    }
    for name in names {
        let stats = async { client.open(&name).await?.stats().await };
        match stats.await {
            Ok(stats) => found.push((name, stats)),
            // A paused or stopped box has no agent to ask.
            Err(error) if error.is_conflict() => found.push((name, BoxStatsResult::default())),
            Err(error) if error.is_not_found() && args.is_empty() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(found)
}

fn table(now: &[(String, BoxStatsResult)]) -> String {
    let row = |(name, stats): &(String, BoxStatsResult)| {
        let unknown = || "-".to_owned();
        vec![
            name.clone(),
            stats
                .cpu_percent
                .map_or_else(unknown, |percent| format!("{percent:.0}%")),
            stats.memory_bytes.map_or_else(unknown, bytes),
            stats.memory_limit_bytes.map_or_else(unknown, bytes),
            stats.pids.map_or_else(unknown, |pids| pids.to_string()),
            stats.disk_bytes.map_or_else(unknown, bytes),
            stats.private_limit_bytes.map_or_else(unknown, bytes),
            stats.network_received_bytes.map_or_else(unknown, bytes),
            stats.network_sent_bytes.map_or_else(unknown, bytes),
        ]
    };
    let rows: Vec<_> = now.iter().map(row).collect();
    output::table(
        &[
            "BOX", "CPU", "MEMORY", "LIMIT", "PIDS", "DISK", "LIMIT", "NET IN", "NET OUT",
        ],
        &rows,
    )
}

/// Formats bytes in their largest unit.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (count.max(1).ilog2() / 10).min(4);
    let tenths = (u128::from(count) * 10) >> (10 * unit);
    match unit {
        0 => format!("{count} B"),
        _ => format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit as usize]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_use_their_largest_unit() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (1 << 30, "1.0 GiB"),
            (u64::MAX, "16777215.9 TiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }
}
