//! Runs as commands: lost callers, records, logs, and the directory that a run leaves behind.

use box_protocol::actions::ReadWhy;
use box_protocol::{Code, CommandState, ExitWhy};
use box_runtime::Caller;
use box_test_wait::{LONG, eventually};
use box_tests::machine::Machine;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{create, ended, get, kill, list, run, run_params, running, try_run, with_shell};

/// Starts a run with a reader that disconnects once the run has begun.
async fn lose_reader(machine: &Machine, id: &str, text: &str, more: Value) {
    let options = super::with(json!({"command_id": id, "attach": {}}), more);
    let params = run_params("s", text, options);
    let (sender, mut chunks) = mpsc::channel(4);
    let caller = Caller::Local;
    let call = Box::pin(machine.runtime.run_in_shell(&caller, params, Some(sender)));
    tokio::select! {
        ended = call => panic!("{ended:?}"),
        first = chunks.recv() => drop(first.unwrap()),
    }
}

#[tokio::test]
async fn a_caller_that_disconnects_ends_its_run_unless_asked_otherwise() {
    with_shell("bash", async |machine| {
        run(machine, "s", "kept=yes").await;
        lose_reader(machine, "killed", "sleep 600", json!({})).await;
        let info = ended(machine, "killed").await;
        assert_eq!(info.exit.unwrap().why, ExitWhy::Killed);
        let keep = json!({"stdin": "open", "on_disconnect": "keep", "note": {"of": "gateway"}});
        lose_reader(machine, "kept", "read line", keep).await;
        let info = get(machine, "kept").await;
        assert_eq!(info.state, CommandState::Running, "{info:?}");
        assert_eq!(info.note.unwrap().as_json(), r#"{"of":"gateway"}"#);
        let input = json!({"box_id": "c", "command_id": "kept", "data": "b2sK"});
        let input = serde_json::from_value(input).unwrap();
        let fed = machine.runtime.input_command(&Caller::Local, input).await;
        assert_eq!(fed.unwrap().accepted, 3);
        assert_eq!(ended(machine, "kept").await.exit.unwrap().code, Some(0));
        assert_eq!(run(machine, "s", "echo $kept").await.text(), "yes");
    })
    .await;
}

#[tokio::test]
async fn a_run_without_a_reader_ends_after_its_time() {
    with_shell("bash", async |machine| {
        let keep = json!({"on_disconnect": "keep", "detached_ms": 50});
        lose_reader(machine, "alone", "sleep 600", keep).await;
        let info = ended(machine, "alone").await;
        assert_eq!(info.exit.unwrap().why, ExitWhy::Idle);
        // A reader stops the clock.
        let short = json!({"detached_ms": 50});
        let ran = try_run(machine, "s", "sleep 0.3; echo read", short).await;
        assert_eq!(ran.unwrap().text(), "read");
    })
    .await;
}

#[tokio::test]
async fn a_run_has_its_own_record_time_and_log_size() {
    with_shell("bash", async |machine| {
        let short = json!({"command_id": "short", "retain_ms": 1});
        try_run(machine, "s", "true", short).await.unwrap();
        eventually("the record expires", async || {
            let key = serde_json::from_value(json!({"box_id": "c", "command_id": "short"}));
            let found = machine.runtime.get_command(&Caller::Local, key.unwrap());
            found.await.is_err_and(|error| {
                assert_eq!(error.code(), Code::NotFound);
                true
            })
        })
        .await;
        let small = json!({"command_id": "small", "log_bytes": 65536});
        super::begin(machine, "s", "head -c 1000000 /dev/zero", small).await;
        let info = ended(machine, "small").await;
        assert_eq!(info.size.stdout, 1_000_000);
        let large = json!({"command_id": "large", "log_bytes": 4_000_000});
        super::begin(machine, "s", "head -c 3000000 /dev/zero", large).await;
        let info = ended(machine, "large").await;
        assert_eq!((info.size.stdout, info.kept_from.stdout), (3_000_000, 0));
        // A run that outlives its reader must be kept.
        let bytes = json!({"attach": {"until": {"bytes": 1}}});
        let params = run_params("s", "true", bytes);
        let (sender, _chunks) = mpsc::channel(4);
        let caller = Caller::Local;
        let run = machine.runtime.run_in_shell(&caller, params, Some(sender));
        let error = run.await.unwrap_err();
        assert_eq!(error.code(), Code::Validation);
    })
    .await;
}

#[tokio::test]
async fn the_directory_of_a_run_can_stay() {
    for (language, look) in [
        ("bash", "pwd"),
        ("sh", "pwd"),
        ("python", "import os; print(os.getcwd())"),
        ("javascript", "console.log(process.cwd())"),
    ] {
        with_shell(language, async |machine| {
            let there = json!({"cwd": "/usr", "cwd_stays": true});
            let ran = try_run(machine, "s", look, there.clone()).await.unwrap();
            assert_eq!(ran.text(), "/usr", "{language}");
            assert_eq!(run(machine, "s", look).await.text(), "/usr", "{language}");
            assert_eq!(list(machine).await[0].cwd, "/usr", "{language}");
            let missing = json!({"cwd": "/nowhere", "cwd_stays": true});
            let ran = try_run(machine, "s", look, missing).await.unwrap();
            assert_eq!(ran.code(), Some(1), "{language}");
            assert_eq!(run(machine, "s", look).await.text(), "/usr", "{language}");
            // Also in a shell that keeps nothing else.
            let stateless = json!({"language": language, "persist": false});
            create(machine, "n", stateless).await.unwrap();
            try_run(machine, "n", look, there).await.unwrap();
            assert_eq!(run(machine, "n", look).await.text(), "/usr", "{language}");
        })
        .await;
    }
}

#[tokio::test]
async fn a_queued_run_of_a_lost_caller_runs_in_its_turn() {
    with_shell("bash", async |machine| {
        let blocking = json!({"command_id": "blocking", "stdin": "open"});
        super::begin(machine, "s", "read line", blocking).await;
        running(machine, "blocking").await;
        let queued = json!({"command_id": "queued", "on_disconnect": "keep", "attach": {}});
        let params = run_params("s", "echo in turn", queued);
        let (sender, _chunks) = mpsc::channel(4);
        let caller = Caller::Local;
        let call = Box::pin(machine.runtime.run_in_shell(&caller, params, Some(sender)));
        let waiting = eventually("the run waits", async || {
            let key = json!({"box_id": "c", "command_id": "queued"});
            let key = serde_json::from_value(key).unwrap();
            let found = machine.runtime.get_command(&Caller::Local, key).await;
            found.is_ok_and(|info| info.state == CommandState::Pending)
        });
        tokio::select! {
            ended = call => panic!("{ended:?}"),
            () = waiting => {}
        }
        kill(machine, "blocking", json!({})).await;
        let info = ended(machine, "queued").await;
        assert_eq!((info.exit.unwrap().code, info.size.stdout), (Some(0), 8));
    })
    .await;
}

#[tokio::test]
async fn the_limits_of_a_run_count_while_it_waits_for_its_turn() {
    with_shell("bash", async |machine| {
        let blocking = json!({"command_id": "blocking", "stdin": "open"});
        super::begin(machine, "s", "read line", blocking).await;
        running(machine, "blocking").await;
        for (id, until, why) in [
            ("time", json!({"ms": 50}), ReadWhy::Time),
            ("silence", json!({"silence_ms": 50}), ReadWhy::Silence),
        ] {
            let keep = json!({"on_disconnect": "keep", "attach": {"until": until}});
            let queued = super::with(json!({"command_id": id}), keep);
            let params = run_params("s", "echo in turn", queued);
            let (sender, _chunks) = mpsc::channel(4);
            let caller = Caller::Local;
            let call = machine.runtime.run_in_shell(&caller, params, Some(sender));
            let answer = tokio::time::timeout(LONG, Box::pin(call)).await;
            let answer = answer.expect("the reader's limit passes").unwrap();
            assert_eq!(answer.read.unwrap().why, why, "{id}");
            assert_eq!(answer.info.state, CommandState::Pending, "{id}");
        }
        let timed = json!({"timeout_ms": 50});
        let ran = try_run(machine, "s", "touch ran", timed.clone()).await;
        let unread = super::with(json!({"command_id": "unread"}), timed);
        super::begin(machine, "s", "touch ran", unread).await;
        for info in [ran.unwrap().info, ended(machine, "unread").await] {
            assert_eq!(info.exit.unwrap().why, ExitWhy::Timeout, "{info:?}");
            assert!(info.started_at.is_none(), "{info:?}");
        }
        assert_eq!(get(machine, "time").await.state, CommandState::Pending);
        kill(machine, "blocking", json!({})).await;
        for id in ["time", "silence"] {
            let info = ended(machine, id).await;
            assert_eq!((info.exit.unwrap().code, info.size.stdout), (Some(0), 8));
        }
        assert_ne!(run(machine, "s", "test -e ran").await.code(), Some(0));
    })
    .await;
}
