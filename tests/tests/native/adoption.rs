//! A killed runtime loses no box and no output: the next runtime adopts everything from the same
//! state directory.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use box_protocol::actions::{
    BoxCreate, BoxDelete, BoxExec, BoxGet, BoxList, CommandAttach, CommandChunk, CommandGet,
    CommandStart, CommandStartResult, ReadEnd,
};
use box_protocol::{BoxError, BoxInfo, BoxState, Code, CommandInfo, CommandState};
use box_rpc::{Action, CallError, Options, Router, Session};
use box_test_wait::eventually;
use box_tests::machine::{Machine, PROGRAM, mark, on_each_machine, processes_with};
use box_transports::{ConnectOptions, Endpoint};
use futures::StreamExt as _;
use rustix::process::Pid;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

/// How many times a runtime is killed.
const ROUNDS: usize = 20;

/// A runtime in a separate process.
pub(super) struct Host {
    process: Child,
    session: Session,
    pub(super) adopted: usize,
}

impl Host {
    pub(super) async fn start(machine: &Machine, state: &Path) -> Result<Self, String> {
        Self::start_with(machine, state, Value::Null).await
    }

    /// Starts a runtime with this network policy for its boxes. `within` has commands that set up a
    /// separate network for it.
    pub(super) async fn start_with(
        machine: &Machine,
        state: &Path,
        network: Value,
    ) -> Result<Self, String> {
        let endpoint = endpoint(state);
        let how = how(machine, state, &network);
        let mut command = match network["within"].as_str() {
            Some(set_up) => {
                let mut command = Command::new("unshare");
                command.args([
                    "--net",
                    "sh",
                    "-ec",
                    &format!("{set_up}\nexec \"$0\" \"$@\""),
                ]);
                command.arg(&*PROGRAM);
                command
            }
            None => Command::new(&*PROGRAM),
        };
        command.arg("serve").arg(how.to_string()).kill_on_drop(true);
        let mut process = command
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let adopted = lines
            .next_line()
            .await
            .unwrap()
            .and_then(|line| line.parse().ok());
        let Some(adopted) = adopted else {
            process.wait().await.unwrap();
            return Err("it did not begin".to_owned());
        };
        let endpoint: Endpoint = endpoint.parse().unwrap();
        let connection = loop {
            match endpoint.connect(&ConnectOptions::default()).await {
                Ok(connection) => break connection,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        let session = Session::start_boxed(connection, Router::empty(), Options::client());
        Ok(Self {
            process,
            session,
            adopted,
        })
    }

    pub(super) fn peer(&self) -> box_rpc::Peer {
        self.session.peer()
    }

    /// Waits until the runtime has reached this many boxes.
    ///
    /// On a busy machine an agent answers after the runtime is ready; its box is unreachable until then.
    pub(super) async fn adopts(&self, boxes: usize) {
        eventually("the runtime reaches its boxes", async || {
            let listed = self.call::<BoxList>(json!({})).await.unwrap().items;
            let is_reached = |info: &&BoxInfo| info.state != BoxState::Unreachable;
            listed.iter().filter(is_reached).count() == boxes
        })
        .await;
    }

    /// Kills the runtime, as `kill -9` does.
    pub(super) async fn kill(mut self) {
        self.process.start_kill().unwrap();
        self.process.wait().await.unwrap();
    }

    pub(super) async fn call<A: Action>(&self, params: Value) -> Result<A::Result, CallError>
    where
        A::Params: serde::de::DeserializeOwned,
    {
        let params: A::Params = serde_json::from_value(params).unwrap();
        self.session.peer().call::<A>(&params).await
    }

    async fn start_command(&self, id: &str, text: &str) -> CommandStartResult {
        let params = json!({"box_id": "kept", "command_id": id, "program": {"text": text},
            "cwd": "/tmp", "on_disconnect": "keep"});
        self.call::<CommandStart>(params).await.unwrap()
    }

    /// The output of a command from an offset, up to a pause or its end.
    pub(super) async fn read(
        &self,
        id: &str,
        from: u64,
        silence: Option<u64>,
    ) -> (Vec<u8>, CommandInfo, ReadEnd) {
        let params = json!({"box_id": "kept", "command_id": id, "view": "bytes",
            "from": {"offsets": {"stdout": from, "stderr": 0}}, "until": {"silence_ms": silence}});
        let params = serde_json::from_value(params).unwrap();
        let mut chunks = self
            .session
            .peer()
            .stream::<CommandAttach>(&params)
            .await
            .unwrap();
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.next().await {
            match chunk.unwrap() {
                CommandChunk::Bytes(piece) => bytes.extend_from_slice(&piece.data),
                other => panic!("{other:?}"),
            }
        }
        let result = chunks.finish().await.unwrap();
        (bytes, result.info, result.read)
    }
}

fn endpoint(state: &Path) -> String {
    format!("unix:{}", state.join("socket").display())
}

/// The argument of such a runtime.
pub(super) fn how(machine: &Machine, state: &Path, network: &Value) -> Value {
    json!({"state": state, "user": machine.user(), "endpoint": endpoint(state), "network": network,
        "parent": cgroup_parent(machine)})
}

/// The parent of the cgroups of its boxes.
pub(super) fn cgroup_parent(machine: &Machine) -> String {
    format!("box-adopt-{}-{}", std::process::id(), machine.uid)
}

/// The directories of all boxes.
pub(super) fn directories(state: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(state).unwrap();
    let paths = all.map(|entry| entry.unwrap().path());
    // The runtime stores layers and stopped boxes beside them.
    let is_box = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| uuid::Uuid::try_parse(name).is_ok())
    };
    paths.filter(is_box).collect()
}

