//! Boxes over `/rpc/ws`: in both dialects, and their owners.

use box_client::{BoxClient, ClientOptions, SpecDraft};
use box_gateways::langbot::Frames;
use box_protocol::actions::{BoxExec, BoxExecParams, BoxListParams};
use box_rpc::{Codecs, Options, Router, Session};
use box_test_wait::LONG;
use box_transports::{ConnectOptions, Endpoint};

use crate::support::{ANN, BOB, Setup, bearer};

/// A client at an endpoint, with a token or without.
pub(crate) async fn connect(endpoint: &str, token: Option<&str>) -> BoxClient {
    let mut options = ClientOptions::default();
    if let Some(token) = token {
        let (name, value) = bearer(token);
        options.connect.headers.push((name.to_owned(), value));
    }
    let endpoint = endpoint.parse().unwrap();
    BoxClient::connect(endpoint, options).await.unwrap()
}

fn spec(id: &str, text: &str) -> SpecDraft {
    SpecDraft::new(id).cmd(text)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_runs_in_a_real_box_in_either_dialect() {
    let server = Setup::new().with_tokens().start();
    let endpoint: Endpoint = server.rpc().parse().unwrap();
    let (name, value) = bearer(ANN);
    let bearer = (name.to_owned(), value);
    let control = ("X-LangBot-Box-Control-Token".to_owned(), ANN.to_owned());
    for (codecs, headers) in [
        (Codecs::JSON_RPC, vec![bearer.clone()]),
        (Codecs::Only(&Frames), vec![bearer]),
        (Codecs::Only(&Frames), vec![control]),
    ] {
        let connect = ConnectOptions {
            headers,
            ..ConnectOptions::default()
        };
        let connection = endpoint.connect(&connect).await.unwrap();
        let options = Options {
            codecs,
            ..Options::client()
        };
        let session = Session::start_boxed(connection, Router::empty(), options);
        let request = BoxExecParams::new(spec("both", "echo hello; id -u >&2; exit 3"));
        let ran = session.peer().call::<BoxExec>(&request).await.unwrap();
        assert_eq!((ran.stdout.trim(), ran.exit_code), ("hello", Some(3)));
        assert_ne!(ran.stderr.trim(), "");
    }
}

/// LangBot's query for the backend.
struct BackendInfo;

impl box_rpc::Action for BackendInfo {
    const NAME: &'static str = "box_get_backend_info";
    type Params = box_rpc::Empty;
    type Result = serde_json::Value;
    type Chunk = box_rpc::Never;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_langbot_connection_serves_only_langbots_actions() {
    let server = Setup::new().with_tokens().start();
    let endpoint: Endpoint = server.rpc().parse().unwrap();
    let connect = |instance: &str| ConnectOptions {
        headers: vec![
            ("X-LangBot-Box-Control-Token".to_owned(), ANN.to_owned()),
            ("X-LangBot-Instance-Id".to_owned(), instance.to_owned()),
        ],
        ..ConnectOptions::default()
    };
    let connection = endpoint.connect(&connect("langbot-1")).await.unwrap();
    let options = Options {
        codecs: Codecs::Only(&Frames),
        ..Options::client()
    };
    let session = Session::start_boxed(connection, Router::empty(), options);
    let peer = session.peer();
    let reported = peer.call::<BackendInfo>(&box_rpc::Empty {});
    assert_eq!(reported.await.unwrap()["name"], "native");
    let native = peer.call::<box_protocol::actions::SystemHealth>(&box_rpc::Empty {});
    assert!(native.await.is_err());
    // The first instance of a token is the token itself.
    for other in ["langbot-2", "", "no instance"] {
        assert!(endpoint.connect(&connect(other)).await.is_err(), "{other}");
    }
    assert!(endpoint.connect(&connect("langbot-1")).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_langbot_connection_refuses_json_rpc() {
    let server = Setup::new().start();
    let connect = ConnectOptions {
        headers: vec![("X-LangBot-Instance-Id".to_owned(), "langbot-1".to_owned())],
        ..ConnectOptions::default()
    };
    let endpoint: Endpoint = server.rpc().parse().unwrap();
    let connection = endpoint.connect(&connect).await.unwrap();
    let options = Options {
        codecs: Codecs::JSON_RPC,
        ..Options::client()
    };
    let session = Session::start_boxed(connection, Router::empty(), options);
    let within = std::time::Duration::from_secs(2);
    let peer = session.peer();
    let request = peer
        .request::<box_protocol::actions::SystemHealth>(&box_rpc::Empty {})
        .deadline(within);
    assert!(request.call().await.is_err());
}

/// The ids of the boxes that a client sees.
pub(crate) async fn seen(client: &BoxClient) -> Vec<String> {
    let list = client.list(BoxListParams::default()).await.unwrap();
    let ids = list.items.iter();
    ids.map(|item| item.box_id.as_str().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_box_belongs_to_its_token_and_the_unix_socket_sees_all() {
    let server = Setup::new().with_tokens().start();
    let ann = connect(&server.rpc(), Some(ANN)).await;
    let bob = connect(&server.rpc(), Some(BOB)).await;
    let here = connect(server.address("unix:"), None).await;
    ann.create(SpecDraft::new("of-ann")).await.unwrap();
    bob.create(SpecDraft::new("of-bob")).await.unwrap();
    here.create(SpecDraft::new("of-all")).await.unwrap();

    assert_eq!(seen(&ann).await, ["of-ann"]);
    assert_eq!(seen(&bob).await, ["of-bob"]);
    assert_eq!(seen(&here).await, ["of-all", "of-ann@ann", "of-bob@bob"]);
    for (client, others) in [(&ann, ["of-bob", "of-all"]), (&bob, ["of-ann", "of-all"])] {
        for id in others {
            assert!(client.open(id).await.unwrap_err().is_not_found(), "{id}");
        }
    }
    // Another connection with the same token is the same caller.
    let again = connect(&server.rpc(), Some(ANN)).await;
    let ran = again.exec(spec("of-ann", "echo again")).await.unwrap();
    assert_eq!(ran.stdout_text().trim(), "again");
    assert!(here.open("of-bob").await.unwrap_err().is_not_found());
    here.open("of-bob@bob")
        .await
        .unwrap()
        .delete()
        .await
        .unwrap();
    assert!(bob.open("of-bob").await.unwrap_err().is_not_found());
}

#[tokio::test]
async fn two_tokens_can_use_the_same_box_id() {
    let server = Setup::new().with_tokens().start();
    let ann = connect(&server.rpc(), Some(ANN)).await;
    let bob = connect(&server.rpc(), Some(BOB)).await;
    let here = connect(server.address("unix:"), None).await;
    for (client, owner) in [(&ann, "ann"), (&bob, "bob"), (&here, "here")] {
        let ran = client.exec(spec("build", &format!("echo {owner} | tee of")));
        assert_eq!(ran.await.unwrap().stdout_text().trim(), owner);
    }
    // Each owner has its own box with its own files.
    for (client, owner) in [(&ann, "ann"), (&bob, "bob"), (&here, "here")] {
        let ran = client.exec(spec("build", "cat of")).await.unwrap();
        assert_eq!(ran.stdout_text().trim(), owner);
    }
    assert_eq!(seen(&here).await, ["build", "build@ann", "build@bob"]);
    ann.open("build").await.unwrap().delete().await.unwrap();
    assert_eq!(seen(&bob).await, ["build"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loopback_caller_does_not_see_boxes_of_the_unix_socket() {
    let server = Setup::new()
        .args(&["--listen", "tcp://127.0.0.1:0"])
        .args(&["--listen", "ws://127.0.0.1:0/rpc/ws"])
        .start();
    let http = connect(&server.rpc(), None).await;
    http.create(SpecDraft::new("of-loopback")).await.unwrap();
    for address in [
        server.rpc(),
        server.address("tcp://").into(),
        server.address("ws://").into(),
    ] {
        let client = connect(&address, None).await;
        assert_eq!(seen(&client).await, ["of-loopback"], "{address}");
        let exit = box_protocol::actions::SystemShutdownParams {
            exit: true,
            within_ms: None,
        };
        let request = client.call::<box_protocol::actions::SystemShutdown>(&exit);
        assert!(request.await.is_err(), "{address}");
    }
    let server = Setup::new().start();
    let here = connect(server.address("unix:"), None).await;
    here.create(SpecDraft::new("of-the-socket")).await.unwrap();
    let http = connect(&server.rpc(), None).await;
    assert!(seen(&http).await.is_empty());
    assert!(http.open("of-the-socket").await.unwrap_err().is_not_found());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_token_the_connection_is_refused() {
    let server = Setup::new().with_tokens().start();
    let options = ClientOptions::default();
    let endpoint: Endpoint = server.rpc().parse().unwrap();
    let connecting = BoxClient::connect(endpoint, options);
    let refused = tokio::time::timeout(LONG, connecting).await.unwrap();
    assert!(refused.is_err());
    assert_eq!(server.client().upgrade(&[]).status, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_streaming_call_without_credit_names_the_requirement() {
    let server = Setup::new().start();
    let client = connect(&server.rpc(), None).await;
    let there = client.create(SpecDraft::new("b")).await.unwrap();
    there.run("echo hi > /workspace/f").await.unwrap();
    let raw: Endpoint = server.rpc().parse().unwrap();
    let connection = raw.connect(&ConnectOptions::default()).await.unwrap();
    let (mut send, mut receive) = connection.split();
    let mut id = 0;
    let mut answer = async |method: &str, mut params: serde_json::Value| {
        id += 1;
        params["box_id"] = "b".into();
        let call =
            serde_json::json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        send.send(call.to_string()).await.unwrap();
        send.flush().await.unwrap();
        let text = tokio::time::timeout(LONG, receive.receive()).await;
        let text = text.unwrap_or_else(|_| panic!("{method} hangs"));
        serde_json::from_str::<serde_json::Value>(&text.unwrap().unwrap()).unwrap()
    };
    let credit = |of: serde_json::Value| -> serde_json::Value {
        let mut of = of;
        of["_meta"] = serde_json::json!({"credit": 0});
        of
    };
    let pack = serde_json::json!({"path": "/workspace/f"});
    let open = serde_json::json!({"port": 9});
    let few = serde_json::json!({"command_id": "c", "until": {"bytes": 1}});
    for (method, params) in [
        ("file.pack", pack),
        ("port.open", open),
        ("command.attach", few),
    ] {
        for params in [params.clone(), credit(params)] {
            let text = answer(method, params).await;
            assert_eq!(
                text["error"]["data"]["code"], "validation",
                "{method}: {text}"
            );
            assert!(
                text["error"]["message"]
                    .as_str()
                    .unwrap()
                    .contains("credit"),
                "{text}"
            );
        }
    }
    // An attach without `until.bytes` waits for the end, and answers with the result alone.
    let start = serde_json::json!({"command_id": "c", "program": {"text": "read x; exit 3"}, "stdin": "open"});
    let started = answer("command.start", start).await;
    assert_eq!(started["result"]["info"]["state"], "running", "{started}");
    let close = serde_json::json!({"command_id": "c", "close": true});
    assert!(answer("command.input", close).await["error"].is_null());
    let ended = answer("command.attach", serde_json::json!({"command_id": "c"})).await;
    assert_eq!(ended["result"]["info"]["exit"]["code"], 3, "{ended}");
}
