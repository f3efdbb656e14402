//! Calls that the runtime forwards to the agent of a box, past its queue of execs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use box_protocol::actions::{
    BoxCreateParams, BoxDeleteParams, FileRead, FileReadParams, FileStat, FileStatParams,
    FileStatResult, FileWrite, FileWriteParams, SystemShutdownParams,
};
use box_protocol::error::{Detail, Ended};
use box_protocol::{BoxError, BoxState, Code, SpecDraft, UnixMs};
use box_runtime::{BoxRuntime, Caller, RuntimeConfig};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::file_backend::{FileBackend, Shared};
use super::fixture::{code, fixture, id, seconds, settle};

fn runtime(shared: Shared, ttl: Duration) -> (BoxRuntime, FileBackend) {
    let backend = FileBackend(Arc::new(shared));
    let mut config = RuntimeConfig::with(backend.clone());
    config.idle_ttl = ttl;
    (BoxRuntime::start(config), backend)
}

async fn create(runtime: &BoxRuntime, caller: &Caller) -> Result<(), BoxError> {
    let params = BoxCreateParams::new(SpecDraft::new("s"));
    runtime.create(caller, params).await.map(drop)
}

fn stat(runtime: &BoxRuntime, path: &str) -> JoinHandle<Result<FileStatResult, BoxError>> {
    let (runtime, path) = (runtime.clone(), path.to_owned());
    tokio::spawn(async move { ask(&runtime, &Caller::Local, "s", &path).await })
}

async fn ask(
    runtime: &BoxRuntime,
    caller: &Caller,
    box_id: &str,
    path: &str,
) -> Result<FileStatResult, BoxError> {
    let params = FileStatParams {
        box_id: id(box_id),
        user: None,
        expand: false,
        paths: vec![path.to_owned()],
        follow: false,
    };
    runtime.forward::<FileStat>(caller, &params).await
}

fn read_params(path: &str) -> FileReadParams {
    FileReadParams {
        box_id: id("s"),
        user: None,
        expand: false,
        path: path.to_owned(),
        part: None,
        if_match: None,
    }
}

