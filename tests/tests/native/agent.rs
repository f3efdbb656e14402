//! The agent's own calls, without a runtime in between.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use box_protocol::actions::{
    AgentChunk, AgentCommand, AgentEnds, AgentEndsParams, AgentHealth, AgentHealthParams,
    AgentInput, AgentInputParams, AgentKill, AgentKillParams, AgentList, AgentListParams,
    AgentOutput, AgentOutputParams, AgentStart, AgentStartParams,
};
use box_protocol::{Code, Exit, ExitWhy};
use box_rpc::{Limits, Options, Peer, Router, Session};
use box_runtime::Backend as _;
use box_runtime::native::NativeBackend;
use box_test_wait::{LONG, eventually};
use box_tests::machine::{agent_of, mark, on_each_machine, parent_of, processes_with};
use box_transports::unix;
use futures::StreamExt as _;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;

#[expect(
    clippy::needless_pass_by_value,
    reason = "callers build the value for this call"
)]
fn start(id: &str, argv: &[&str], more: Value) -> AgentStartParams {
    let mut params = json!({"command_id": id, "program": {"argv": argv}, "cwd": "/tmp",
        "env": {"PATH": "/usr/bin:/bin"}});
    for (name, value) in more.as_object().unwrap() {
        params[name] = value.clone();
    }
    serde_json::from_value(params).unwrap()
}

fn collected(id: &str, argv: &[&str]) -> AgentStartParams {
    start(id, argv, json!({"reply": {"collected": {"bytes": 1000}}}))
}

/// The output from an offset, the number of dropped bytes before it, and how the command ended.
async fn read(peer: &Peer, id: &str, from: u64) -> (Vec<u8>, u64, AgentCommand) {
    let params: AgentOutputParams = serde_json::from_value(
        json!({"command_id": id, "from": {"offsets": {"stdout": from}}, "view": "bytes"}),
    )
    .unwrap();
    let mut chunks = peer.stream::<AgentOutput>(&params).await.unwrap();
    let (mut bytes, mut gone, mut skip) = (Vec::new(), 0, 0);
    while let Some(chunk) = chunks.next().await {
        match chunk.unwrap() {
            AgentChunk::Begin(begin) => {
                gone = begin.raw.stdout.saturating_sub(from);
                skip = from.saturating_sub(begin.raw.stdout);
            }
            AgentChunk::Bytes(piece) => bytes.extend_from_slice(&piece.data),
            other => panic!("{other:?}"),
        }
    }
    let answer = chunks.finish().await.unwrap();
    bytes.drain(..usize::try_from(skip).unwrap());
    (bytes, gone, answer)
}

