//! From the policy layer over a Unix socket to a real box.

use box_rpc::{Limits, Options, Router, Session};
use box_service::{BoxService, Query, ServiceConfig};
use box_transports::server::Server;
use box_transports::{ConnectOptions, Endpoint, ListenOptions};
use serde_json::json;

use super::support::on_each_machine;

#[tokio::test]
async fn a_tool_call_runs_in_a_real_box_behind_a_socket() {
    on_each_machine(async |machine| {
        let (sockets, root) = (tempfile::tempdir().unwrap(), machine.directory());
        let endpoint: Endpoint = format!("unix:{}/box.sock", sockets.path().display())
            .parse()
            .unwrap();
        let listener = endpoint.listen(&ListenOptions::default()).await.unwrap();
        let _server = Server::start(listener, machine.runtime.router(), |_| Options::default());
        let connection = endpoint.connect(&ConnectOptions::default()).await.unwrap();
        let options = Options {
            limits: Limits::default(),
            ..Options::default()
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
