//! Connections by name and by address, and how denied ones fail.

use box_protocol::actions::{BoxStatsParams, BoxStatsResult};
use box_runtime::Caller;

use super::*;

#[tokio::test]
async fn an_allowed_name_is_reachable_and_another_does_not_resolve() {
    let server = Server::http("127.0.0.7", "hello from outside");
    let port = server.port();
    let set_up = |config: &mut NativeConfig| {
        let hosts = [("web.test", "127.0.0.7"), ("other.test", "127.0.0.7")];
        open(config, json!(["web.test", "127.0.0.7"]), &hosts);
    };
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        let before = server.taken();
        let page = online(machine, "web", &format!("curl -sS http://web.test:{port}/")).await;
        assert_eq!(printed(&page), "hello from outside");
        assert_eq!(server.taken(), before + 1);
        let other = online(
            machine,
            "web",
            &format!("curl -sS http://other.test:{port}/"),
        )
        .await;
        assert_eq!(other.exit_code, Some(6), "{other:?}");
        assert!(other.stderr.contains("Could not resolve host"), "{other:?}");
        // The address has no name in the list. It is a loopback address of the machine other than
        // the listed one.
        let elsewhere = Server::http("127.0.0.8", "not for you");
        let refused = online(
            machine,
            "web",
            &format!("curl -sS http://127.0.0.8:{}/", elsewhere.port()),
        )
        .await;
        assert_eq!(refused.exit_code, Some(7), "its own loopback: {refused:?}");
        assert_eq!((server.taken(), elsewhere.taken()), (before + 1, 0));
    })
    .await;
}

#[tokio::test]
async fn allowed_addresses_are_reachable_over_ipv4_and_ipv6_and_others_refused() {
    let (four, six) = (
        Server::http("127.0.0.7", "four"),
        Server::http("::1", "six"),
    );
    let set_up = |config: &mut NativeConfig| {
        // A box cannot dial a loopback address of the machine, because it has its own. So names
        // resolve to it.
        let hosts = [
            ("four.test", "127.0.0.7"),
            ("six.test", "::1"),
            ("private.test", "127.0.0.8"),
        ];
        open(config, json!(["*.test", "127.0.0.7", "::1"]), &hosts);
    };
    let hidden = Server::http("127.0.0.8", "hidden");
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        for (name, port, says) in [
            ("four.test", four.port(), "four"),
            ("six.test", six.port(), "six"),
        ] {
            for family in ["-4", "-6"] {
                let page = online(
                    machine,
                    "b",
                    &format!("curl -sS {family} http://{name}:{port}/"),
                )
                .await;
                assert_eq!(
                    printed(&page),
                    says,
                    "the box sees an address of the same family"
                );
            }
        }
        let port = hidden.port();
        let refused = says(
            machine,
            "b",
            &format!("print(word(lambda: first('private.test', {port})))"),
        )
        .await;
        assert_eq!(
            refused, "ECONNREFUSED",
            "a name alone opens no address that is not public"
        );
        for literal in [
            "10.1.2.3",
            "169.254.169.254",
            "192.168.1.1",
            "8.8.8.8",
            "fd00:ec2::254",
            "2606:4700::1111",
        ] {
            let refused = says(
                machine,
                "b",
                &format!("print(word(lambda: first('{literal}', 80)))"),
            )
            .await;
            assert_eq!(refused, "ECONNREFUSED", "{literal} is not listed");
        }
        let unassigned = "print(word(lambda: first('198.18.77.77', 80)))";
        assert_eq!(says(machine, "b", unassigned).await, "EHOSTUNREACH");
        assert_eq!(hidden.taken(), 0);
    })
    .await;
}

#[tokio::test]
async fn a_policy_changes_live_and_cuts_what_is_no_longer_allowed() {
    let server = Server::start("127.0.0.7", |mut stream| {
        let mut buffer = [0; 100];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            let _ = stream.write_all(&buffer[..length]);
        }
    });
    let port = server.port();
    let set_up = |config: &mut NativeConfig| {
        let hosts = [("one.test", "127.0.0.7"), ("two.test", "127.0.0.7")];
        open(config, json!(["*.test", "127.0.0.7"]), &hosts);
    };
    on_each_machine_set_up(TEST_LIMIT, set_up, async |machine| {
        let text = format!(
            "one, two = dial('one.test', {port}), dial('two.test', {port})
for s in one, two:
    s.sendall(b'x'); s.recv(1)
print(word(lambda: one.recv(1)))
two.sendall(b'still'); print(two.recv(10).decode())
print(word(lambda: first('one.test', {port}, b'x')))
print(first('two.test', {port}, b'again'))"
        );
        let change = async {
            let caller = Caller::Local;
            let is_ready = |used: &BoxStatsResult| {
                used.network_connections == Some(2) && used.network_received_bytes == Some(2)
            };
            while !machine
                .runtime
                .stats(&caller, stats_of("live"), None)
                .await
                .is_ok_and(|used| is_ready(&used))
            {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let update = json!({"box_id": "live", "network_policy": {"allow": ["two.test"]}});
            let update = serde_json::from_value(update).unwrap();
            machine.runtime.update(&caller, update).await.unwrap();
        };
        let (answer, ()) = tokio::join!(says(machine, "live", &text), change);
        assert_eq!(
            answer.lines().collect::<Vec<_>>(),
            ["ECONNRESET", "still", "gaierror", "again"]
        );
    })
    .await;
}

fn stats_of(session: &str) -> BoxStatsParams {
    serde_json::from_value(json!({"box_id": session})).unwrap()
}