#[tokio::test]
async fn missing_programs_and_directories_are_typed_errors() {
    on_each_machine(async |machine| {
        let (id, agent) = machine.agent().await;
        let peer = agent.peer();
        for (params, code, word) in [
            (
                collected("a", &["no-such-program"]),
                Code::Validation,
                "program",
            ),
            (
                collected("b", &["/etc/passwd"]),
                Code::Validation,
                "permission denied",
            ),
            (
                start("c", &["true"], json!({"cwd": "/nowhere"})),
                Code::Validation,
                "cwd",
            ),
            (
                start("d", &["true"], json!({"cwd": "/etc/passwd"})),
                Code::Validation,
                "cwd",
            ),
            (
                start("e", &["true"], json!({"user": "root"})),
                Code::Denied,
                "user",
            ),
        ] {
            let error = peer.call::<AgentStart>(&params).await.unwrap_err();
            assert_eq!(error.code(), code, "{params:?}: {error:?}");
            assert!(error.to_string().contains(word), "{params:?}: {error:?}");
        }
        let answer = peer
            .call::<AgentStart>(&collected("g", &["echo", "hi"]))
            .await
            .unwrap();
        assert_eq!(answer.exit, Some(Exit::returned(0)));
        assert_eq!(&*answer.collected.unwrap().stdout, b"hi\n");
        let health = peer
            .call::<AgentHealth>(&AgentHealthParams::default())
            .await
            .unwrap();
        assert_eq!(
            (health.contract, health.running.len()),
            (box_agent::CONTRACT, 0)
        );
        machine.backend.stop(id).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_detached_command_is_read_from_any_offset_and_waited_for() {
    on_each_machine(async |machine| {
        let (id, agent) = machine.agent().await;
        let peer = agent.peer();
        let argv = [
            "sh",
            "-c",
            "for i in 1 2 3; do echo $i; sleep 0.05; done; exit 4",
        ];
        let answer = peer
            .call::<AgentStart>(&start("d", &argv, json!({})))
            .await
            .unwrap();
        assert_eq!(answer.exit, None);
        let again = peer
            .call::<AgentStart>(&start("d", &argv, json!({})))
            .await
            .unwrap();
        assert_eq!(
            (again.existed, again.pid),
            (true, answer.pid),
            "never twice"
        );
        assert_eq!(read(&peer, "d", 0).await.0, b"1\n2\n3\n");
        let (bytes, _, answer) = read(&peer, "d", 2).await;
        assert_eq!(bytes, b"2\n3\n", "also after its end");
        assert_eq!(
            (answer.exit, answer.size.stdout),
            (Some(Exit::returned(4)), 6)
        );
        // A log with a limit drops its oldest bytes and reports how many.
        let small = start("s", &["seq", "10000"], json!({"log_bytes": 4096}));
        peer.call::<AgentStart>(&small).await.unwrap();
        let (bytes, gone, _) = read(&peer, "s", 0).await;
        assert_eq!(bytes.len() as u64 + gone, 48_894);
        assert!(bytes.ends_with(b"9999\n10000\n"));
        machine.backend.stop(id).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_kill_sends_the_signal_then_kills_the_tree_and_returns_at_its_end() {
    on_each_machine(async |machine| {
        let (id, agent) = machine.agent().await;
        let peer = agent.peer();
        let kill = async |id: &str, signal: &str, grace: u64| {
            let params: AgentKillParams = serde_json::from_value(
                json!({"command_id": id, "signal": signal, "grace_ms": grace}),
            )
            .unwrap();
            peer.call::<AgentKill>(&params).await
        };
        let seconds = mark();
        let script =
            format!("trap '' TERM; (setsid sleep {seconds} &); sleep {seconds}; sleep {seconds}");
        peer.call::<AgentStart>(&start("k", &["sh", "-c", &script], json!({})))
            .await
            .unwrap();
        eventually("they run", async || processes_with(&seconds) == 2).await;
        let ignored = kill("k", "TERM", 0).await.unwrap();
        assert_eq!((ignored.exit, ignored.already), (None, false));
        let begun = Instant::now();
        let killed = kill("k", "TERM", 200).await.unwrap();
        assert_eq!(killed.exit, Some(Exit::by_signal(9, ExitWhy::Killed)));
        assert!(begun.elapsed() >= Duration::from_millis(200));
        assert_eq!(processes_with(&seconds), 0);
        assert!(kill("k", "KILL", 0).await.unwrap().already);
        assert_eq!(
            kill("none", "KILL", 0).await.unwrap_err().code(),
            Code::NotFound
        );
        assert_eq!(
            kill("k", "NONSENSE", 0).await.unwrap_err().code(),
            Code::Validation
        );
        machine.backend.stop(id).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_command_killed_before_it_begins_is_reported_and_forgotten() {
    on_each_machine(async |machine| {
        let (id, agent) = machine.agent().await;
        let peer = agent.peer();
        let held = start("held", &["true"], json!({"hold": true, "retain_ms": 50}));
        peer.call::<AgentStart>(&held).await.unwrap();
        let kill: AgentKillParams = serde_json::from_value(json!({"command_id": "held"})).unwrap();
        let killed = peer.call::<AgentKill>(&kill).await.unwrap();
        assert_eq!(killed.exit, Some(Exit::by_signal(9, ExitWhy::Killed)));
        let asked = AgentEndsParams::default();
        let ends = tokio::time::timeout(LONG, peer.call::<AgentEnds>(&asked));
        let answer = ends.await.expect("no event reports it").unwrap();
        assert_eq!((answer.first, answer.ends.len()), (0, 1));
        assert_eq!(
            (
                answer.ends[0].command_id.as_str(),
                Some(answer.ends[0].exit)
            ),
            ("held", killed.exit)
        );
        let find: AgentListParams = serde_json::from_value(json!({"command_id": "held"})).unwrap();
        eventually("the agent forgets it", async || {
            peer.call::<AgentList>(&find).await.is_err()
        })
        .await;
        machine.backend.stop(id).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_call_that_is_dropped_while_it_starts_a_command_leaves_nothing_running() {
    on_each_machine(async |machine| {
        let (id, agent) = machine.agent().await;
        let peer = agent.peer();
        let (reader, seconds) = (mark(), mark());
        // With a second command the shell stays, and with it the mark.
        let reads = ["sh", "-c", "cat > /dev/null; true", &reader];
        peer.call::<AgentStart>(&start("reads", &reads, json!({"stdin": "open"})))
            .await
            .unwrap();
        // The process shows its arguments some time after the agent has started it.
        eventually("the reader runs", async || parent_of(&reader).is_some()).await;
        let pid = rustix::process::Pid::from_raw(parent_of(&reader).unwrap()).unwrap();
        let signal = |signal| rustix::process::kill_process(pid, signal).unwrap();
        let streamed = json!({"stdin": "open", "reply": {"streamed": {}}});
        let lost = start("lost", &["sleep", &seconds], streamed);
        let more: AgentInputParams =
            serde_json::from_value(json!({"command_id": "reads", "data": "eA=="})).unwrap();
        for calls in (0..=120).step_by(8) {
            // The agent reads all of these calls at once, and yields to others after a number of
            // calls.
            signal(rustix::process::Signal::STOP);
            let mut before: Vec<_> = (0..calls)
                .map(|_| Box::pin(peer.call::<AgentInput>(&more)))
                .collect();
            let dropped = tokio::task::unconstrained(async {
                for call in &mut before {
                    assert!(futures::poll!(call).is_pending());
                }
                peer.stream::<AgentStart>(&lost).await.unwrap()
            })
            .await;
            tokio::time::sleep(Duration::from_millis(50)).await;
            drop(dropped);
            tokio::time::sleep(Duration::from_millis(50)).await;
            signal(rustix::process::Signal::CONT);
            for call in before {
                call.await.unwrap();
            }
            let begun = Instant::now();
            loop {
                let health = AgentHealthParams::default();
                let running = peer.call::<AgentHealth>(&health).await.unwrap().running;
                if running.len() == 1 && processes_with(&seconds) == 0 {
                    break;
                }
                assert!(begun.elapsed() < LONG, "after {calls} calls: {running:?}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        machine.backend.stop(id).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn an_agent_outlives_its_connection_and_is_found_by_its_socket() {
    on_each_machine(async |machine| {
        let state = tempfile::tempdir().unwrap();
        let mut config = machine.config();
        config.state_dir = Some(state.path().to_owned());
        let backend = NativeBackend::new(config);
        let (id, agent) = agent_of(&backend).await;
        let params = start("kept", &["sleep", "60"], json!({}));
        let pid = agent.peer().call::<AgentStart>(&params).await.unwrap().pid;
        agent.cut();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        let dir = state.path().join(id.simple().to_string());
        let socket = dir.join("agent.sock");
        assert_eq!((mode(&dir), mode(&socket)), (0o700, 0o600));
        let mut stream = tokio::net::UnixStream::connect(&socket).await.unwrap();
        let mut greeting = [0; 4];
        stream.read_exact(&mut greeting).await.unwrap();
        assert_eq!(&greeting, b"box1");
        let listens = stream.peer_cred().unwrap().pid().unwrap();
        let name = std::fs::read_to_string(format!("/proc/{listens}/comm")).unwrap();
        assert_eq!(name, "box-init\n", "the kernel says that the agent listens");
        let connection = unix::over(stream, &Limits::default());
        let again = Session::start(connection, Router::empty(), Options::client());
        let health = again
            .peer()
            .call::<AgentHealth>(&AgentHealthParams::default())
            .await
            .unwrap();
        assert_eq!(health.running.len(), 1);
        let kill = serde_json::from_value(json!({"command_id": "kept"})).unwrap();
        let killed = again.peer().call::<AgentKill>(&kill).await.unwrap();
        assert_eq!(
            killed.exit,
            Some(Exit::by_signal(9, ExitWhy::Killed)),
            "{pid}"
        );
        backend.stop(id).await.unwrap();
        assert_eq!(state.path().read_dir().unwrap().count(), 0);
    })
    .await;
}
