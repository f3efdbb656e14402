//! Commands in real boxes, read over connections that the test cuts.

use std::time::Duration;

use box_client::{Chunk, Code, ExitWhy, Offsets, SpecDraft, StreamName};
use box_test_wait::eventually;
use box_tests::machine::on_each_machine;
use futures::StreamExt as _;

use super::support::{ServerAndClient, fresh, serve, served, with_a_box};

/// Three hundred lines, slow enough to be cut in the middle.
const LINES: &str =
    "for i in $(seq 1 300); do echo line $i; echo err $i >&2; sleep 0.01; done; exit 4";

fn lines(word: &str) -> String {
    let lines: Vec<_> = (1..=300).map(|n| format!("{word} {n}\n")).collect();
    lines.concat()
}

#[tokio::test]
async fn id_and_process_are_known_when_start_returns() {
    with_a_box(async |_, work| {
        let mut command = work
            .command("echo $$")
            .cwd("/")
            .id("mine")
            .start()
            .await
            .unwrap();
        assert_eq!(command.id().as_str(), "mine");
        let pid = command.pid().unwrap();
        let result = command.result().await.unwrap();
        assert_eq!(result.stdout_text().trim(), pid.to_string());
        assert!(result.success());
        let made = work.command("true").start().await.unwrap();
        assert_eq!(made.id().as_str().len(), 32);
    })
    .await;
}

#[tokio::test]
async fn both_streams_come_in_order_with_their_offsets() {
    with_a_box(async |_, work| {
        let text = "echo one; sleep 0.1; echo two >&2; sleep 0.1; printf 'drei\\377'; exit 7";
        let mut command = work.command(text).cwd("/").start().await.unwrap();
        let mut collected = Vec::new();
        while let Some(chunk) = command.next().await.transpose().unwrap() {
            let Chunk::Output { stream, offset, .. } = chunk else {
                panic!("{chunk:?}")
            };
            collected.push((stream, offset, chunk.text().into_owned()));
        }
        let expected = [
            (StreamName::Stdout, 0, "one\n".to_owned()),
            (StreamName::Stderr, 0, "two\n".to_owned()),
            (StreamName::Stdout, 4, "drei\u{fffd}".to_owned()),
        ];
        assert_eq!(collected, expected);
        // Invalid UTF-8 is replaced, and offsets count the original bytes.
        assert_eq!(
            command.offsets(),
            Offsets {
                stdout: 11,
                stderr: 4
            }
        );
        let result = command.result().await.unwrap();
        assert_eq!(
            (result.exit_code(), &*result.stderr_text()),
            (Some(7), "two\n")
        );
        let raw = work
            .run("printf '\\377\\000'")
            .cwd("/")
            .bytes()
            .await
            .unwrap();
        assert_eq!(&raw.stdout[..], b"\xff\0");
    })
    .await;
}

#[tokio::test]
async fn no_byte_is_lost_with_the_connection() {
    with_a_box(async |served, work| {
        let mut command = work.command(LINES).cwd("/").start().await.unwrap();
        let mut cuts = 0;
        while let Some(chunk) = command.next().await {
            chunk.unwrap();
            if command.offsets().stdout > cuts * 1000 + 500 && cuts < 2 {
                cuts += 1;
                served.server.cut();
            }
        }
        assert_eq!(cuts, 2);
        let result = command.result().await.unwrap();
        assert_eq!(result.exit_code(), Some(4));
        assert_eq!(result.stdout_text(), lines("line"));
        assert_eq!(result.stderr_text(), lines("err"));
        assert_eq!(result.dropped, Offsets::default());
    })
    .await;
}

#[tokio::test]
async fn a_command_outlives_the_restart_of_its_server() {
    on_each_machine(async |machine| {
        let directory = tempfile::tempdir().unwrap();
        let socket = format!("unix:{}", directory.path().join("s").display());
        for endpoint in [format!("queue:{}", fresh("restart")), socket] {
            let ServerAndClient { client, server } =
                served(&endpoint, machine.runtime.router()).await;
            let spec = SpecDraft::new(fresh("restarted"));
            let work = client.create(spec).await.unwrap();
            let mut command = work.command(LINES).cwd("/").start().await.unwrap();
            command.next().await.unwrap().unwrap();
            server.close(Duration::from_millis(50), true).await;
            let _again = serve(&endpoint.parse().unwrap(), machine.runtime.router()).await;
            let result = command.result().await.unwrap();
            assert_eq!(
                (result.stdout_text().into_owned(), result.exit_code()),
                (lines("line"), Some(4))
            );
        }
    })
    .await;
}

