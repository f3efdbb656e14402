//! Stopped boxes, checkpoints and rollbacks on the real program, also across `kill -9`.

use box_test_wait::blocking::eventually;

use super::snapshots::{assert_nothing_left, is_live, restart, start};
use super::support::{Server, err, out, users};

/// Options of boxes with files in memory and on a disk.
const STORAGE: [&[&str]; 2] = [&[], &["--disk-mb", "700m"]];

fn run(server: &Server, name: &str, storage: &[&str], text: &str) {
    let named = ["run", "--name", name, "--keep"];
    server.ok(&[&named[..], storage, &[text]].concat());
}

#[test]
fn a_stopped_box_survives_its_server_and_keeps_its_files() {
    for user in users() {
        for storage in STORAGE {
            let server = start(user);
            let make = "mkdir ~/d; echo one > ~/d/f; echo two > /tmp/g; rm -f ~/.none; echo w > w";
            run(&server, "b", storage, make);
            server.run(&["exec", "--id", "c", "b", "echo said; exit 3"]);
            assert_eq!(server.ok(&["stop", "b"]), "b\n");
            assert_eq!(server.json(&["ls"])[0]["state"], "stopped");
            let shown = server.json(&["inspect", "b/c"]);
            assert_eq!(shown["exit"]["code"], 3, "{shown}");
            assert_eq!(shown["box_id"], server.json(&["ls"])[0]["box_id"]);
            assert_eq!(out(&server.run(&["logs", "b/c"])), "said\n");
            let refused = err(&server.run(&["exec", "b", "true"]));
            assert!(refused.contains("boxd start b"), "{refused}");
            let server = restart(server, user);
            assert_eq!(server.json(&["ls"])[0]["state"], "stopped");
            assert_eq!(out(&server.run(&["logs", "b/c"])), "said\n");
            assert_eq!(server.ok(&["start", "b"]), "b\n");
            let text = "cat ~/d/f /tmp/g w /etc/hostname; echo three >> ~/d/f; rm /tmp/g";
            assert_eq!(server.ok(&["exec", "b", text]), "one\ntwo\nw\nb\n");
            let shown = server.json(&["inspect", "b/c"]);
            assert_eq!(shown["box_id"], server.json(&["ls"])[0]["box_id"]);
            assert_eq!(out(&server.run(&["logs", "b/c"])), "said\n");
            server.ok(&["stop", "b"]);
            server.ok(&["start", "b"]);
            let server = restart(server, user);
            let text = "cat ~/d/f; ls /tmp; cat w";
            assert_eq!(server.ok(&["exec", "b", text]), "one\nthree\nw\n");
            server.ok(&["stop", "b"]);
            server.ok(&["rm", "b"]);
            assert_nothing_left(&server);
        }
    }
}

#[test]
fn a_box_that_stops_often_has_few_layers() {
    for user in users() {
        let server = start(user);
        run(&server, "b", &[], "true");
        for round in 0..11 {
            let text =
                format!("rm -f /tmp/f*; echo {round} > /tmp/f{round}; echo {round} >> ~/all");
            server.ok(&["exec", "b", &text]);
            server.ok(&["stop", "b"]);
            eventually("many layers become one", || {
                super::snapshots::layers(&server).len() < 8
            });
            server.ok(&["start", "b"]);
        }
        assert_eq!(
            server.ok(&["exec", "b", "ls /tmp; cat /tmp/f*; wc -l < ~/all"]),
            "f10\n10\n11\n"
        );
        server.ok(&["rm", "-f", "b"]);
        assert_nothing_left(&server);
    }
}

#[test]
fn a_stopped_box_is_forked_and_snapshotted_without_a_copy() {
    for user in users() {
        for storage in STORAGE {
            let server = start(user);
            run(&server, "b", storage, "echo one > /tmp/f");
            server.ok(&["stop", "b"]);
            let before = super::snapshots::layers(&server);
            server.ok(&["snapshot", "b", "s"]);
            let names = server.ok(&["fork", "b", "-n", "2"]);
            assert_eq!(super::snapshots::layers(&server), before);
            for name in names.lines() {
                let text = "cat /tmp/f; echo changed > /tmp/f";
                assert_eq!(server.ok(&["exec", name, text]), "one\n");
            }
            server.ok(&["start", "b"]);
            assert_eq!(
                server.ok(&["exec", "b", "cat /tmp/f; echo two > /tmp/f"]),
                "one\n"
            );
            assert_eq!(
                server.ok(&["run", "--snapshot", "s", "cat /tmp/f"]),
                "one\n"
            );
            server.ok(&["rm", "-f", "--all"]);
            server.ok(&["snapshot", "rm", "s"]);
            assert_nothing_left(&server);
        }
    }
}

