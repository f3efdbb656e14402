//! Calls to a server as a whole, with a scripted backend.

use std::time::Duration;

use box_client::{BoxClient, BoxListParams, ClientError, ClientOptions, Code, SpecDraft};
use box_rpc::{Auth, Options, Tokens};
use box_test_wait::eventually;
use box_tests::boxes;
use box_tests::fixture::TOKEN;
use box_transports::server::Server;
use box_transports::{Endpoint, ListenOptions};

use super::support::{fresh, serve, served};

#[tokio::test]
async fn boxes_are_made_found_listed_used_and_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", directory.path().join("s").display());
    for endpoint in [format!("queue:{}", fresh("boxes")), socket] {
        let served = served(&endpoint, boxes::router()).await;
        let client = &served.client;
        assert_eq!(client.health().await.unwrap().name.as_deref(), Some("fake"));
        let work = client.create(SpecDraft::new("one")).await.unwrap();
        assert_eq!((work.id().as_str(), work.existed()), ("one", false));
        let error = client.create(SpecDraft::new("one")).await.unwrap_err();
        assert!(error.is_conflict(), "{error:?}");
        let again = client.get_or_create(SpecDraft::new("one")).await.unwrap();
        assert!(again.existed());
        let error = client.get_or_create(SpecDraft::new("one").cpus(3.0)).await;
        assert_eq!(error.unwrap_err().detail().field.as_deref(), Some("cpus"));
        assert_eq!(client.open("one").await.unwrap().id(), work.id());
        let ran = client
            .exec(SpecDraft::new("one").cmd("hello"))
            .await
            .unwrap();
        assert_eq!(ran.stdout_text(), "executed: hello");
        let all = client.list(BoxListParams::default()).await.unwrap();
        assert_eq!((all.total, &all.items[0].box_id), (1, work.id()));
        assert_eq!(client.status().await.unwrap().active_boxes, 1);
        work.delete().await.unwrap();
        for error in [work.delete().await.err(), client.open("one").await.err()] {
            assert!(error.unwrap().is_not_found());
        }
    }
}

#[tokio::test]
async fn invalid_parameters_are_refused_before_they_are_sent() {
    let served = served(&format!("queue:{}", fresh("rules")), boxes::router()).await;
    let work = served.client.create(SpecDraft::new("w")).await.unwrap();
    drop(served.server);
    // The client cannot send any more, so a refusal comes from the client itself.
    eventually("the connection is gone", async || {
        served.client.peer().is_err()
    })
    .await;
    let client = &served.client;
    let refused = [
        client.create(SpecDraft::new("x").cpus(0.0)).await.err(),
        client.create(SpecDraft::new("a/b")).await.err(),
        client.exec(SpecDraft::new("x").cmd("  \n")).await.err(),
        client.exec(SpecDraft::new("x")).await.err(),
        client.open("").await.err(),
        work.run(" \t").await.err(),
        work.command("").start().await.err(),
        work.command("x").id("a/b").start().await.err(),
        work.command("x").env("A=B", "c").start().await.err(),
        work.program(Vec::<String>::new()).execute().await.err(),
        work.shell("..").open().await.err(),
    ];
    for (n, error) in refused.into_iter().enumerate() {
        assert_eq!(error.unwrap().code(), Code::Validation, "{n}");
    }
    let error = client.health().await.unwrap_err();
    assert!(
        matches!(error, ClientError::Failed(_)) && error.is_unavailable(),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_box_can_end_when_its_handle_is_dropped() {
    let served = served(&format!("queue:{}", fresh("ephemeral")), boxes::router()).await;
    let client = &served.client;
    drop(client.create(SpecDraft::new("stays")).await.unwrap());
    let brief = client
        .create(SpecDraft::new("goes"))
        .await
        .unwrap()
        .ephemeral();
    let clone = brief.clone();
    drop(brief);
    client.open("goes").await.unwrap();
    drop(clone);
    eventually("it is gone", async || client.open("goes").await.is_err()).await;
    client.open("stays").await.unwrap();
}

#[tokio::test]
async fn an_absent_server_is_reported_at_once_or_waited_for() {
    let endpoint: Endpoint = format!("queue:{}", fresh("later")).parse().unwrap();
    let error = BoxClient::connect(endpoint.clone(), ClientOptions::default()).await;
    assert!(error.unwrap_err().is_unavailable());
    let patient = ClientOptions::default().first_connection(Duration::from_secs(20));
    let connecting = tokio::spawn(BoxClient::connect(endpoint.clone(), patient));
    tokio::time::sleep(Duration::from_millis(50)).await;
    let _server = serve(&endpoint, boxes::router()).await;
    connecting.await.unwrap().unwrap().health().await.unwrap();
}

#[tokio::test]
async fn a_client_sends_its_token_again_when_it_reconnects() {
    let requires_token = async |endpoint: &Endpoint| {
        let listener = endpoint.listen(&ListenOptions::default()).await.unwrap();
        let auth = Auth::Tokens(Tokens::new([("tester".to_owned(), TOKEN.to_owned())]));
        let options = Options::new(auth);
        Server::start(listener, boxes::router(), move |_| options.clone())
    };
    let first = requires_token(&"tcp://127.0.0.1:0".parse().unwrap()).await;
    let endpoint = first.endpoint().clone();
    let denied = BoxClient::connect(endpoint.clone(), ClientOptions::default()).await;
    assert!(denied.unwrap_err().to_string().contains("denied"));
    let client = BoxClient::connect(endpoint.clone(), ClientOptions::default().token(TOKEN)).await;
    let client = client.unwrap();
    client.health().await.unwrap();
    drop(first);
    eventually("it is gone", async || client.health().await.is_err()).await;
    let _second = requires_token(&endpoint).await;
    eventually("it is back", async || client.health().await.is_ok()).await;
}
