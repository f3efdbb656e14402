//! Inputs and results of `box.exec`.

use box_protocol::actions::{OnDisconnect, Stdin, SystemShutdownParams};
use box_protocol::{BoxError, BoxState, Code, Defaults, Env, ExecStatus, ExecutionStatus, Program};
use box_runtime::fake::Reply;

use tokio::time::Instant;

use super::fixture::{code, exec_of, fixture, seconds, settle, spec};

#[tokio::test(start_paused = true)]
async fn a_result_has_output_code_and_duration() {
    let w = fixture();
    w.backend
        .next_command(Reply::stdout("out").stderr("err").exit(3).takes(seconds(2)));
    let result = w.exec("s", "job").await.unwrap();
    assert_eq!(
        (result.stdout.as_str(), result.stderr.as_str()),
        ("out", "err")
    );
    assert_eq!(
        (result.status, result.exit_code),
        (ExecutionStatus::Completed, Some(3))
    );
    assert_eq!(
        (result.backend_name.as_str(), result.box_id.as_str()),
        ("fake", "s")
    );
    assert_eq!((result.duration_ms, result.signal), (2000, None));
}

#[tokio::test(start_paused = true)]
async fn a_signal_is_128_and_the_signal_beside_it() {
    let w = fixture();
    w.backend.next_command(Reply::default().signal(11));
    let result = w.exec("s", "crash").await.unwrap();
    assert_eq!((result.exit_code, result.signal), (Some(139), Some(11)));
}

#[tokio::test(start_paused = true)]
async fn output_beyond_a_mebibyte_is_counted() {
    let w = fixture();
    w.backend
        .next_command(Reply::stdout(vec![b'a'; 1024 * 1024 + 5]).stderr(vec![b'b'; 7]));
    let result = w.exec("s", "cat").await.unwrap();
    assert_eq!(
        (result.stdout.len(), result.stdout_dropped),
        (1024 * 1024, 5)
    );
    assert_eq!((result.stderr.len(), result.stderr_dropped), (7, 0));
}

#[tokio::test(start_paused = true)]
async fn bytes_that_are_not_utf8_are_replaced() {
    let w = fixture();
    w.backend
        .next_command(Reply::stdout(vec![b'a', 0xff, b'b']));
    assert_eq!(w.exec("s", "cat").await.unwrap().stdout, "a\u{fffd}b");
}

#[tokio::test(start_paused = true)]
async fn a_command_gets_a_shell_a_directory_and_a_clean_environment() {
    let w = fixture();
    let mut env = Env::new();
    env.insert("TERM", "vt100").unwrap();
    env.insert("TOKEN", "t").unwrap();
    let mut draft = spec("s", "  echo $TOKEN \n")
        .env(env)
        .workdir("/workspace/deep")
        .timeout_sec(7);
    let mut defaults = Defaults {
        user: Some("dev".to_owned()),
        ..Defaults::default()
    };
    defaults.env.insert("TOKEN", "default").unwrap();
    defaults.env.insert("LANG", "C").unwrap();
    draft.defaults = Some(defaults);
    w.exec_spec(draft).await.unwrap();
    let command = &w.backend.commands()[0];
    assert_eq!(command.program, Program::text("echo $TOKEN").unwrap());
    assert_eq!(
        (command.cwd.as_str(), command.make_cwd),
        ("/workspace/deep", true)
    );
    assert_eq!(
        command.env.names(),
        [
            "HOME",
            "LANG",
            "NPM_CONFIG_PREFIX",
            "PATH",
            "PIP_BREAK_SYSTEM_PACKAGES",
            "TERM",
            "TOKEN",
            "USER"
        ]
    );
    assert_eq!(
        (
            &*command.env["TERM"],
            &*command.env["TOKEN"],
            &*command.env["LANG"]
        ),
        ("vt100", "t", "C")
    );
    assert_eq!(
        (command.stdin, command.timeout_ms),
        (Stdin::Closed, Some(7000))
    );
    assert_eq!(command.user.as_deref(), Some("dev"));
}

