//! Real boxes behind every transport and in both dialects: the wire changes no behaviour.

use std::net::TcpListener;
use std::process::Command;

use box_protocol::actions::{
    BoxExec, BoxGet, BoxGetParams, CommandAttach, CommandAttachParams, CommandChunk, CommandStart,
};
use box_protocol::{BoxExecutionResult, BoxId, Code, ExecutionStatus, SpecDraft};
use box_rpc::{CallError, Peer};
use box_service::{BoxService, Query, ServiceConfig};
use box_tests::every_transport;
use box_tests::fixture::Setup;
use box_tests::machine::{mark, params, printed, processes_with, spec};
use futures::StreamExt as _;
use serde_json::json;

every_transport!(
    a_command_runs_in_a_real_box,
    files_persist_in_a_box_and_stay_out_of_others,
    a_timeout_kills_the_command_and_deletes_the_box,
    without_a_network_nothing_outside_is_reached,
    a_box_that_cannot_be_is_a_typed_error,
    a_tool_call_goes_through_service_wire_and_runtime,
);

every_transport!(two_clients: a_caller_that_is_cut_resumes_at_its_offset);

async fn exec_spec(peer: &Peer, spec: SpecDraft) -> Result<BoxExecutionResult, CallError> {
    peer.call::<BoxExec>(&params(spec)).await
}

async fn exec(peer: &Peer, session: &str, cmd: &str) -> BoxExecutionResult {
    let ran = exec_spec(peer, SpecDraft::new(session).cmd(cmd)).await;
    ran.unwrap()
}

async fn a_command_runs_in_a_real_box(setup: Setup) {
    let fixture = setup.real_boxes().start().await;
    let result = exec(
        &fixture.peer,
        "simple",
        "echo hello-box; id -un; echo oops >&2",
    )
    .await;
    assert_eq!(printed(&result), "hello-box\nbox");
    assert_eq!(
        (result.stderr.as_str(), result.backend_name.as_str()),
        ("oops\n", "native")
    );
}

async fn files_persist_in_a_box_and_stay_out_of_others(setup: Setup) {
    let fixture = setup.real_boxes().start().await;
    let write = "echo 'hello from file' > /tmp/testfile.txt";
    printed(&exec(&fixture.peer, "one", write).await);
    let read = exec(&fixture.peer, "one", "cat /tmp/testfile.txt").await;
    assert_eq!(printed(&read), "hello from file");
    let other = exec(&fixture.peer, "two", "cat /tmp/testfile.txt").await;
    assert_eq!(other.exit_code, Some(1));
}

async fn a_timeout_kills_the_command_and_deletes_the_box(setup: Setup) {
    let seconds = mark();
    let fixture = setup.real_boxes().start().await;
    let asked = json!({"box_id": "slow", "timeout_sec": 1, "cmd": format!("sleep {seconds}")});
    let asked = json!({"spec": spec(asked), "on_timeout": "drop_box"});
    let asked = serde_json::from_value(asked).unwrap();
    let result = fixture.peer.call::<BoxExec>(&asked).await.unwrap();
    assert_eq!(
        (result.status, result.exit_code),
        (ExecutionStatus::TimedOut, None)
    );
    assert_eq!(processes_with(&seconds), 0);
    let asked = BoxGetParams::new(BoxId::new("slow").unwrap());
    let Err(CallError::Refused(error)) = fixture.peer.call::<BoxGet>(&asked).await else {
        panic!("the session is still there")
    };
    assert_eq!(error.code(), Code::NotFound);
}

async fn without_a_network_nothing_outside_is_reached(setup: Setup) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let connect = format!("exec 3<>/dev/tcp/127.0.0.1/{port}");
    // The control: the same command reaches the same listener from outside.
    let outside = Command::new("bash").args(["-c", &connect]).status();
    assert!(outside.unwrap().success());
    let fixture = setup.real_boxes().start().await;
    let inside = exec(&fixture.peer, "offline", &format!("bash -c '{connect}'")).await;
    assert_eq!(inside.exit_code, Some(1), "{inside:?}");
    assert!(inside.stderr.contains("Connection refused"), "{inside:?}");
    let away = "bash -c 'exec 3<>/dev/tcp/1.1.1.1/80'";
    let away = exec(&fixture.peer, "offline", away).await;
    assert!(away.stderr.contains("Network is unreachable"), "{away:?}");
}

async fn a_box_that_cannot_be_is_a_typed_error(setup: Setup) {
    let fixture = setup.real_boxes().start().await;
    let asked = json!({"box_id": "gone", "host_path": "/not/there/at/all", "cmd": "true"});
    let Err(CallError::Refused(error)) = exec_spec(&fixture.peer, spec(asked)).await else {
        panic!("the path to mount does not exist")
    };
    assert_eq!(error.code(), Code::Validation);
    assert!(error.message().contains("does not exist"), "{error:?}");
    printed(&exec(&fixture.peer, "other", "true").await);
}

async fn a_tool_call_goes_through_service_wire_and_runtime(setup: Setup) {
    let fixture = setup.real_boxes().start().await;
    let config: ServiceConfig = serde_json::from_value(json!({})).unwrap();
    let service = BoxService::with_client(config, fixture.peer.clone()).unwrap();
    service.initialize().await.unwrap();
    let command = json!({"command": "echo service-path"});
    let command = command.as_object().unwrap().clone();
    let result = service.execute_tool(command, &Query::new(42)).await;
    let result = result.unwrap();
    assert!(result.ok, "{result:?}");
    assert_eq!(
        (result.stdout.as_str(), result.session_id.as_str()),
        ("service-path\n", "42")
    );
}

async fn a_caller_that_is_cut_resumes_at_its_offset(setup: Setup) {
    let (first, second) = setup.real_boxes().start_twice().await;
    printed(&exec(&first.peer, "cut", "true").await);
    let text = "for i in $(seq 1 300); do echo line $i; sleep 0.002; done";
    let start =
        json!({"box_id": "cut", "command_id": "c", "program": {"text": text}, "cwd": "/tmp"});
    let start = serde_json::from_value(start).unwrap();
    first.peer.call::<CommandStart>(&start).await.unwrap();
    let from = |offset: usize| -> CommandAttachParams {
        let params = json!({"box_id": "cut", "command_id": "c",
            "from": {"offsets": {"stdout": offset, "stderr": 0}}});
        serde_json::from_value(params).unwrap()
    };
    let mut read = String::new();
    let mut chunks = first.peer.stream::<CommandAttach>(&from(0)).await.unwrap();
    while read.len() < 500 {
        let Some(Ok(CommandChunk::Text(piece))) = chunks.next().await else {
            panic!("it continues")
        };
        read.push_str(&piece.data);
    }
    first.client.cut();
    let mut chunks = second
        .peer
        .stream::<CommandAttach>(&from(read.len()))
        .await
        .unwrap();
    while let Some(chunk) = chunks.next().await {
        let CommandChunk::Text(piece) = chunk.unwrap() else {
            panic!("no byte is dropped")
        };
        assert_eq!(piece.offset, read.len() as u64);
        read.push_str(&piece.data);
    }
    let whole: Vec<String> = (1..=300).map(|n| format!("line {n}\n")).collect();
    assert_eq!(read, whole.concat());
    let exit = chunks.finish().await.unwrap().info.exit.unwrap();
    assert_eq!(exit.code, Some(0));
}
