//! Which commands are started, and how often.

use box_protocol::actions::{ReadWhy, StreamName};
use box_protocol::error::{Detail, Subject};
use box_protocol::{Code, CommandState, ExitWhy};
use box_runtime::Caller;
use box_tests::machine::printed;
use serde_json::json;

use super::{attach, kill, read_through, run, start, text, with_box};

#[tokio::test]
async fn a_command_is_streamed_in_the_order_it_writes() {
    with_box(async |machine| {
        let script = "echo one; echo two >&2; sleep 0.05; echo three; exit 3";
        let (got, result) = read_through(machine, text(script, json!({"env": {"A": "b"}}))).await;
        assert_eq!(got.text(), "one\nthree\n");
        assert_eq!(got.stderr, b"two\n");
        assert_eq!(got.order.last(), Some(&StreamName::Stdout));
        let started = got.started.unwrap();
        assert_eq!(
            (started.command_id, started.state),
            (result.info.command_id.clone(), CommandState::Running)
        );
        assert_eq!(started.box_id.as_str(), "c");
        assert!(started.pid.is_some_and(|pid| pid > 1));
        let info = result.info;
        let exit = info.exit.unwrap();
        assert_eq!((exit.code, exit.why), (Some(3), ExitWhy::Exit));
        assert_eq!(
            (info.size.stdout, info.size.stderr, info.env_keys),
            (10, 4, vec!["A".to_owned()])
        );
        let read = result.read.unwrap();
        assert_eq!(
            (read.why, read.next.stdout, read.pos),
            (ReadWhy::Exit, 10, 14)
        );
    })
    .await;
}

#[tokio::test]
async fn arguments_run_directly_and_texts_in_a_shell() {
    with_box(async |machine| {
        let words = start(json!({"argv": ["echo", "$HOME", "a b"]}), json!({}));
        assert_eq!(read_through(machine, words).await.0.text(), "$HOME a b\n");
        let (got, _) = read_through(
            machine,
            text("echo $HOME $0 [[ && [[ -n $BASH ]] && echo bash", json!({})),
        )
        .await;
        assert!(
            got.text().contains("/home/box") && got.text().contains("bash"),
            "{got:?}"
        );
        for (params, field) in [
            (text("true", json!({"cwd": "/nowhere"})), "cwd"),
            (
                start(json!({"argv": ["no-such-program"]}), json!({})),
                "program",
            ),
        ] {
            let error = run(machine, params).await.unwrap_err();
            assert_eq!(error.code(), Code::Validation);
            assert!(error.message().contains(field), "{error:?}");
        }
        let error = run(machine, text("true", json!({"user": "root"})))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Denied);
        let listed = serde_json::from_value(json!({"box_id": "c"})).unwrap();
        let listed = machine
            .runtime
            .list_commands(&Caller::Local, listed)
            .await
            .unwrap();
        assert_eq!(
            listed.items.len(),
            2,
            "a command that never started does not exist"
        );
    })
    .await;
}

#[tokio::test]
async fn a_command_id_starts_only_once() {
    with_box(async |machine| {
        let params = || {
            text(
                "echo begun >> /tmp/begun; sleep 0.2; echo done",
                json!({"command_id": "once"}),
            )
        };
        let all = (0..8).map(|_| run(machine, params()));
        let all = futures::future::join_all(all).await;
        let fresh = all
            .iter()
            .filter(|result| !result.as_ref().unwrap().existed)
            .count();
        assert_eq!(fresh, 1);
        let (got, result) = read_through(machine, params()).await;
        assert!(result.existed);
        assert_eq!(got.text(), "done\n");
        assert_eq!(printed(&machine.exec("c", "cat /tmp/begun").await), "begun");
        let mut again = params();
        again.replace = true;
        assert!(!run(machine, again).await.unwrap().existed);
        attach(machine, "once", json!({"view": "none"}))
            .await
            .unwrap();
        assert_eq!(
            printed(&machine.exec("c", "cat /tmp/begun").await),
            "begun\nbegun"
        );
    })
    .await;
}

