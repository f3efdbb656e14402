//! The state of a shell, how long it lasts, and which callers share it.

use std::time::{Duration, Instant};

use box_protocol::actions::ShellState;
use box_protocol::{Code, CommandState, ExitWhy, Role};
use box_test_wait::eventually;
use box_tests::machine::{gone, mark, printed, processes_with};
use serde_json::json;

use super::{begin, create, delete, ended, get, list, run, try_run, with_each_shell, with_shell};

#[tokio::test]
async fn a_shell_keeps_its_state_between_runs() {
    with_each_shell(async |machine, language| {
        let first = "mkdir -p /tmp/d; cd /tmp/d; plain=p; export EXP=e; f() { echo \"f $1\"; }; sleep 60 & job=$!";
        let ran = run(machine, "s", first).await;
        assert_eq!((ran.code(), ran.text()), (Some(0), ""));
        assert_eq!(ran.info.role, Role::Run);
        assert_eq!(ran.info.shell_id.as_ref().unwrap().as_str(), "s");
        assert_eq!((&*ran.info.cwd, ran.info.shell_replaced), ("/tmp", false));
        let second = "pwd; echo $plain; sh -c 'echo $EXP'; f x; kill -0 $job && echo alive; echo err >&2; (exit 7)";
        let ran = run(machine, "s", second).await;
        assert_eq!(ran.text(), "/tmp/d\np\ne\nf x\nalive", "{language}");
        assert_eq!((&*ran.stderr, ran.code()), (&b"err\n"[..], Some(7)));
        assert_eq!(ran.info.cwd, "/tmp/d");
        let info = list(machine).await.remove(0);
        assert_eq!((&*info.cwd, info.state), ("/tmp/d", ShellState::Idle));
        assert_eq!(info.last, Some(ran.info.command_id));
    })
    .await;
}

#[tokio::test]
async fn fifty_runs_in_a_row_keep_the_state() {
    with_each_shell(async |machine, _| {
        run(machine, "s", "n=0").await;
        for n in 1..=50 {
            let ran = run(machine, "s", "n=$((n + 1)); echo $n").await;
            assert_eq!(ran.text(), n.to_string());
        }
    })
    .await;
}

#[tokio::test]
async fn runs_are_serialised_and_shells_are_not() {
    with_shell("bash", async |machine| {
        let text = "read x </tmp/count; sleep 0.03; echo $((x + 1)) >/tmp/count";
        run(machine, "s", "echo 0 >/tmp/count").await;
        let all = (0..8).map(|_| run(machine, "s", text));
        futures::future::join_all(all).await;
        assert_eq!(run(machine, "s", "cat /tmp/count").await.text(), "8");

        begin(
            machine,
            "s",
            "until [ -e /tmp/go ]; do sleep 0.01; done; echo first",
            json!({"command_id": "one"}),
        )
        .await;
        let waits = begin(machine, "s", "echo second", json!({"command_id": "two"})).await;
        assert_eq!(waits.info.state, CommandState::Pending);
        let info = list(machine).await.remove(0);
        assert_eq!(info.state, ShellState::Busy);
        create(machine, "other", json!({})).await.unwrap();
        assert_eq!(run(machine, "other", "echo now").await.text(), "now");
        assert_eq!(get(machine, "two").await.state, CommandState::Pending);
        run(machine, "other", "touch /tmp/go").await;
        let (one, two) = (ended(machine, "one").await, ended(machine, "two").await);
        assert!(one.ended_at <= two.started_at, "{one:?} {two:?}");

        // Each waits for the other.
        let meet = |own: &str, other: &str| {
            format!("touch /tmp/{own}; until [ -e /tmp/{other} ]; do sleep 0.01; done; echo {own}")
        };
        let (a, b) = (meet("a", "b"), meet("b", "a"));
        let both = tokio::join!(run(machine, "s", &a), run(machine, "other", &b));
        assert_eq!((both.0.text(), both.1.text()), ("a", "b"));
    })
    .await;
}

#[tokio::test]
async fn a_shell_is_created_once_and_ends_when_it_is_deleted() {
    with_shell("bash", async |machine| {
        let note = |n: usize| json!({"note": {"n": n}});
        let all = (0..8).map(|n| create(machine, "once", note(n)));
        let all = futures::future::join_all(all).await;
        let fresh = all.iter().filter(|made| !made.as_ref().unwrap().existed);
        assert_eq!(fresh.count(), 1);
        assert_eq!(list(machine).await.len(), 2);

        let seconds = mark();
        run(machine, "once", &format!("sleep {seconds} &")).await;
        begin(
            machine,
            "once",
            &format!("sleep {seconds}"),
            json!({"command_id": "now"}),
        )
        .await;
        begin(
            machine,
            "once",
            "echo never >/tmp/never",
            json!({"command_id": "later"}),
        )
        .await;
        eventually("they run", async || processes_with(&seconds) == 2).await;
        assert!(delete(machine, "once").await);
        gone(&seconds).await;
        for id in ["now", "later"] {
            assert_eq!(ended(machine, id).await.exit.unwrap().why, ExitWhy::Killed);
        }
        assert!(!delete(machine, "once").await);
        let params = json!({"command_id": "nowhere"});
        let error = try_run(machine, "once", "echo never >/tmp/never", params).await;
        assert_eq!(error.unwrap_err().code(), Code::NotFound);
        let left = machine
            .exec("c", "ls -A /tmp/never /tmp | grep -c box-shell")
            .await;
        assert_eq!(printed(&left), "1", "the job of the other shell");
        assert_eq!(machine.exec("c", "cat /tmp/never").await.exit_code, Some(1));
    })
    .await;
}

