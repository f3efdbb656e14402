//! Output arrives complete, with any content and any length.

use box_protocol::actions::{BoxExecParams, CommandChunk, StreamName};
use box_runtime::Caller;
use box_tests::machine::{Machine, on_each_machine, printed, spec};
use serde_json::json;
use tokio::sync::mpsc;

#[tokio::test]
async fn a_command_opens_its_streams_by_path() {
    on_each_machine(async |machine| {
        let cmd = "echo out > /dev/stdout; echo err > /dev/stderr; echo more >> /proc/self/fd/1";
        let result = machine.exec("names", cmd).await;
        assert_eq!(printed(&result), "out\nmore", "{result:?}");
        assert_eq!(result.stderr, "err\n");
    })
    .await;
}

#[tokio::test]
async fn a_mebibyte_of_each_stream_is_exact_and_more_is_counted() {
    on_each_machine(async |machine| {
        let bytes = 1 << 20;
        for more in [0, 1, 100_000] {
            let cmd = format!(
                "seq 1000000 | head -c {0}; seq 1000000 | tr 0-9 a-j | head -c {0} >&2",
                bytes + more
            );
            let result = machine.exec("much", &cmd).await;
            let expected: String = (1..)
                .flat_map(|n: u32| format!("{n}\n").into_bytes())
                .map(char::from)
                .take(bytes)
                .collect();
            assert!(result.stdout == expected, "{} bytes", result.stdout.len());
            let letters = expected.replace(|c: char| c.is_ascii_digit(), "");
            assert_eq!(result.stderr.matches('\n').count(), letters.len());
            assert_eq!(result.stderr.len(), bytes);
            let more = more as u64;
            assert_eq!((result.stdout_dropped, result.stderr_dropped), (more, more));
        }
        // Short output takes another path.
        for bytes in [0, 1, 4095, 4096, 4097, 65_536] {
            let result = machine
                .exec("much", &format!("head -c {bytes} /dev/zero | tr '\\0' x"))
                .await;
            assert_eq!(printed(&result).len(), bytes);
        }
    })
    .await;
}

/// Everything that a command wrote to one stream, as it was streamed.
async fn streamed(machine: &Machine, cmd: &str, slowly: bool) -> Vec<u8> {
    let (sender, mut chunks) = mpsc::channel(1);
    let asked: BoxExecParams = serde_json::from_value(json!({
        "spec": spec(json!({"box_id": "stream", "cmd": cmd})), "attach": {"view": "bytes"}}))
    .unwrap();
    let call = tokio::spawn(machine.runtime.exec_streamed(&Caller::Local, asked, sender));
    let (mut all, mut count) = (Vec::new(), 0);
    while let Some(chunk) = chunks.recv().await {
        count += 1;
        if slowly && count % 16 == 0 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        match chunk {
            CommandChunk::Started(_) => assert!(all.is_empty()),
            CommandChunk::Bytes(piece) => {
                assert_eq!(
                    (piece.stream, piece.offset),
                    (StreamName::Stdout, all.len() as u64)
                );
                all.extend_from_slice(&piece.data);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(call.await.unwrap().unwrap().exit_code, Some(0));
    all
}

#[tokio::test]
async fn streamed_bytes_are_exact_also_for_a_slow_reader() {
    on_each_machine(async |machine| {
        let every_byte: Vec<u8> = (0..=255).collect();
        let cmd = "for i in $(seq 0 255); do printf \"\\\\$(printf %03o $i)\"; done";
        assert_eq!(streamed(machine, cmd, false).await, every_byte);
        let expected: Vec<u8> = (1..=800_000)
            .flat_map(|n| format!("{n}\n").into_bytes())
            .collect();
        for slowly in [false, true] {
            let all = streamed(machine, "seq 800000", slowly).await;
            assert!(all == expected, "{} of {} bytes", all.len(), expected.len());
        }
        let trickle = "for i in 1 2 3; do echo $i; sleep 0.05; done";
        assert_eq!(streamed(machine, trickle, false).await, b"1\n2\n3\n");
    })
    .await;
}
