//! Boxes share nothing with each other, and no network with the host.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};

use box_tests::machine::{on_each_machine, printed};
use serde_json::json;

use super::{Answers, as_root, inside, outside};

const NEIGHBOUR: &str = include_str!("probes/neighbour.py");
const NETWORK: &str = include_str!("probes/network.py");
const NAMESPACES: [&str; 7] = ["user", "pid", "mnt", "net", "uts", "ipc", "cgroup"];

#[tokio::test]
async fn twenty_boxes_share_nothing() {
    on_each_machine(async |machine| {
        let names: Vec<String> = (0..20).map(|n| format!("{n}")).collect();
        let all = async |task: &'static str| -> Vec<Answers> {
            let each = names.iter().map(async |name| {
                let session = format!("neighbour-{name}");
                inside(machine, &session, NEIGHBOUR, &[name, task]).await
            });
            futures::future::join_all(each).await
        };
        for left in all("leave").await {
            assert_eq!(
                (left["shmget"].as_str(), left["msgget"].as_str()),
                ("True", "True")
            );
        }
        let looked = all("look").await;
        for (name, said) in names.iter().zip(&looked) {
            let own = format!("mark-{name}");
            assert_eq!(
                (said["files"].as_str(), said["processes"].as_str()),
                (own.as_str(), own.as_str())
            );
            assert!(said["pids"].parse::<u32>().unwrap() < 10, "{said:?}");
            // The probe finds its own, which shows that its questions are right.
            for way in ["abstract", "loopback"] {
                assert_eq!(said[way], "ok None", "{way}");
            }
            assert_eq!(
                (said["shmget"].as_str(), said["msgget"].as_str()),
                ("EEXIST", "EEXIST")
            );
        }
        let host = outside(NEIGHBOUR, &["-", "look"]);
        for kind in NAMESPACES {
            let mut seen: Vec<&String> = looked.iter().map(|said| &said[kind]).collect();
            seen.push(&host[kind]);
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), 21, "{kind}: {seen:?}");
        }
        // A later box finds nothing of theirs.
        let late = inside(machine, "late", NEIGHBOUR, &["late", "look"]).await;
        assert_eq!(
            (late["files"].as_str(), late["processes"].as_str()),
            ("", "")
        );
        assert_eq!(
            (late["shmget"].as_str(), late["msgget"].as_str()),
            ("ok True", "ok True")
        );
        assert_eq!(
            (late["abstract"].as_str(), late["loopback"].as_str()),
            ("ECONNREFUSED", "ECONNREFUSED")
        );
    })
    .await;
}

#[tokio::test]
async fn the_network_of_the_host_is_unreachable() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let name = format!("box-canary-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let unix = UnixListener::bind_addr(&address).unwrap();
    unix.set_nonblocking(true).unwrap();
    let host = outside(NETWORK, &[&port, &name]);
    for way in ["loopback", "unspecified", "abstract", "own"] {
        assert_eq!(host[way], "ok None", "control: {way}");
    }
    assert_eq!(host["listed"], "True", "control");
    let routes = std::fs::read_to_string("/proc/net/route").unwrap();
    if routes
        .lines()
        .any(|line| line.split_whitespace().nth(1) == Some("00000000"))
    {
        assert_eq!(
            (host["metadata"].as_str(), host["outside"].as_str()),
            ("ok None", "ok None"),
            "control"
        );
    }
    if as_root() {
        assert_eq!(
            (host["raw"].as_str(), host["packet"].as_str()),
            ("ok None", "ok None"),
            "control"
        );
    }
    while listener.accept().is_ok() {}
    while unix.accept().is_ok() {}
    on_each_machine(async |machine| {
        let said = inside(machine, "network", NETWORK, &[&port, &name]).await;
        for way in [
            "loopback",
            "loopback_name",
            "unspecified",
            "mapped",
            "abstract",
        ] {
            assert_eq!(said[way], "ECONNREFUSED", "{way}");
        }
        for way in ["metadata", "outside", "private", "outside6"] {
            assert!(
                ["ENETUNREACH", "EADDRNOTAVAIL"].contains(&said[way].as_str()),
                "{way}: {said:?}"
            );
        }
        assert_eq!(said["own"], "ok None", "control");
        assert_eq!(
            (said["raw"].as_str(), said["packet"].as_str()),
            ("EPERM", "EAFNOSUPPORT")
        );
        assert_eq!(said["listed"], "False");
        let none_waits = |accepted: std::io::Result<()>| {
            accepted.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
        };
        assert!(
            none_waits(listener.accept().map(drop)) && none_waits(unix.accept().map(drop)),
            "no connection arrived"
        );
    })
    .await;
}

#[tokio::test]
async fn killing_everything_in_a_box_harms_no_other() {
    on_each_machine(async |machine| {
        printed(
            &machine
                .exec(
                    "bystander",
                    "sleep 1000 > /dev/null 2>&1 & echo $! > /tmp/pid",
                )
                .await,
        );
        let shot = machine
            .exec("shooter", "kill -9 -1; kill -9 1; echo done")
            .await;
        assert!(
            shot.stdout.contains("done") || shot.signal == Some(9),
            "{shot:?}"
        );
        assert_eq!(
            printed(&machine.exec("shooter", "echo again").await),
            "again"
        );
        printed(&machine.exec("bystander", "kill -0 $(cat /tmp/pid)").await);
        let control = machine
            .exec(
                "bystander",
                "kill -9 $(cat /tmp/pid); while kill -0 $(cat /tmp/pid) 2> /dev/null; do sleep 0.01; done; kill -0 $(cat /tmp/pid)",
            )
            .await;
        assert_ne!(
            control.exit_code,
            Some(0),
            "control: {}",
            json!(control.stderr)
        );
    })
    .await;
}
