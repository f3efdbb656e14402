//! Commands as objects: started, found again, read from anywhere by anybody, fed, signalled, forgotten.

use std::time::{Duration, Instant};

use box_protocol::actions::{
    CommandAttachParams, CommandChunk, CommandStartParams, CommandStartResult, ReadEnd, ReadWhy,
    StreamName,
};
use box_protocol::{BoxError, Code, CommandInfo, CommandState, ExitWhy};
use box_runtime::Caller;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::support::{Machine, eventually, on_each_machine, printed, processes_with};

/// What a reader got.
#[derive(Debug, Default)]
struct Got {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    gaps: u64,
    started: Option<CommandInfo>,
    /// The streams in the order they came.
    order: Vec<StreamName>,
}

impl Got {
    fn take(&mut self, chunk: CommandChunk) {
        let (stream, bytes) = match chunk {
            CommandChunk::Started(info) => return self.started = Some(*info),
            CommandChunk::Gap(gap) => return self.gaps += gap.bytes,
            CommandChunk::Text(piece) => (piece.stream, piece.data.into_bytes()),
            CommandChunk::Bytes(piece) => (piece.stream, piece.data.to_vec()),
            CommandChunk::Display(shown) => panic!("{shown:?}"),
        };
        self.order.push(stream);
        match stream {
            StreamName::Stdout => self.stdout.extend_from_slice(&bytes),
            StreamName::Stderr => self.stderr.extend_from_slice(&bytes),
        }
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }
}

fn start(program: Value, more: Value) -> CommandStartParams {
    let mut params = json!({"session_id": "c", "program": program, "cwd": "/tmp"});
    for (name, value) in more.as_object().unwrap() {
        params[name] = value.clone();
    }
    serde_json::from_value(params).unwrap()
}

fn text(text: &str, more: Value) -> CommandStartParams {
    start(json!({"text": text}), more)
}

async fn run(
    machine: &Machine,
    params: CommandStartParams,
) -> Result<CommandStartResult, BoxError> {
    machine
        .runtime
        .start_command(&Caller::local(), params, None)
        .await
}

/// Starts one and reads it to the end.
async fn read_through(
    machine: &Machine,
    mut params: CommandStartParams,
) -> (Got, CommandStartResult) {
    params.attach.get_or_insert_default();
    let (sender, mut chunks) = mpsc::channel(4);
    let caller = Caller::local();
    let running = machine.runtime.start_command(&caller, params, Some(sender));
    let reading = async {
        let mut got = Got::default();
        while let Some(chunk) = chunks.recv().await {
            got.take(chunk);
        }
        got
    };
    let (result, got) = tokio::join!(running, reading);
    (got, result.unwrap())
}

async fn attach(
    machine: &Machine,
    id: &str,
    more: Value,
) -> Result<(Got, CommandInfo, ReadEnd), BoxError> {
    let mut params = json!({"session_id": "c", "command_id": id});
    for (name, value) in more.as_object().unwrap() {
        params[name] = value.clone();
    }
    let params: CommandAttachParams = serde_json::from_value(params).unwrap();
    let (sender, mut chunks) = mpsc::channel(4);
    let caller = Caller::local();
    let running = machine.runtime.attach_command(&caller, params, sender);
    let reading = async {
        let mut got = Got::default();
        while let Some(chunk) = chunks.recv().await {
            got.take(chunk);
        }
        got
    };
    let (result, got) = tokio::join!(running, reading);
    result.map(|result| (got, result.info, result.read))
}

async fn kill(machine: &Machine, id: &str, more: Value) -> Result<(CommandInfo, bool), BoxError> {
    let mut params = json!({"session_id": "c", "command_id": id});
    for (name, value) in more.as_object().unwrap() {
        params[name] = value.clone();
    }
    let params = serde_json::from_value(params).unwrap();
    let killed = machine
        .runtime
        .kill_command(&Caller::local(), params)
        .await?;
    Ok((killed.info, killed.already))
}

async fn input(machine: &Machine, id: &str, more: Value) -> Result<u64, BoxError> {
    let mut params = json!({"session_id": "c", "command_id": id});
    for (name, value) in more.as_object().unwrap() {
        params[name] = value.clone();
    }
    let params = serde_json::from_value(params).unwrap();
    let wrote = machine
        .runtime
        .input_command(&Caller::local(), params)
        .await?;
    Ok(wrote.accepted)
}

