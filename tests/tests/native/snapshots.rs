//! Copies of the private files of boxes, and boxes on top of them.

use std::path::Path;
use std::time::Duration;

use box_protocol::actions::{AgentStart, AgentStartParams};
use box_protocol::{BoxError, BoxSpec, Code};
use box_rpc::{Codecs, Options, Router, Session};
use box_runtime::native::NativeBackend;
use box_runtime::{
    Backend as _, Layer, LayerKind, Reach, Snapshot, SnapshotRequest, StartRequest, StartedBox,
};
use box_test_wait::{LONG, eventually};
use box_tests::machine::{Machine, on_each_machine};
use serde_json::{Value, json};
use uuid::Uuid;

/// A box without a runtime.
pub(super) struct DirectBox {
    backend: NativeBackend,
    pub(super) id: Uuid,
    agent: Session,
}

impl DirectBox {
    async fn start(machine: &Machine, more: Value, layers: &[Layer]) -> Self {
        Self::start_in(&machine.backend, more, layers).await
    }

    pub(super) async fn start_in(backend: &NativeBackend, more: Value, layers: &[Layer]) -> Self {
        let mut asked = json!({"box_id": "direct", "read_only_rootfs": false});
        for (name, value) in more.as_object().unwrap() {
            asked[name] = value.clone();
        }
        let spec = BoxSpec::from_value(asked).unwrap();
        let id = Uuid::now_v7();
        let request = StartRequest::new(id, &spec).with_layers(layers);
        let started = backend.start(request).await.unwrap();
        Self::with(backend, id, started)
    }

    pub(super) fn with(backend: &NativeBackend, id: Uuid, started: StartedBox) -> Self {
        let options = Options {
            codecs: Codecs::JSON_RPC,
            ..Options::client()
        };
        let agent = Session::start_boxed(started.connection, Router::empty(), options);
        Self {
            backend: backend.clone(),
            id,
            agent,
        }
    }

    /// Runs a script as the guest. Returns what it prints.
    pub(super) async fn sh(&self, script: &str) -> String {
        let params = json!({"command_id": Uuid::now_v7().to_string(), "program": {"argv": ["/bin/sh", "-c", script]},
            "cwd": "/home/box", "env": {"PATH": "/usr/bin:/bin"},
            "reply": {"collected": {"bytes": 100_000}}});
        let params: AgentStartParams = serde_json::from_value(params).unwrap();
        let ran = self.agent.peer().call::<AgentStart>(&params).await.unwrap();
        let collected = ran.collected.unwrap();
        let error = String::from_utf8_lossy(&collected.stderr).into_owned();
        assert_eq!(ran.exit.unwrap().code, Some(0), "{script}: {error}");
        String::from_utf8(collected.stdout.to_vec()).unwrap()
    }

    async fn snapshot(&self, into: &Path) -> Result<Snapshot, BoxError> {
        self.backend
            .snapshot(self.id, SnapshotRequest::new(into, LONG))
            .await
    }

    pub(super) async fn end(self) {
        self.backend.stop(self.id).await.unwrap();
    }
}

/// A layer of copied files.
fn copied_files(path: &Path) -> Layer {
    Layer::new(path, LayerKind::Directory)
}

/// A request that every machine can serve: of a box without processes.
pub(super) fn of_stopped(into: &Path) -> SnapshotRequest<'_> {
    SnapshotRequest::new(into, LONG).of_stopped(true)
}

/// Waits until a directory is removed.
async fn gone(path: &Path) {
    eventually("the copy is removed", async || !path.exists()).await;
}

/// Makes every kind of file that a guest can make.
pub(super) const FILES: &str = "set -e; umask 022; mkdir -p dir/deep private; chmod 700 private; echo secret > private/s; chmod 000 private/s; \
    echo one > dir/one; ln dir/one dir/deep/same; ln -s ../one dir/deep/link; ln -s /etc/passwd out; \
    truncate -s 1G sparse; printf x | dd of=sparse bs=1 seek=50000000 conv=notrunc 2> /dev/null; \
    mkfifo fifo; touch -d @1.5 old; mkdir -p /opt/tool /tmp/t /srv/new; echo t > /opt/tool/t; echo t > /tmp/t/t; echo n > /srv/new/n; \
    printf '#!/bin/sh\\necho runs\\n' > program; chmod 755 program; head -c 3000000 /dev/zero | tr '\\0' b > big";

/// Shows them.
pub(super) const SHOW: &str = "set -e; ls -A; cat dir/one dir/deep/link /opt/tool/t /tmp/t/t /srv/new/n; readlink out; \
    stat -c '%n %a %U %F %h' private private/s dir dir/one fifo program; stat -c '%n %s %Y' sparse old big; \
    stat -c %i dir/one dir/deep/same | uniq | wc -l; du -m sparse | cut -f 1; head -c 50000001 sparse | tail -c 1; echo; ./program; tail -c 3 big; echo";

