//! Calls that name the same command, port, file or shell take effect in the order in which they
//! were sent, from the client through service, runtime and agent.
//!
//! The data of one message may be as large as a message.

use box_protocol::actions::{
    BoxExec, CommandGet, CommandInput, CommandKill, CommandStart, FileRead, FileRemove, FileStat,
    FileWrite, PortChunk, PortOpen, PortSend, ShellCreate, ShellDelete, ShellRun,
};
use box_protocol::{Code, SpecDraft};
use box_rpc::{Action, Peer, PendingCall};
use box_test_wait::eventually;
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Fixture, Setup, Transport};
use box_tests::machine::{params, printed};
use futures::StreamExt as _;
use serde_json::{Value, json};

every_transport!(
    pipelined_writes_to_a_file_take_effect_as_they_were_sent,
    pipelined_input_of_a_command_arrives_as_it_was_sent,
    pipelined_bytes_to_a_port_arrive_as_they_were_sent,
    pipelined_texts_of_a_shell_run_as_they_were_sent,
    a_call_that_hangs_keeps_no_other_waiting,
);

/// The number of concurrent calls.
const CALLS: usize = 100;
const ROUNDS: usize = 4;

async fn start(setup: Setup) -> Fixture {
    let fixture = setup.real_service().start().await;
    exec(&fixture.peer, "true").await;
    fixture
}

async fn exec(peer: &Peer, cmd: &str) -> String {
    let spec = SpecDraft::new("o").cmd(cmd);
    let result = peer.call::<BoxExec>(&params(spec)).await.unwrap();
    printed(&result).to_owned()
}

/// Sends a call without waiting for its answer. Some calls have a request key.
async fn ask<A: Action>(peer: &Peer, number: usize, mut asked: Value) -> PendingCall<A> {
    asked["box_id"] = json!("o");
    let asked: A::Params = serde_json::from_value(asked).unwrap();
    let request = peer.request::<A>(&asked);
    let request = if number.is_multiple_of(3) {
        request.key(format!("{} {}", uuid::Uuid::now_v7(), A::NAME))
    } else {
        request
    };
    request.send().await.unwrap()
}

async fn call<A: Action>(peer: &Peer, asked: Value) -> A::Result {
    ask::<A>(peer, 1, asked).await.result().await.unwrap()
}

async fn answers<A: Action>(asked: Vec<PendingCall<A>>) {
    for (number, asked) in asked.into_iter().enumerate() {
        let answer = asked.result().await;
        answer.unwrap_or_else(|error| panic!("{} {number}: {error:?}", A::NAME));
    }
}

/// The line for a number. Some lines are longer than one message to the agent.
fn line(number: usize) -> String {
    let long = if number % 10 == 5 { 20_000 } else { 3 };
    format!("{number} {}\n", "x".repeat(long))
}

fn base64(text: &str) -> String {
    let blob: box_protocol::Blob = text.as_bytes().to_vec().into();
    serde_json::to_value(blob)
        .unwrap()
        .as_str()
        .unwrap()
        .to_owned()
}

/// The leading numbers of the lines of a file in the box.
async fn numbers(peer: &Peer, path: &str) -> Vec<usize> {
    let text = exec(peer, &format!("cut -d' ' -f1 {path}")).await;
    text.lines().map(|line| line.parse().unwrap()).collect()
}

fn in_order() -> Vec<usize> {
    (0..CALLS).collect()
}

