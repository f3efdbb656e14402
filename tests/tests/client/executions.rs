//! Collected runs, as the adapters of other SDKs collect them.

use std::time::Duration;

use box_client::{ClientError, Code, Execution, ExecutionReader, Replaced};
use serde_json::json;

use super::scripted_server::{Reply, ScriptedServer, Then, out, said, started};
use super::support::with_a_box;

#[tokio::test]
async fn a_run_is_collected_piece_by_piece() {
    with_a_box(async |_, work| {
        let run = work
            .command("echo hi; echo oh >&2")
            .cwd("/")
            .id("run-1")
            .execute()
            .await
            .unwrap();
        assert_eq!(run.id.as_deref(), Some("run-1"));
        assert_eq!(
            (run.stdout[0].text.as_str(), run.stderr_text().as_str()),
            ("hi\n", "oh\n")
        );
        assert!(run.stdout[0].at.0 > 0);
        assert!(run.took.is_some());
        assert_eq!((run.exit_code, run.error, run.cut), (Some(0), None, None));
    })
    .await;
}

#[tokio::test]
async fn a_nonzero_code_is_the_exit_code_of_the_run() {
    with_a_box(async |_, work| {
        let run = work.command("exit 7").cwd("/").execute().await.unwrap();
        assert_eq!((run.exit_code, run.success()), (Some(7), false));
        assert!(run.stdout.is_empty());
    })
    .await;
}

#[tokio::test]
async fn an_error_of_the_interpreter_is_the_error_of_the_run() {
    with_a_box(async |_, work| {
        let python = work.shell("py").python().open().await.unwrap();
        let run = python
            .run("print('before')\nraise ValueError('7')")
            .await
            .unwrap();
        let error = run.error.clone().unwrap();
        assert_eq!((&*error.name, &*error.value), ("ValueError", "7"));
        assert!(!error.traceback.is_empty());
        assert_eq!(
            (run.exit_code(), &*run.stdout_text()),
            (Some(1), "before\n")
        );
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn blank_commands_are_refused_before_anything_is_sent() {
    let script = ScriptedServer::new([]);
    let work = script.work().await;
    let shell = work.shell("s").open().await.unwrap();
    for text in ["", "   ", "\n\t"] {
        let refused = [
            work.command(text).execute().await.map(drop).unwrap_err(),
            work.run(text).await.map(drop).unwrap_err(),
            shell.run(text).await.map(drop).unwrap_err(),
        ];
        for error in refused {
            assert_eq!(error.code(), Code::Validation, "{error:?}");
        }
    }
    assert!(script.asked(&["command.start", "shell.run"]).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_failing_server_is_an_error_and_not_a_run() {
    let failed = box_client::BoxError::internal("boom");
    let script = ScriptedServer::new([Reply(vec![], Then::Refuse(failed.clone()))]);
    let error = script
        .work()
        .await
        .command("other")
        .execute()
        .await
        .unwrap_err();
    assert_eq!(error, ClientError::Refused(failed));
}

#[tokio::test(start_paused = true)]
async fn a_run_that_was_cut_has_no_exit_code() {
    let cut = Reply(vec![], Then::Cut);
    let first = Reply(
        vec![started(), out(0, "half"), said("stderr", 0, "x")],
        Then::Cut,
    );
    let script = ScriptedServer::new([first].into_iter().chain(vec![cut; 5]));
    let run = script.work().await.command("x").execute().await.unwrap();
    assert_eq!(
        (run.stdout_text(), run.stderr_text()),
        ("half".to_owned(), "x".to_owned())
    );
    assert_eq!((run.exit_code, run.took), (None, None));
    assert!(
        matches!(run.cut, Some(ClientError::Disconnected { losses: 6, .. })),
        "{run:?}"
    );
}

#[tokio::test]
async fn a_run_in_a_shell_has_its_directory_and_timeout() {
    let script = ScriptedServer::new([Reply(vec![out(0, "/var")], Then::Exit(0))]);
    let shell = script.work().await.shell("sess-1").open().await.unwrap();
    let run = shell
        .run("pwd")
        .cwd("/var")
        .timeout(Duration::from_secs(5))
        .await
        .unwrap();
    assert_eq!(
        (run.stdout_text().as_ref(), run.exit_code()),
        ("/var", Some(0))
    );
    let asked = script.asked(&["shell.run"]).pop().unwrap().params;
    let id = asked["command_id"].clone();
    let expected = json!({"box_id": "b", "shell_id": "sess-1", "command_id": id, "text": "pwd", "cwd": "/var",
        "timeout_ms": 5000, "env": {}, "stdin": "closed"});
    assert_eq!(asked, expected);

    with_a_box(async |_, work| {
        let shell = work.shell("sess-1").open().await.unwrap();
        let run = shell
            .run("pwd")
            .cwd("/var")
            .timeout(Duration::from_mins(2))
            .await
            .unwrap();
        assert_eq!(run.stdout_text(), "/var\n");
        assert!(run.took.is_some());
        let run = shell
            .run("sleep 60")
            .timeout(Duration::from_millis(200))
            .await
            .unwrap();
        assert_eq!((run.exit_code(), run.is_silent()), (None, false));
    })
    .await;
}

#[tokio::test]
async fn a_run_that_ends_its_shell_has_its_code_and_the_next_run_fails() {
    with_a_box(async |_, work| {
        let shell = work.shell("sess-2").open().await.unwrap();
        let run = shell.run("exit 7").await.unwrap();
        assert_eq!((run.exit_code(), run.replaced), (Some(7), None));
        let next = shell.run("echo on").await.unwrap();
        assert_eq!(next.stdout_text(), "on\n");
        assert_eq!(next.replaced, Some(Replaced::InPlace));
        assert_eq!(
            shell.recovered(),
            0,
            "the box replaced the shell, not the handle"
        );
    })
    .await;
}

#[test]
fn events_have_the_same_result_in_every_framing() {
    let events = [
        json!({"type": "init", "text": "exec-1", "timestamp": 1}),
        json!({"type": "stdout", "text": "hi", "timestamp": 2}),
        json!({"type": "error", "error": {"ename": "E", "evalue": "no room", "traceback": null}}),
    ];
    let read = |frame: fn(&serde_json::Value) -> String| -> Execution {
        let mut reader = ExecutionReader::default();
        for event in &events {
            reader.push(frame(event).as_bytes());
            reader.push(b"not-json\n\n");
        }
        reader.finish()
    };
    let bare = read(|event| format!("{event}\n"));
    assert_eq!(bare, read(|event| format!("data: {event}\n\n")));
    assert_eq!(
        bare,
        read(|event| format!("event: x\r\ndata:{event}\r\n\r\n"))
    );
    assert_eq!(bare.id.as_deref(), Some("exec-1"));
    assert_eq!(bare.error.unwrap().traceback, Vec::<String>::new());
    assert_eq!(bare.exit_code, None);
}