async fn get(machine: &Machine, id: &str) -> Result<CommandInfo, BoxError> {
    let key = serde_json::from_value(json!({"session_id": "c", "command_id": id})).unwrap();
    machine.runtime.get_command(&Caller::local(), key).await
}

/// The box that every test here uses.
async fn with_box(test: impl AsyncFn(&Machine)) {
    on_each_machine(async |machine| {
        printed(&machine.exec("c", "true").await);
        test(machine).await;
    })
    .await;
}

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
        assert_eq!(started.session_id.as_str(), "c");
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
async fn words_run_as_they_are_and_texts_in_a_shell() {
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
        let listed = serde_json::from_value(json!({"session_id": "c"})).unwrap();
        let listed = machine
            .runtime
            .list_commands(&Caller::local(), listed)
            .await
            .unwrap();
        assert_eq!(listed.items.len(), 2, "what never began is not there");
    })
    .await;
}

#[tokio::test]
async fn an_id_starts_once_however_often_it_is_asked_for() {
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
async fn output_is_read_from_any_place_by_many_at_once() {
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
async fn readers_stop_when_they_have_waited_enough_and_the_command_goes_on() {
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
async fn input_is_written_closed_and_refused_afterwards() {
    with_box(async |machine| {
        let open = json!({"command_id": "cat", "stdin": "open"});
        run(machine, text("cat; echo end", open)).await.unwrap();
        let large = vec![b'x'; 300_000];
        let data = box_protocol::Blob::from(large.clone());
        let reading = attach(machine, "cat", json!({"view": "bytes"}));
        let writing = async {
            assert_eq!(
                input(machine, "cat", json!({"data": data})).await.unwrap(),
                300_000
            );
            input(machine, "cat", json!({"close": true})).await.unwrap();
        };
        let (read, ()) = tokio::join!(reading, writing);
        let (got, info, _) = read.unwrap();
        assert_eq!(got.stdout, [&large[..], b"end\n"].concat());
        assert_eq!(info.exit.unwrap().code, Some(0));
        let error = input(machine, "cat", json!({"data": "eA=="}))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Conflict);
        run(machine, text("sleep 60", json!({"command_id": "deaf"})))
            .await
            .unwrap();
        let error = input(machine, "deaf", json!({"data": "eA=="}))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Conflict);
    })
    .await;
}

#[tokio::test]
async fn a_command_may_have_a_terminal() {
    with_box(async |machine| {
        let script = "tty; stty size; read line; echo got $line; trap 'stty size; exit 4' WINCH; sleep 60 & wait";
        let pty = json!({"command_id": "t", "pty": {"cols": 91, "rows": 17}});
        run(machine, text(script, pty)).await.unwrap();
        let quiet = || json!({"until": {"silence_ms": 500}});
        let (got, ..) = attach(machine, "t", quiet()).await.unwrap();
        assert_eq!(got.text(), "/dev/pts/0\r\n17 91\r\n");
        let data = box_protocol::Blob::from("typed\n");
        input(machine, "t", json!({"data": data})).await.unwrap();
        let (got, ..) = attach(machine, "t", quiet()).await.unwrap();
        assert!(got.text().ends_with("got typed\r\n"), "{:?}", got.text());
        input(machine, "t", json!({"size": {"cols": 40, "rows": 30}})).await.unwrap();
        let (late, info, _) = attach(machine, "t", json!({})).await.unwrap();
        assert!(late.text().starts_with(got.text()), "replayed for a late joiner");
        assert!(late.text().contains("30 40"), "{:?}", late.text());
        assert_eq!(info.exit.unwrap().code, Some(4));
        // Ctrl-C is the terminal's.
        run(machine, text("cat", json!({"command_id": "i", "pty": {"cols": 80, "rows": 24}}))).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        input(machine, "i", json!({"data": box_protocol::Blob::from("\x03")})).await.unwrap();
        let (_, info, _) = attach(machine, "i", json!({"view": "none"})).await.unwrap();
        assert_eq!(info.exit.unwrap().signal, Some(2));
        let resize = input(machine, "i", json!({"size": {"cols": 1, "rows": 1}})).await;
        assert_eq!(resize.unwrap_err().code(), Code::Conflict);
    })
    .await;
}

#[tokio::test]
async fn a_held_command_begins_with_its_first_reader() {
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
async fn one_reader_may_have_it_alone() {
    with_box(async |machine| {
        run(machine, text("sleep 60", json!({"command_id": "x"})))
            .await
            .unwrap();
        let first = attach(machine, "x", json!({"exclusive": "refuse"}));
        let others = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let refused = attach(machine, "x", json!({"exclusive": "refuse"})).await;
            assert_eq!(refused.unwrap_err().code(), Code::Conflict);
            // One that does not want it alone may look.
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
async fn commands_end_by_timeout_and_when_they_are_left_alone() {
    with_box(async |machine| {
        let seconds = format!("86600.{}", machine.uid);
        let stubborn =
            format!("trap '' TERM; (setsid sleep {seconds} &); sleep {seconds}; sleep {seconds}");
        let timed = json!({"command_id": "timed", "timeout_ms": 300});
        run(machine, text(&stubborn, timed)).await.unwrap();
        let (_, info, _) = attach(machine, "timed", json!({"view": "none"}))
            .await
            .unwrap();
        assert_eq!(
            (info.exit.unwrap().why, info.exit.unwrap().code),
            (ExitWhy::Timeout, None)
        );
        eventually("nothing is left", || processes_with(&seconds) == 0).await;
        let alone = json!({"command_id": "alone", "detached_ms": 300});
        run(machine, text(&stubborn, alone)).await.unwrap();
        let begun = Instant::now();
        attach(machine, "alone", json!({"until": {"ms": 500}}))
            .await
            .unwrap();
        assert_eq!(
            get(machine, "alone").await.unwrap().state,
            CommandState::Running,
            "somebody read it"
        );
        loop {
            let info = get(machine, "alone").await.unwrap();
            if let Some(exit) = info.exit {
                assert_eq!(exit.why, ExitWhy::Idle);
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(20));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        eventually("nothing is left", || processes_with(&seconds) == 0).await;
    })
    .await;
}

#[tokio::test]
async fn a_caller_that_goes_takes_its_command_along_unless_told_otherwise() {
    with_box(async |machine| {
        for (keep, left) in [("kill", 0), ("keep", 1)] {
            let seconds = format!("8670{left}.{}", machine.uid);
            let params = text(
                &format!("exec sleep {seconds}"),
                json!({"on_disconnect": keep, "attach": {}}),
            );
            let (sender, mut chunks) = mpsc::channel(4);
            let runtime = machine.runtime.clone();
            let call = tokio::spawn(async move {
                runtime
                    .start_command(&Caller::local(), params, Some(sender))
                    .await
            });
            assert!(matches!(
                chunks.recv().await,
                Some(CommandChunk::Started(_))
            ));
            eventually("it runs", || processes_with(&seconds) == 1).await;
            call.abort();
            if left == 0 {
                eventually("it was killed", || processes_with(&seconds) == 0).await;
            } else {
                tokio::time::sleep(Duration::from_millis(300)).await;
                assert_eq!(processes_with(&seconds), 1);
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_full_log_waits_for_its_reader_and_forgets_without_one() {
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

#[tokio::test]
async fn records_are_forgotten_after_their_time_and_that_is_told() {
    with_box(async |machine| {
        let short = json!({"command_id": "short", "retain_ms": 100});
        run(machine, text("echo x", short)).await.unwrap();
        attach(machine, "short", json!({"view": "none"}))
            .await
            .unwrap();
        let begun = Instant::now();
        let error = loop {
            match get(machine, "short").await {
                Err(error) => break error,
                Ok(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
            assert!(begun.elapsed() < Duration::from_secs(10));
        };
        assert_eq!(error.code(), Code::NotFound);
        let detail: box_protocol::error::Detail = error.detail().unwrap();
        assert!(detail.expired);
        let error = get(machine, "never-there").await.unwrap_err();
        assert!(
            !error
                .detail::<box_protocol::error::Detail>()
                .unwrap_or_default()
                .expired
        );
    })
    .await;
}