#[tokio::test]
async fn an_idle_shell_ends_and_a_busy_one_does_not() {
    with_shell("bash", async |machine| {
        // Long enough to send the command, and shorter than the command takes.
        create(machine, "brief", json!({"idle_ms": 1500}))
            .await
            .unwrap();
        let begun = Instant::now();
        assert_eq!(run(machine, "brief", "sleep 2; echo on").await.text(), "on");
        eventually("the idle shell ends", async || {
            list(machine).await.len() <= 1
        })
        .await;
        assert!(
            begun.elapsed() >= Duration::from_millis(3500),
            "{:?}",
            begun.elapsed()
        );
    })
    .await;
}

#[tokio::test]
async fn a_shell_can_discard_its_state_after_each_run() {
    for (language, change, look) in [
        ("bash", "cd /; x=1; export y=2; exit 5", "pwd; echo [$x$y]"),
        ("sh", "cd /; x=1; export y=2; (exit 5)", "pwd; echo [$x$y]"),
        (
            "python",
            "import os, sys; os.chdir('/'); x = 1; sys.exit(5)",
            "import os; print(os.getcwd()); print(['x' in globals()])",
        ),
    ] {
        with_shell(language, async |machine| {
            create(
                machine,
                "n",
                json!({"language": language, "persist": false}),
            )
            .await
            .unwrap();
            for _ in 0..3 {
                assert_eq!(run(machine, "n", change).await.code(), Some(5));
                let ran = run(machine, "n", look).await;
                let empty = if language == "python" {
                    "[False]"
                } else {
                    "[]"
                };
                assert_eq!(ran.text(), format!("/tmp\n{empty}"), "{language}");
                assert!(!ran.info.shell_replaced);
            }
        })
        .await;
    }
}

#[tokio::test]
async fn settings_of_one_run_are_its_own() {
    for (language, text) in [
        ("bash", "pwd; echo $A $B; sh -c 'echo $A'"),
        ("sh", "pwd; echo $A $B; sh -c 'echo $A'"),
        (
            "python",
            "import os; print(os.getcwd()); print(os.environ.get('A', ''), os.environ.get('B', ''), flush=True); os.system('echo $A')",
        ),
        (
            "javascript",
            "console.log(process.cwd()); console.log(process.env.A ?? '', process.env.B ?? ''); require('child_process').execSync('echo $A', {stdio: 'inherit'})",
        ),
    ] {
        with_shell(language, async |machine| {
            create(
                machine,
                "t",
                json!({"language": language, "env": {"A": "first"}}),
            )
            .await
            .unwrap();
            let own = json!({"cwd": "/usr", "env": {"A": "it's", "B": "$b"}});
            let ran = try_run(machine, "t", text, own).await.unwrap();
            assert_eq!(ran.text(), "/usr\nit's $b\nit's", "{language}: {ran:?}");
            assert_eq!(ran.info.cwd, "/usr");
            let ran = run(machine, "t", text).await;
            let lines: Vec<_> = ran.text().lines().map(str::trim_end).collect();
            assert_eq!(lines, ["/tmp", "first", "first"], "{language}: {ran:?}");
            let nowhere = json!({"cwd": "/nowhere"});
            let ran = try_run(machine, "t", text, nowhere).await.unwrap();
            assert_eq!((ran.text(), ran.code()), ("", Some(1)), "{language}");
        })
        .await;
    }
}

#[tokio::test]
async fn a_shell_id_belongs_to_one_language() {
    with_shell("bash", async |machine| {
        for (asked, field) in [
            (json!({"language": "python"}), "language"),
            (json!({"persist": false}), "persist"),
        ] {
            let error = create(machine, "s", asked).await.unwrap_err();
            assert_eq!(error.code(), box_protocol::Code::Conflict);
            assert!(error.message().starts_with(field), "{error:?}");
        }
        assert!(create(machine, "s", json!({})).await.unwrap().existed);
    })
    .await;
}

#[tokio::test]
async fn missing_interpreters_directories_and_shells_are_refused() {
    with_shell("bash", async |machine| {
        let none = json!({"language": "javascript", "env": {"PATH": "/nowhere"}});
        let error = create(machine, "none", none).await.unwrap_err();
        assert_eq!(error.code(), Code::Unsupported);
        let error = create(machine, "none", json!({"cwd": "/nowhere"}))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Validation);
        assert_eq!(list(machine).await.len(), 1);
        let error = try_run(machine, "none", "true", json!({}))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
    })
    .await;
}