async fn pipelined_writes_to_a_file_take_effect_as_they_were_sent(setup: Setup) {
    let fixture = start(setup).await;
    let peer = &fixture.peer;
    for round in 0..ROUNDS {
        let path = format!("/tmp/appended-{round}");
        let mut asked = Vec::new();
        for number in 0..CALLS {
            let data = base64(&line(number));
            let write = json!({"path": path, "data": data, "append": true});
            asked.push(ask::<FileWrite>(peer, number, write).await);
        }
        answers(asked).await;
        assert_eq!(numbers(peer, &path).await, in_order(), "round {round}");

        // Of many replacements the last one stays, and each read sees the write before it.
        let path = format!("/tmp/replaced-{round}");
        let (mut asked, mut looks) = (Vec::new(), Vec::new());
        for number in 0..CALLS / 2 {
            let data = base64(&"x".repeat(number));
            let write = json!({"path": path, "data": data});
            asked.push(ask::<FileWrite>(peer, number, write).await);
            looks.push(ask::<FileStat>(peer, 1, json!({"paths": [path]})).await);
        }
        let removed = ask::<FileRemove>(peer, 1, json!({"paths": [path]})).await;
        answers(asked).await;
        for (number, look) in looks.into_iter().enumerate() {
            let seen = serde_json::to_value(look.result().await.unwrap()).unwrap();
            let size = &seen["paths"][&path]["stat"]["size"];
            assert_eq!(*size, json!(number), "round {round}: {seen}");
        }
        removed.result().await.unwrap();
        exec(peer, &format!("test ! -e {path}")).await;
    }
}

async fn pipelined_input_of_a_command_arrives_as_it_was_sent(setup: Setup) {
    let fixture = start(setup).await;
    let peer = &fixture.peer;
    for round in 0..ROUNDS {
        let (id, path) = (format!("cat-{round}"), format!("/tmp/input-{round}"));
        // Without waiting for answers, the client starts the command, sends input, closes it, and
        // reads the status.
        let text = format!("cat > {path}");
        let begin = json!({"command_id": id, "program": {"text": text}, "stdin": "open"});
        let started = ask::<CommandStart>(peer, 1, begin).await;
        let mut asked = Vec::new();
        for number in 0..CALLS {
            let data = base64(&line(number));
            let input = json!({"command_id": id, "data": data});
            asked.push(ask::<CommandInput>(peer, number, input).await);
        }
        let close = json!({"command_id": id, "close": true});
        asked.push(ask::<CommandInput>(peer, 1, close).await);
        let known = ask::<CommandGet>(peer, 1, json!({"command_id": id})).await;
        started.result().await.unwrap();
        answers(asked).await;
        known.result().await.unwrap();
        eventually("the command has read it all", async || {
            numbers(peer, &path).await.len() == CALLS
        })
        .await;
        assert_eq!(numbers(peer, &path).await, in_order(), "round {round}");
    }
}

async fn pipelined_bytes_to_a_port_arrive_as_they_were_sent(setup: Setup) {
    const SERVER: &str = "import socket, threading
listener = socket.create_server(('127.0.0.1', 7000))
open('/tmp/listens', 'w').close()
number = 0
while True:
    stream, _ = listener.accept()
    with open(f'/tmp/sent-{number}', 'wb') as out:
        while data := stream.recv(65536):
            out.write(data)
    open(f'/tmp/whole-{number}', 'w').close()
    number += 1";
    let fixture = start(setup).await;
    let peer = &fixture.peer;
    let serve = format!(
        "cat > /tmp/serve.py <<'EOF'\n{SERVER}\nEOF\npython3 /tmp/serve.py > /tmp/said 2>&1 &"
    );
    exec(peer, &serve).await;
    exec(peer, "until test -e /tmp/listens; do sleep 0.05; done").await;
    for round in 0..ROUNDS {
        let port = serde_json::from_value(json!({"box_id": "o", "port": 7000})).unwrap();
        let mut chunks = peer.stream::<PortOpen>(&port).await.unwrap();
        let Some(Ok(PortChunk::ConnId(id))) = chunks.next().await else {
            panic!("no connection")
        };
        let mut asked = Vec::new();
        for number in 0..CALLS {
            let close = number == CALLS - 1;
            let send = json!({"conn_id": id, "data": base64(&line(number)), "close": close});
            asked.push(ask::<PortSend>(peer, number, send).await);
        }
        answers(asked).await;
        let whole = format!("until test -e /tmp/whole-{round}; do sleep 0.05; done");
        exec(peer, &whole).await;
        let path = format!("/tmp/sent-{round}");
        assert_eq!(numbers(peer, &path).await, in_order(), "round {round}");
    }
}

