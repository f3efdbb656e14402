//! The contract over a connection: errors keep their codes, chunks arrive, unserved actions say so.

use box_protocol::actions::{
    AttachOptions, BoxCreate, BoxCreateParams, BoxDelete, BoxDeleteParams, BoxExec, BoxGet,
    BoxGetParams, BoxList, BoxListParams, CommandChunk, SystemConfigure, SystemConfigureParams,
    SystemHealth, SystemShutdown, SystemShutdownParams, SystemStatus,
};
use box_protocol::{Code, SpecDraft};
use box_rpc::{CallError, Empty, Options, Router, Session};
use box_runtime::Caller;
use box_runtime::fake::Reply;
use box_transports::queue;
use futures::StreamExt as _;

use super::fixture::{Fixture, code, exec_of, fixture, id, seconds, settle, spec};

struct Line {
    client: Session,
    _server: Session,
}

fn line(w: &Fixture, caller: Option<&str>) -> Line {
    let (near, far) = queue::pair(64);
    let options = Options::new(caller.map_or(Caller::Local, Caller::token));
    Line {
        _server: Session::start(far, w.runtime.router(), options),
        client: Session::start(near, Router::empty(), Options::client()),
    }
}

fn word<T: std::fmt::Debug>(result: Result<T, CallError>) -> Code {
    result.unwrap_err().code()
}

#[tokio::test(start_paused = true)]
async fn a_box_is_created_used_and_deleted_over_a_connection() {
    let w = fixture();
    let line = line(&w, None);
    let peer = line.client.peer();
    let initialized = peer
        .call::<SystemConfigure>(&SystemConfigureParams::default())
        .await
        .unwrap();
    assert!(initialized.initialized);
    assert_eq!(
        peer.call::<SystemHealth>(&Empty {})
            .await
            .unwrap()
            .name
            .as_deref(),
        Some("fake")
    );
    let create = BoxCreateParams::new(SpecDraft::new("r-1"));
    assert!(!peer.call::<BoxCreate>(&create).await.unwrap().existed);
    let result = peer
        .call::<BoxExec>(&exec_of(spec("r-1", "echo remote")))
        .await
        .unwrap();
    assert_eq!(
        (result.stdout.as_str(), result.exit_code),
        ("executed: echo remote", Some(0))
    );
    let conflicting = exec_of(spec("r-1", "true").cpus(3.0));
    assert_eq!(
        word(peer.call::<BoxExec>(&conflicting).await),
        Code::Conflict
    );
    let key = BoxGetParams::new(id("r-1"));
    assert_eq!(
        peer.call::<BoxGet>(&key).await.unwrap().info.backend_name,
        "fake"
    );
    assert_eq!(
        peer.call::<BoxList>(&BoxListParams::default())
            .await
            .unwrap()
            .total,
        1
    );
    assert_eq!(
        peer.call::<SystemStatus>(&Empty {})
            .await
            .unwrap()
            .active_boxes,
        1
    );
    let delete = BoxDeleteParams {
        box_id: id("r-1"),
        force: false,
    };
    peer.call::<BoxDelete>(&delete).await.unwrap();
    assert_eq!(word(peer.call::<BoxDelete>(&delete).await), Code::NotFound);
    assert_eq!(word(peer.call::<BoxGet>(&key).await), Code::NotFound);
    let down = peer
        .call::<SystemShutdown>(&SystemShutdownParams::default())
        .await
        .unwrap();
    assert_eq!(down.ended, 0);
}

#[tokio::test(start_paused = true)]
async fn a_connection_has_the_identity_of_its_token() {
    let w = fixture();
    let (alice, bob) = (line(&w, Some("alice")), line(&w, Some("bob")));
    alice
        .client
        .peer()
        .call::<BoxExec>(&exec_of(spec("s", "true")))
        .await
        .unwrap();
    assert_eq!(
        bob.client
            .peer()
            .call::<BoxList>(&BoxListParams::default())
            .await
            .unwrap()
            .total,
        0
    );
    let refused = bob
        .client
        .peer()
        .call::<BoxGet>(&BoxGetParams::new(id("s")))
        .await;
    assert_eq!(word(refused), Code::NotFound);
    w.runtime
        .get(&Caller::token("alice"), &id("s"))
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn output_streams_over_a_connection() {
    let w = fixture();
    let line = line(&w, None);
    w.backend
        .next_command(Reply::stdout(vec![b'x'; 40 * 32 * 1024]));
    let mut params = exec_of(spec("s", "job"));
    params.attach = Some(AttachOptions::default());
    let peer = line.client.peer();
    let mut stream = peer.stream::<BoxExec>(&params).await.unwrap();
    let mut bytes = 0;
    while let Some(chunk) = stream.next().await {
        if let CommandChunk::Text(piece) = chunk.unwrap() {
            bytes += piece.data.len();
        }
    }
    assert_eq!(bytes, 40 * 32 * 1024);
    assert_eq!(stream.finish().await.unwrap().exit_code, Some(0));
    // Without a stream the same call collects.
    w.backend.next_command(Reply::stdout("all"));
    assert_eq!(peer.call::<BoxExec>(&params).await.unwrap().stdout, "all");
}

#[tokio::test(start_paused = true)]
async fn a_broken_connection_kills_its_command() {
    let w = fixture();
    let line = line(&w, None);
    w.backend.on_command("sleep", Reply::hang());
    let peer = line.client.peer();
    let params = exec_of(spec("s", "sleep"));
    let call = tokio::spawn(async move { peer.call::<BoxExec>(&params).await });
    settle().await;
    assert_eq!(w.backend.execs().len(), 1);
    line.client.cut();
    drop(line);
    tokio::time::sleep(seconds(1)).await;
    assert_eq!(w.backend.killed(), ["sleep"]);
    assert_eq!(word(call.await.unwrap()), Code::Unavailable);
    assert_eq!(w.ids().await, ["s"]);
}

#[tokio::test(start_paused = true)]
async fn configuration_is_bounded() {
    let w = fixture();
    let params = |bytes: usize| {
        let value = serde_json::Value::String("x".repeat(bytes));
        SystemConfigureParams([("key".to_owned(), value)].into_iter().collect())
    };
    w.runtime
        .configure(&w.caller, params(100_000))
        .await
        .unwrap();
    assert_eq!(
        code(w.runtime.configure(&w.caller, params(300_000)).await),
        Code::TooLarge
    );
    w.runtime
        .configure(&w.caller, params(200_000))
        .await
        .unwrap();
}
