//! A box without a network reaches only itself.

use std::net::TcpListener;
use std::process::Command;

use box_tests::machine::{on_each_machine, printed};

#[tokio::test]
async fn without_a_network_nothing_outside_is_reached() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let connect = format!("exec 3<>/dev/tcp/127.0.0.1/{port}");
    // The control: the same command reaches the same listener from outside.
    let outside = Command::new("bash")
        .args(["-c", &connect])
        .status()
        .unwrap();
    assert!(outside.success());
    on_each_machine(async |machine| {
        let inside = machine
            .exec("offline", &format!("bash -c '{connect}'"))
            .await;
        assert_eq!(inside.exit_code, Some(1), "{inside:?}");
        assert!(inside.stderr.contains("Connection refused"), "{inside:?}");
        let away = machine
            .exec("offline", "bash -c 'exec 3<>/dev/tcp/1.1.1.1/80'")
            .await;
        assert!(away.stderr.contains("Network is unreachable"), "{away:?}");
        let routes = machine
            .exec(
                "offline",
                "tail -n +2 /proc/net/route; ls /sys/class/net 2>/dev/null",
            )
            .await;
        assert_eq!(routes.stdout, "");
        // Its own loopback works, so the missing loopback is not the reason of the refusals.
        let own = "python3 -c \"import socket; s = socket.create_server(('127.0.0.1', 0)); \
                   socket.create_connection(s.getsockname()); print('reached')\"";
        assert_eq!(printed(&machine.exec("offline", own).await), "reached");
    })
    .await;
}
