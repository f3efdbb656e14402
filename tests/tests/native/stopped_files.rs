//! Boxes that end and keep their private files as layers of later boxes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use box_protocol::{BoxError, BoxSpec, Code};
use box_runtime::native::NativeBackend;
use box_runtime::{
    Backend as _, Layer, LayerFiles, LayerKind, Reach, SnapshotRequest, StartRequest,
};
use box_test_wait::{LONG, eventually};
use box_tests::machine::{Machine, on_each_machine};
use serde_json::{Value, json};
use tempfile::TempDir;
use uuid::Uuid;

use super::snapshots::{DirectBox, FILES, SHOW, of_stopped};

/// A backend whose boxes outlive it, with a directory for layers.
struct Place {
    backend: NativeBackend,
    state: TempDir,
    layers: TempDir,
}

impl Place {
    fn new(machine: &Machine) -> Self {
        let (state, layers) = (machine.directory(), machine.directory());
        let backend = Self::backend(machine, state.path());
        Self {
            backend,
            state,
            layers,
        }
    }

    fn backend(machine: &Machine, state: &Path) -> NativeBackend {
        let mut config = machine.config();
        config.state_dir = Some(state.to_owned());
        config.outlive = true;
        NativeBackend::new(config)
    }

    fn layer(&self, name: &str) -> PathBuf {
        self.layers.path().join(name)
    }

    fn state_of(&self, id: Uuid) -> PathBuf {
        self.state.path().join(id.simple().to_string())
    }

    async fn start(&self, more: &Value, layers: &[Layer]) -> DirectBox {
        DirectBox::start_in(&self.backend, more.clone(), layers).await
    }

    /// Starts a box that continues on a disk.
    async fn continued(&self, more: &Value, disk: &Path) -> Result<DirectBox, BoxError> {
        let mut asked = json!({"box_id": "direct", "read_only_rootfs": false});
        for (name, value) in more.as_object().unwrap() {
            asked[name] = value.clone();
        }
        let spec = BoxSpec::from_value(asked).unwrap();
        let id = Uuid::now_v7();
        let request = StartRequest::new(id, &spec).with_disk(Some(disk));
        let started = self.backend.start(request).await?;
        Ok(DirectBox::with(&self.backend, id, started))
    }

    async fn stop(&self, id: Uuid, into: &Path) -> Result<LayerFiles, BoxError> {
        self.backend.stop_into_layer(id, of_stopped(into)).await
    }

    /// Drops the backend, as the end of its process would, and adopts its boxes.
    async fn next(self, machine: &Machine) -> Self {
        let Self {
            backend,
            state,
            layers,
        } = self;
        drop(backend);
        let backend = Self::backend(machine, state.path());
        eventually("the state is free", async || {
            backend.adopt(|_| true).await.is_ok()
        })
        .await;
        Self {
            backend,
            state,
            layers,
        }
    }

    /// Whether a loop device has a disk of a box or a layer.
    fn has_loops(&self) -> bool {
        let devices = std::fs::read_dir("/sys/block").unwrap().flatten();
        let mut files = devices.filter_map(|device| {
            std::fs::read_to_string(device.path().join("loop/backing_file")).ok()
        });
        files.any(|file| {
            let file = Path::new(file.trim());
            // The disks of spare boxes have no name: the kernel shows a number after `#`.
            let is_spare = file
                .file_name()
                .is_some_and(|name| name.as_encoded_bytes().starts_with(b"#"));
            let is_here = [&self.state, &self.layers]
                .iter()
                .any(|directory| file.starts_with(directory.path()));
            is_here && !is_spare
        })
    }

    async fn is_clean(&self) {
        eventually("no loop device is left", async || !self.has_loops()).await;
    }
}

/// Boxes with private files in memory and on a disk.
fn kinds() -> [Value; 2] {
    [json!({}), json!({"disk_mb": 2000})]
}

