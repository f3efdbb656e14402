//! A killed runtime loses its connections, and the next one restores the network of its boxes.

use box_protocol::actions::{BoxDelete, BoxExec};
use box_tests::machine::on_each_machine;

use super::*;
use crate::adoption::Host;

#[tokio::test]
async fn an_adopted_box_reaches_the_same_destinations_by_the_same_addresses() {
    let server = Server::http("127.0.0.7", "still here");
    let port = server.port();
    let network = json!({"policy": {"allow": ["*.test", "127.0.0.7"]}, "hosts": {"one.test": ["127.0.0.7"], "two.test": ["127.0.0.7"]}});
    on_each_machine(async |machine| {
        let dir = machine.directory();
        let start = || Host::start_with(machine, dir.path(), network.clone());
        let exec = |cmd: String| json!({"spec": {"box_id": "kept", "network": "on", "cmd": cmd, "network_policy": {"allow": ["one.test", "two.test:1"]}}});
        let first = start().await.unwrap();
        // A program that keeps the resolved address, and an idle connection.
        let lookup = "getent ahostsv4 one.test | head -1 | cut -d' ' -f1 >/tmp/answer; cat /tmp/answer";
        let answer = first.call::<BoxExec>(exec(lookup.to_owned())).await.unwrap();
        assert!(answer.stdout.starts_with("198.18.1."), "{answer:?}");
        let held = format!("(exec 3<>/dev/tcp/one.test/{port}; cat <&3 >/dev/null; echo cut >/tmp/end) >/dev/null 2>&1 & sleep 0.5; echo held");
        let held = first.call::<BoxExec>(exec(format!("bash -c '{held}'"))).await.unwrap();
        assert_eq!(held.stdout.trim(), "held", "{held:?}");
        first.kill().await;

        let second = start().await.unwrap();
        second.adopts(1).await;
        let cut = "for n in $(seq 100); do test -e /tmp/end && break; sleep 0.1; done; cat /tmp/end".to_owned();
        assert_eq!(second.call::<BoxExec>(exec(cut)).await.unwrap().stdout.trim(), "cut");
        // Another name does not get the address of the first.
        let other = second.call::<BoxExec>(exec("getent ahostsv4 two.test | head -1".to_owned())).await.unwrap();
        assert_eq!(other.exit_code, Some(0), "{other:?}");
        assert!(!other.stdout.contains(answer.stdout.trim()), "{other:?}");
        let page = format!("curl -sS http://one.test:{port}/ && curl -sS http://$(cat /tmp/answer):{port}/");
        let page = second.call::<BoxExec>(exec(page)).await.unwrap();
        assert_eq!(page.stdout, "still herestill here", "{page:?}");
        // The policy of the box itself was stored with it.
        let refused = second.call::<BoxExec>(exec(format!("curl -sS http://two.test:{port}/"))).await.unwrap();
        assert!(matches!(refused.exit_code, Some(7 | 56)), "{refused:?}");
        second.call::<BoxDelete>(json!({"box_id": "kept", "force": true})).await.unwrap();
        second.kill().await;
    })
    .await;
}
