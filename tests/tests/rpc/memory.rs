//! Memory stays bounded for any input.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use box_rpc::{ALL_UNREAD_BYTES, CloseReason, unread_bytes};
use box_test_wait::eventually;
use box_tests::fixture::{Dialect, Setup};
use box_tests::process::status_kib;
use serde_json::json;

/// The peak resident size of a process, in bytes.
fn peak(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a process");
    status_kib(&status, "VmHWM") * 1024
}

/// A line without an end, far longer than the message limit. The process that reads it, with its code,
/// stays under three times that limit, and answers the next call.
#[test]
fn an_endless_line_is_not_kept() {
    const LIMIT: u64 = 16 * 1024 * 1024;
    let mut server = Command::new(env!("CARGO_BIN_EXE_box-test-server"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = server.stdin.take().unwrap();
    input
        .write_all(b"{\"jsonrpc\":\"2.0\",\"id\":5,\"method\":\"echo\",\"params\":{\"text\":\"")
        .unwrap();
    let block = vec![b'x'; 1 << 20];
    for _ in 0..1024 {
        input.write_all(&block).unwrap();
    }
    let peak = peak(server.id());
    assert!(peak < 3 * LIMIT, "{peak} bytes for a line of 1 GiB");
    input.write_all(b"\"}}\n{\"jsonrpc\":\"2.0\",\"id\":6,\"method\":\"echo\",\"params\":{\"text\":\"on\"}}\n").unwrap();
    drop(input);
    let output = server.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("\"id\":5,\"error\"") && text.contains("message_bytes of 16777216"),
        "{text}"
    );
    assert!(text.contains("\"id\":6,\"result\""), "{text}");
}

const MIB: usize = 1 << 20;

/// Answers of 64 KiB each, which the peer does not read: their bytes are bounded, and the other
/// calls fail with the reason.
#[tokio::test]
async fn unread_answers_of_one_peer_are_bounded() {
    for dialect in [Dialect::JsonRpc, Dialect::LangBot] {
        let setup = Setup::in_process(dialect).server(|limits| {
            limits.in_flight = Some(1000);
            limits.unread_bytes = Some(MIB);
        });
        let (server, mut raw) = setup.server_session_holding(1).await;
        for id in 1..=400 {
            raw.call(id, "big", &json!({"n": MIB / 16})).await;
        }
        let held = || server.peer().stats().unread_bytes;
        eventually("all have been answered", async || {
            server.peer().stats().received == 400
        })
        .await;
        assert!(held() <= MIB + 400 * 512, "{} bytes", held());
        let (mut whole, mut refused) = (0, 0);
        for _ in 0..400 {
            match raw.answer().await.outcome {
                Ok(_) => whole += 1,
                Err(error) => {
                    assert!(error.message.contains("unread_bytes"), "{error:?}");
                    refused += 1;
                }
            }
        }
        assert!(
            whole >= 16 && refused > 200,
            "{whole} whole, {refused} refused"
        );
        eventually("no bytes are held any more", async || held() == 0).await;
        raw.call(500, "big", &json!({"n": MIB / 16})).await;
        raw.answer().await.result();
    }
}

/// Peers that never read, each within its bound. The process stays within the global bound, and
/// frees the memory later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_answers_of_all_peers_are_bounded() {
    let setup = || {
        Setup::in_process(Dialect::JsonRpc).server(|limits| {
            limits.in_flight = Some(1000);
            limits.queue_slots = Some(1);
            // On a busy machine a peer must not be closed for its time before its bytes.
            limits.frame_ms = Some(600_000);
        })
    };
    let (innocent, mut reader) = setup().server_session_holding(1).await;
    let mut peers = Vec::new();
    for _ in 0..12 {
        let (server, mut raw) = setup().server_session_holding(1).await;
        for id in 1..=40 {
            if raw.try_call(id, "big", &json!({"n": MIB})).await.is_err() {
                break;
            }
        }
        peers.push((server, raw));
        assert!(
            unread_bytes() <= ALL_UNREAD_BYTES + 4 * MIB,
            "{} bytes",
            unread_bytes()
        );
        reader.call(1, "big", &json!({"n": MIB})).await;
        assert_eq!(
            reader.answer().await.result()["text"]
                .as_str()
                .unwrap()
                .len(),
            MIB
        );
    }
    eventually("the server closes at least 3 of 12 peers", async || {
        let mut flooded = 0;
        for (server, _) in &peers {
            let closed = tokio::time::timeout(Duration::ZERO, server.closed()).await;
            flooded += usize::from(closed == Ok(CloseReason::Flooded));
        }
        flooded >= 3
    })
    .await;
    drop(peers);
    eventually("no bytes are held any more", async || unread_bytes() < MIB).await;
    assert_eq!(innocent.peer().stats().unread_bytes, 0);
}