/// The agents of these boxes.
pub(super) async fn agents(state: &Path) -> Vec<Pid> {
    let mut agents = Vec::new();
    for directory in directories(state) {
        let socket = UnixStream::connect(directory.join("agent.sock")).await;
        let agent = socket.unwrap().peer_cred().unwrap().pid().unwrap();
        agents.push(Pid::from_raw(agent).unwrap());
    }
    agents
}

pub(super) fn code(error: CallError) -> Code {
    BoxError::from(error).code()
}

/// Checks that the numbers of a counter are consecutive.
fn check(bytes: &[u8], next: &mut u64) {
    for line in std::str::from_utf8(bytes).unwrap().lines() {
        assert_eq!(line, format!("line {next}"), "no byte is lost or repeated");
        *next += 1;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn boxes_commands_logs_and_exits_survive_every_kill() {
    on_each_machine(async |machine| {
        let state = machine.directory();
        let mut host = Host::start(machine, state.path()).await.unwrap();
        assert_eq!(host.adopted, 0);
        let spec = json!({"spec": {"box_id": "kept", "persistent": true, "memory_mb": 300, "labels": {"a": "b"}}});
        host.call::<BoxCreate>(spec.clone()).await.unwrap();
        let made = host.call::<BoxGet>(json!({"box_id": "kept"})).await.unwrap().info;
        // Load: one command that writes as fast as it can, and one that only counts.
        host.start_command("load", "while :; do seq 1 10000; done").await;
        let counter = "i=0; while :; do echo line $i; i=$((i+1)); sleep 0.005; done";
        host.start_command("count", counter).await;
        let (mut next, mut offset) = (0, 0);
        for round in 0..ROUNDS {
            let id = format!("ends-{round}");
            let ends = format!("echo begun; sleep 0.1; echo ended {round}; exit {round}");
            host.start_command(&id, &ends).await;
            // A client is reading when the runtime is killed.
            let peer = host.session.peer();
            let params = json!({"box_id": "kept", "command_id": "load", "view": "bytes",
                "from": {"tail": 0}});
            let params = serde_json::from_value(params).unwrap();
            let mut reading = peer.stream::<CommandAttach>(&params).await.unwrap();
            assert!(reading.next().await.unwrap().is_ok());
            host.kill().await;
            tokio::time::sleep(Duration::from_millis(if round % 2 == 0 { 0 } else { 150 })).await;
            host = Host::start(machine, state.path()).await.unwrap();
            host.adopts(1).await;
            // The runtime has its end, even without a reader.
            let (bytes, info, _) = host.read(&id, 0, None).await;
            assert_eq!(bytes, format!("begun\nended {round}\n").as_bytes());
            assert_eq!(info.exit.unwrap().code, i32::try_from(round).ok());
            let (bytes, info, end) = host.read("count", offset, Some(1)).await;
            check(&bytes[..bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1)], &mut next);
            offset = end.next.stdout - (bytes.len() - bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1)) as u64;
            assert_eq!(info.state, CommandState::Running);
        }
        assert!(next > 10, "{next}");
        let now = host.call::<BoxGet>(json!({"box_id": "kept"})).await.unwrap().info;
        assert_eq!((now.created_at, &now.labels, &now.missing), (made.created_at, &made.labels, &made.missing));
        let ran = json!({"spec": {"box_id": "kept", "persistent": true, "memory_mb": 300, "cmd": "echo still here"}});
        assert_eq!(host.call::<BoxExec>(ran).await.unwrap().stdout, "still here\n");
        let other = json!({"spec": {"box_id": "kept", "memory_mb": 301, "cmd": "true"}});
        assert_eq!(code(host.call::<BoxExec>(other).await.unwrap_err()), Code::Conflict);
        host.call::<BoxDelete>(json!({"box_id": "kept", "force": true})).await.unwrap();
        assert_eq!(code(host.call::<CommandGet>(json!({"box_id": "kept", "command_id": "count"})).await.unwrap_err()), Code::NotFound);
        let left = std::fs::read_dir(state.path()).unwrap().filter(|entry| entry.as_ref().unwrap().path().is_dir());
        assert_eq!(left.count(), 0);
        host.kill().await;
    })
    .await;
}