#[tokio::test]
async fn a_box_on_a_snapshot_has_all_files_of_the_first() {
    on_each_machine(async |machine| {
        for more in [json!({}), json!({"disk_mb": 2000})] {
            let place = machine.directory();
            let into = place.path().join("one");
            let first = DirectBox::start(machine, more.clone(), &[]).await;
            first.sh(FILES).await;
            let shown = first.sh(SHOW).await;
            let copied = machine.backend.snapshot(first.id, of_stopped(&into)).await;
            let copied = copied.unwrap();
            assert!(copied.bytes > 3_000_000 && copied.bytes < 20_000_000, "{copied:?}");
            assert!(copied.entries > 20, "{copied:?}");
            // Later changes are not in the snapshot.
            first.sh("rm -rf dir big; echo late > late").await;
            first.end().await;
            let layers = [copied_files(&into)];
            let second = DirectBox::start(machine, more.clone(), &layers).await;
            assert_eq!(second.sh(SHOW).await, shown, "{} {more}", machine.name);
            // The guest owns everything, and a second snapshot has only the changes.
            second.sh("rm -r dir private; mkdir dir; echo two > dir/two; echo more >> big; chmod 644 program; rm -r /srv/new").await;
            let next = place.path().join("two");
            let copied = machine.backend.snapshot(second.id, of_stopped(&next)).await;
            let copied = copied.unwrap();
            assert!(copied.bytes < 4_000_000, "{copied:?}");
            second.end().await;
            let layers = [copied_files(&next), copied_files(&into)];
            let third = DirectBox::start(machine, more.clone(), &layers).await;
            let show = "ls -A; ls dir; tail -c 5 big; stat -c %a program; ls /srv; cat /opt/tool/t";
            let shown = third.sh(show).await;
            let wanted = "big\ndir\nfifo\nold\nout\nprogram\nsparse\ntwo\nmore\n644\nt\n";
            assert_eq!(shown, wanted, "{} {more}", machine.name);
            third.end().await;
        }
    })
    .await;
}

/// Writes a number to two files, in turn, with many files between them.
const WRITER: &str = "mkdir a m z; i=0; while [ $i -lt 40 ]; do head -c 1000000 /dev/zero > m/$i; i=$((i+1)); done; \
    (i=0; while :; do i=$((i+1)); echo $i > a/n.new; mv a/n.new a/n; echo $i > z/n.new; mv z/n.new z/n; done) > /dev/null 2>&1 & \
    until [ -e z/n ]; do sleep 0.01; done";

#[tokio::test]
async fn a_snapshot_of_a_running_box_is_of_one_moment() {
    on_each_machine(async |machine| {
        let place = machine.directory();
        let running = DirectBox::start(machine, json!({}), &[]).await;
        running.sh(WRITER).await;
        if machine.lacks("cgroup.freeze").await {
            let into = place.path().join("refused");
            let error = running.snapshot(&into).await.unwrap_err();
            assert_eq!(error.code(), Code::Unsupported, "{error:?}");
            gone(&into).await;
            return running.end().await;
        }
        let mut last = 0;
        for round in 0..5 {
            let into = place.path().join(round.to_string());
            let copied = running.snapshot(&into).await.unwrap();
            assert!(
                copied.paused > Duration::ZERO && copied.bytes > 40_000_000,
                "{copied:?}"
            );
            let read = |name: &str| {
                let text = std::fs::read_to_string(into.join("home/box").join(name));
                text.unwrap().trim().parse::<u64>().unwrap()
            };
            let (a, z) = (read("a/n"), read("z/n"));
            assert!(a == z || a == z + 1, "{a} and {z} are of different times");
            // The processes continue.
            assert!(a > last, "{a} after {last}");
            last = a;
            let more = format!("until [ $(cat z/n) -gt {a} ]; do sleep 0.01; done");
            running.sh(&more).await;
        }
        running.end().await;
    })
    .await;
}

#[tokio::test]
async fn a_box_continues_after_a_failed_or_dropped_snapshot() {
    on_each_machine(async |machine| {
        if machine.lacks("cgroup.freeze").await {
            return;
        }
        let place = machine.directory();
        let running = DirectBox::start(machine, json!({}), &[]).await;
        running.sh(WRITER).await;
        let continues = async || {
            running
                .sh("n=$(cat z/n); until [ $(cat z/n) -gt $n ]; do sleep 0.01; done")
                .await;
        };
        // Too large, too many files, and too slow.
        let request = |into| SnapshotRequest::new(into, LONG);
        let into = place.path().join("failed");
        for (request, code) in [
            (
                request(&into).with_limits(1_000_000, u64::MAX),
                Code::Capacity,
            ),
            (request(&into).with_limits(u64::MAX, 10), Code::Capacity),
            (SnapshotRequest::new(&into, Duration::ZERO), Code::Timeout),
        ] {
            let error = machine
                .backend
                .snapshot(running.id, request)
                .await
                .unwrap_err();
            assert_eq!(error.code(), code, "{error:?}");
            let path = into.to_str().unwrap();
            assert!(!error.message().contains(path), "{error:?}");
            continues().await;
            gone(&into).await;
        }
        // The caller gives up at any point.
        for micros in [0, 100, 1000, 3000, 10_000, 30_000] {
            let copy = running.snapshot(&into);
            let ended = tokio::time::timeout(Duration::from_micros(micros), copy).await;
            continues().await;
            if ended.is_ok() {
                std::fs::remove_dir_all(&into).unwrap();
            }
            gone(&into).await;
        }
        // Control: the same request succeeds.
        let copied = running.snapshot(&place.path().join("whole")).await.unwrap();
        assert!(copied.bytes > 40_000_000, "{copied:?}");
        // An existing directory is never filled or removed.
        let kept = place.path().join("kept");
        std::fs::create_dir(&kept).unwrap();
        assert!(running.snapshot(&kept).await.is_err());
        assert!(kept.exists());
        running.end().await;
    })
    .await;
}