#[tokio::test(start_paused = true)]
async fn an_unknown_box_or_that_of_another_owner_is_not_found() {
    let (runtime, _backend) = runtime(Shared::default(), seconds(300));
    create(&runtime, &Caller::token("alice")).await.unwrap();
    for (caller, box_id) in [("bob", "s"), ("alice", "other")] {
        let caller = Caller::token(caller);
        let refused = ask(&runtime, &caller, box_id, "/x").await;
        assert_eq!(code(refused), Code::NotFound);
    }
    let mine = ask(&runtime, &Caller::token("alice"), "s", "/x").await;
    mine.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_call_waits_for_a_starting_box() {
    let shared = Shared {
        start_takes: seconds(20),
        ..Shared::default()
    };
    let (runtime, _backend) = runtime(shared, seconds(300));
    let made = tokio::spawn({
        let runtime = runtime.clone();
        async move { create(&runtime, &Caller::Local).await }
    });
    settle().await;
    let waiting = stat(&runtime, "/x");
    sleep(seconds(19)).await;
    assert!(!waiting.is_finished());
    made.await.unwrap().unwrap();
    waiting.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_call_shares_the_outcome_of_the_start_it_waits_for() {
    let shared = Shared {
        start_takes: seconds(5),
        start_fails: true,
        ..Shared::default()
    };
    let (runtime, _backend) = runtime(shared, seconds(300));
    let made = tokio::spawn({
        let runtime = runtime.clone();
        async move { create(&runtime, &Caller::Local).await }
    });
    settle().await;
    let waiting = stat(&runtime, "/x");
    assert_eq!(code(made.await.unwrap()), Code::Unavailable);
    let error = waiting.await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("no box today"), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_box_with_a_disconnected_agent_is_unavailable_with_the_reason() {
    let (runtime, backend) = runtime(Shared::default(), seconds(300));
    create(&runtime, &Caller::Local).await.unwrap();
    let under_way = stat(&runtime, "/slow");
    settle().await;
    backend.0.agents.lock().await.clear();
    let lost = under_way.await.unwrap();
    assert_eq!(code(lost), Code::Unavailable);
    settle().await;
    let info = runtime.get(&Caller::Local, &id("s")).await.unwrap();
    assert_eq!(info.state, BoxState::Failed);
    let error = stat(&runtime, "/x").await.unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("agent"), "{error:?}");
}

/// The reason in the error why the box of a call has ended.
fn ended(error: &BoxError) -> Option<Ended> {
    error.detail().and_then(|detail: Detail| detail.ended)
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_box_ends_gets_the_reason_and_so_do_later_calls() {
    let me = Caller::Local;
    for why in [
        Ended::Deleted,
        Ended::Expired,
        Ended::Shutdown,
        Ended::Failed,
    ] {
        let (runtime, backend) = runtime(Shared::default(), seconds(300));
        create(&runtime, &me).await.unwrap();
        let under_way = stat(&runtime, "/slow");
        settle().await;
        match why {
            Ended::Deleted => {
                let params = BoxDeleteParams {
                    box_id: id("s"),
                    force: true,
                };
                runtime.delete(&me, params).await.map(drop).unwrap();
            }
            Ended::Expired => {
                let change =
                    serde_json::json!({"box_id": "s", "lifetime": {"expires_at": UnixMs::now()}});
                let change = serde_json::from_value(change).unwrap();
                runtime.update(&me, change).await.unwrap();
            }
            Ended::Shutdown => {
                let params = SystemShutdownParams {
                    exit: false,
                    within_ms: None,
                };
                runtime.shutdown(&me, params).await.map(drop).unwrap();
            }
            _ => backend.0.agents.lock().await.clear(),
        }
        let error = under_way.await.unwrap().unwrap_err();
        assert_eq!(ended(&error), Some(why), "{error:?}");
        settle().await;
        let later = stat(&runtime, "/x").await.unwrap().unwrap_err();
        assert_eq!(ended(&later), Some(why), "{later:?}");
        // Other callers learn nothing, and a new box starts without a history.
        let other = ask(&runtime, &Caller::token("bob"), "s", "/x").await;
        assert_eq!(ended(&other.unwrap_err()), None);
        if why == Ended::Failed {
            continue;
        }
        assert_eq!(later.code(), Code::NotFound);
        create(&runtime, &me).await.unwrap();
        stat(&runtime, "/x").await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_to_an_expired_idle_box_names_the_reason() {
    let (runtime, _backend) = runtime(Shared::default(), seconds(100));
    let me = Caller::Local;
    create(&runtime, &me).await.unwrap();
    sleep(seconds(110)).await;
    let error = runtime.get(&me, &id("s")).await.unwrap_err();
    assert_eq!(
        (error.code(), ended(&error)),
        (Code::NotFound, Some(Ended::Idle))
    );
    let expected = "box s not found: it expired: no call used it for its idle time";
    assert_eq!(error.message(), expected);
}

#[tokio::test(start_paused = true)]
async fn a_call_keeps_its_box_in_use_until_it_ends() {
    let (runtime, _backend) = runtime(Shared::default(), seconds(100));
    let me = Caller::Local;
    create(&runtime, &me).await.unwrap();
    sleep(seconds(90)).await;
    let slow = stat(&runtime, "/slow");
    // The call takes ten times the idle limit. The idle time restarts when the call ends.
    slow.await.unwrap().unwrap();
    sleep(seconds(99)).await;
    let info = runtime.get(&me, &id("s")).await.unwrap();
    assert_eq!(info.state, BoxState::Running);
    let idle = UnixMs::now().since(info.last_used_at);
    assert!(idle < Duration::from_mins(5), "{idle:?}");
    sleep(seconds(2)).await;
    assert_eq!(code(runtime.get(&me, &id("s")).await), Code::NotFound);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_call_is_cancelled_in_the_agent() {
    let (runtime, backend) = runtime(Shared::default(), seconds(100));
    create(&runtime, &Caller::Local).await.unwrap();
    let slow = stat(&runtime, "/slow");
    settle().await;
    assert_eq!(backend.0.running.load(Ordering::Relaxed), 1);
    slow.abort();
    settle().await;
    assert_eq!(backend.0.running.load(Ordering::Relaxed), 0);
    sleep(seconds(101)).await;
    let gone = runtime.get(&Caller::Local, &id("s")).await;
    assert_eq!(code(gone), Code::NotFound, "no call keeps the box in use");
}

#[tokio::test(start_paused = true)]
async fn calls_beyond_the_limit_of_a_box_are_refused_and_later_ones_accepted() {
    let (runtime, _backend) = runtime(Shared::default(), seconds(100));
    create(&runtime, &Caller::Local).await.unwrap();
    let calls: Vec<_> = (0..192).map(|_| stat(&runtime, "/slow")).collect();
    settle().await;
    let refused = stat(&runtime, "/x").await.unwrap();
    assert_eq!(code(refused), Code::Overloaded);
    create(&runtime, &Caller::Local).await.unwrap();
    calls[0].abort();
    settle().await;
    stat(&runtime, "/x").await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn bytes_beyond_the_limit_of_a_box_are_refused_and_later_ones_accepted() {
    let (runtime, _backend) = runtime(Shared::default(), seconds(100));
    create(&runtime, &Caller::Local).await.unwrap();
    let write = |path: &str, bytes: usize| {
        let runtime = runtime.clone();
        let params = serde_json::json!({"box_id": "s", "path": path, "data": "",
            "upload": {"id": path.trim_matches('/'), "offset": 0, "done": true}});
        let mut params: FileWriteParams = serde_json::from_value(params).unwrap();
        params.data = vec![0; bytes].into();
        tokio::spawn(async move { runtime.forward::<FileWrite>(&Caller::Local, &params).await })
    };
    let calls: Vec<_> = (0..4).map(|_| write("/slow", 16 << 20)).collect();
    settle().await;
    let error = write("/x", 1).await.unwrap().unwrap_err();
    let detail: Detail = error.detail().unwrap();
    assert_eq!(error.code(), Code::Overloaded);
    assert_eq!(detail.limit.as_deref(), Some("bytes_inside"));
    stat(&runtime, "/x").await.unwrap().unwrap();
    calls[0].abort();
    settle().await;
    write("/x", 16 << 20).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_agents_error_keeps_its_code_and_a_short_message() {
    let (runtime, _backend) = runtime(Shared::default(), seconds(100));
    create(&runtime, &Caller::Local).await.unwrap();
    let error = stat(&runtime, "/refused").await.unwrap().unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::NotFound, "no such file")
    );
    let detail: Detail = error.detail().unwrap();
    assert_eq!(
        (detail.errno.as_deref(), detail.limit),
        (Some("ENOENT"), None)
    );
    let rude = stat(&runtime, "/rude").await.unwrap().unwrap_err();
    assert_eq!((rude.code(), rude.message().len()), (Code::Conflict, 512));
    assert_eq!(rude.detail::<Detail>(), None);
}

#[tokio::test(start_paused = true)]
async fn chunks_are_forwarded_with_back_pressure() {
    let (runtime, backend) = runtime(Shared::default(), seconds(100));
    let me = Caller::Local;
    create(&runtime, &me).await.unwrap();
    let (to, mut chunks) = mpsc::channel(2);
    let params = read_params("/file");
    let (result, total) = tokio::join!(
        runtime.forward_streamed::<FileRead>(&me, &params, to),
        async {
            let mut total = 0;
            while let Some(chunk) = chunks.recv().await {
                assert_eq!(chunk.offset, total);
                total += chunk.data.len() as u64;
            }
            total
        }
    );
    assert_eq!((result.unwrap().size, total), (400, 400));

    let (to, chunks) = mpsc::channel(2);
    let endless = tokio::spawn({
        let runtime = runtime.clone();
        async move {
            let params = read_params("/endless");
            runtime
                .forward_streamed::<FileRead>(&Caller::Local, &params, to)
                .await
        }
    });
    sleep(seconds(10)).await;
    assert!(!endless.is_finished(), "without a reader the call waits");
    drop(chunks);
    assert_eq!(code(endless.await.unwrap()), Code::Cancelled);
    settle().await;
    assert_eq!(backend.0.running.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn a_chunk_that_is_too_large_ends_the_call() {
    let (runtime, _backend) = runtime(Shared::default(), seconds(100));
    let me = Caller::Local;
    create(&runtime, &me).await.unwrap();
    let (to, mut chunks) = mpsc::channel(2);
    let params = read_params("/large");
    let read = runtime.forward_streamed::<FileRead>(&me, &params, to).await;
    assert_eq!(code(read), Code::Unavailable);
    assert!(chunks.recv().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn an_agent_without_file_support_is_unsupported() {
    let w = fixture();
    w.exec("s", "true").await.unwrap();
    let refused = ask(&w.runtime, &w.caller, "s", "/x").await;
    assert_eq!(code(refused), Code::Unsupported);
}