async fn pipelined_texts_of_a_shell_run_as_they_were_sent(setup: Setup) {
    let fixture = start(setup).await;
    let peer = &fixture.peer;
    for round in 0..ROUNDS {
        let (shell, path) = (format!("s-{round}"), format!("/tmp/ran-{round}"));
        let create = ask::<ShellCreate>(peer, 1, json!({"shell_id": shell})).await;
        let mut asked = Vec::new();
        for number in 0..CALLS {
            // Each run sees the state that the previous one left.
            let text = format!(
                "test \"${{N:-{number}}}\" = {number} && echo {number} x >> {path}; N=$(({number} + 1))"
            );
            let run = json!({"shell_id": shell, "text": text, "command_id": format!("run-{round}-{number}")});
            asked.push(ask::<ShellRun>(peer, number, run).await);
        }
        let last = format!("run-{round}-{}", CALLS - 1);
        create.result().await.unwrap();
        answers(asked).await;
        eventually("the last has run", async || {
            let info = call::<CommandGet>(peer, json!({"command_id": last})).await;
            serde_json::to_value(info).unwrap()["state"] == "exited"
        })
        .await;
        assert_eq!(numbers(peer, &path).await, in_order(), "round {round}");
        call::<ShellDelete>(peer, json!({"shell_id": shell})).await;
    }
}

async fn a_call_that_hangs_keeps_no_other_waiting(setup: Setup) {
    let fixture = start(setup).await;
    let peer = &fixture.peer;
    let deaf =
        json!({"command_id": "deaf", "program": {"text": "exec sleep 100000"}, "stdin": "open"});
    call::<CommandStart>(peer, deaf).await;
    // More than its pipe holds, and the command never reads it.
    let much = json!({"command_id": "deaf", "data": base64(&"x".repeat(1 << 20))});
    let stuck = ask::<CommandInput>(peer, 1, much).await;
    let behind = json!({"command_id": "deaf", "data": base64("more")});
    let behind = ask::<CommandInput>(peer, 1, behind).await;
    // Other calls are served, also those that inspect or end the command.
    let reads =
        json!({"command_id": "reads", "program": {"text": "cat > /tmp/input"}, "stdin": "open"});
    call::<CommandStart>(peer, reads).await;
    call::<CommandInput>(
        peer,
        json!({"command_id": "reads", "data": base64("all"), "close": true}),
    )
    .await;
    call::<FileWrite>(peer, json!({"path": "/tmp/other", "data": base64("x")})).await;
    call::<CommandGet>(peer, json!({"command_id": "deaf"})).await;
    call::<CommandKill>(peer, json!({"command_id": "deaf", "signal": "KILL"})).await;
    for asked in [stuck, behind] {
        assert_eq!(asked.result().await.unwrap_err().code(), Code::Conflict);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_longest_message_carries_a_file_and_input_into_a_box() {
    // In base64, one mebibyte less than the longest message.
    const BYTES: usize = (15 << 20) / 4 * 3;
    let program = env!("CARGO_BIN_EXE_box-test-server");
    let fixture = start(Setup::new(Transport::Unix, Dialect::JsonRpc, program)).await;
    let peer = &fixture.peer;
    let data = base64(&"x".repeat(BYTES));
    call::<FileWrite>(peer, json!({"path": "/tmp/long", "data": data})).await;
    assert_eq!(exec(peer, "stat -c %s /tmp/long").await, BYTES.to_string());
    let append = json!({"path": "/tmp/long", "data": data, "append": true});
    call::<FileWrite>(peer, append).await;
    assert_eq!(
        exec(peer, "stat -c %s /tmp/long").await,
        (2 * BYTES).to_string()
    );
    let begin =
        json!({"command_id": "wc", "program": {"text": "wc -c > /tmp/counted"}, "stdin": "open"});
    call::<CommandStart>(peer, begin).await;
    let input = json!({"command_id": "wc", "data": data, "close": true});
    let accepted = call::<CommandInput>(peer, input).await.accepted;
    assert_eq!(accepted, BYTES as u64);
    eventually("it has counted", async || {
        exec(peer, "cat /tmp/counted").await == BYTES.to_string()
    })
    .await;
    let read = serde_json::from_value(json!({"box_id": "o", "path": "/tmp/long"})).unwrap();
    let info = peer.call::<FileRead>(&read).await.unwrap();
    assert_eq!(info.size, 2 * BYTES as u64);
}
