//! Servers that are killed in the middle of snapshots, forks, stops and rollbacks.

use std::process::{Child, Stdio};
use std::time::Duration;

use box_test_wait::blocking::eventually;

use super::snapshots::{assert_nothing_left, is_live, layers, restart, start};
use super::support::{Server, users};

const ROUNDS: u64 = 10;

/// Options of boxes with files in memory and on a disk.
const STORAGE: [&[&str]; 2] = [&[], &["--disk-mb", "700m"]];

/// Starts a client whose result does not matter.
fn begin(server: &Server, arguments: &[&str]) -> Child {
    let mut command = server.boxd(arguments);
    let command = command.stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::null()).spawn().unwrap()
}

/// Waits for a random part of the time that a call takes.
fn wait_some(round: u64) {
    let nanos = std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
    let random = u64::from(nanos / 1000) % 60;
    std::thread::sleep(Duration::from_millis(random + round * 6));
}

fn prepare(server: &Server, storage: &[&str]) {
    let files = "mkdir ~/d; for n in $(seq 400); do echo $n > ~/d/$n; done; echo 0 > /tmp/f";
    let named = ["run", "--name", "b", "--keep"];
    server.ok(&[&named[..], storage, &[files]].concat());
}

/// Checks that the box has all its files.
fn assert_whole(server: &Server, name: &str) {
    let text = "cat ~/d/* | sort -n | uniq | wc -l";
    assert_eq!(server.ok(&["exec", name, text]), "400\n", "{name}");
}

/// The layers that the snapshots name.
fn named(server: &Server) -> Vec<String> {
    let items = server.json(&["snapshot", "ls"]);
    let mut named = Vec::new();
    for item in items.as_array().unwrap() {
        assert_eq!(item["state"], "ready", "{item}");
        let layers = item["content"]["snapshot"]["layers"].as_array().unwrap();
        named.extend(
            layers
                .iter()
                .map(|layer| layer.as_str().unwrap().to_owned()),
        );
    }
    named.sort();
    named.dedup();
    named
}

#[test]
fn a_kill_during_a_snapshot_leaves_a_whole_one_or_none() {
    for user in users() {
        for storage in STORAGE {
            let mut server = start(user);
            prepare(&server, storage);
            let live = is_live(&server, "b");
            for round in 0..ROUNDS {
                let mut client = begin(&server, &["snapshot", "b", &format!("s{round}")]);
                wait_some(round);
                server = restart(server, user);
                client.wait().unwrap();
                let found = named(&server);
                if live {
                    eventually("only the layers of snapshots are left", || {
                        let mut left = layers(&server);
                        left.sort();
                        left == found || left == named(&server)
                    });
                }
            }
            if !live {
                server.ok(&["start", "b"]);
            }
            assert_whole(&server, "b");
            for item in server.json(&["snapshot", "ls"]).as_array().unwrap() {
                let name = item["name"].as_str().unwrap();
                let text = "ls ~/d | wc -l; cat /tmp/f";
                assert_eq!(server.ok(&["run", "--snapshot", name, text]), "400\n0\n");
            }
            server.ok(&["rm", "-f", "--all"]);
            for item in server.json(&["snapshot", "ls"]).as_array().unwrap() {
                server.ok(&["snapshot", "rm", item["name"].as_str().unwrap()]);
            }
            assert_nothing_left(&server);
        }
    }
}

#[test]
fn a_kill_during_a_stop_or_a_start_loses_no_file() {
    for user in users() {
        for storage in STORAGE {
            let mut server = start(user);
            prepare(&server, storage);
            for round in 0..ROUNDS {
                let state = server.json(&["ls"])[0]["state"].clone();
                let change = if state == "stopped" { "start" } else { "stop" };
                let mut client = begin(&server, &[change, "b"]);
                wait_some(round);
                server = restart(server, user);
                client.wait().unwrap();
                let listed = server.json(&["ls"]);
                assert_eq!(
                    listed.as_array().unwrap().len(),
                    1,
                    "round {round}: {listed}"
                );
                eventually("the box is running or stopped", || {
                    let listed = server.json(&["ls"]);
                    let state = listed[0]["state"].as_str();
                    matches!(state, Some("running" | "stopped"))
                });
                server.ok(&["start", "b"]);
                assert_whole(&server, "b");
                let text = format!("echo {round} >> ~/rounds; wc -l < ~/rounds");
                assert_eq!(server.ok(&["exec", "b", &text]), format!("{}\n", round + 1));
                if round % 2 == 0 {
                    server.ok(&["stop", "b"]);
                }
            }
            server.ok(&["rm", "-f", "b"]);
            assert_nothing_left(&server);
        }
    }
}

#[test]
fn a_kill_during_a_fork_leaves_all_boxes_or_none() {
    for user in users() {
        let mut server = start(user);
        prepare(&server, &[]);
        is_live(&server, "b");
        for round in 0..ROUNDS / 2 {
            let prefix = format!("r{round}");
            let arguments = ["fork", "b", "-n", "16", "--prefix", &prefix];
            let mut client = begin(&server, &arguments);
            if round == 0 {
                // In any case after the first box.
                eventually("a box runs", || {
                    let listed = server.json(&["ls"]);
                    let mut boxes = listed.as_array().unwrap().iter();
                    boxes.any(|info| {
                        let id = info["box_id"].as_str().unwrap();
                        id.starts_with(&prefix) && info["state"] == "running"
                    })
                });
            } else {
                wait_some(2 * round);
            }
            server = restart(server, user);
            let is_done = client.wait().unwrap().success();
            let listed = server.ok(&["ps", "-q"]);
            let made = listed.lines().filter(|name| name.starts_with(&prefix));
            let made: Vec<_> = made.collect();
            assert!(matches!(made.len(), 0 | 16), "round {round}: {made:?}");
            assert!(
                made.len() == 16 || !is_done,
                "round {round}: a fork is lost"
            );
            for name in made {
                assert_whole(&server, name);
                server.ok(&["rm", "-f", name]);
            }
        }
        server.ok(&["start", "b"]);
        assert_whole(&server, "b");
        server.ok(&["rm", "-f", "--all"]);
        assert_nothing_left(&server);
    }
}

#[test]
fn a_kill_during_a_rollback_leaves_one_of_both_states() {
    for user in users() {
        for storage in STORAGE {
            let mut server = start(user);
            prepare(&server, storage);
            is_live(&server, "b");
            server.ok(&["checkpoint", "b", "c"]);
            server.ok(&["start", "b"]);
            for round in 0..ROUNDS {
                server.ok(&["exec", "b", "echo 1 > /tmp/f"]);
                let mut client = begin(&server, &["rollback", "b", "c"]);
                wait_some(round);
                server = restart(server, user);
                client.wait().unwrap();
                eventually("the box is running or stopped", || {
                    let listed = server.json(&["ls"]);
                    let state = listed[0]["state"].as_str();
                    matches!(state, Some("running" | "stopped"))
                });
                server.ok(&["start", "b"]);
                let found = server.ok(&["exec", "b", "cat /tmp/f"]);
                assert!(matches!(found.trim(), "0" | "1"), "round {round}: {found}");
                assert_whole(&server, "b");
            }
            server.ok(&["rollback", "b", "c"]);
            assert_eq!(server.ok(&["exec", "b", "cat /tmp/f"]), "0\n");
            server.ok(&["rm", "-f", "b"]);
            assert_nothing_left(&server);
        }
    }
}
