//! Shells: one operation at a time, replaced once when they are lost, closed without an error.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use box_client::{BoxError, ClientError, Code, Replaced, ShellHandle};
use box_protocol::error::{Detail, Subject};
use serde_json::json;

use super::scripted_server::{Reply, ScriptedServer, Then, out};
use super::support::with_a_box;

const SHELLS: &[&str] = &["shell.create", "shell.run", "shell.delete"];

/// A scripted shell. Each run prints `ok`.
async fn scripted(runs: usize) -> (Arc<ScriptedServer>, ShellHandle) {
    let script = ScriptedServer::new(vec![Reply(vec![out(0, "ok")], Then::Exit(0)); runs]);
    let work = script.work().await;
    let shell = work
        .shell("s")
        .download_root("/mnt/data")
        .open()
        .await
        .unwrap();
    (script, shell)
}

fn no_such_shell() -> BoxError {
    BoxError::not_found("no such shell").with_detail(&Detail::about(Subject::Shell))
}

fn broken() -> BoxError {
    BoxError::unavailable("the shell is broken").with_detail(&Detail::about(Subject::Shell))
}

#[tokio::test(start_paused = true)]
async fn runs_of_one_handle_never_overlap() {
    let (script, shell) = scripted(3).await;
    let run = |n| {
        let shell = shell.clone();
        tokio::spawn(async move { shell.run(format!("cmd-{n}")).await.unwrap() })
    };
    for done in [run(0), run(1), run(2)] {
        assert_eq!(done.await.unwrap().stdout_text(), "ok");
    }
    assert_eq!(script.most.load(Ordering::SeqCst), 1);
    let texts: Vec<_> = script
        .asked(&["shell.run"])
        .iter()
        .map(|run| run.params["text"].clone())
        .collect();
    assert_eq!(texts, ["cmd-0", "cmd-1", "cmd-2"]);
}

#[tokio::test(start_paused = true)]
async fn operations_of_a_handle_run_one_after_the_other() {
    let (script, shell) = scripted(1).await;
    let outcome = tokio::join!(
        async { shell.run("x").await.map(drop) },
        async { shell.list("/a").await.map(drop) },
        shell.write("/a", "x"),
        shell.append("/a", "y"),
        async { shell.download("/mnt/data/a").await.map(drop) },
    );
    assert_eq!(outcome, (Ok(()), Ok(()), Ok(()), Ok(()), Ok(())));
    assert_eq!(script.most.load(Ordering::SeqCst), 1, "two ran at once");
}

