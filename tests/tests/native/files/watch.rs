//! `file.watch`: changes of files, as the output of a command.

use std::time::Duration;

use box_protocol::actions::{
    BoxCreate, BoxDelete, ChangeKind, CommandChunk, CommandKillResult, CommandStartResult,
    FileChange, FileMkdir, FileWatch, ReadEnd, ReadWhy,
};
use box_protocol::{BoxError, Code, CommandState, ExitWhy, Role};
use box_runtime::Caller;
use box_tests::machine::on_each_machine;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::super::adoption::Host;
use super::BoxFiles;

impl BoxFiles<'_> {
    async fn watch(self, params: Value) -> Result<CommandStartResult, BoxError> {
        let runtime = &self.machine.runtime;
        let params = self.params(params);
        runtime.watch_files(&Caller::Local, params, None).await
    }

    /// The changes from an offset in a watch's log, until it is silent or has ended.
    async fn changes(self, id: &str, from: u64) -> (Vec<(ChangeKind, String)>, ReadEnd) {
        let params = self.params(json!({"command_id": id, "view": "text",
            "from": {"offsets": {"stdout": from, "stderr": 0}}, "until": {"silence_ms": 300}}));
        let (to, mut chunks) = mpsc::channel(2);
        let (runtime, caller) = (&self.machine.runtime, Caller::Local);
        let reading = runtime.attach_command(&caller, params, to);
        let (result, text) = tokio::join!(reading, async {
            let mut text = String::new();
            while let Some(chunk) = chunks.recv().await {
                match chunk {
                    CommandChunk::Text(piece) => text.push_str(&piece.data),
                    other => panic!("{other:?}"),
                }
            }
            text
        });
        let answer = text.lines().map(|line| {
            let change: FileChange = serde_json::from_str(line).unwrap();
            (change.kind, change.path)
        });
        (answer.collect(), result.unwrap().read)
    }

    /// As [`Self::changes`], once they match: on a busy machine the watch may pause before it has
    /// reported all.
    async fn changes_with(
        self,
        id: &str,
        from: u64,
        is: impl Fn(&[(ChangeKind, String)]) -> bool,
    ) -> (Vec<(ChangeKind, String)>, ReadEnd) {
        let begun = std::time::Instant::now();
        loop {
            let (seen, read) = self.changes(id, from).await;
            if is(&seen) {
                return (seen, read);
            }
            assert!(begun.elapsed() < box_test_wait::LONG, "{seen:?}");
        }
    }

    async fn kill(self, params: Value) -> CommandKillResult {
        let params = self.params(params);
        let runtime = &self.machine.runtime;
        runtime.kill_command(&Caller::Local, params).await.unwrap()
    }
}

fn has(changes: &[(ChangeKind, String)], kind: ChangeKind, path: &str) -> bool {
    changes.contains(&(kind, path.to_owned()))
}

#[tokio::test]
async fn changes_by_guests_and_by_the_host_are_reported() {
    on_each_machine(async |machine| {
        let dir = machine.directory();
        let shape = json!({"host_path": dir.path(), "host_path_mode": "rw"});
        let inside = BoxFiles::with(machine, "watch", shape).await;
        for (id, path) in [("w", "/workspace"), ("t", "/tmp"), ("h", "/home/box")] {
            let asked = json!({"path": path, "recursive": true, "command_id": id});
            let info = inside.watch(asked).await.unwrap().info;
            assert_eq!((info.role, info.state), (Role::Watch, CommandState::Running));
            assert_eq!(info.pid, None);
        }
        inside
            .run("for d in /workspace /tmp /home/box; do mkdir -p $d/a/b; echo x > $d/a/b/f; mv $d/a $d/c; done")
            .await;
        for (id, path) in [("w", "/workspace"), ("t", "/tmp"), ("h", "/home/box")] {
            let (seen, read) = inside.changes_with(id, 0, |seen| {
                let made = seen.iter().any(|(kind, path)| {
                    *kind == ChangeKind::Created && path.ends_with("/b/f")
                });
                made && has(seen, ChangeKind::Moved, &format!("{path}/c"))
            }).await;
            assert!(has(&seen, ChangeKind::Created, &format!("{path}/a")), "{seen:?}");
            inside.write(&format!("{path}/c/b/g"), "y").await;
            let (later, _) = inside.changes_with(id, read.next.stdout, |later| {
                has(later, ChangeKind::Created, &format!("{path}/c/b/g"))
            }).await;
            assert!(!has(&later, ChangeKind::Created, &format!("{path}/c/b/f")), "{later:?}");
        }
        let (_, read) = inside.changes("w", 0).await;
        std::fs::write(dir.path().join("outside"), "z").unwrap();
        inside.changes_with("w", read.next.stdout, |seen| {
            has(seen, ChangeKind::Created, "/workspace/outside")
        }).await;
    })
    .await;
}

