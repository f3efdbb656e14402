//! The system directories, `/etc` and `/dev` of a box are private: its watches and locks there
//! affect no other process.
//!
//! Also what `/proc` and a workspace show of the host.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command};

use box_test_wait::eventually;
use box_tests::machine::{Machine, on_each_machine, printed};
use rustix::fs::FlockOperation;
use serde_json::json;

use super::{Answers, answers, as_root, command, inside, inside_with, outside};

const VIEWS: &str = include_str!("probes/views.py");

/// Paths that every box shares with the host by name.
const WATCHED: &str = "/usr/bin /usr/lib /etc /etc/ld.so.cache";
const LOCKED: [&str; 4] = ["/usr/bin", "/usr/bin/env", "/etc", "/etc/ld.so.cache"];

/// Starts a probe that runs beside others, and waits until it has begun. `stop` returns its
/// answers.
async fn begin(machine: &Machine, session: &str, args: &str) {
    let probe = command(VIEWS, &[args]);
    let place = "/tmp/probe";
    let started = format!(
        "mkdir {place}; cat > {place}/run <<'END-OF-RUN'\n{probe}END-OF-RUN\n\
         (sh {place}/run > {place}/said 2>&1; touch {place}/done) &\n\
         until [ -e {place}/ready ]; do sleep 0.02; [ ! -e {place}/done ] || exec cat {place}/said; done; echo ready"
    );
    assert_eq!(printed(&machine.exec(session, &started).await), "ready");
}

async fn stop(machine: &Machine, session: &str) -> Answers {
    let stopped = "touch /tmp/probe/stop; until [ -e /tmp/probe/done ]; do sleep 0.02; done; cat /tmp/probe/said";
    answers(printed(&machine.exec(session, stopped).await))
}

fn run_on_the_host(program: &str) {
    Command::new(program).arg("--version").output().unwrap();
}

/// Starts the watching program on the host, and waits until it watches.
async fn watch_the_host(mode: &str, watched: &str, here: &Path) -> Child {
    let watching = Command::new("sh")
        .args([
            "-c",
            &command(VIEWS, &[mode, here.to_str().unwrap(), watched]),
        ])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    eventually("the host is watched", async || here.join("ready").exists()).await;
    watching
}

#[tokio::test]
async fn a_watch_in_a_box_shows_no_activity_of_the_host_or_other_boxes() {
    let here = tempfile::tempdir().unwrap();
    let watching = watch_the_host("watch", WATCHED, here.path()).await;
    run_on_the_host("/usr/bin/factor");
    std::fs::write(here.path().join("stop"), "").unwrap();
    let said = watching.wait_with_output().unwrap();
    let host = answers(&String::from_utf8(said.stdout).unwrap());
    assert!(host["seen"].contains("factor"), "control: {host:?}");

    on_each_machine(async |machine| {
        begin(machine, "watcher", &format!("watch /tmp/probe {WATCHED}")).await;
        run_on_the_host("/usr/bin/factor");
        printed(&machine.exec("other", "/usr/bin/expr 1 + 1").await);
        printed(&machine.exec("watcher", "/usr/bin/tac < /dev/null").await);
        let said = stop(machine, "watcher").await;
        let seen: Vec<&str> = said["seen"].split(' ').collect();
        assert!(seen.contains(&"tac"), "control: its own: {said:?}");
        assert!(
            !seen.contains(&"factor") && !seen.contains(&"expr"),
            "{}: {said:?}",
            machine.name
        );
    })
    .await;
}