fn kind_of(more: &Value) -> LayerKind {
    if *more == json!({}) {
        LayerKind::Directory
    } else {
        LayerKind::Disk
    }
}

/// Runs an expression about extended attributes.
const ATTRIBUTE: &str = "python3 -c 'import os, sys; exec(sys.argv[1])'";

/// Whether a process or a descriptor of any process refers to a mount namespace.
fn is_used(namespace: &str) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.into_iter().any(|process| {
        let path = process.path();
        let is_it = |link: PathBuf| {
            std::fs::read_link(link).is_ok_and(|target| target.as_os_str() == namespace)
        };
        let open = std::fs::read_dir(path.join("fd")).into_iter().flatten();
        is_it(path.join("ns/mnt")) || open.flatten().any(|fd| is_it(fd.path()))
    })
}

#[tokio::test]
async fn stopping_keeps_all_files_and_nothing_else() {
    on_each_machine(async |machine| {
        let place = Place::new(machine);
        for more in kinds() {
            let name = format!("{} {more}", machine.name);
            let first = place.start(&more, &[]).await;
            first.sh(FILES).await;
            // Before Linux 6.6, files in memory have no such attributes.
            first.sh(&format!("{ATTRIBUTE} 'os.setxattr(\"dir/one\", \"user.note\", b\"kept\")' 2> /dev/null || true")).await;
            let attribute = format!("{ATTRIBUTE} 'print(os.listxattr(\"dir/deep/same\"))'");
            let (shown, attributes) = (first.sh(SHOW).await, first.sh(&attribute).await);
            let namespace = first.sh("readlink /proc/self/ns/mnt").await;
            let into = place.layer(if more == json!({}) { "memory" } else { "disk" });
            let id = first.id;
            assert!(is_used(namespace.trim()), "control");
            let files = place.stop(id, &into).await.unwrap();
            assert_eq!(files.kind, kind_of(&more), "{name}");
            assert!(files.bytes > 3_000_000 && files.bytes < 40_000_000, "{files:?}");
            assert!(files.entries > 20 && files.entries < 1000, "{files:?}");
            assert!(!place.backend.alive(id).await);
            eventually("the mounts are gone", async || !is_used(namespace.trim())).await;
            assert!(!place.has_loops(), "{name}");
            // A repeated call has the same result, and the last one removes the records.
            assert_eq!(place.stop(id, &into).await.unwrap(), files, "{name}");
            place.backend.stop(id).await.unwrap();
            assert!(!place.state_of(id).exists(), "{name}");
            let layers = [Layer::new(&into, files.kind)];
            let (second, third) = tokio::join!(place.start(&more, &layers), place.start(&more, &layers));
            for boxed in [&second, &third] {
                assert_eq!(boxed.sh(SHOW).await, shown, "{name}");
                assert_eq!(boxed.sh(&attribute).await, attributes, "{name}");
            }
            second.sh("rm -r dir private; mkdir dir; echo two > dir/two; echo more >> big; rm -r /srv/new").await;
            let next = into.with_extension("next");
            let files = place.stop(second.id, &next).await.unwrap();
            place.backend.stop(second.id).await.unwrap();
            assert_eq!(third.sh(SHOW).await, shown, "{name}");
            third.end().await;
            let layers = [Layer::new(&next, files.kind), layers[0].clone()];
            let show = "ls -A; ls dir; tail -c 5 big; ls /srv; cat /opt/tool/t";
            let wanted = "big\ndir\nfifo\nold\nout\nprogram\nsparse\ntwo\nmore\nt\n";
            let last = place.start(&more, &layers).await;
            assert_eq!(last.sh(show).await, wanted, "{name}");
            last.end().await;
            // One layer instead of two.
            let merged = into.with_extension("merged");
            let request = SnapshotRequest::new(&merged, LONG);
            let files = place.backend.merge_layers(&layers, request).await.unwrap();
            assert_eq!(files.kind, LayerKind::Directory);
            let last = place.start(&more, &[Layer::new(&merged, files.kind)]).await;
            assert_eq!(last.sh(show).await, wanted, "{name}");
            last.end().await;
            place.is_clean().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_box_continues_on_the_disk_of_a_stopped_one() {
    on_each_machine(async |machine| {
        let place = Place::new(machine);
        let more = json!({"disk_mb": 600, "memory_mb": 64});
        let first = place.start(&more, &[]).await;
        first.sh(FILES).await;
        let shown = first.sh(SHOW).await;
        let into = place.layer("disk");
        place.stop(first.id, &into).await.unwrap();
        place.backend.stop(first.id).await.unwrap();
        for round in 0..3 {
            let boxed = place.continued(&more, &into).await.unwrap();
            assert_eq!(boxed.sh(SHOW).await, shown, "{} {round}", machine.name);
            boxed
                .sh(&format!("echo {round} > /tmp/t/round; sync"))
                .await;
            if machine.uid == 0 {
                let full = boxed
                    .sh("head -c 700000000 /dev/zero > /tmp/big; echo $?; rm /tmp/big")
                    .await;
                assert_eq!(full, "1\n", "the limit holds");
            }
            // In place, to another place and back.
            let moved = if round == 1 {
                place.layer("moved")
            } else {
                into.clone()
            };
            let files = place.stop(boxed.id, &moved).await.unwrap();
            assert_eq!(files.kind, LayerKind::Disk);
            place.backend.stop(boxed.id).await.unwrap();
            if round == 1 {
                assert!(!into.exists());
                std::fs::rename(&moved, &into).unwrap();
            }
        }
        // A box that ends in another way leaves the disk at its place.
        let boxed = place.continued(&more, &into).await.unwrap();
        boxed
            .sh("cat /tmp/t/round; echo ended > /tmp/t/round; sync")
            .await;
        boxed.end().await;
        place.is_clean().await;
        let boxed = place.continued(&more, &into).await.unwrap();
        assert_eq!(
            boxed.sh("cat /tmp/t/round").await,
            "ended\n",
            "{}",
            machine.name
        );
        boxed.end().await;
        assert!(
            place
                .continued(&more, &place.layer("missing"))
                .await
                .is_err()
        );
        place.is_clean().await;
    })
    .await;
}

#[tokio::test]
async fn a_stop_that_fails_leaves_the_box_as_it_was() {
    on_each_machine(async |machine| {
        let place = Place::new(machine);
        for more in kinds() {
            let name = format!("{} {more}", machine.name);
            let boxed = place.start(&more, &[]).await;
            // A machine that cannot freeze boxes refuses files that become shorter during a copy.
            boxed.sh("head -c 20000000 /dev/zero > big; (while :; do date +%N >> tick; sleep 0.01; done) > /dev/null 2>&1 & until [ -e tick ]; do sleep 0.01; done").await;
            let tick = async || boxed.sh("tail -n 1 tick").await;
            let (into, full) = (place.layer("into"), place.layer("full"));
            std::fs::create_dir_all(full.join("used")).unwrap();
            let few = of_stopped(&into).with_limits(u64::MAX, 3);
            let small = of_stopped(&into).with_limits(1_000_000, u64::MAX);
            let slow = SnapshotRequest::new(&into, Duration::ZERO).of_stopped(true);
            let nowhere = place.layer("no/where");
            let mut requests = vec![
                (few, Code::Capacity),
                (small, Code::Capacity),
                (of_stopped(&full), Code::Unavailable),
                (of_stopped(&nowhere), Code::Unavailable),
            ];
            if kind_of(&more) == LayerKind::Directory {
                requests.push((slow, Code::Timeout));
            }
            for (request, code) in requests {
                let error = place.backend.stop_into_layer(boxed.id, request).await;
                let error = error.unwrap_err();
                assert_eq!(error.code(), code, "{name}: {error:?}");
                let place_name = place.state.path().to_str().unwrap();
                assert!(!error.message().contains(place_name), "{error:?}");
                assert!(!into.exists(), "{name}");
                let before = tick().await;
                eventually("the box runs", async || tick().await != before).await;
            }
            assert_eq!(boxed.sh("stat -c %s big").await, "20000000\n", "{name}");
            std::fs::remove_dir_all(&full).unwrap();
            place.stop(boxed.id, &into).await.unwrap();
            place.backend.stop(boxed.id).await.unwrap();
            box_sys::walk::remove_all(&into).unwrap();
        }
        // A box that does not exist.
        let gone = place.stop(Uuid::now_v7(), &place.layer("gone")).await;
        assert_eq!(gone.unwrap_err().code(), Code::Unavailable);
        place.is_clean().await;
    })
    .await;
}

#[tokio::test]
async fn a_stop_that_nothing_waits_for_has_no_effect_or_completes() {
    on_each_machine(async |machine| {
        let place = Place::new(machine);
        let mut number = 0;
        for more in kinds() {
            let mut layers = Vec::new();
            let mut boxed = place.start(&more, &layers).await;
            boxed
                .sh("mkdir many; i=0; while [ $i -lt 300 ]; do echo $i > many/$i; i=$((i+1)); done")
                .await;
            for micros in [0, 300, 1000, 3000, 10_000, 30_000, 100_000] {
                let into = place.layer(&number.to_string());
                number += 1;
                let stop = place.stop(boxed.id, &into);
                let waited = tokio::time::timeout(Duration::from_micros(micros), stop).await;
                if waited.is_err() && place.backend.alive(boxed.id).await {
                    // It may still end, if the decision was made.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                let files = place.stop(boxed.id, &into).await.unwrap();
                place.backend.stop(boxed.id).await.unwrap();
                layers.insert(0, Layer::new(&into, files.kind));
                boxed = place.start(&more, &layers).await;
                let shown = boxed
                    .sh("ls many | wc -l; cat many/299; echo x >> many/299")
                    .await;
                let lines = "x\n".repeat(layers.len() - 1);
                let expected = format!("300\n299\n{lines}");
                assert_eq!(shown, expected, "{} {more} {micros}", machine.name);
            }
            boxed.end().await;
        }
        place.is_clean().await;
    })
    .await;
}

#[tokio::test]
async fn concurrent_stops_of_a_box_have_one_result() {
    on_each_machine(async |machine| {
        let place = Place::new(machine);
        for (number, more) in kinds().iter().cycle().take(8).enumerate() {
            let boxed = place.start(more, &[]).await;
            boxed.sh("head -c 1000000 /dev/zero > zeros").await;
            let into = place.layer(&number.to_string());
            // The later calls begin while the first one still unmounts or moves the files.
            let later = async || {
                while place.backend.alive(boxed.id).await {
                    tokio::task::yield_now().await;
                }
                place.stop(boxed.id, &into).await
            };
            let results = tokio::join!(
                place.stop(boxed.id, &into),
                later(),
                later(),
                later(),
                later()
            );
            let files = results.0.unwrap();
            for repeated in [results.1, results.2, results.3, results.4] {
                assert_eq!(repeated.unwrap(), files, "{} {more}", machine.name);
            }
            place.backend.stop(boxed.id).await.unwrap();
            let boxed = place.start(more, &[Layer::new(&into, files.kind)]).await;
            assert_eq!(boxed.sh("stat -c %s zeros").await, "1000000\n");
            boxed.end().await;
        }
        place.is_clean().await;
    })
    .await;
}

/// The record of a decision, as the backend writes it.
fn decide(state: &Path, from: &Path, into: &Path, kind: LayerKind) {
    let files = LayerFiles {
        kind,
        bytes: 4096,
        entries: 1,
    };
    let record = json!({"from": from, "into": into, "files": files});
    std::fs::write(state.join("stop.json"), record.to_string()).unwrap();
}

/// Where the process of the runtime ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Crash {
    BeforeTheDecision,
    WithAllProcesses,
    WithoutProcesses,
    AfterTheMove,
}

#[tokio::test]
async fn a_later_process_completes_a_stop() {
    on_each_machine(async |machine| {
        let mut place = Place::new(machine);
        let mut number = 0;
        for crash in [
            Crash::BeforeTheDecision,
            Crash::WithAllProcesses,
            Crash::WithoutProcesses,
            Crash::AfterTheMove,
        ] {
            for more in kinds() {
                let name = format!("{} {crash:?} {more}", machine.name);
                let boxed = place.start(&more, &[]).await;
                boxed
                    .sh("echo kept > file; mkdir dir; ln file dir/same; sync")
                    .await;
                let (id, state) = (boxed.id, place.state_of(boxed.id));
                place.backend.persist(id, "record").unwrap();
                let (into, kind) = (place.layer(&format!("layer-{number}")), kind_of(&more));
                number += 1;
                let from = if kind == LayerKind::Disk {
                    state.join("disk")
                } else {
                    let copy = state.join("files-1");
                    place.backend.snapshot(id, of_stopped(&copy)).await.unwrap();
                    copy
                };
                if crash == Crash::AfterTheMove {
                    let into = into.clone();
                    place.stop(id, &into).await.unwrap();
                } else if crash != Crash::BeforeTheDecision {
                    decide(&state, &from, &into, kind);
                }
                drop(boxed);
                if crash == Crash::WithoutProcesses {
                    let record = std::fs::read(state.join("box.json")).unwrap();
                    let record: Value = serde_json::from_slice(&record).unwrap();
                    let pid = record["sandbox"]["pid"].as_i64().unwrap();
                    // After the end of the fork server, which ends the disks of its boxes.
                    place = place.next(machine).await;
                    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
                    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
                } else {
                    place = place.next(machine).await;
                }
                let reached = place.backend.reach(id).await.unwrap();
                if crash == Crash::BeforeTheDecision {
                    let Reach::Alive(started) = reached else {
                        panic!("{name}: {reached:?}");
                    };
                    let boxed = DirectBox::with(&place.backend, id, started);
                    assert_eq!(boxed.sh("cat file").await, "kept\n", "{name}");
                    // The copy of the first attempt is in the way of nothing.
                    place.stop(id, &into).await.unwrap();
                } else {
                    let Reach::Stopped { into: found, files } = reached else {
                        panic!("{name}: {reached:?}");
                    };
                    assert_eq!((found, files.kind), (into.clone(), kind), "{name}");
                    // Again, as after a second crash.
                    let again = place.backend.reach(id).await.unwrap();
                    assert!(matches!(again, Reach::Stopped { .. }), "{name}: {again:?}");
                }
                assert!(into.exists(), "{name}");
                place.backend.stop(id).await.unwrap();
                assert!(!state.exists(), "{name}");
                let boxed = place.start(&more, &[Layer::new(&into, kind)]).await;
                let shown = boxed.sh("cat file dir/same").await;
                assert_eq!(shown, "kept\nkept\n", "{name}");
                boxed.end().await;
                place.is_clean().await;
            }
        }
        // A decision whose files are gone.
        let boxed = place.start(&json!({}), &[]).await;
        let (id, state) = (boxed.id, place.state_of(boxed.id));
        place.backend.persist(id, "record").unwrap();
        decide(
            &state,
            &state.join("files-1"),
            &place.layer("never"),
            LayerKind::Directory,
        );
        drop(boxed);
        let place = place.next(machine).await;
        let reached = place.backend.reach(id).await.unwrap();
        assert!(matches!(reached, Reach::Dead(_)), "{reached:?}");
        assert!(!state.exists());
    })
    .await;
}
