//! Connections by name and by address, and what is in the way of those that may not be.

use super::*;

#[tokio::test]
async fn a_name_that_is_allowed_is_reached_and_another_is_not_there() {
    let server = Server::http("127.0.0.7", "hello from outside");
    let port = server.port();
    let set_up = |config: &mut NativeConfig| {
        let hosts = [("web.test", "127.0.0.7"), ("other.test", "127.0.0.7")];
        open(config, json!(["web.test", "127.0.0.7"]), &hosts);
    };
    on_each_machine_set_up(LONG, set_up, async |machine| {
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
        // By its address there is no name that could be listed; it is one of the machine's, and another than listed.
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
