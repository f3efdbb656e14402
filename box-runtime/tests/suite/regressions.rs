//! Sequences of calls that once failed.

use box_protocol::actions::{
    AgentChunk, AttachOptions, BoxExec, OutputPiece, ReadBegin, StreamName, Until, View,
};
use box_protocol::{
    BoxMountSpec, Code, ExecutionStatus, HostPathMode, Lifetime, PerStream, SpecDraft, UnixMs,
};
use box_rpc::{Caller, Options, Router, Session};
use box_runtime::fake::{InjectedFault, Reply};
use box_transports::queue;
use tokio::sync::mpsc;

use super::fixture::{exec_of, fixture, seconds, settle, spec};

fn piece(offset: u64, data: Vec<u8>) -> AgentChunk {
    AgentChunk::Bytes(OutputPiece {
        stream: StreamName::Stdout,
        offset,
        pos: 0,
        at: UnixMs(0),
        data: data.into(),
    })
}

fn streamed(view: View) -> box_protocol::actions::BoxExecParams {
    let mut params = exec_of(spec("s", "job").timeout_sec(3));
    params.attach = Some(AttachOptions {
        view,
        until: Until::default(),
    });
    params
}

#[tokio::test]
async fn a_box_that_expires_before_it_is_ready_is_not_restarted() {
    let fixture = fixture();
    fixture
        .backend
        .next_start(InjectedFault::Slow(std::time::Duration::from_millis(5)));
    let mut past = SpecDraft::new("s");
    past.lifetime = Some(Lifetime {
        expires_at: Some(UnixMs(1)),
        ..Lifetime::default()
    });
    let made = fixture.create(past).await;
    assert!(made.is_err(), "{made:?}");
    settle().await;
    assert!(
        fixture.backend.starts().len() <= 1,
        "{:?}",
        fixture.backend.starts()
    );
}

#[tokio::test(start_paused = true)]
async fn offsets_that_overflow_are_invalid_and_leave_no_box_behind() {
    let fixture = fixture();
    fixture.backend.next_command(Reply::default().chunks(vec![
        AgentChunk::Started { pid: 2, info: None },
        AgentChunk::Begin(ReadBegin {
            raw: PerStream {
                stdout: u64::MAX,
                stderr: 0,
            },
            ..ReadBegin::default()
        }),
        piece(u64::MAX, b"x".to_vec()),
    ]));
    let (to, mut from) = mpsc::channel(2);
    let exec = fixture
        .runtime
        .exec_streamed(&fixture.caller, streamed(View::Bytes), to);
    let (result, ()) = tokio::join!(exec, async { while from.recv().await.is_some() {} });
    assert_eq!(result.unwrap_err().code(), Code::Unavailable);
    settle().await;
    assert_eq!(fixture.backend.running(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_box_has_the_mounts_of_the_call_that_restarts_it() {
    let fixture = fixture();
    let mount = |path: &str| BoxMountSpec::new(path, "/x", HostPathMode::Rw).unwrap();
    let with = |path: &str| spec("s", "a").extra_mounts(vec![mount(path)]);
    fixture.exec_spec(with("/shared/x")).await.unwrap();
    fixture.backend.cut_agent("s");
    settle().await;
    fixture.exec("s", "b").await.unwrap();
    assert_eq!(fixture.backend.specs().last().unwrap().extra_mounts, []);
    fixture.backend.cut_agent("s");
    settle().await;
    fixture.exec_spec(with("/shared/y")).await.unwrap();
    assert_eq!(
        fixture.backend.specs().last().unwrap().extra_mounts,
        [mount("/shared/y")]
    );
}

#[tokio::test(start_paused = true)]
async fn an_unsendable_chunk_ends_the_call_but_not_the_queue() {
    let fixture = fixture();
    let (near, far) = queue::pair(64);
    let mut options = Options::new(Caller::Local);
    options.limits.message_bytes = 64 * 1024;
    let _server = Session::start(far, fixture.runtime.router(), options);
    let client = Session::start(near, Router::empty(), Options::client());
    let output = (0..10).map(|n| piece(n * 32_768, vec![0; 32_768]));
    let chunks = std::iter::once(AgentChunk::Started { pid: 2, info: None })
        .chain(output)
        .collect();
    fixture
        .backend
        .next_command(Reply::default().chunks(chunks));
    let params = streamed(View::Text);
    let call = async {
        client
            .peer()
            .stream::<BoxExec>(&params)
            .await
            .unwrap()
            .finish()
            .await
    };
    let ended = tokio::time::timeout(seconds(3600), call)
        .await
        .expect("the call is answered");
    assert_eq!(ended.unwrap_err().code(), Code::TooLarge);
    fixture.exec("s", "next").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_stalled_reader_does_not_extend_the_timeout() {
    let fixture = fixture();
    fixture
        .backend
        .next_command(Reply::stdout(vec![b'x'; 4_000_000]));
    let (to, from) = mpsc::channel(2);
    let exec = fixture
        .runtime
        .exec_streamed(&fixture.caller, streamed(View::Bytes), to);
    let result = tokio::time::timeout(seconds(600), exec)
        .await
        .expect("it ends");
    assert_eq!(result.unwrap().status, ExecutionStatus::TimedOut);
    drop(from);
    fixture.exec("s", "next").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waited_for_another_owners_box_does_not_take_its_id() {
    let fixture = fixture();
    let alice = fixture.with_token("alice");
    fixture.backend.on_command("long", Reply::hang());
    let _running = alice.begin("s", "long").await;
    let waiting = fixture.begin("s@alice", "x").await;
    alice.shutdown().await;
    assert_eq!(waiting.await.unwrap().unwrap_err().code(), Code::NotFound);
    alice.exec("s", "y").await.unwrap();
}
