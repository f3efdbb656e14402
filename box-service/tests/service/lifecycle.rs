//! How a service begins and ends, with an injected client and with its own connector.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use box_protocol::{BoxError, Code};
use box_rpc::{Caller, Options};
use box_service::connector::{EndpointConnector, InProcess};
use box_service::{BoxService, Connector, RuntimeClient, ServiceConfig};
use box_test_wait::eventually;
use box_transports::reconnecting::ReconnectOptions;
use box_transports::server::Server;
use box_transports::{ConnectOptions, Endpoint, ListenOptions};
use serde_json::json;

use crate::scripted_runtime::{ScriptedRuntime, connect, object, query};

/// A connector that counts its calls.
#[derive(Debug, Clone)]
struct CountingConnector {
    inner: Arc<InProcess>,
    connected: Arc<AtomicUsize>,
    disposed: Arc<AtomicUsize>,
}

impl CountingConnector {
    fn new(inner: InProcess) -> Self {
        Self {
            inner: Arc::new(inner),
            connected: Arc::default(),
            disposed: Arc::default(),
        }
    }

    fn counts(&self) -> (usize, usize) {
        (
            self.connected.load(Ordering::SeqCst),
            self.disposed.load(Ordering::SeqCst),
        )
    }
}

#[async_trait]
impl Connector for CountingConnector {
    async fn connect(&self, caller: &Caller) -> Result<RuntimeClient, BoxError> {
        self.connected.fetch_add(1, Ordering::SeqCst);
        tokio::task::yield_now().await;
        self.inner.connect(caller).await
    }

    fn dispose(&self) {
        self.disposed.fetch_add(1, Ordering::SeqCst);
        self.inner.dispose();
    }

    fn owns_runtime(&self) -> bool {
        self.inner.owns_runtime()
    }
}

async fn run(service: &BoxService) -> Result<(), BoxError> {
    let query = query(1);
    let ran = service.execute_tool(object(json!({"command": "ls"})), &query);
    ran.await.map(drop)
}

#[tokio::test]
async fn a_service_with_a_connector_connects_on_initialize() {
    let runtime = ScriptedRuntime::new();
    let connector = CountingConnector::new(InProcess::new(runtime.router()));
    let service = BoxService::with_connector(ServiceConfig::default(), connector.clone()).unwrap();
    assert_eq!(connector.counts(), (0, 0));
    service.initialize().await.unwrap();
    assert_eq!(connector.counts(), (1, 0));
    run(&service).await.unwrap();
    assert_eq!(connector.counts(), (1, 0));
    assert_eq!(runtime.record().started, ["person_test_user"]);
}

#[tokio::test]
async fn many_first_calls_connect_once() {
    let connector = CountingConnector::new(InProcess::new(ScriptedRuntime::new().router()));
    let service = BoxService::with_connector(ServiceConfig::default(), connector.clone()).unwrap();
    let all = futures::future::join_all((0..8).map(|_| run(&service))).await;
    assert!(all.into_iter().all(|one| one.is_ok()));
    assert_eq!(connector.counts(), (1, 0));
}

#[tokio::test]
async fn initialize_checks_the_health_of_an_injected_client() {
    let runtime = ScriptedRuntime::new();
    let served = runtime.served(ServiceConfig::default());
    assert_eq!(runtime.record().health_checks, 0);
    served.initialize().await.unwrap();
    assert_eq!(runtime.record().health_checks, 1);
}

#[test]
fn dispose_ends_the_connector_without_a_running_executor() {
    let connector = CountingConnector::new(InProcess::new(ScriptedRuntime::new().router()));
    let service = BoxService::with_connector(ServiceConfig::default(), connector.clone()).unwrap();
    service.dispose();
    assert_eq!(connector.counts(), (0, 1));
    service.dispose();
    assert_eq!(connector.counts(), (0, 1));
}