#[test]
fn a_box_returns_to_its_checkpoints() {
    for user in users() {
        for storage in STORAGE {
            let server = start(user);
            run(&server, "b", storage, "echo one > /tmp/f");
            let live = is_live(&server, "b");
            assert_eq!(server.ok(&["checkpoint", "b"]), "checkpoint-1\n");
            server.run(&["start", "b"]);
            server.ok(&["exec", "b", "echo two > /tmp/f; touch /tmp/new"]);
            if !live {
                server.ok(&["stop", "b"]);
            }
            assert_eq!(server.ok(&["checkpoint", "b", "later"]), "later\n");
            let taken = err(&server.run(&["checkpoint", "b", "later"]));
            assert!(taken.contains("later is taken"), "{taken}");
            server.run(&["start", "b"]);
            server.ok(&["exec", "b", "rm -r /tmp/*"]);
            assert_eq!(server.ok(&["rollback", "b", "checkpoint-1"]), "b\n");
            assert_eq!(server.ok(&["exec", "b", "cat /tmp/*"]), "one\n");
            let server = restart(server, user);
            assert_eq!(server.ok(&["rollback", "b"]), "b\n");
            assert_eq!(
                server.ok(&["exec", "b", "cat /tmp/f; ls /tmp"]),
                "two\nf\nnew\n"
            );
            let listed = server.json(&["checkpoint", "b", "--ls"]);
            assert_eq!(listed.as_array().unwrap().len(), 2, "{listed}");
            server.ok(&["stop", "b"]);
            server.ok(&["rollback", "b", "checkpoint-1"]);
            assert_eq!(server.json(&["ls"])[0]["state"], "stopped");
            let missing = err(&server.run(&["rollback", "b", "nope"]));
            assert!(
                missing.contains("the box has no checkpoint nope"),
                "{missing}"
            );
            server.ok(&["start", "b"]);
            assert_eq!(server.ok(&["exec", "b", "cat /tmp/*"]), "one\n");
            server.ok(&["rm", "-f", "b"]);
            assert_nothing_left(&server);
        }
    }
}

#[test]
fn a_box_that_was_killed_returns_to_its_checkpoint() {
    let server = Server::start();
    run(&server, "b", &[], "echo one > /tmp/f");
    if !is_live(&server, "b") {
        return;
    }
    server.ok(&["checkpoint", "b"]);
    let hungry = "python3 -c 'x = bytearray(3 << 30)' || tail /dev/zero";
    server.run(&["exec", "b", hungry]);
    eventually("the box ended or lives", || {
        matches!(
            server.json(&["ls"])[0]["state"].as_str(),
            Some("failed" | "running")
        )
    });
    server.ok(&["rollback", "b"]);
    assert_eq!(server.ok(&["exec", "b", "cat /tmp/f"]), "one\n");
}

#[test]
fn a_lifetime_that_the_machine_cannot_keep_is_refused() {
    for user in users() {
        let server = start(user);
        server.ok(&["run", "--name", "probe", "true"]);
        let can_pause = is_live(&server, "probe");
        for option in ["--on-idle", "--on-expiry"] {
            let times = ["--ttl", "1h", "--expire", "1h"];
            let run = [
                &["run", "--name", "b"][..],
                &times,
                &[option, "pause", "true"],
            ];
            let ran = server.run(&run.concat());
            assert_eq!(ran.status.success(), can_pause, "{ran:?}");
            if !can_pause {
                let error = format!("{option}: this machine cannot pause a box (cgroup.freeze)");
                assert!(err(&ran).contains(&error), "{ran:?}");
            }
            server.run(&["rm", "-f", "b"]);
            assert_eq!(server.ok(&["ps", "-q"]), "probe\n");
        }
    }
}