#[tokio::test]
async fn a_lock_in_a_box_blocks_nothing_outside() {
    on_each_machine(async |machine| {
        // The devices of an ordinary user's box are the host's, because that user cannot make any.
        let own_devices = !machine.lacks("two_uids").await;
        let mut places = LOCKED.to_vec();
        places.push("/dev/null");
        let list = places.join(" ");
        begin(machine, "locker", &format!("lock /tmp/probe {list}")).await;
        let beside = inside(machine, "locker", VIEWS, &["try", &list]).await;
        let other = inside(machine, "other", VIEWS, &["try", &list]).await;
        let host = outside(VIEWS, &["try", &list]);
        for place in places {
            let case = format!("{}: {place}", machine.name);
            assert_eq!(beside[place], "EAGAIN", "control: {case}");
            let free = place != "/dev/null" || own_devices;
            let wanted = if free { "ok None" } else { "EAGAIN" };
            assert_eq!(other[place], wanted, "another box: {case}");
            assert_eq!(host[place], wanted, "the host: {case}");
            let posix = format!("posix {place}");
            assert_eq!(beside[&posix], "read", "control: {case}");
            let wanted = if free { "none" } else { "read" };
            assert_eq!(other[&posix], wanted, "another box: {case}");
            assert_eq!(host[&posix], wanted, "the host: {case}");
        }
        assert_eq!(stop(machine, "locker").await["locked"], "5");
    })
    .await;
}

#[tokio::test]
async fn a_lock_of_the_host_blocks_no_box() {
    // No other test locks it on the host.
    const PLACE: &str = "/usr/bin/nl";
    let held = std::fs::File::open(PLACE).unwrap();
    let shared = FlockOperation::NonBlockingLockShared;
    rustix::fs::fcntl_lock(&held, shared).unwrap();
    rustix::fs::flock(&held, shared).unwrap();
    let posix = format!("posix {PLACE}");
    let host = outside(VIEWS, &["try", PLACE]);
    assert_eq!(host[&posix], "read", "control");
    assert_eq!(host[PLACE], "EAGAIN", "control");
    on_each_machine(async |machine| {
        let said = inside(machine, "locked", VIEWS, &["try", PLACE]).await;
        assert_eq!(said[&posix], "none", "{}", machine.name);
        assert_eq!(said[PLACE], "ok None", "{}", machine.name);
    })
    .await;
}

/// The files of `/etc` are copies. They belong to an ordinary user if that user made them.
#[tokio::test]
async fn a_lease_in_a_box_blocks_nothing_outside() {
    const PLACES: &str = "/etc/ld.so.conf /usr/bin/env /tmp/own";
    on_each_machine(async |machine| {
        for session in ["lease", "other"] {
            machine.exec(session, "touch /tmp/own").await;
        }
        begin(machine, "lease", &format!("lease /tmp/probe {PLACES}")).await;
        let beside = inside(machine, "lease", VIEWS, &["open", PLACES]).await;
        let other = inside(machine, "other", VIEWS, &["open", PLACES]).await;
        let host = outside(VIEWS, &["open", "/etc/ld.so.conf /usr/bin/env"]);
        let said = stop(machine, "lease").await;
        let is_owner = machine.lacks("two_uids").await;
        for (place, leased) in [
            ("/etc/ld.so.conf", is_owner),
            ("/usr/bin/env", false),
            ("/tmp/own", true),
        ] {
            let case = format!("{}: {place}", machine.name);
            let wanted = if leased {
                ("ok 0", "EAGAIN")
            } else {
                ("EACCES", "ok None")
            };
            assert_eq!((&*said[place], &*beside[place]), wanted, "control: {case}");
            assert_eq!(other[place], "ok None", "another box: {case}");
            if place != "/tmp/own" {
                assert_eq!(host[place], "ok None", "the host: {case}");
            }
        }
    })
    .await;
}

/// A system directory with a file that few programs read.
const NOTIFIED: &str = "/usr/lib";
const READ: &str = "/usr/lib/os-release";