#[tokio::test]
async fn a_held_command_starts_with_its_first_reader() {
    with_box(async |machine| {
        let held = json!({"command_id": "h", "hold": true});
        let result = run(machine, text("echo begun | tee /tmp/held", held))
            .await
            .unwrap();
        assert_eq!(result.info.state, CommandState::Held);
        assert_eq!(machine.exec("c", "cat /tmp/held").await.exit_code, Some(1));
        let (got, info, _) = attach(machine, "h", json!({})).await.unwrap();
        assert_eq!((got.text(), info.state), ("begun\n", CommandState::Exited));
        run(
            machine,
            text("true", json!({"command_id": "never", "hold": true})),
        )
        .await
        .unwrap();
        let (info, _) = kill(machine, "never", json!({})).await.unwrap();
        assert_eq!(
            (info.state, info.exit.unwrap().why),
            (CommandState::Exited, ExitWhy::Killed)
        );
    })
    .await;
}

#[tokio::test]
async fn concurrent_replacements_of_a_command_each_get_their_own() {
    with_box(async |machine| {
        let params = |number: usize| {
            let more = json!({"command_id": "place", "replace": true, "on_disconnect": "keep"});
            text(&format!("echo {number}; sleep 600"), more)
        };
        run(machine, params(0)).await.unwrap();
        let all = (1..=8).map(|number| run(machine, params(number)));
        for result in futures::future::join_all(all).await {
            assert!(!result.unwrap().existed);
        }
        let left = machine.exec("c", "pgrep -c -f 'sleep 60[0]'").await;
        assert_eq!(printed(&left), "1");
    })
    .await;
}

#[tokio::test]
async fn a_list_of_long_commands_is_whole() {
    with_box(async |machine| {
        let long = "x".repeat(100_000);
        for number in 0..80 {
            let more = json!({"command_id": format!("l{number}"), "retain_ms": -1});
            let params = start(json!({"argv": ["true", long]}), more);
            run(machine, params).await.unwrap();
        }
        let list = async || {
            let params = serde_json::from_value(json!({"box_id": "c"})).unwrap();
            machine.runtime.list_commands(&Caller::Local, params).await
        };
        let listed = list().await.unwrap().items;
        let ids: Vec<_> = listed
            .iter()
            .map(|info| info.command_id.as_str().to_owned())
            .collect();
        let all: Vec<_> = (0..80).map(|number| format!("l{number}")).collect();
        assert_eq!(ids.len(), 80);
        assert!(all.iter().all(|id| ids.contains(id)));
        for number in 80..130 {
            let more = json!({"command_id": format!("l{number}"), "retain_ms": -1});
            run(machine, start(json!({"argv": ["true", long]}), more))
                .await
                .unwrap();
        }
        assert_eq!(
            list().await.unwrap_err().code(),
            box_protocol::Code::TooLarge
        );
        let running = json!({"box_id": "c", "running": true});
        let running = serde_json::from_value(running).unwrap();
        let listed = machine.runtime.list_commands(&Caller::Local, running).await;
        assert_eq!(listed.unwrap().items, []);
    })
    .await;
}

#[tokio::test]
async fn commands_are_listed_by_their_process_id() {
    with_box(async |machine| {
        let mut pids = Vec::new();
        for id in ["one", "two"] {
            let more = json!({"command_id": id, "stdin": "open"});
            let started = run(machine, text("read line", more)).await.unwrap();
            pids.push(started.info.pid.unwrap());
        }
        for (id, pid) in ["one", "two"].into_iter().zip(&pids) {
            let params = json!({"box_id": "c", "pid": pid, "running": true});
            let params = serde_json::from_value(params).unwrap();
            let listed = machine.runtime.list_commands(&Caller::Local, params).await;
            let found = listed.unwrap().items;
            let ids: Vec<_> = found.iter().map(|info| info.command_id.as_str()).collect();
            assert_eq!(ids, [id]);
        }
        let key = json!({"box_id": "c", "command_id": "none"});
        let key = serde_json::from_value(key).unwrap();
        let error = machine.runtime.get_command(&Caller::Local, key).await;
        let detail: Detail = error.unwrap_err().detail().unwrap();
        assert_eq!(detail.subject, Some(Subject::Command));
    })
    .await;
}