#[tokio::test]
async fn a_paused_box_stays_paused_and_can_be_resumed_during_a_snapshot() {
    on_each_machine(async |machine| {
        if machine.lacks("cgroup.freeze").await {
            return;
        }
        let (place, workspace) = (machine.directory(), machine.directory());
        let more = json!({"host_path": workspace.path()});
        let running = DirectBox::start(machine, more, &[]).await;
        running.sh(WRITER).await;
        running.sh("(i=0; while :; do i=$((i+1)); echo $i > /workspace/n.new; mv /workspace/n.new /workspace/n; sleep 0.01; done) > /dev/null 2>&1 & until [ -e /workspace/n ]; do sleep 0.01; done").await;
        let count = || std::fs::read_to_string(workspace.path().join("n")).unwrap();
        machine.backend.freeze(running.id, true).await.unwrap();
        let before = count();
        running.snapshot(&place.path().join("one")).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(count(), before, "the box is still paused");
        // Resumed while it is being copied: the copy is complete first.
        let into = place.path().join("two");
        let (copied, resumed) = tokio::join!(running.snapshot(&into), async {
            eventually("the copy begins", async || into.exists()).await;
            machine.backend.freeze(running.id, false).await
        });
        copied.unwrap();
        resumed.unwrap();
        eventually("the box runs", async || count() != before).await;
        running.end().await;
    })
    .await;
}

#[tokio::test]
async fn a_box_that_has_ended_or_ends_during_a_snapshot_makes_none() {
    on_each_machine(async |machine| {
        let place = machine.directory();
        let running = DirectBox::start(machine, json!({}), &[]).await;
        running
            .sh("i=0; while [ $i -lt 60 ]; do head -c 1000000 /dev/zero > $i; i=$((i+1)); done")
            .await;
        let id = running.id;
        let into = place.path().join("ended");
        let (copied, ()) = tokio::join!(machine.backend.snapshot(id, of_stopped(&into)), async {
            eventually("the copy begins", async || into.join("home").exists()).await;
            machine.backend.stop(id).await.unwrap();
        });
        // The copy may have been complete before the end.
        match copied {
            Ok(copied) => assert!(copied.bytes >= 60_000_000, "{copied:?}"),
            Err(error) => {
                assert_eq!(error.code(), Code::Conflict, "{error:?}");
                gone(&into).await;
            }
        }
        let into = place.path().join("gone");
        let error = machine.backend.snapshot(id, of_stopped(&into)).await;
        assert_eq!(error.unwrap_err().code(), Code::Unavailable);
        assert!(!into.exists());
    })
    .await;
}

#[tokio::test]
async fn a_box_of_an_earlier_process_can_be_copied() {
    on_each_machine(async |machine| {
        let (place, state) = (machine.directory(), machine.directory());
        let mut config = machine.config();
        config.state_dir = Some(state.path().to_owned());
        config.outlive = true;
        for more in [json!({}), json!({"disk_mb": 2000})] {
            let id = {
                let earlier = NativeBackend::new(config.clone());
                let made = DirectBox::start_in(&earlier, more.clone(), &[]).await;
                made.sh("echo kept > file").await;
                earlier.persist(made.id, "record").unwrap();
                made.id
            };
            let backend = NativeBackend::new(config.clone());
            let adopted = async || backend.adopt(|_| true).await;
            // The earlier process must have ended first.
            eventually("the state is free", async || {
                adopted()
                    .await
                    .is_ok_and(|found| found.boxes.iter().any(|found| found.id == id))
            })
            .await;
            let Reach::Alive(started) = backend.reach(id).await.unwrap() else {
                panic!("the box is dead");
            };
            let again = DirectBox::with(&backend, id, started);
            again.sh("echo more >> file").await;
            let into = place.path().join(id.to_string());
            let copied = backend.snapshot(id, of_stopped(&into)).await;
            copied.unwrap_or_else(|error| panic!("{} {more}: {error:?}", machine.name));
            let file = std::fs::read_to_string(into.join("home/box/file")).unwrap();
            assert_eq!(file, "kept\nmore\n", "{} {more}", machine.name);
            again.end().await;
        }
    })
    .await;
}