#[tokio::test]
async fn file_notifications_in_a_box_show_no_activity_of_the_host_or_other_boxes() {
    let here = tempfile::tempdir().unwrap();
    let watching = watch_the_host("notify", NOTIFIED, here.path()).await;
    std::fs::read(READ).unwrap();
    for request in ["others", "stop"] {
        std::fs::write(here.path().join(request), "").unwrap();
    }
    let said = watching.wait_with_output().unwrap();
    let host = answers(&String::from_utf8(said.stdout).unwrap());
    // The kernel may be built without them.
    let there_are = host["watched"] == "ok 0";
    if there_are {
        assert_ne!(host["others"], "0", "control: {host:?}");
    }
    on_each_machine(async |machine| {
        begin(machine, "notify", &format!("notify /tmp/probe {NOTIFIED}")).await;
        std::fs::read(READ).unwrap();
        let read = format!("cat {READ} > /dev/null");
        machine.exec("other", &read).await;
        let counted =
            "touch /tmp/probe/others; until [ -e /tmp/probe/counted ]; do sleep 0.02; done";
        machine.exec("notify", counted).await;
        machine.exec("notify", &read).await;
        let said = stop(machine, "notify").await;
        assert_eq!(said["watched"], host["watched"], "{}", machine.name);
        assert_eq!(said["others"], "0", "{}: {said:?}", machine.name);
        if there_are {
            assert_ne!(said["all"], "0", "control: its own: {said:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn the_mounts_of_a_box_name_no_directory_of_the_host() {
    on_each_machine(async |machine| {
        let said = inside(machine, "mounts", VIEWS, &["mounts"]).await;
        assert!(said.contains_key("/usr"), "control: {said:?}");
        for (place, layers) in &said {
            let names = layers.trim_start_matches("lowerdir=").split(':');
            for name in names {
                let own = name == "/n" || name == "/p" || name.starts_with("/t/");
                assert!(own, "{}: {place}: {layers}", machine.name);
            }
        }
    })
    .await;
    if as_root() {
        let own = Machine::new("root", None);
        assert!(
            !own.lacks("overlay").await,
            "control: this machine has overlays"
        );
    }
}

#[tokio::test]
async fn proc_shows_only_the_documented_files_of_the_machine() {
    const SECURITY: &str = include_str!("../../../../docs/security.md");
    let (_, list) = SECURITY
        .split_once("`/proc` shows of the machine: ")
        .unwrap();
    let (list, _) = list.split_once("\n\n").unwrap();
    let listed: Vec<&str> = list.split('`').skip(1).step_by(2).collect();
    assert!(listed.contains(&"meminfo"), "control: {listed:?}");
    let host = outside(VIEWS, &["proc"]);
    if as_root() {
        assert_eq!(host["interrupts"], "True", "control");
    }
    on_each_machine(async |machine| {
        let said = inside(machine, "proc", VIEWS, &["proc"]).await;
        assert_eq!(said["meminfo"], "True", "control");
        let shown = said.iter().filter(|(_, shown)| *shown == "True");
        let unlisted: Vec<&String> = shown
            .map(|(name, _)| name)
            .filter(|name| !listed.contains(&name.as_str()))
            .collect();
        assert!(unlisted.is_empty(), "{}: {unlisted:?}", machine.name);
    })
    .await;
}

#[tokio::test]
async fn a_socket_is_reachable_only_through_its_mounted_directory() {
    on_each_machine(async |machine| {
        let (given, kept) = (machine.directory(), machine.directory());
        let listeners = [&given, &kept].map(|dir| {
            let path = dir.path().join("socket");
            let listener = UnixListener::bind(&path).unwrap();
            let all = std::fs::Permissions::from_mode(0o777);
            std::fs::set_permissions(&path, all).unwrap();
            std::os::unix::fs::chown(&path, Some(machine.uid), Some(machine.uid)).unwrap();
            listener
        });
        let outside = kept.path().join("socket").to_str().unwrap().to_owned();
        let paths = ["socket", "/workspace/socket", &outside];
        let more = json!({"host_path": given.path()});
        let said = inside_with(machine, "socket", VIEWS, &paths, more).await;
        assert_eq!(said["/workspace/socket"], "ok None", "{}", machine.name);
        assert_eq!(said[&outside], "ENOENT", "{}", machine.name);
        drop(listeners);
    })
    .await;
}
