//! How a service begins and ends over every transport: with its own connector, which over stdio
//! starts the runtime, and with an injected client.

use std::path::PathBuf;

use box_protocol::{BoxError, Code};
use box_rpc::Empty;
use box_service::{BoxService, Query, RuntimeClient, ServiceConfig, ToolResult};
use box_test_wait::eventually;
use box_tests::boxes::{BackendCalls, InspectBackend, InspectProcess};
use box_tests::every_transport;
use box_tests::fixture::{Setup, Transport};
use serde_json::{Map, Value};

every_transport!(
    a_service_connects_by_itself_when_it_begins,
    dispose_returns_at_once_and_ends_what_the_service_started,
    dispose_leaves_an_injected_client_alone,
);

async fn run(service: &BoxService, command: &str) -> Result<ToolResult, BoxError> {
    let parameters = Map::from_iter([("command".to_owned(), Value::from(command))]);
    let query = Query::new(1).from_launcher("person", "test_user");
    service.execute_tool(parameters, &query).await
}

async fn seen(client: &RuntimeClient) -> BackendCalls {
    client.call::<InspectBackend>(&Empty {}).await.unwrap()
}

async fn assert_disposed(service: &BoxService) {
    let error = run(service, "pwd").await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::Unavailable, "the service is disposed")
    );
}

async fn a_service_connects_by_itself_when_it_begins(setup: Setup) {
    let (connector, place) = setup.boxes().connector().await;
    let service = BoxService::with_connector(ServiceConfig::default(), connector).unwrap();
    assert_eq!(place.connections(), 0);
    service.initialize().await.unwrap();
    assert_eq!(service.status().await.connector_error, None);
    let ran = run(&service, "echo own").await.unwrap();
    assert_eq!((ran.ok, ran.stdout.as_str()), (true, "executed: echo own"));
    let client = service.client().await.unwrap();
    assert_eq!(seen(&client).await.starts, ["person_test_user"]);
}

async fn dispose_returns_at_once_and_ends_what_the_service_started(setup: Setup) {
    // Calls on a connection with closed input may finish within this time.
    let setup = setup.boxes().server(|limits| limits.drain_ms = Some(200));
    let (connector, place) = setup.connector().await;
    let service = BoxService::with_connector(ServiceConfig::default(), connector).unwrap();
    service.initialize().await.unwrap();
    let client = service.client().await.unwrap();
    let process = client.call::<InspectProcess>(&Empty {}).await.unwrap().n;
    let hanging = tokio::spawn({
        let service = service.clone();
        async move { run(&service, "hang").await }
    });
    eventually("it runs", async || seen(&client).await.execs.len() == 1).await;

    service.dispose();
    assert_disposed(&service).await;
    let ended = hanging.await.unwrap();
    assert!(ended.is_err(), "{ended:?}");
    eventually("its connection is gone", async || {
        client.is_closed() && place.connections() == 0
    })
    .await;

    if setup.transport == Transport::Stdio {
        assert_ne!(process, u64::from(std::process::id()));
        let process = PathBuf::from(format!("/proc/{process}"));
        eventually("the runtime is gone", async || !process.exists()).await;
    } else {
        let another = setup.another_client(&place).await;
        let service = BoxService::with_client(ServiceConfig::default(), another.peer()).unwrap();
        let sessions = service.sessions().await.unwrap();
        assert_eq!(sessions.len(), 1, "the external runtime still runs");
    }
}

async fn dispose_leaves_an_injected_client_alone(setup: Setup) {
    let fixture = setup.boxes().start().await;
    let client = RuntimeClient::from(fixture.peer.clone());
    let service = BoxService::with_client(ServiceConfig::default(), client.clone()).unwrap();
    service.initialize().await.unwrap();
    run(&service, "echo first").await.unwrap();
    service.dispose();
    assert_disposed(&service).await;
    let another = BoxService::with_client(ServiceConfig::default(), client.clone()).unwrap();
    run(&another, "echo second").await.unwrap();
    let BackendCalls { starts, stops, .. } = seen(&client).await;
    assert_eq!((starts.len(), stops.len()), (1, 0), "the same box");
}
