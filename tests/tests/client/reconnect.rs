//! When the client resumes a command, when it does not, and what it reports. Time is paused.

use std::sync::atomic::Ordering;
use std::time::Duration;

use box_client::{BoxError, Chunk, ClientError, Code, Exit, ExitWhy, Offsets, ReadWhy, StreamName};
use box_protocol::actions::{CommandChunk, Displayed};
use futures::StreamExt as _;
use serde_json::json;

use super::scripted_server::{Reply, ScriptedServer, Then, out, said, started};

const READS: &[&str] = &["command.start", "command.attach"];

/// The time of each call in milliseconds since the script began.
fn times(script: &ScriptedServer) -> Vec<u128> {
    let asked = script.asked(READS);
    asked.iter().map(|call| call.at.as_millis()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_lost_command_is_resumed_from_its_offsets() {
    let script = ScriptedServer::new([
        Reply(
            vec![started(), out(0, "aé"), said("stderr", 0, "x"), out(3, "b")],
            Then::Cut,
        ),
        Reply(vec![out(4, "c"), said("stderr", 1, "y")], Then::Exit(3)),
    ]);
    let mut command = script.work().await.command("x").start().await.unwrap();
    assert_eq!(command.pid(), Some(7));
    let mut collected = Vec::new();
    while let Some(chunk) = command.next().await {
        let chunk = chunk.unwrap();
        collected.push((chunk.stream().unwrap(), chunk.text().into_owned()));
    }
    let (out, err) = (StreamName::Stdout, StreamName::Stderr);
    let expected = [(out, "aé"), (err, "x"), (out, "b"), (out, "c"), (err, "y")];
    assert_eq!(
        collected,
        expected.map(|(stream, text)| (stream, text.to_owned()))
    );
    let asked = script.asked(&["command.attach"]);
    assert_eq!(asked.len(), 1);
    let from = json!({"offsets": {"stdout": 4, "stderr": 1}});
    assert_eq!(asked[0].params["from"], from);
    assert_eq!(asked[0].params["command_id"], command.id().as_str());
    assert_eq!(
        command.offsets(),
        Offsets {
            stdout: 5,
            stderr: 2
        }
    );
    let result = command.result().await.unwrap();
    assert_eq!(
        (result.exit, result.success()),
        (Some(Exit::returned(3)), false)
    );
    assert_eq!(
        (&*result.stdout_text(), &*result.stderr_text()),
        ("aébc", "xy")
    );
    assert_eq!(
        command.result().await.unwrap(),
        result,
        "a second call returns the same"
    );
}

#[tokio::test(start_paused = true)]
async fn the_displays_of_a_run_are_delivered_once() {
    let show = |text: &str| {
        let data = [("text/plain".into(), text.into())].into();
        CommandChunk::Display(Displayed { data, main: false })
    };
    let script = ScriptedServer::new([
        Reply(vec![started(), out(0, "a"), show("1")], Then::Cut),
        Reply(vec![show("1"), show("2")], Then::Exit(0)),
    ]);
    let mut command = script.work().await.command("x").start().await.unwrap();
    let mut shown = Vec::new();
    while let Some(chunk) = command.next().await {
        if let Chunk::Display(one) = chunk.unwrap() {
            shown.push(one.data["text/plain"].clone());
        }
    }
    assert_eq!(shown, ["1", "2"]);
}

#[tokio::test(start_paused = true)]
async fn the_pauses_grow_and_the_sixth_loss_is_unavailable() {
    let cut = Reply(vec![], Then::Cut);
    let first = Reply(vec![started(), out(0, "a")], Then::Cut);
    let script = ScriptedServer::new([first].into_iter().chain(vec![cut; 5]));
    let mut command = script.work().await.command("x").start().await.unwrap();
    let error = command.result().await.unwrap_err();
    assert!(
        matches!(error, ClientError::Disconnected { losses: 6, .. }),
        "{error:?}"
    );
    assert_eq!(error.code(), Code::Unavailable);
    // Each connection lives for one millisecond.
    assert_eq!(times(&script), [0, 501, 1502, 3503, 7504, 15505]);
    assert!(command.next().await.is_none(), "an error is the last item");
    assert_eq!(
        command.exit().await,
        Err(error),
        "and later calls return the same"
    );

    // The handle has lost nothing: another handle resumes from its offsets, with as many attempts.
    script.add(Reply(vec![], Then::Cut));
    script.add(Reply(vec![out(1, "b")], Then::Exit(0)));
    let mut again = command.reconnect().await.unwrap();
    assert_eq!(again.id(), command.id());
    assert_eq!(again.result().await.unwrap().stdout_text(), "b");
    let last = script.asked(READS).pop().unwrap();
    assert_eq!(last.params["from"]["offsets"]["stdout"], 1);
}

#[tokio::test(start_paused = true)]
async fn a_failed_connection_attempt_counts_as_a_loss() {
    let script = ScriptedServer::new([Reply(vec![started()], Then::Cut)]);
    let mut command = script.work().await.command("x").start().await.unwrap();
    script.down.store(true, Ordering::SeqCst);
    let begun = tokio::time::Instant::now();
    let error = command.exit().await.unwrap_err();
    assert!(
        matches!(error, ClientError::Disconnected { losses: 6, .. }),
        "{error:?}"
    );
    assert_eq!(begun.elapsed().as_millis(), 15501);
    assert_eq!(
        script.connects.load(Ordering::SeqCst),
        6,
        "one attempt each, no other pauses"
    );
}

#[tokio::test(start_paused = true)]
async fn output_resets_the_count_of_losses() {
    let mut replies = vec![Reply(vec![started()], Then::Cut)];
    for n in 0..20 {
        replies.push(Reply(vec![], Then::Cut));
        replies.push(Reply(vec![out(n, ".")], Then::Cut));
    }
    replies.push(Reply(vec![], Then::Exit(0)));
    let script = ScriptedServer::new(replies);
    let mut command = script.work().await.command("x").start().await.unwrap();
    let result = command.result().await.unwrap();
    assert_eq!(result.stdout_text(), ".".repeat(20));
}

#[tokio::test(start_paused = true)]
async fn a_client_reconnects_to_a_restarting_server_at_once() {
    let restart = |offset| Reply(vec![out(offset, ".")], Then::Restart);
    let script = ScriptedServer::new([
        Reply(vec![started()], Then::Restart),
        restart(0),
        Reply(vec![], Then::Restart),
        Reply(vec![out(1, ".")], Then::Exit(0)),
    ]);
    let mut command = script.work().await.command("x").start().await.unwrap();
    assert_eq!(command.result().await.unwrap().stdout_text(), "..");
    // The only elapsed time is the time that the server takes to close.
    assert!(
        times(&script).last().unwrap() < &400,
        "{:?}",
        times(&script)
    );
    assert_eq!(script.asked(READS).len(), 4);
}

#[tokio::test(start_paused = true)]
async fn no_command_is_resumed_after_a_kill() {
    let script = ScriptedServer::new([Reply(vec![started(), out(0, "a")], Then::Hang)]);
    let mut command = script.work().await.command("x").start().await.unwrap();
    command.next().await.unwrap().unwrap();
    script.cut_on_kill.store(true, Ordering::SeqCst);
    let error = command.kill().await.unwrap_err();
    assert_eq!(
        error.code(),
        Code::Unavailable,
        "the kill was lost: {error:?}"
    );
    let error = command.exit().await.unwrap_err();
    assert!(matches!(error, ClientError::Failed(_)), "{error:?}");
    assert_eq!(script.asked(READS).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_kill_returns_the_exit_status() {
    for exit in [None, Some(Exit::by_signal(9, ExitWhy::Killed))] {
        let script = ScriptedServer::new([Reply(vec![started()], Then::Hang)]);
        let mut command = script.work().await.command("x").start().await.unwrap();
        *script.kill_exit.lock().unwrap() = exit;
        command.kill().await.unwrap();
        script.cut();
        assert_eq!(command.exit().await, exit.ok_or(ClientError::Killed));
        assert_eq!(script.asked(READS).len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_kill_ends_the_wait_for_the_next_attempt() {
    let script = ScriptedServer::new([Reply(vec![started()], Then::Cut)]);
    let mut command = script.work().await.command("x").start().await.unwrap();
    let control = command.control();
    script.down.store(true, Ordering::SeqCst);
    let reading = tokio::spawn(async move { command.exit().await });
    // In the middle of the pause of four seconds.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let begun = tokio::time::Instant::now();
    assert!(control.kill().await.is_err());
    assert!(reading.await.unwrap().is_err());
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_command_killed_between_two_attempts_is_not_resumed() {
    let exit = Exit::by_signal(9, ExitWhy::Killed);
    for exit in [None, Some(exit)] {
        let script = ScriptedServer::new([Reply(vec![started()], Then::Cut)]);
        let mut command = script.work().await.command("x").start().await.unwrap();
        *script.kill_exit.lock().unwrap() = exit;
        let control = command.control();
        let reading = tokio::spawn(async move { command.exit().await });
        tokio::time::sleep(Duration::from_millis(200)).await;
        control.kill().await.unwrap();
        assert_eq!(reading.await.unwrap(), exit.ok_or(ClientError::Killed));
        assert_eq!(script.asked(READS).len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_command_that_is_not_found_is_not_retried() {
    let gone = BoxError::not_found("no such command");
    let script = ScriptedServer::new([
        Reply(vec![started()], Then::Cut),
        Reply(vec![], Then::Refuse(gone)),
    ]);
    let mut command = script.work().await.command("x").start().await.unwrap();
    let error = command.result().await.unwrap_err();
    assert!(error.is_not_found(), "{error:?}");
    assert_eq!(times(&script), [0, 501]);
}

#[tokio::test(start_paused = true)]
async fn an_error_of_a_lost_hop_is_a_lost_connection() {
    for error in [
        BoxError::unavailable("no way on"),
        BoxError::cancelled("ending"),
    ] {
        let script = ScriptedServer::new([
            Reply(vec![started(), out(0, "a")], Then::Refuse(error)),
            Reply(vec![out(1, "b")], Then::Exit(0)),
        ]);
        let mut command = script.work().await.command("x").start().await.unwrap();
        assert_eq!(command.result().await.unwrap().stdout_text(), "ab");
    }
}

#[tokio::test(start_paused = true)]
async fn a_loss_before_the_start_is_known_starts_once() {
    let script = ScriptedServer::new([
        Reply(vec![], Then::Cut),
        Reply(vec![], Then::Cut),
        Reply(vec![started(), out(0, "a")], Then::Exit(0)),
    ]);
    let mut command = script.work().await.command("x").start().await.unwrap();
    assert_eq!(command.result().await.unwrap().stdout_text(), "a");
    let asked = script.asked(READS);
    assert_eq!(asked.len(), 3);
    for call in &asked {
        assert_eq!(call.action, "command.start");
        assert_eq!(call.params["command_id"], command.id().as_str());
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_start_fails_at_once() {
    for error in [
        BoxError::unavailable("no backend"),
        BoxError::validation("cwd: no such directory"),
        BoxError::not_found("no such box"),
    ] {
        let script = ScriptedServer::new([Reply(vec![], Then::Refuse(error.clone()))]);
        let refused = script.work().await.command("x").start().await.unwrap_err();
        assert_eq!(refused, ClientError::Refused(error));
        assert_eq!(times(&script), [0]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_ends_without_an_exit_is_an_error() {
    for why in [
        ReadWhy::Exit,
        ReadWhy::Taken,
        ReadWhy::Silence,
        ReadWhy::Bytes,
    ] {
        let script = ScriptedServer::new([Reply(vec![started(), out(0, "a")], Then::Stop(why))]);
        let mut command = script.work().await.command("x").start().await.unwrap();
        let error = command.result().await.unwrap_err();
        assert_eq!(error, ClientError::NoExit(Some(why)));
        assert_eq!(command.result().await.unwrap_err(), error);
        assert_eq!(script.asked(READS).len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_chunk_must_be_the_start() {
    for reply in [
        Reply(vec![out(0, "a")], Then::Hang),
        Reply(vec![], Then::Exit(0)),
    ] {
        let script = ScriptedServer::new([reply]);
        let error = script.work().await.command("x").start().await.unwrap_err();
        assert_eq!(error.code(), Code::Internal);
        assert!(error.to_string().contains("started"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_output_is_reported_with_its_size() {
    let gap: CommandChunk =
        serde_json::from_value(json!({"gap": {"stream": "stdout", "offset": 1, "bytes": 100}}))
            .unwrap();
    let script = ScriptedServer::new([
        Reply(vec![started(), out(0, "a"), gap], Then::Cut),
        Reply(vec![out(101, "b")], Then::Exit(0)),
    ]);
    let mut command = script.work().await.command("x").start().await.unwrap();
    command.next().await.unwrap().unwrap();
    let gap = Chunk::Gap {
        stream: StreamName::Stdout,
        offset: 1,
        bytes: 100,
    };
    assert_eq!(command.next().await, Some(Ok(gap)));
    assert_eq!(command.offsets().stdout, 101);
    let result = command.result().await.unwrap();
    assert_eq!((&*result.stdout_text(), result.dropped.stdout), ("ab", 100));
}

#[tokio::test(start_paused = true)]
async fn no_input_is_sent_to_an_ended_command() {
    let script = ScriptedServer::new([Reply(vec![started()], Then::Exit(0))]);
    let mut command = script.work().await.command("x").start().await.unwrap();
    command.send_input("before").await.unwrap();
    command.exit().await.unwrap();
    command.kill().await.unwrap();
    command.signal("TERM").await.unwrap();
    command.send_input("after").await.unwrap();
    command.close_input().await.unwrap();
    command.resize(80, 24).await.unwrap();
    let sent = script.asked(&["command.input", "command.kill"]);
    assert_eq!(sent.len(), 1, "{sent:?}");
}

#[tokio::test(start_paused = true)]
async fn a_call_does_not_wait_for_a_connection_without_reconnection() {
    let script = ScriptedServer::new([Reply(vec![started()], Then::Cut)]);
    let peer = script.work().await;
    drop(peer);
    let client = script.client();
    while client.peer().is_err() {
        tokio::task::yield_now().await;
    }
    let one = box_client::BoxClient::from_peer(client.peer().unwrap());
    let work = one.open("b").await.unwrap();
    let mut command = work.command("x").start().await.unwrap();
    let begun = tokio::time::Instant::now();
    let error = command.exit().await.unwrap_err();
    assert!(
        matches!(error, ClientError::Disconnected { losses: 1, .. }),
        "{error:?}"
    );
    assert!(begun.elapsed() < Duration::from_millis(100));
}