#[tokio::test]
async fn dispose_returns_at_once_and_shuts_an_owned_runtime_down() {
    let runtime = ScriptedRuntime::new();
    let connector = CountingConnector::new(InProcess::new(runtime.router()).owning_runtime());
    let service = BoxService::with_connector(ServiceConfig::default(), connector.clone()).unwrap();
    service.initialize().await.unwrap();
    service.dispose();
    assert_eq!(runtime.record().shutdowns, 0);
    eventually("the connector is disposed", async || {
        connector.counts() == (1, 1)
    })
    .await;
    assert_eq!(runtime.record().shutdowns, 1);
    let error = run(&service).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::Unavailable, "the service is disposed")
    );
}

#[tokio::test]
async fn dispose_leaves_an_external_runtime_running() {
    let runtime = ScriptedRuntime::new();
    let connector = CountingConnector::new(InProcess::new(runtime.router()));
    let service = BoxService::with_connector(ServiceConfig::default(), connector.clone()).unwrap();
    service.initialize().await.unwrap();
    let client = service.client().await.unwrap();
    service.dispose();
    assert_eq!(connector.counts(), (1, 1));
    eventually("the client is closed", async || client.is_closed()).await;
    assert_eq!(runtime.record().shutdowns, 0);
}

#[tokio::test]
async fn dispose_leaves_an_injected_client_alone() {
    let runtime = ScriptedRuntime::new();
    let (connection, client) = connect(runtime.router());
    let service = BoxService::with_client(ServiceConfig::default(), client.clone()).unwrap();
    service.initialize().await.unwrap();
    service.dispose();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(runtime.record().shutdowns, 0);
    assert!(!client.is_closed() && !connection.near.peer().is_closed());
    let another = BoxService::with_client(ServiceConfig::default(), client).unwrap();
    run(&another).await.unwrap();
}

#[tokio::test]
async fn a_disabled_service_does_not_connect() {
    let connector = CountingConnector::new(InProcess::new(ScriptedRuntime::new().router()));
    let config = ServiceConfig {
        enabled: false,
        ..ServiceConfig::default()
    };
    let service = BoxService::with_connector(config, connector.clone()).unwrap();
    service.initialize().await.unwrap();
    assert_eq!(run(&service).await.unwrap_err().code(), Code::Unavailable);
    let status = service.status().await;
    assert!(!status.enabled && !status.available);
    assert_eq!(connector.counts(), (0, 0));
}

#[tokio::test]
async fn a_lost_connection_is_replaced() {
    let runtime = ScriptedRuntime::new();
    let connector = CountingConnector::new(InProcess::new(runtime.router()));
    let service = BoxService::with_connector(ServiceConfig::default(), connector.clone()).unwrap();
    service.initialize().await.unwrap();
    let client = service.client().await.unwrap();
    // The connector replaces its own pair, which drops the old one.
    connector.inner.connect(&Caller::Local).await.unwrap();
    eventually("the client is closed", async || client.is_closed()).await;
    run(&service).await.unwrap();
    assert_eq!(connector.counts(), (2, 0));
}

#[tokio::test]
async fn an_endpoint_connects_and_disconnects() {
    let runtime = ScriptedRuntime::new();
    let endpoint: Endpoint = "queue:box-service-lifecycle".parse().unwrap();
    let link = || {
        EndpointConnector::new(
            endpoint.clone(),
            ConnectOptions::default(),
            ReconnectOptions::default(),
        )
    };
    let unreachable = link().first_connection(Duration::from_millis(50));
    let service = BoxService::with_connector(ServiceConfig::default(), unreachable).unwrap();
    service.initialize().await.unwrap();
    assert!(service.status().await.connector_error.is_some());

    let listener = endpoint.listen(&ListenOptions::default()).await.unwrap();
    let server = Server::start(listener, runtime.router(), |_| Options::new(Caller::Local));
    let service = BoxService::with_connector(ServiceConfig::default(), link()).unwrap();
    service.initialize().await.unwrap();
    run(&service).await.unwrap();
    let client = service.client().await.unwrap();
    service.dispose();
    eventually("the client is closed", async || client.is_closed()).await;
    assert_eq!(runtime.record().shutdowns, 0);
    drop(server);
}