#[tokio::test]
async fn another_handle_can_resume_a_command() {
    with_a_box(async |_, work| {
        let mut first = work.command(LINES).cwd("/").start().await.unwrap();
        let mut read = String::new();
        while read.len() < 500 {
            let chunk = first.next().await.unwrap().unwrap();
            if chunk.stream() == Some(StreamName::Stdout) {
                read.push_str(&chunk.text());
            }
        }
        let mut second = first.reconnect().await.unwrap();
        drop(first);
        assert!(second.pid().is_some());
        let rest = second.result().await.unwrap();
        read.push_str(&rest.stdout_text());
        assert_eq!((read, rest.exit_code()), (lines("line"), Some(4)));
        let mut third = work.attach(second.id(), Offsets::default()).await.unwrap();
        assert_eq!(third.result().await.unwrap().stdout_text(), lines("line"));
        let error = work.attach("absent", Offsets::default()).await.unwrap_err();
        assert!(error.is_not_found(), "{error:?}");
    })
    .await;
}

#[tokio::test]
async fn a_command_takes_input_until_it_ends() {
    with_a_box(async |_, work| {
        let mut cat = work
            .command("cat; echo over")
            .cwd("/")
            .with_input()
            .start()
            .await
            .unwrap();
        cat.send_input("one\n").await.unwrap();
        let big = "x".repeat(600_000);
        cat.send_input(big.clone()).await.unwrap();
        cat.close_input().await.unwrap();
        let result = cat.result().await.unwrap();
        assert_eq!(result.stdout_text(), format!("one\n{big}over\n"));
        for _ in 0..2 {
            cat.send_input("late").await.unwrap();
            cat.close_input().await.unwrap();
            cat.kill().await.unwrap();
        }
        // A command that has ended, and no client has read its end.
        let unread = work
            .command("true")
            .cwd("/")
            .with_input()
            .start()
            .await
            .unwrap();
        eventually("all commands end", async || {
            let commands = work.commands().await.unwrap();
            commands.iter().all(|info| info.exit.is_some())
        })
        .await;
        unread.send_input("late").await.unwrap();
        unread.close_input().await.unwrap();
        unread.kill().await.unwrap();
        // A command without input refuses input.
        let closed = work.command("sleep 60").cwd("/").start().await.unwrap();
        assert_eq!(
            closed.send_input("x").await.unwrap_err().code(),
            Code::Conflict
        );
        closed.kill().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_killed_command_has_that_reason_and_a_timeout_no_exit_code() {
    with_a_box(async |_, work| {
        let mut command = work
            .command("echo a; sleep 60")
            .cwd("/")
            .start()
            .await
            .unwrap();
        command.next().await.unwrap().unwrap();
        command.kill().await.unwrap();
        let result = command.result().await.unwrap();
        assert_eq!(result.exit.unwrap().why, ExitWhy::Killed);
        assert_eq!(
            (result.exit_code(), &*result.stdout_text()),
            (Some(137), "a\n")
        );
        let timed = work
            .run("sleep 60")
            .cwd("/")
            .timeout(Duration::from_millis(200));
        let timed = timed.await.unwrap();
        assert_eq!(
            (timed.exit.unwrap().why, timed.exit_code()),
            (ExitWhy::Timeout, None)
        );
        assert!(!timed.success());
    })
    .await;
}

#[tokio::test]
async fn a_command_outlives_its_handle_unless_killed_on_disconnect() {
    with_a_box(async |_, work| {
        let run = "sleep 0.3; echo done";
        drop(
            work.command(run)
                .cwd("/")
                .id("loose")
                .detached()
                .start()
                .await
                .unwrap(),
        );
        let mut loose = work.attach("loose", Offsets::default()).await.unwrap();
        assert_eq!(loose.result().await.unwrap().stdout_text(), "done\n");
        drop(
            work.command("sleep 60")
                .cwd("/")
                .id("tied")
                .kill_on_disconnect()
                .start()
                .await
                .unwrap(),
        );
        let mut tied = work.attach("tied", Offsets::default()).await.unwrap();
        assert_ne!(tied.exit().await.unwrap().code, Some(0));
        let short = Duration::from_millis(100);
        drop(
            work.command("sleep 60")
                .cwd("/")
                .id("idle")
                .idle_limit(short)
                .start()
                .await
                .unwrap(),
        );
        let ended = async || {
            let commands = work.commands().await.unwrap();
            let idle = commands
                .into_iter()
                .find(|info| info.command_id.as_str() == "idle");
            idle.and_then(|info| info.exit).map(|exit| exit.why)
        };
        let mut why = None;
        for _ in 0..12_000 {
            why = ended().await;
            if why.is_some() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(why, Some(ExitWhy::Idle));
    })
    .await;
}

#[tokio::test]
async fn output_beyond_the_capture_limit_is_counted() {
    with_a_box(async |_, work| {
        let result = work
            .run("printf 0123456789")
            .cwd("/")
            .capture_limit(4)
            .await
            .unwrap();
        assert_eq!((&*result.stdout_text(), result.dropped.stdout), ("0123", 6));
    })
    .await;
}