#[tokio::test]
async fn a_watch_is_found_again_listed_and_ended_as_commands_are() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "watch-ends").await;
        let asked = json!({"path": "/tmp", "command_id": "w"});
        assert!(!inside.watch(asked.clone()).await.unwrap().existed);
        assert!(inside.watch(asked).await.unwrap().existed);
        inside.run("mkdir /workspace/d; sleep 60 & true").await;
        let other = inside.watch(json!({"path": "/workspace/d"})).await.unwrap();
        let list = inside.params(json!({"role": "watch"}));
        let runtime = &machine.runtime;
        let listed = runtime.list_commands(&Caller::Local, list).await.unwrap();
        assert_eq!(listed.items.len(), 2);
        let killed = inside
            .kill(json!({"command_id": "w", "signal": "TERM"}))
            .await;
        assert_eq!(killed.info.exit.unwrap().why, ExitWhy::Killed);
        assert!(!killed.already);
        inside.run("touch /tmp/later; rmdir /workspace/d").await;
        assert_eq!(inside.changes("w", 0).await.0, []);
        let (seen, read) = inside.changes(other.info.command_id.as_str(), 0).await;
        assert_eq!(seen, [(ChangeKind::Removed, "/workspace/d".to_owned())]);
        assert_eq!(read.why, ReadWhy::Exit);
        let asked = inside.params(json!({"command_id": other.info.command_id}));
        let exit = runtime.get_command(&Caller::Local, asked).await;
        assert_eq!(exit.unwrap().exit.unwrap().code, Some(0));
    })
    .await;
}

#[tokio::test]
async fn a_watch_that_cannot_be_found_again_ends_with_its_call() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "watch-call").await;
        let running = async |named: bool| {
            let mut asked = json!({"path": "/tmp", "attach": {}});
            if named {
                asked["command_id"] = json!("named");
            }
            let (to, mut chunks) = mpsc::channel(2);
            let (caller, params) = (Caller::Local, inside.params(asked));
            let call = machine.runtime.watch_files(&caller, params, Some(to));
            let first = tokio::select! {
                result = call => panic!("{result:?}"),
                chunk = chunks.recv() => chunk.unwrap(),
            };
            let CommandChunk::Started(info) = first else {
                panic!("{first:?}");
            };
            loop {
                let key = inside.params(json!({"command_id": info.command_id}));
                let now = machine.runtime.get_command(&Caller::Local, key).await;
                let now = now.unwrap().state;
                if named || now == CommandState::Exited {
                    break now;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        assert_eq!(running(false).await, CommandState::Exited);
        assert_eq!(running(true).await, CommandState::Running);
    })
    .await;
}

#[tokio::test]
async fn a_watch_of_a_forbidden_path_is_refused() {
    on_each_machine(async |machine| {
        let inside = BoxFiles::new(machine, "watch-no").await;
        inside
            .run(
                "cd /tmp; mkdir closed; chmod 0 closed; ln -s /proc/self/root out; ln -s loop loop",
            )
            .await;
        for (path, want) in [
            ("/tmp/none", Code::NotFound),
            ("/tmp/closed", Code::Denied),
            ("/proc/self", Code::Denied),
            ("/proc/1/fd", Code::Denied),
            ("/tmp/loop", Code::Validation),
            ("/tmp/out/tmp", Code::Validation),
            ("tmp", Code::Validation),
        ] {
            let refused = inside
                .watch(json!({"path": path, "command_id": "no"}))
                .await;
            assert_eq!(refused.unwrap_err().code(), want, "{path}");
        }
        let root = json!({"path": "/tmp", "user": "root"});
        assert_eq!(inside.watch(root).await.unwrap_err().code(), Code::Denied);
        // The guest can still have watches, and none of the refused ones is left.
        let list = inside.params(json!({}));
        let listed = machine.runtime.list_commands(&Caller::Local, list).await;
        assert_eq!(listed.unwrap().items, []);
    })
    .await;
}

#[tokio::test]
async fn a_watch_outlives_the_runtime_that_started_it() {
    on_each_machine(async |machine| {
        let state = machine.directory();
        let host = Host::start(machine, state.path()).await.unwrap();
        let box_spec = json!({"spec": {"box_id": "kept"}});
        host.call::<BoxCreate>(box_spec).await.unwrap();
        let asked = json!({"box_id": "kept", "path": "/tmp", "recursive": true, "command_id": "w"});
        host.call::<FileWatch>(asked).await.unwrap();
        let mkdir = |path: &str| json!({"box_id": "kept", "path": path});
        host.call::<FileMkdir>(mkdir("/tmp/before")).await.unwrap();
        let (before, ..) = host.read("w", 0, Some(300)).await;
        host.kill().await;
        let host = Host::start(machine, state.path()).await.unwrap();
        host.adopts(1).await;
        host.call::<FileMkdir>(mkdir("/tmp/before/after"))
            .await
            .unwrap();
        let (all, info, _) = host.read("w", 0, Some(300)).await;
        assert_eq!(
            (info.role, info.state),
            (Role::Watch, CommandState::Running)
        );
        assert!(all.starts_with(&before) && !before.is_empty());
        let later = String::from_utf8(all[before.len()..].to_vec()).unwrap();
        let change: FileChange = serde_json::from_str(later.lines().next().unwrap()).unwrap();
        assert_eq!(
            (change.kind, change.path.as_str()),
            (ChangeKind::Created, "/tmp/before/after")
        );
        let gone = json!({"box_id": "kept", "force": true});
        host.call::<BoxDelete>(gone).await.unwrap();
        host.kill().await;
    })
    .await;
}
