//! Output while a command runs.

use box_protocol::actions::{
    AgentChunk, AttachOptions, CommandChunk, OutputPiece, StreamName, Until, View,
};
use box_protocol::{BoxState, Code, ExecutionStatus, Role, UnixMs};
use box_runtime::fake::Reply;
use tokio::sync::mpsc;

use super::fixture::{Fixture, code, exec_of, fixture, seconds, settle, spec};

fn piece(stream: StreamName, offset: u64, data: &[u8]) -> AgentChunk {
    AgentChunk::Bytes(OutputPiece {
        stream,
        offset,
        pos: 0,
        at: UnixMs(0),
        data: data.to_vec().into(),
    })
}

async fn streamed(
    w: &Fixture,
    view: View,
    reply: Reply,
) -> (
    Result<box_protocol::BoxExecutionResult, box_protocol::BoxError>,
    Vec<CommandChunk>,
) {
    w.backend.next_command(reply);
    let mut params = exec_of(spec("s", "job").timeout_sec(3));
    params.attach = Some(AttachOptions {
        view,
        until: Until::default(),
    });
    let (sender, mut receiver) = mpsc::channel(2);
    let mut chunks = Vec::new();
    let (result, ()) = tokio::join!(w.runtime.exec_streamed(&w.caller, params, sender), async {
        while let Some(chunk) = receiver.recv().await {
            chunks.push(chunk);
        }
    });
    (result, chunks)
}

fn texts(chunks: &[CommandChunk]) -> Vec<(StreamName, u64, u64, &str)> {
    let mut texts = Vec::new();
    for chunk in chunks {
        if let CommandChunk::Text(piece) = chunk {
            texts.push((piece.stream, piece.offset, piece.pos, &*piece.data));
        }
    }
    texts
}

#[tokio::test(start_paused = true)]
async fn the_start_comes_first_then_output_then_the_result() {
    let w = fixture();
    let (result, chunks) =
        streamed(&w, View::Text, Reply::stdout("out").stderr("err").exit(4)).await;
    let result = result.unwrap();
    assert_eq!((result.exit_code, result.stdout.as_str()), (Some(4), ""));
    let CommandChunk::Started(info) = &chunks[0] else {
        panic!("{chunks:?}")
    };
    assert_eq!(
        (info.role, info.box_id.as_str(), info.pid),
        (Role::Exec, "s", Some(2))
    );
    assert_eq!(
        texts(&chunks),
        [
            (StreamName::Stdout, 0, 0, "out"),
            (StreamName::Stderr, 0, 3, "err")
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn split_characters_are_joined() {
    let w = fixture();
    let reply = Reply::default().chunks(vec![
        AgentChunk::Started { pid: 9, info: None },
        piece(StreamName::Stdout, 0, b"a\xe2\x82"),
        piece(StreamName::Stdout, 3, b"\xacb\xff"),
        piece(StreamName::Stdout, 6, b"z\xe2"),
    ]);
    let (result, chunks) = streamed(&w, View::Text, reply).await;
    result.unwrap();
    let stdout = StreamName::Stdout;
    assert_eq!(
        texts(&chunks),
        [
            (stdout, 0, 0, "a"),
            (stdout, 1, 1, "€b\u{fffd}"),
            (stdout, 8, 8, "z"),
            (stdout, 9, 9, "\u{fffd}"),
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn the_bytes_view_is_unchanged_and_no_view_collects() {
    let w = fixture();
    let (result, chunks) = streamed(&w, View::Bytes, Reply::stdout(b"\xff\x00".to_vec())).await;
    result.unwrap();
    assert!(matches!(&chunks[1], CommandChunk::Bytes(piece) if piece.data[..] == [0xff, 0]));
    let (result, chunks) = streamed(&w, View::None, Reply::stdout("all")).await;
    assert_eq!((result.unwrap().stdout.as_str(), chunks.len()), ("all", 0));
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_streams_invalid_chunks_fails_the_box() {
    let w = fixture();
    let started = AgentChunk::Started { pid: 1, info: None };
    let lies = [
        vec![piece(StreamName::Stdout, 0, b"early")],
        vec![started.clone(), started.clone()],
        vec![started.clone(), piece(StreamName::Stdout, 7, b"ahead")],
        vec![
            started.clone(),
            piece(StreamName::Stdout, 0, &vec![0; 33 * 1024]),
        ],
        vec![started, piece(StreamName::Stderr, 1, b"ahead")],
    ];
    for lie in lies {
        let (result, _) = streamed(&w, View::Bytes, Reply::default().chunks(lie)).await;
        assert_eq!(code(result), Code::Unavailable);
        assert_eq!(w.get("s").await.unwrap().state, BoxState::Failed);
    }
}

#[tokio::test(start_paused = true)]
async fn a_streamed_timeout_ends_the_box_too() {
    let w = fixture();
    let (result, chunks) = streamed(&w, View::Text, Reply::hang().stderr("x")).await;
    assert_eq!(result.unwrap().status, ExecutionStatus::TimedOut);
    assert_eq!(texts(&chunks).len(), 1);
    assert_eq!(w.ids().await, [""; 0]);
    let (result, _) = streamed(&w, View::Text, Reply::hang().ignores_timeout()).await;
    assert_eq!(result.unwrap().stderr, "Command timed out after 3 seconds.");
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_is_not_a_silent_agent() {
    let w = fixture();
    w.backend
        .next_command(Reply::stdout(vec![b'x'; 20 * 32 * 1024]));
    let mut params = exec_of(spec("s", "job").timeout_sec(3));
    params.attach = Some(AttachOptions::default());
    let (sender, mut receiver) = mpsc::channel(1);
    let (runtime, caller) = (w.runtime.clone(), w.caller.clone());
    let exec = tokio::spawn(async move { runtime.exec_streamed(&caller, params, sender).await });
    tokio::time::sleep(seconds(60)).await;
    let mut bytes = 0;
    while let Some(chunk) = receiver.recv().await {
        bytes += texts(&[chunk])
            .iter()
            .map(|(.., text)| text.len())
            .sum::<usize>();
    }
    assert_eq!(bytes, 20 * 32 * 1024);
    assert_eq!(exec.await.unwrap().unwrap().exit_code, Some(0));
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_leaves_kills_the_command() {
    let w = fixture();
    w.backend.next_command(Reply::hang());
    let mut params = exec_of(spec("s", "job"));
    params.attach = Some(AttachOptions::default());
    let (sender, _receiver) = mpsc::channel(8);
    let (runtime, caller) = (w.runtime.clone(), w.caller.clone());
    let exec = tokio::spawn(async move { runtime.exec_streamed(&caller, params, sender).await });
    settle().await;
    exec.abort();
    settle().await;
    assert_eq!(w.backend.killed(), ["job"]);
}