#[tokio::test]
async fn remains_of_ended_boxes_are_removed_and_a_state_directory_has_one_server() {
    on_each_machine(async |machine| {
        let state = machine.directory();
        let seconds = mark();
        let host = Host::start(machine, state.path()).await.unwrap();
        for id in ["one", "two"] {
            let cmd = format!("sleep {seconds} > /dev/null 2>&1 & echo $!");
            host.call::<BoxExec>(json!({"spec": {"box_id": id, "cmd": cmd}}))
                .await
                .unwrap();
        }
        assert!(
            Host::start(machine, state.path()).await.is_err(),
            "it has one already"
        );
        host.kill().await;
        eventually("the boxes still run", async || {
            processes_with(&seconds) == 2
        })
        .await;
        // A box without a record has no owner.
        let boxes: Vec<_> = std::fs::read_dir(state.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_dir())
            .collect();
        assert_eq!(boxes.len(), 2);
        std::fs::remove_file(boxes[0].join("box.json")).unwrap();
        let host = Host::start(machine, state.path()).await.unwrap();
        host.adopts(1).await;
        eventually("the other box is ended", async || {
            processes_with(&seconds) == 1
        })
        .await;
        eventually("and its directory is removed", async || !boxes[0].exists()).await;
        assert!(boxes[1].exists());
        // It ended while no runtime ran: reported gone, and cleaned up.
        for id in ["one", "two"] {
            let _ = host
                .call::<BoxDelete>(json!({"box_id": id, "force": true}))
                .await;
        }
        assert_eq!(processes_with(&seconds), 0);
        host.call::<BoxCreate>(json!({"spec": {"box_id": "three"}}))
            .await
            .unwrap();
        host.kill().await;
        let left = std::fs::read_dir(state.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .find(|path| path.is_dir())
            .unwrap();
        let socket = tokio::net::UnixStream::connect(left.join("agent.sock"))
            .await
            .unwrap();
        let agent = socket.peer_cred().unwrap().pid().unwrap();
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(agent).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        eventually("it is dead", async || {
            !Path::new(&format!("/proc/{agent}/root")).exists()
        })
        .await;
        let host = Host::start(machine, state.path()).await.unwrap();
        assert_eq!(host.adopted, 0);
        assert!(!left.exists());
        assert_eq!(
            code(
                host.call::<BoxGet>(json!({"box_id": "three"}))
                    .await
                    .unwrap_err()
            ),
            Code::NotFound
        );
        host.kill().await;
    })
    .await;
}

#[tokio::test]
async fn a_box_whose_workspace_is_gone_takes_no_other_with_it() {
    on_each_machine(async |machine| {
        let state = machine.directory();
        let (kept, lost) = (machine.directory(), machine.directory());
        let seconds = mark();
        let host = Host::start(machine, state.path()).await.unwrap();
        for (id, workspace) in [("lost", &lost), ("kept", &kept), ("plain", &kept)] {
            let quota = if id == "plain" { 0 } else { 8 };
            let cmd = format!("sleep {seconds} > /dev/null 2>&1 & echo $!");
            let spec = json!({"box_id": id, "host_path": workspace.path(), "workspace_quota_mb": quota, "cmd": cmd});
            host.call::<BoxExec>(json!({"spec": spec})).await.unwrap();
        }
        host.kill().await;
        // Another directory has its path now.
        let aside = lost.path().with_extension("aside");
        std::fs::rename(lost.path(), &aside).unwrap();
        std::fs::create_dir(lost.path()).unwrap();
        let host = Host::start(machine, state.path()).await.unwrap();
        host.adopts(2).await;
        eventually("this box is ended", async || processes_with(&seconds) == 2).await;
        let directories = || {
            let all = std::fs::read_dir(state.path()).unwrap();
            all.filter(|entry| entry.as_ref().unwrap().path().is_dir()).count()
        };
        eventually("and nothing is left of it", async || directories() == 2).await;
        assert_eq!(code(host.call::<BoxGet>(json!({"box_id": "lost"})).await.unwrap_err()), Code::NotFound);
        // The quota of the other box still applies.
        let fill = "for i in $(seq 200); do head -c 1M /dev/urandom > f$i; sleep 0.01; done";
        let spec = json!({"box_id": "kept", "host_path": kept.path(), "workspace_quota_mb": 8, "cmd": fill});
        let error = host.call::<BoxExec>(json!({"spec": spec})).await.unwrap_err();
        assert!(BoxError::from(error).message().starts_with("workspace_quota_mb: the workspace exceeds 8 MiB"));
        host.kill().await;
        let host = Host::start(machine, state.path()).await.unwrap();
        host.adopts(1).await;
        assert_eq!(processes_with(&seconds), 1);
        host.call::<BoxDelete>(json!({"box_id": "plain", "force": true})).await.unwrap();
        assert_eq!((directories(), processes_with(&seconds)), (0, 0));
        std::fs::remove_dir(lost.path()).unwrap();
        std::fs::rename(aside, lost.path()).unwrap();
        host.kill().await;
    })
    .await;
}

/// Changes the record of the box in this directory.
fn rewrite(directory: &Path, change: impl Fn(&mut Value)) {
    let path = directory.join("box.json");
    let mut kept: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let mut record: Value = serde_json::from_str(kept["record"].as_str().unwrap()).unwrap();
    change(&mut record);
    kept["record"] = json!(record.to_string());
    std::fs::write(path, kept.to_string()).unwrap();
}

#[tokio::test]
async fn a_record_of_another_version_costs_no_box() {
    on_each_machine(async |machine| {
        let state = machine.directory();
        let seconds = mark();
        let host = Host::start(machine, state.path()).await.unwrap();
        for id in ["odd", "newer", "strange"] {
            let cmd = format!("sleep {seconds} > /dev/null 2>&1 & echo $!");
            let spec = json!({"box_id": id, "labels": {"id": id}, "cmd": cmd});
            host.call::<BoxExec>(json!({"spec": spec})).await.unwrap();
        }
        host.kill().await;
        let directory_of = |id: &str| {
            let all = std::fs::read_dir(state.path()).unwrap();
            let mut all = all.map(|entry| entry.unwrap().path());
            let is_it = |path: &std::path::PathBuf| {
                let record = std::fs::read_to_string(path.join("box.json"));
                record.is_ok_and(|record| record.contains(id))
            };
            all.find(is_it).unwrap()
        };
        // Fields that this version does not know, and values that it would refuse in a request.
        rewrite(&directory_of("odd"), |record| {
            record["colour"] = json!("blue");
            record["spec"]["colour"] = json!({"of": "money"});
            record["spec"]["memory_mb"] = json!(1);
            record["spec"]["workdir"] = json!("not normal");
        });
        let newer = directory_of("newer");
        rewrite(&newer, |record| record["version"] = json!(99));
        let strange = directory_of("strange");
        let whole = std::fs::read(strange.join("box.json")).unwrap();
        std::fs::write(strange.join("box.json"), "{").unwrap();
        let host = Host::start(machine, state.path()).await.unwrap();
        host.adopts(1).await;
        let odd = host
            .call::<BoxGet>(json!({"box_id": "odd"}))
            .await
            .unwrap()
            .info;
        assert_eq!((odd.memory_mb, odd.labels["id"].as_str()), (1, "odd"));
        assert_eq!(processes_with(&seconds), 3, "the other boxes still run");
        assert!(newer.exists() && strange.exists());
        host.kill().await;
        // A runtime that can read the records adopts the boxes again.
        rewrite(&newer, |record| record["version"] = json!(1));
        std::fs::write(strange.join("box.json"), whole).unwrap();
        let host = Host::start(machine, state.path()).await.unwrap();
        host.adopts(3).await;
        for id in ["odd", "newer", "strange"] {
            host.call::<BoxDelete>(json!({"box_id": id, "force": true}))
                .await
                .unwrap();
        }
        assert_eq!(processes_with(&seconds), 0);
        host.kill().await;
    })
    .await;
}