#[tokio::test(start_paused = true)]
async fn an_exec_overrides_the_shell_and_directory_of_the_box() {
    let w = fixture();
    let with_defaults = |cmd: &str| {
        let mut draft = spec("s", cmd).mount_path("/work");
        draft.defaults = Some(Defaults {
            shell: Some("/bin/zsh".to_owned()),
            cwd: Some("/srv".to_owned()),
            ..Defaults::default()
        });
        draft
    };
    w.exec_spec(with_defaults("a")).await.unwrap();
    w.exec_spec(with_defaults("b").workdir("/work"))
        .await
        .unwrap();
    let mut params = exec_of(with_defaults(""));
    params.program = Some(Program::argv(["sh", "-lc", "c"]).unwrap());
    w.runtime.exec(&w.caller, params.clone()).await.unwrap();
    w.exec_spec(spec("t", "d").mount_path("/work"))
        .await
        .unwrap();
    let commands = w.backend.commands();
    let argv = |words: [&str; 3]| Program::argv(words).unwrap();
    let started: Vec<_> = commands
        .iter()
        .map(|command| (command.program.clone(), command.cwd.as_str()))
        .collect();
    assert_eq!(
        started,
        [
            (argv(["/bin/zsh", "-c", "a"]), "/srv"),
            (argv(["/bin/zsh", "-c", "b"]), "/work"),
            (argv(["sh", "-lc", "c"]), "/srv"),
            (Program::text("d").unwrap(), "/work"),
        ]
    );
    params.spec = with_defaults("both");
    assert_eq!(
        code(w.runtime.exec(&w.caller, params).await),
        Code::Validation
    );
}

#[tokio::test(start_paused = true)]
async fn execs_of_one_box_take_turns_and_boxes_run_in_parallel() {
    let w = fixture();
    w.backend
        .answer_with(|_| Reply::default().takes(seconds(10)));
    let begun = Instant::now();
    let (a, b, c) = tokio::join!(w.exec("s", "1"), w.exec("s", "2"), w.exec("t", "3"));
    let took = [a, b, c].map(|result| result.unwrap().duration_ms);
    assert_eq!(took, [10_000; 3]);
    assert_eq!(begun.elapsed().as_secs(), 20);
}

