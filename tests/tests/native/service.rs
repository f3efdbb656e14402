//! From the policy layer over a Unix socket to a real box.

use box_protocol::actions::{
    BoxEvents, BoxGet, BoxStats, BoxTransition, FileRead, FileReadParams, FileWrite,
    FileWriteParams, PortChunk, PortOpen, PortSend,
};
use box_rpc::{Caller, Limits, Options, Router, Session};
use box_service::{BoxService, Query, ServiceConfig};
use box_test_wait::eventually;
use box_tests::machine::{on_each_machine, printed};
use box_transports::queue;
use box_transports::server::Server;
use box_transports::{ConnectOptions, Endpoint, ListenOptions};
use futures::StreamExt as _;
use serde_json::json;

#[tokio::test]
async fn a_tool_call_runs_in_a_real_box_behind_a_socket() {
    on_each_machine(async |machine| {
        let (sockets, root) = (tempfile::tempdir().unwrap(), machine.directory());
        let endpoint: Endpoint = format!("unix:{}/box.sock", sockets.path().display())
            .parse()
            .unwrap();
        let listener = endpoint.listen(&ListenOptions::default()).await.unwrap();
        let _server = Server::start(listener, machine.runtime.router(), |_| {
            Options::new(Caller::Local)
        });
        let connection = endpoint.connect(&ConnectOptions::default()).await.unwrap();
        let options = Options {
            limits: Limits::default(),
            ..Options::client()
        };
        let client = Session::start_boxed(connection, Router::empty(), options);
        let workspace = root.path().join("workspace");
        std::fs::create_dir(&workspace).unwrap();
        std::os::unix::fs::chown(&workspace, Some(machine.uid), Some(machine.uid)).unwrap();
        let config: ServiceConfig = serde_json::from_value(json!({"profile": "default",
            "allowed_host_mount_roots": [root.path()], "default_host_workspace": workspace}))
        .unwrap();
        let service = BoxService::with_client(config, client.peer()).unwrap();
        service.initialize().await.unwrap();
        let command = json!({"command": "echo service-path | tee made"});
        let command = command.as_object().unwrap().clone();
        let result = service
            .execute_tool(command, &Query::new(42))
            .await
            .unwrap();
        assert!(result.ok);
        assert!(result.stdout.contains("service-path"), "{result:?}");
        assert_eq!(result.session_id.as_str(), "42");
        assert_eq!(
            std::fs::read_to_string(workspace.join("made")).unwrap(),
            "service-path\n"
        );
    })
    .await;
}

/// A connection within this process to this router.
fn linked(router: Router) -> (Session, Session) {
    let (near, far) = queue::pair(64);
    let options = || Options {
        limits: Limits::in_process(),
        ..Options::new(Caller::Local)
    };
    let server = Session::start(far, router, options());
    (server, Session::start(near, Router::empty(), options()))
}

#[tokio::test]
async fn files_of_a_real_box_are_reached_through_the_service() {
    on_each_machine(async |machine| {
        printed(&machine.exec("files", "true").await);
        let (_runtime, to_runtime) = linked(machine.runtime.router());
        let config = ServiceConfig::default();
        let service = BoxService::with_client(config, to_runtime.peer()).unwrap();
        service.initialize().await.unwrap();
        let (_service, to_service) = linked(service.router());
        let data = vec![7; 100_000];
        let asked = json!({"box_id": "files", "path": "/tmp/f", "data": ""});
        let mut write: FileWriteParams = serde_json::from_value(asked).unwrap();
        write.data = data.clone().into();
        let peer = to_service.peer();
        let written = peer.call::<FileWrite>(&write).await.unwrap();
        assert_eq!((written.size, written.owner.as_str()), (100_000, "box"));
        let asked = json!({"box_id": "files", "path": "/tmp/f"});
        let read: FileReadParams = serde_json::from_value(asked).unwrap();
        let mut chunks = peer.stream::<FileRead>(&read).await.unwrap();
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.next().await {
            bytes.extend_from_slice(&chunk.unwrap().data);
        }
        assert_eq!(chunks.finish().await.unwrap(), written);
        assert_eq!(bytes, data);
    })
    .await;
}

#[tokio::test]
async fn stats_events_and_ports_of_a_real_box_are_reached_through_the_service() {
    on_each_machine(async |machine| {
        let server = "cd /tmp && python3 -m http.server 8000 > /dev/null 2>&1 & true";
        printed(&machine.exec("s", server).await);
        let (_runtime, to_runtime) = linked(machine.runtime.router());
        let config = ServiceConfig::default();
        let service = BoxService::with_client(config, to_runtime.peer()).unwrap();
        service.initialize().await.unwrap();
        let (_service, client) = linked(service.router());
        let peer = client.peer();
        let every = serde_json::from_value(json!({"box_id": "s", "every_ms": 20})).unwrap();
        let mut figures = peer.stream::<BoxStats>(&every).await.unwrap();
        for _ in 0..3 {
            figures.next().await.unwrap().unwrap();
        }
        drop(figures);
        let all = serde_json::from_value(json!({})).unwrap();
        let mut events = peer.stream::<BoxEvents>(&all).await.unwrap();
        assert_eq!(events.next().await.unwrap().unwrap().kind, "started");
        let running = serde_json::from_value(json!({"box_id": "s", "to": "running"})).unwrap();
        let moved = peer.call::<BoxTransition>(&running).await.unwrap();
        assert!(!moved.changed);
        let inside = serde_json::from_value(json!({"box_id": "s", "guest": true})).unwrap();
        eventually("the box listens", async || {
            let found = peer.call::<BoxGet>(&inside).await.unwrap();
            found.guest.unwrap().ports.contains(&8000)
        })
        .await;
        let open = serde_json::from_value(json!({"box_id": "s", "port": 8000})).unwrap();
        let mut chunks = peer.stream::<PortOpen>(&open).await.unwrap();
        let Some(Ok(PortChunk::ConnId(id))) = chunks.next().await else {
            panic!("no connection");
        };
        // `GET / HTTP/1.0`
        let request = json!({"box_id": "s", "conn_id": id, "data": "R0VUIC8gSFRUUC8xLjANCg0K"});
        let request = serde_json::from_value(request).unwrap();
        peer.call::<PortSend>(&request).await.unwrap();
        let Some(Ok(PortChunk::Data(data))) = chunks.next().await else {
            panic!("no answer");
        };
        assert!(data.starts_with(b"HTTP/1.0 200"), "{data:?}");
    })
    .await;
}
