//! A minimal client that only sends frames and reads answers.
//!
//! It keeps the cost of a client out of the comparison of servers.

use std::time::Instant;

use anyhow::{Context, Result};
use box_transports::{ConnectOptions, Endpoint};
use serde_json::{Value, json};

use super::servers::INSTANCE;

/// Returns the data of `box_exec`, as LangBot's client writes it.
pub(super) fn spec(cmd: &str) -> Value {
    json!({
        "cmd": cmd, "workdir": "/workspace", "timeout_sec": 30, "network": "off", "session_id": "s", "env": {},
        "image": "rockchin/langbot-sandbox:latest", "host_path": null, "host_path_mode": "rw",
        "mount_path": "/workspace", "extra_mounts": [], "persistent": false, "cpus": 1.0, "memory_mb": 512,
        "pids_limit": 128, "read_only_rootfs": true, "workspace_quota_mb": 0,
    })
}

/// Returns a request frame.
pub(super) fn frame(id: u64, action: &str, data: &Value) -> String {
    let context =
        json!({"instance_uuid": INSTANCE, "workspace_uuid": "w", "placement_generation": 1});
    if action.starts_with("__") {
        json!({"seq_id": id, "action": action, "data": data}).to_string()
    } else {
        json!({"seq_id": id, "action": action, "data": data, "context": context}).to_string()
    }
}

/// Returns calls per second over one websocket, at this concurrency.
pub(super) async fn rate(
    url: &str,
    action: &str,
    data: &Value,
    calls: u64,
    at_once: u64,
) -> Result<f64> {
    let endpoint: Endpoint = url.parse()?;
    let options = ConnectOptions {
        headers: vec![("X-LangBot-Instance-Id".to_owned(), INSTANCE.to_owned())],
        ..ConnectOptions::default()
    };
    let (mut send, mut receive) = endpoint.connect(&options).await?.split();
    let frames: Vec<String> = (0..calls + at_once)
        .map(|id| frame(id, action, data))
        .collect();
    let mut frames = frames.into_iter();
    let mut begun = Instant::now();
    for (number, first) in frames.by_ref().take(usize::try_from(at_once)?).enumerate() {
        send.send(first).await?;
        if number == 0 {
            // The first call creates the box, which is not measured.
            send.flush().await?;
            receive.receive().await?.context("the server ended")?;
            begun = Instant::now();
        }
    }
    send.flush().await?;
    let mut answered = 0;
    while answered + 1 < calls {
        let answer = receive.receive().await?.context("the server ended")?;
        anyhow::ensure!(answer.contains("success"), "refused: {answer}");
        answered += 1;
        let mut next = frames.next();
        // The client answers all frames of one read with one write, as any client would.
        while receive.receive_ready().is_some() {
            answered += 1;
            if let Some(frame) = next.take() {
                send.send(frame).await?;
            }
            next = frames.next();
        }
        if let Some(frame) = next {
            send.send(frame).await?;
        }
        send.flush().await?;
    }
    #[allow(clippy::cast_precision_loss, reason = "a count of calls")]
    let calls = calls as f64;
    Ok(calls / begun.elapsed().as_secs_f64())
}
