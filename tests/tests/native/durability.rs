//! An answered call stays in effect when the runtime is killed a moment later.

use box_protocol::actions::{
    BoxCreate, BoxDelete, BoxExec, BoxGet, BoxUpdate, CommandStart, FileOutcome, FileStat,
};
use box_test_wait::eventually;
use box_tests::machine::{Machine, on_each_machine};
use serde_json::{Value, json};

use super::adoption::Host;

async fn is_there(host: &Host, session: &str, path: &str) -> bool {
    let params = json!({"box_id": session, "paths": [path]});
    let reported = host.call::<FileStat>(params).await.unwrap();
    matches!(reported.paths[path], FileOutcome::Stat(_))
}

async fn begin(host: &Host, session: &str, on_disconnect: &str) {
    let cmd = "touch /tmp/begun; until [ -e /tmp/go ]; do sleep 0.05; done; touch /tmp/ended";
    let params: Value =
        json!({"spec": {"box_id": session, "cmd": cmd}, "on_disconnect": on_disconnect});
    let params = serde_json::from_value(params).unwrap();
    let peer = host.peer();
    tokio::spawn(async move { peer.call::<BoxExec>(&params).await });
    eventually("the command begins", async || {
        is_there(host, session, "/tmp/begun").await
    })
    .await;
}

async fn round(machine: &Machine) {
    let state = machine.directory();
    let host = Host::start(machine, state.path()).await.unwrap();
    for session in ["kept", "cut"] {
        let spec = json!({"spec": {"box_id": session, "labels": {"old": "1"}}});
        host.call::<BoxCreate>(spec).await.unwrap();
    }
    begin(&host, "kept", "keep").await;
    begin(&host, "cut", "kill").await;
    let changed = json!({"box_id": "kept", "name": "renamed", "labels": {"old": null, "new": "2"},
        "lifetime": {"idle_ms": 3_600_000}});
    host.call::<BoxUpdate>(changed).await.unwrap();
    // While the exec runs, directly after the answer.
    host.kill().await;

    let host = Host::start(machine, state.path()).await.unwrap();
    host.adopts(2).await;
    let reported = host
        .call::<BoxGet>(json!({"box_id": "kept"}))
        .await
        .unwrap();
    let reported = serde_json::to_value(reported.info).unwrap();
    assert_eq!(
        (
            &reported["name"],
            &reported["labels"],
            &reported["lifetime"]["idle_ms"]
        ),
        (&json!("renamed"), &json!({"new": "2"}), &json!(3_600_000))
    );
    for session in ["kept", "cut"] {
        let go = json!({"box_id": session, "program": {"argv": ["touch", "/tmp/go"]}});
        host.call::<CommandStart>(go).await.unwrap();
    }
    eventually("the command ends", async || {
        is_there(&host, "kept", "/tmp/ended").await
    })
    .await;
    assert!(!is_there(&host, "cut", "/tmp/ended").await);
    for session in ["kept", "cut"] {
        let cmd = json!({"spec": {"box_id": session, "cmd": "pgrep sleep; true"}});
        let after = host.call::<BoxExec>(cmd).await.unwrap();
        assert_eq!(after.stdout, "", "{session}");
        host.call::<BoxDelete>(json!({"box_id": session}))
            .await
            .unwrap();
    }
    host.kill().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_and_a_detached_exec_survive_a_kill_of_the_server() {
    on_each_machine(async |machine| round(machine).await).await;
}