#[tokio::test(start_paused = true)]
async fn a_busy_box_has_the_status_running() {
    let w = fixture();
    w.backend.next_command(Reply::default().takes(seconds(10)));
    let running = w.begin("s", "job").await;
    assert_eq!(w.get("s").await.unwrap().status, ExecStatus::Running);
    running.await.unwrap().unwrap();
    assert_eq!(w.get("s").await.unwrap().status, ExecStatus::Idle);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_call_kills_its_command_and_keeps_the_box() {
    let w = fixture();
    w.backend.on_command("sleep", Reply::hang());
    let running = w.begin("s", "sleep").await;
    running.abort();
    settle().await;
    assert_eq!(w.backend.killed(), ["sleep"]);
    w.exec("s", "next").await.unwrap();
    assert_eq!(w.backend.starts(), ["s"]);
    assert_eq!(w.backend.stops(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_call_cancelled_in_the_queue_never_runs() {
    let w = fixture();
    w.backend
        .on_command("sleep", Reply::default().takes(seconds(5)));
    let running = w.begin("s", "sleep").await;
    let waiting = w.begin("s", "never").await;
    waiting.abort();
    running.await.unwrap().unwrap();
    w.exec("s", "last").await.unwrap();
    let texts: Vec<_> = w
        .backend
        .execs()
        .into_iter()
        .map(|(_, text)| text)
        .collect();
    assert_eq!(texts, ["sleep", "last"]);
}

#[tokio::test(start_paused = true)]
async fn a_kept_command_outlives_its_caller() {
    let w = fixture();
    w.backend
        .on_command("job", Reply::default().takes(seconds(60)));
    let mut params = exec_of(spec("s", "job").timeout_sec(100));
    params.on_disconnect = OnDisconnect::Keep;
    let running = w.begin_exec(params.clone()).await;
    let waiting = w.begin_exec(params).await;
    running.abort();
    waiting.abort();
    settle().await;
    assert_eq!(w.get("s").await.unwrap().status, ExecStatus::Running);
    let last = w.exec("s", "after").await.unwrap();
    assert_eq!(last.exit_code, Some(0));
    assert!(w.backend.killed().is_empty());
    assert_eq!(w.backend.execs().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn files_appear_in_the_mounted_directory() {
    let w = fixture();
    let dir = tempfile::tempdir().unwrap();
    w.backend
        .next_command(Reply::stdout("wrote files").writes("sub/output.bin", 2048));
    let path = dir.path().to_str().unwrap();
    w.exec_spec(spec("s", "generate").host_path(path))
        .await
        .unwrap();
    assert_eq!(
        std::fs::metadata(dir.path().join("sub/output.bin"))
            .unwrap()
            .len(),
        2048
    );
}

#[tokio::test(start_paused = true)]
async fn an_exec_after_exit_is_refused() {
    let w = fixture();
    let exit = SystemShutdownParams {
        exit: true,
        within_ms: None,
    };
    w.runtime.shutdown(&w.caller, exit).await.unwrap();
    w.runtime.exit_requested().await;
    assert_eq!(code(w.exec("s", "true").await), Code::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn the_next_exec_waits_for_the_end_of_a_killed_one() {
    let w = fixture();
    w.backend
        .on_command("sleep", Reply::hang().lingers(seconds(4)));
    let begun = Instant::now();
    w.begin("s", "sleep").await.abort();
    w.exec("s", "next").await.unwrap();
    assert!(begun.elapsed() >= seconds(4));
    assert_eq!(w.backend.starts(), ["s"]);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_cannot_kill_fails_the_box() {
    let w = fixture();
    w.backend
        .on_command("sleep", Reply::hang().lingers(seconds(60)));
    w.begin("s", "sleep").await.abort();
    tokio::time::sleep(seconds(11)).await;
    assert_eq!(w.get("s").await.unwrap().state, BoxState::Failed);
    w.exec("s", "next").await.unwrap();
    assert_eq!(w.backend.starts(), ["s", "s"]);
}

#[tokio::test(start_paused = true)]
async fn exec_ids_are_unique() {
    let w = fixture();
    // Two boxes of the same millisecond: a call to one box may still exist for the next runtime of
    // the other.
    w.exec("a", "true").await.unwrap();
    w.exec("b", "true").await.unwrap();
    let ids = w
        .backend
        .commands()
        .into_iter()
        .map(|params| params.command_id);
    let ids: Vec<_> = ids.collect();
    assert_ne!(ids[0], ids[1]);
}

#[tokio::test(start_paused = true)]
async fn an_exec_with_a_used_id_is_refused_and_the_box_stays() {
    let w = fixture();
    w.exec("s", "true").await.unwrap();
    let taken = BoxError::conflict("the command runs already");
    w.backend.next_command(Reply::refuse(taken));
    assert_eq!(code(w.exec("s", "job").await), Code::Conflict);
    w.exec("s", "true").await.unwrap();
    assert_eq!(w.backend.starts(), ["s"]);
}

#[tokio::test(start_paused = true)]
async fn a_kept_exec_continues_in_its_agent() {
    let w = fixture();
    for on_disconnect in [OnDisconnect::Keep, OnDisconnect::Kill] {
        let mut params = exec_of(spec("s", "true"));
        params.on_disconnect = on_disconnect;
        w.runtime.exec(&w.caller, params).await.unwrap();
    }
    let kept: Vec<_> = w
        .backend
        .commands()
        .iter()
        .map(|params| params.keep)
        .collect();
    assert_eq!(kept, [true, false]);
}