#[tokio::test(start_paused = true)]
async fn a_lost_shell_is_replaced_for_the_run_created_first_and_released_after() {
    for lost in [no_such_shell(), broken()] {
        let (script, shell) = scripted(2).await;
        script.refuse("shell.run", lost);
        let run = shell.run("test").await.unwrap();
        assert_eq!(run.stdout_text(), "ok");
        let Some(Replaced::For(fresh)) = run.replaced else {
            panic!("the caller sees no error: {run:?}")
        };
        let asked = script.asked(SHELLS);
        let collected: Vec<_> = asked
            .iter()
            .map(|call| (call.action, call.params["shell_id"].as_str().unwrap()))
            .collect();
        let expected = [
            ("shell.create", "s"),
            ("shell.run", "s"),
            ("shell.create", fresh.as_str()),
            ("shell.run", fresh.as_str()),
            ("shell.delete", fresh.as_str()),
        ];
        assert_eq!(collected, expected);
        assert_ne!(fresh.as_str(), "s");
        assert_eq!(asked[1].params["command_id"], asked[3].params["command_id"]);
        assert_eq!(shell.recovered(), 1);
        // The next run uses the shell itself again.
        let next = shell.run("next").await.unwrap();
        assert_eq!(
            (
                next.replaced,
                script.asked(&["shell.run"])[2].params["shell_id"].as_str()
            ),
            (None, Some("s"))
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_shell_is_replaced_only_once() {
    let (script, shell) = scripted(0).await;
    script.refuse("shell.run", no_such_shell());
    script.refuse("shell.run", no_such_shell());
    let error = shell.run("test").await.unwrap_err();
    assert!(error.is_not_found(), "{error:?}");
    assert_eq!(script.asked(&["shell.run"]).len(), 2);
    assert_eq!(
        script.asked(&["shell.delete"]).len(),
        1,
        "it is released all the same"
    );
    assert_eq!(shell.recovered(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_does_not_hide_the_result_of_a_run() {
    let (script, shell) = scripted(1).await;
    script.refuse("shell.run", broken());
    script.refuse("shell.delete", BoxError::internal("boom"));
    let run = shell.run("test").await.unwrap();
    assert_eq!(run.stdout_text(), "ok");
    assert!(matches!(run.replaced, Some(Replaced::For(_))));
    assert_eq!(script.asked(&["shell.delete"]).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_run_is_repeated_only_if_its_shell_is_lost() {
    let (script, shell) = scripted(1).await;
    let run = shell.run("echo hello").await.unwrap();
    assert_eq!((run.replaced, shell.recovered()), (None, 0));
    assert_eq!(script.asked(&["shell.run"]).len(), 1);
    // The error is for the box, not for the shell.
    script.refuse("shell.run", BoxError::not_found("no such box"));
    assert!(shell.run("echo hello").await.unwrap_err().is_not_found());
    assert_eq!(script.asked(&["shell.create"]).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn every_operation_sends_the_silence_limit() {
    let (script, shell) = scripted(2).await;
    script.refuse("shell.run", broken());
    shell.run("replaced").await.unwrap();
    shell.run("plain").await.unwrap();
    let reads = script.asked(&["command.attach"]);
    assert_eq!(reads.len(), 2);
    for read in reads {
        assert_eq!(read.params["until"]["silence_ms"], json!(600_000));
    }
    shell.list("/test").await.unwrap();
    shell.write("/a", "x").await.unwrap();
    shell.append("/a", "x").await.unwrap();
    let others = script.asked(&["file.list", "file.write"]);
    assert_eq!(others.len(), 3);
    for call in others {
        let within = call.within.unwrap();
        assert!(
            within > Duration::from_secs(599) && within <= Duration::from_mins(10),
            "{call:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_run_continues_without_its_caller() {
    let stop = Then::Stop(box_client::ReadWhy::Silence);
    let script = ScriptedServer::new([Reply(vec![out(0, "a")], stop)]);
    let shell = script.work().await.shell("s").open().await.unwrap();
    let run = shell.run("sleep 9999").await.unwrap();
    assert!(run.is_silent());
    assert_eq!((run.stdout_text().as_ref(), run.exit_code()), ("a", None));
    assert!(script.asked(&["command.kill", "shell.delete"]).is_empty());
}

#[tokio::test(start_paused = true)]
async fn concurrent_appends_lose_nothing() {
    let (_script, shell) = scripted(0).await;
    let (one, two) = tokio::join!(
        shell.append("/mnt/data/log", "A\n"),
        shell.append("/mnt/data/log", "B\n")
    );
    one.unwrap();
    two.unwrap();
    let all = shell.download("/mnt/data/log").await.unwrap();
    assert_eq!(&all[..], b"seed\nA\nB\n");
}

#[tokio::test(start_paused = true)]
async fn the_chunks_of_a_download_are_joined() {
    let (script, shell) = scripted(0).await;
    assert_eq!(
        &shell.download("/mnt/data/file").await.unwrap()[..],
        b"seed\n",
        "two chunks"
    );
    shell.write("/mnt/data/file", "one").await.unwrap();
    assert_eq!(
        &shell.download("/mnt/data/file").await.unwrap()[..],
        b"one",
        "a single one"
    );
    assert!(
        shell.download("/mnt/data/empty").await.unwrap().is_empty(),
        "none"
    );
    let asked = script.asked(&["file.read"]);
    assert_eq!(asked[0].params["path"], "/mnt/data/file");
}

#[tokio::test(start_paused = true)]
async fn a_failed_download_keeps_its_code_and_converts_to_an_io_error() {
    let (script, shell) = scripted(0).await;
    for (error, kind) in [
        (
            BoxError::unavailable("network error"),
            std::io::ErrorKind::ConnectionAborted,
        ),
        (
            BoxError::not_found("no such file"),
            std::io::ErrorKind::NotFound,
        ),
    ] {
        script.refuse("file.read", error.clone());
        let failed = shell.download("/mnt/data/file").await.unwrap_err();
        assert_eq!(
            failed,
            ClientError::Refused(error.clone()),
            "with the original error"
        );
        let io = std::io::Error::from(failed);
        assert_eq!(io.kind(), kind);
        assert!(io.to_string().contains(error.message()), "{io}");
    }
}

#[tokio::test(start_paused = true)]
async fn downloads_from_elsewhere_are_refused_before_anything_is_sent() {
    let (script, shell) = scripted(0).await;
    for path in [
        "/etc/passwd",
        "/mnt/data/../../etc/passwd",
        "../secret",
        "/a/b/../../../etc/shadow",
        "/mnt/database",
        "relative",
    ] {
        let error = shell.download(path).await.unwrap_err();
        assert_eq!(error.code(), Code::Denied, "{path}");
        assert_eq!(error.detail().field.as_deref(), Some("path"));
        let outside = error.to_string().contains("must be under /mnt/data");
        assert!(outside || path.contains(".."), "{error}");
    }
    assert!(script.asked(&["file.read"]).is_empty());
}

#[tokio::test(start_paused = true)]
async fn close_ends_the_shell_once_and_the_handle_forever() {
    let (script, shell) = scripted(0).await;
    for _ in 0..3 {
        shell.clone().close().await;
    }
    let ended = script.asked(&["shell.delete"]);
    assert_eq!(
        (ended.len(), ended[0].params["shell_id"].as_str()),
        (1, Some("s"))
    );
    let asked = [
        shell.run("x").await.map(drop),
        shell.list("/").await.map(drop),
        shell.write("/a", "x").await,
        shell.download("/mnt/data/a").await.map(drop),
    ];
    for outcome in asked {
        assert_eq!(outcome.unwrap_err().code(), Code::Conflict);
    }
    assert!(
        script
            .asked(&["shell.run", "file.list", "file.write", "file.read"])
            .is_empty()
    );
}

#[tokio::test(start_paused = true)]
async fn close_never_fails() {
    let (script, shell) = scripted(0).await;
    script.refuse("shell.delete", BoxError::internal("teardown boom"));
    shell.close().await;
    assert_eq!(script.asked(&["shell.delete"]).len(), 1);
    // Closing does not fail without a connection either.
    let (script, shell) = scripted(0).await;
    script.down.store(true, Ordering::SeqCst);
    script.cut();
    shell.close().await;
    shell.close().await;
    assert!(script.asked(&["shell.delete"]).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_run_whose_connection_is_lost_is_resumed_and_not_run_again() {
    let script = ScriptedServer::new([
        Reply(vec![out(0, "a")], Then::Cut),
        Reply(vec![out(1, "b")], Then::Exit(0)),
    ]);
    let shell = script.work().await.shell("s").open().await.unwrap();
    let run = shell.run("x").await.unwrap();
    assert_eq!(
        (run.stdout_text().as_ref(), run.exit_code()),
        ("ab", Some(0))
    );
    assert_eq!(script.asked(&["shell.run"]).len(), 1);
    assert_eq!(script.asked(&["command.attach"]).len(), 2);
}

#[tokio::test]
async fn a_real_shell_keeps_its_state_across_a_cut_connection() {
    with_a_box(async |served, work| {
        let shell = work
            .shell("s")
            .cwd("/tmp")
            .env("KEPT", "1")
            .open()
            .await
            .unwrap();
        shell.run("cd /usr; x=41").await.unwrap();
        let slow = shell.run("for i in 1 2 3 4 5 6; do echo $i; sleep 0.05; done; echo $((x + 1))");
        let cut = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            served.server.cut();
        };
        let (run, ()) = tokio::join!(async { slow.await }, cut);
        let run = run.unwrap();
        assert_eq!(run.stdout_text(), "1\n2\n3\n4\n5\n6\n42\n");
        let run = shell.run("pwd; echo $KEPT $x").await.unwrap();
        assert_eq!(
            (&*run.stdout_text(), run.replaced.clone()),
            ("/usr\n1 41\n", None)
        );
        assert_eq!(shell.info().await.unwrap().cwd, "/usr");
    })
    .await;
}

#[tokio::test]
async fn a_real_shell_that_is_gone_is_replaced_for_the_run() {
    with_a_box(async |_, work| {
        let shell = work.shell("s").env("KEPT", "1").open().await.unwrap();
        shell.run("x=1").await.unwrap();
        // Another client ends it.
        work.shell("s").open().await.unwrap().close().await;
        let run = shell.run("echo [$KEPT] [$x]").await.unwrap();
        assert_eq!(run.stdout_text(), "[1] []\n");
        assert!(matches!(run.replaced, Some(Replaced::For(_))), "{run:?}");
        assert!(shell.info().await.unwrap_err().is_not_found());
        shell.close().await;
    })
    .await;
}

#[tokio::test]
async fn real_files_are_written_listed_and_downloaded_through_a_shell() {
    with_a_box(async |_, work| {
        let shell = work
            .shell("s")
            .silence_limit(Duration::from_mins(2))
            .open()
            .await
            .unwrap();
        let appends = (0..8).map(|n| {
            let shell = shell.clone();
            tokio::spawn(async move { shell.append("/workspace/log", format!("{n}\n")).await })
        });
        for append in appends.collect::<Vec<_>>() {
            append.await.unwrap().unwrap();
        }
        let log = shell.download("/workspace/log").await.unwrap();
        assert_eq!(&log[..], b"0\n1\n2\n3\n4\n5\n6\n7\n");
        shell
            .write("/workspace/dir/file", vec![0_u8; 3_000_000])
            .await
            .unwrap();
        assert_eq!(
            shell.download("/workspace/dir/file").await.unwrap().len(),
            3_000_000
        );
        shell.write("/workspace/empty", "").await.unwrap();
        assert!(shell.download("/workspace/empty").await.unwrap().is_empty());
        let listed = shell.list("/workspace").await.unwrap();
        let paths: Vec<_> = listed.iter().map(|entry| entry.path.as_str()).collect();
        assert_eq!(
            paths,
            ["/workspace/dir", "/workspace/empty", "/workspace/log"]
        );
        assert!(
            shell
                .download("/workspace/none")
                .await
                .unwrap_err()
                .is_not_found()
        );
        // A run that is silent for longer than the limit continues, and the client does not wait
        // for it.
        let shell = work.shell("s").silence_limit(Duration::from_secs(1));
        let shell = shell.open().await.unwrap();
        let run = shell
            .run("echo a; sleep 3; echo b > /workspace/late")
            .await
            .unwrap();
        assert!(run.is_silent(), "{run:?}");
        assert_eq!(run.exit_code(), None);
        let id = run.id.unwrap();
        let mut on = work
            .attach(id, box_client::Offsets::default())
            .await
            .unwrap();
        assert!(on.result().await.unwrap().success(), "it continued");
    })
    .await;
}
