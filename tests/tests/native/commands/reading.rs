//! Output, read from any offset by any client.

use std::time::Duration;

use box_protocol::actions::ReadWhy;
use box_protocol::{Code, CommandState, ExitWhy};
use box_test_wait::eventually;
use box_tests::machine::printed;
use serde_json::json;

use super::{attach, get, kill, read_through, run, text, with_box};

#[tokio::test]
async fn concurrent_readers_read_output_from_any_offset() {
    with_box(async |machine| {
        let script = "for i in 1 2 3 4 5; do echo line $i; sleep 0.05; done";
        run(machine, text(script, json!({"command_id": "lines"})))
            .await
            .unwrap();
        let whole = "line 1\nline 2\nline 3\nline 4\nline 5\n";
        let from = |offset: u64, after: u64| async move {
            tokio::time::sleep(Duration::from_millis(after)).await;
            let from = json!({"from": {"offsets": {"stdout": offset, "stderr": 0}}});
            Box::pin(attach(machine, "lines", from)).await.unwrap().0
        };
        let (all, second, inside) = tokio::join!(from(0, 0), from(7, 120), from(9, 120));
        assert_eq!(all.text(), whole);
        assert_eq!((second.text(), inside.text()), (&whole[7..], &whole[9..]));
        let (tail, _, end) = attach(machine, "lines", json!({"from": {"tail": 7}}))
            .await
            .unwrap();
        assert_eq!((tail.text(), end.why), ("line 5\n", ReadWhy::Exit));
        let (after, ..) = attach(machine, "lines", json!({"from": {"pos": 28}}))
            .await
            .unwrap();
        assert_eq!(after.text(), "line 5\n");
        let error = attach(machine, "lines", json!({"from": {"pos": 36}}))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Validation);
        let (part, _, end) = attach(machine, "lines", json!({"until": {"bytes": 10}}))
            .await
            .unwrap();
        assert_eq!(
            (part.text(), end.why, end.next.stdout),
            (&whole[..10], ReadWhy::Bytes, 10)
        );
        assert_eq!(
            attach(machine, "none", json!({})).await.unwrap_err().code(),
            Code::NotFound
        );
    })
    .await;
}

#[tokio::test]
async fn readers_stop_at_their_limits_and_the_command_continues() {
    with_box(async |machine| {
        let script = "echo a; sleep 0.3; echo b; sleep 60";
        run(machine, text(script, json!({"command_id": "slow"})))
            .await
            .unwrap();
        let (now, info, end) = attach(machine, "slow", json!({"until": {"ms": 0}}))
            .await
            .unwrap();
        assert!(now.text().is_empty() || now.text() == "a\n");
        assert_eq!(
            (end.why, info.state),
            (ReadWhy::Time, CommandState::Running)
        );
        let (got, _, end) = attach(machine, "slow", json!({"until": {"ms": 150}}))
            .await
            .unwrap();
        assert_eq!((got.text(), end.why), ("a\n", ReadWhy::Time));
        let from = json!({"from": {"offsets": end.next}, "until": {"silence_ms": 400}});
        let (got, _, end) = attach(machine, "slow", from).await.unwrap();
        assert_eq!((got.text(), end.why), ("b\n", ReadWhy::Silence));
        let (info, already) = kill(machine, "slow", json!({"forget": true}))
            .await
            .unwrap();
        assert!(!already);
        assert_eq!(info.exit.unwrap().why, ExitWhy::Killed);
        let error = get(machine, "slow").await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
    })
    .await;
}

#[tokio::test]
async fn a_reader_without_time_gets_all_that_the_log_holds() {
    with_box(async |machine| {
        let script = "seq 1 100000; sleep 600";
        let params = text(script, json!({"command_id": "kept"}));
        run(machine, params).await.unwrap();
        let whole: usize = (1..=100_000).map(|n: u32| n.to_string().len() + 1).sum();
        eventually("the log has all lines", async || {
            get(machine, "kept").await.unwrap().size.stdout == whole as u64
        })
        .await;
        for _ in 0..20 {
            let (got, _, end) = attach(machine, "kept", json!({"until": {"ms": 0}}))
                .await
                .unwrap();
            assert_eq!((got.text().len(), end.why), (whole, ReadWhy::Time));
        }
        // A command that never pauses keeps no reader.
        run(machine, text("yes", json!({"command_id": "endless"})))
            .await
            .unwrap();
        let (_, info, end) = attach(machine, "endless", json!({"until": {"ms": 20}}))
            .await
            .unwrap();
        assert_eq!(
            (end.why, info.state),
            (ReadWhy::Time, CommandState::Running)
        );
        for id in ["kept", "endless"] {
            kill(machine, id, json!({"forget": true})).await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_reader_can_be_exclusive() {
    with_box(async |machine| {
        run(machine, text("sleep 600", json!({"command_id": "x"})))
            .await
            .unwrap();
        let first = attach(machine, "x", json!({"exclusive": "refuse"}));
        let others = async {
            // The agent serves this call after the first one: once another command has run, it has
            // started.
            for _ in 0..3 {
                printed(&machine.exec("c", "true").await);
            }
            let refused = attach(machine, "x", json!({"exclusive": "refuse"})).await;
            assert_eq!(refused.unwrap_err().code(), Code::Conflict);
            // A reader that does not ask for exclusive access may read.
            attach(machine, "x", json!({"until": {"ms": 0}}))
                .await
                .unwrap();
            let taken = json!({"exclusive": "take", "until": {"ms": 50}});
            attach(machine, "x", taken).await.unwrap().2
        };
        let (first, second) = tokio::join!(first, others);
        assert_eq!(first.unwrap().2.why, ReadWhy::Taken);
        assert_eq!(second.why, ReadWhy::Time);
        let again = json!({"exclusive": "refuse", "until": {"ms": 0}});
        attach(machine, "x", again).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_full_log_waits_for_its_reader_and_drops_output_without_one() {
    with_box(async |machine| {
        let flood = "seq 1 400000";
        let expected: usize = (1..=400_000).map(|n: u32| n.to_string().len() + 1).sum();
        let small = json!({"command_id": "kept", "log_bytes": 65536, "attach": {"view": "bytes"}});
        let (got, result) = read_through(machine, text(flood, small)).await;
        assert_eq!(
            (got.stdout.len(), got.gaps),
            (expected, 0),
            "the program waited"
        );
        assert!(got.stdout.ends_with(b"399999\n400000\n"));
        assert_eq!(result.read.unwrap().dropped.stdout, 0);
        let alone = json!({"command_id": "lost", "log_bytes": 65536});
        run(machine, text(flood, alone)).await.unwrap();
        attach(machine, "lost", json!({"view": "none"}))
            .await
            .unwrap();
        let (got, info, end) = attach(machine, "lost", json!({"view": "bytes"}))
            .await
            .unwrap();
        assert_eq!(
            got.stdout.len() + usize::try_from(got.gaps).unwrap(),
            expected
        );
        assert!(
            got.gaps > 0 && got.stdout.len() <= 65536,
            "{}",
            got.stdout.len()
        );
        assert_eq!(end.dropped.stdout, got.gaps);
        assert_eq!(info.kept_from.stdout, got.gaps);
        assert!(got.stdout.ends_with(b"399999\n400000\n"));
    })
    .await;
}
