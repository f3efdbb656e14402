//! A link reconnects by itself, and reports that it is reconnecting.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use box_rpc::{
    Auth, CallError, Caller, Code, ConnectionError, Empty, HelloParams, Options, Session, Tokens,
};
use box_test_wait::eventually;
use box_tests::actions::{Echo, Server as TestServer, Text, Who};
use box_tests::fixture::TOKEN;
use box_transports::reconnecting::{ReconnectOptions, Reconnecting};
use box_transports::server::Server;
use box_transports::{ConnectOptions, Endpoint, ListenOptions, queue};
use tokio::time::Instant;

async fn server(endpoint: &Endpoint) -> Server {
    let listener = endpoint.listen(&ListenOptions::default()).await.unwrap();
    let auth = Auth::Tokens(Tokens::new([("linked".to_owned(), TOKEN.to_owned())]));
    let options = Options::new(auth);
    Server::start(
        listener,
        Arc::new(TestServer::default()).router(),
        move |_| options.clone(),
    )
}

fn quick() -> ReconnectOptions {
    ReconnectOptions {
        hello: Some(HelloParams {
            token: Some(TOKEN.into()),
            ..HelloParams::default()
        }),
        first_wait: Duration::from_millis(10),
        longest_wait: Duration::from_millis(100),
        ..ReconnectOptions::default()
    }
}

#[tokio::test]
async fn a_reconnected_client_authenticates_again_and_calls_in_between_fail() {
    let directory = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", directory.path().join("s").display());
    for text in [
        "tcp://127.0.0.1:0",
        "ws://127.0.0.1:0",
        &socket,
        "queue:reconnect",
    ] {
        let first = server(&text.parse().unwrap()).await;
        let endpoint = first.endpoint().clone();
        let link = Reconnecting::to(endpoint.clone(), ConnectOptions::default(), quick());
        assert_eq!(
            link.connected()
                .await
                .unwrap()
                .call::<Who>(&Empty {})
                .await
                .unwrap(),
            Text::new("linked")
        );
        assert_eq!(link.hello().unwrap().contract, 1);
        drop(first);
        link.disconnected().await;
        let error = link.call::<Echo>(&Text::new("x")).await.unwrap_err();
        assert!(matches!(error, CallError::NotSent(_)), "{error:?}");
        assert_eq!(error.code(), Code::Unavailable);
        let _second = server(&endpoint).await;
        eventually("the link has reconnected", async || {
            link.call::<Echo>(&Text::new("x")).await.is_ok()
        })
        .await;
        assert_eq!(
            link.call::<Who>(&Empty {}).await.unwrap(),
            Text::new("linked")
        );
    }
}

#[tokio::test]
async fn a_wrong_token_fails_every_call() {
    let server = server(&"tcp://127.0.0.1:0".parse().unwrap()).await;
    let hello = HelloParams {
        token: Some("wrong".into()),
        ..HelloParams::default()
    };
    let link = Reconnecting::to(
        server.endpoint().clone(),
        ConnectOptions::default(),
        ReconnectOptions {
            hello: Some(hello),
            ..quick()
        },
    );
    eventually("the link knows the refusal", async || {
        link.call::<Echo>(&Text::new("x"))
            .await
            .unwrap_err()
            .to_string()
            .contains("denied")
    })
    .await;
}

/// An unreachable server, and a counter of the attempts.
fn nowhere() -> (box_transports::reconnecting::Connector, Arc<AtomicU64>) {
    let tries = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&tries);
    let connector: box_transports::reconnecting::Connector = Box::new(move || {
        counter.fetch_add(1, Ordering::SeqCst);
        Box::pin(async { Err(ConnectionError::Closed) })
    });
    (connector, tries)
}

#[tokio::test(start_paused = true)]
async fn attempts_become_rarer_up_to_a_bound() {
    let (connector, tries) = nowhere();
    let _link = Reconnecting::with_connector(connector, ReconnectOptions::default());
    tokio::time::sleep(Duration::from_secs(10)).await;
    let early = tries.load(Ordering::SeqCst);
    assert!((5..=12).contains(&early), "{early}");
    tokio::time::sleep(Duration::from_secs(1000)).await;
    let late = tries.load(Ordering::SeqCst) - early;
    assert!(
        (95..=205).contains(&late),
        "{late} attempts in 1000 s with waits of 5 to 10 s"
    );
}

#[tokio::test(start_paused = true)]
async fn a_caller_can_force_an_attempt() {
    let (connector, tries) = nowhere();
    let link = Reconnecting::with_connector(connector, ReconnectOptions::default());
    tokio::time::sleep(Duration::from_mins(1)).await;
    let before = tries.load(Ordering::SeqCst);
    link.retry_now();
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(tries.load(Ordering::SeqCst), before + 1);
}

#[tokio::test(start_paused = true)]
async fn a_single_attempt_fails_at_once_with_its_error() {
    let (connector, tries) = nowhere();
    let link = Reconnecting::with_connector(connector, ReconnectOptions::default());
    tokio::time::sleep(Duration::from_mins(1)).await;
    let (before, begun) = (tries.load(Ordering::SeqCst), Instant::now());
    for n in 1..=3 {
        let error = link.try_now().await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable);
        assert_eq!(tries.load(Ordering::SeqCst), before + n);
    }
    assert_eq!(begun.elapsed(), Duration::ZERO);
    let waited = link.connected_within(Duration::from_secs(7)).await;
    assert!(waited.is_err());
    assert_eq!(begun.elapsed(), Duration::from_secs(7));
}

#[tokio::test(start_paused = true)]
async fn a_client_reconnects_at_once_after_a_bye_for_a_restart() {
    let (give, mut take) = tokio::sync::mpsc::unbounded_channel();
    let connector: box_transports::reconnecting::Connector = Box::new(move || {
        let give = give.clone();
        Box::pin(async move {
            let (ours, theirs) = queue::pair(16);
            let _ = give.send(theirs);
            Ok(Box::new(ours) as Box<dyn box_rpc::Connection>)
        })
    });
    let link = Reconnecting::with_connector(
        connector,
        ReconnectOptions {
            first_wait: Duration::from_secs(100),
            longest_wait: Duration::from_secs(100),
            ..ReconnectOptions::default()
        },
    );
    let serve = |connection| {
        Session::start(
            connection,
            Arc::new(TestServer::default()).router(),
            Options::new(Caller::Local),
        )
    };
    let first = serve(take.recv().await.unwrap());
    link.connected().await.unwrap();
    let left = Instant::now();
    first.close_for_restart(Duration::from_secs(1)).await;
    let _second = serve(take.recv().await.unwrap());
    link.connected().await.unwrap();
    assert!(
        left.elapsed() < Duration::from_secs(5),
        "{:?}",
        left.elapsed()
    );
}
