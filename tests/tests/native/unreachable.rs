//! A runtime gives up a box only when it knows that the box is dead: other reasons may pass.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;

use box_protocol::actions::{
    BoxCreate, BoxDelete, BoxEvent, BoxEvents, BoxExec, BoxGet, BoxList, BoxTransition, BoxUpdate,
    CommandStart, FileStat, FileWrite,
};
use box_protocol::{BoxState, Code, UnixMs};
use box_test_wait::eventually;
use box_tests::machine::{Machine, PROGRAM, mark, on_each_machine, pids_with, processes_with};
use futures::StreamExt as _;
use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;

use super::adoption::{Host, agents, cgroup_parent, code, directories, how};

async fn state_of(host: &Host, id: &str) -> BoxState {
    let reported = host.call::<BoxGet>(json!({"box_id": id})).await;
    reported.unwrap().info.state
}

async fn becomes(host: &Host, id: &str, state: BoxState) {
    eventually(&format!("{id} becomes {state:?}"), async || {
        state_of(host, id).await == state
    })
    .await;
}

async fn events(host: &Host, id: &str) -> Vec<BoxEvent> {
    let params = serde_json::from_value(json!({"box_id": id})).unwrap();
    let reported = host.peer().stream::<BoxEvents>(&params).await.unwrap();
    reported.map(Result::unwrap).collect().await
}

fn kinds(events: &[BoxEvent]) -> Vec<&str> {
    events.iter().map(|event| event.kind.as_str()).collect()
}

async fn delete(host: &Host, id: &str) {
    let params = json!({"box_id": id, "force": true});
    host.call::<BoxDelete>(params).await.unwrap();
}

/// Makes a box with a process that has this mark in its arguments.
async fn fill(host: &Host, id: &str, mark: &str) {
    let cmd = format!("sleep {mark} > /dev/null 2>&1 & echo $!");
    let params = json!({"spec": {"box_id": id, "cmd": cmd}});
    let before = processes_with(mark);
    host.call::<BoxExec>(params).await.unwrap();
    // The shell answers before its child has become `sleep`.
    eventually("the process runs", async || processes_with(mark) > before).await;
}

/// Runs a server with this many descriptors until it has adopted all boxes it can, and kills it.
async fn start_with_few_descriptors(machine: &Machine, state: &Path, descriptors: usize) {
    let limited = format!("ulimit -n {descriptors}; exec \"$0\" serve \"$1\"");
    let mut command = Command::new("sh");
    command.args(["-c", &limited]).arg(&*PROGRAM);
    command.arg(how(machine, state, &Value::Null).to_string());
    let command = command.stdout(Stdio::piped()).kill_on_drop(true);
    let mut process = command.spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    // The server prints how many it has adopted, or exits because it can do nothing.
    let _ = lines.next_line().await;
    let _ = process.start_kill();
    process.wait().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_that_is_short_of_descriptors_costs_no_box() {
    const BOXES: usize = 12;
    on_each_machine(async |machine| {
        let state = machine.directory();
        let mark = mark();
        let host = Host::start(machine, state.path()).await.unwrap();
        for number in 0..BOXES {
            fill(&host, &format!("box-{number}"), &mark).await;
        }
        host.kill().await;
        for descriptors in [20, 30, 40] {
            start_with_few_descriptors(machine, state.path(), descriptors).await;
            assert_eq!(processes_with(&mark), BOXES, "{descriptors} descriptors");
        }
        let host = Host::start(machine, state.path()).await.unwrap();
        host.adopts(BOXES).await;
        for number in 0..BOXES {
            delete(&host, &format!("box-{number}")).await;
        }
        assert_eq!(processes_with(&mark), 0);
        host.kill().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_that_cannot_read_the_stopped_boxes_costs_no_box() {
    const BOXES: usize = 4;
    const ROUNDS: usize = 20;
    on_each_machine(async |machine| {
        let state = machine.directory();
        let mark = mark();
        let host = Host::start(machine, state.path()).await.unwrap();
        for number in 0..BOXES {
            fill(&host, &format!("box-{number}"), &mark).await;
        }
        host.kill().await;
        let stopped = state.path().join("stopped");
        assert!(!stopped.exists());
        std::fs::write(&stopped, "not a directory").unwrap();
        // A server that has reached boxes ends them with itself, unless it exits before.
        for round in 0..ROUNDS {
            assert!(Host::start(machine, state.path()).await.is_err());
            assert_eq!(processes_with(&mark), BOXES, "round {round}");
        }
        std::fs::remove_file(stopped).unwrap();
        let host = Host::start(machine, state.path()).await.unwrap();
        host.adopts(BOXES).await;
        for number in 0..BOXES {
            delete(&host, &format!("box-{number}")).await;
        }
        assert_eq!(processes_with(&mark), 0);
        host.kill().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_whose_server_dies_before_it_has_a_record_ends_by_itself() {
    on_each_machine(async |machine| {
        let (state, workspace) = (machine.directory(), machine.directory());
        let hold = workspace.path().join("hold");
        let everybody = Mode::from_raw_mode(0o666);
        rustix::fs::mknodat(CWD, &hold, FileType::Fifo, everybody, 0).unwrap();
        for (path, mode) in [(hold.as_path(), 0o666), (workspace.path(), 0o755)] {
            std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
        let host = Host::start(machine, state.path()).await.unwrap();
        let params = json!({"spec": {"box_id": "newborn", "host_path": workspace.path()}});
        let params = serde_json::from_value(params).unwrap();
        let peer = host.peer();
        let making = tokio::spawn(async move { peer.call::<BoxCreate>(&params).await });
        // Once its agent reads here, the runtime knows that the box is made. No client can reach
        // the agent yet.
        let mut writer = None;
        eventually("the box is made", async || {
            let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            writer = rustix::fs::open(&hold, flags, Mode::empty()).ok();
            writer.is_some()
        })
        .await;
        host.kill().await;
        assert!(making.await.unwrap().is_err());
        let left = directories(state.path());
        assert_eq!(left.len(), 1);
        let host = Host::start(machine, state.path()).await.unwrap();
        assert_eq!(host.adopted, 0);
        assert!(left[0].exists(), "its directory stays while the box runs");
        let logs = std::fs::File::open(left[0].join("logs")).unwrap();
        let is_dead = || rustix::fs::flock(&logs, FlockOperation::NonBlockingLockExclusive).is_ok();
        assert!(!is_dead());
        drop(writer);
        eventually("it ends", async || is_dead()).await;
        drop(logs);
        eventually("and nothing is left of it", async || {
            directories(state.path()).is_empty()
        })
        .await;
        let list = host.call::<BoxList>(json!({})).await.unwrap();
        assert_eq!(list.items, []);
        host.kill().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_becomes_ready_with_a_stuck_agent() {
    on_each_machine(async |machine| {
        let state = machine.directory();
        let mark = mark();
        let host = Host::start(machine, state.path()).await.unwrap();
        fill(&host, "stuck", &mark).await;
        let stuck = agents(state.path()).await[0];
        for id in ["one", "two"] {
            fill(&host, id, &mark).await;
        }
        host.kill().await;
        kill_process(stuck, Signal::STOP).unwrap();
        let host = Host::start(machine, state.path()).await.unwrap();
        host.adopts(2).await;
        let reported = host.call::<BoxGet>(json!({"box_id": "stuck"})).await;
        let reported = reported.unwrap().info;
        assert_eq!(reported.state, BoxState::Unreachable);
        assert!(reported.reason.is_some());
        let list = host
            .call::<BoxList>(json!({"state": ["unreachable"]}))
            .await;
        assert_eq!(list.unwrap().total, 1);
        assert_eq!(kinds(&events(&host, "stuck").await), ["unreachable"]);
        // Calls that need its agent are refused at once, and no call makes another box in its
        // place.
        let ran = json!({"spec": {"box_id": "stuck", "cmd": "true"}});
        let refused = host.call::<BoxExec>(ran.clone()).await.unwrap_err();
        assert!(
            refused.to_string().contains("has not answered"),
            "{refused}"
        );
        assert_eq!(code(refused), Code::Unavailable);
        let write = json!({"box_id": "stuck", "path": "/tmp/a", "data": ""});
        let refused = host.call::<FileWrite>(write).await.unwrap_err();
        assert_eq!(code(refused), Code::Unavailable);
        let delete_it = json!({"box_id": "stuck"});
        let refused = host.call::<BoxDelete>(delete_it).await.unwrap_err();
        assert_eq!(code(refused), Code::Unavailable);
        assert_eq!(processes_with(&mark), 3, "no process of it was ended");
        // The agent answers, and the box is available again.
        kill_process(stuck, Signal::CONT).unwrap();
        becomes(&host, "stuck", BoxState::Running).await;
        host.call::<BoxExec>(ran).await.unwrap();
        let reported = events(&host, "stuck").await;
        assert_eq!(kinds(&reported), ["unreachable", "adopted"]);
        host.kill().await;
        // A box without an answering agent is deleted by force, or fails when the agent dies.
        kill_process(stuck, Signal::STOP).unwrap();
        let host = Host::start(machine, state.path()).await.unwrap();
        assert_eq!(state_of(&host, "stuck").await, BoxState::Unreachable);
        delete(&host, "stuck").await;
        assert_eq!(
            (processes_with(&mark), directories(state.path()).len()),
            (2, 2)
        );
        host.kill().await;
        let both = agents(state.path()).await;
        kill_process(both[0], Signal::STOP).unwrap();
        let host = Host::start(machine, state.path()).await.unwrap();
        host.adopts(1).await;
        let mut silent = "one";
        if state_of(&host, silent).await != BoxState::Unreachable {
            silent = "two";
        }
        kill_process(both[0], Signal::KILL).unwrap();
        becomes(&host, silent, BoxState::Failed).await;
        for id in ["one", "two"] {
            delete(&host, id).await;
        }
        assert_eq!(
            (processes_with(&mark), directories(state.path()).len()),
            (0, 0)
        );
        host.kill().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_that_ends_during_adoption_does_not_remove_files_of_stopped_boxes() {
    on_each_machine(async |machine| {
        let state = machine.directory();
        let mark = mark();
        let host = Host::start(machine, state.path()).await.unwrap();
        fill(&host, "stuck", &mark).await;
        let stuck = agents(state.path()).await[0];
        for id in ["stopped", "expired"] {
            let spec = json!({"spec": {"box_id": id, "persistent": true}});
            host.call::<BoxCreate>(spec).await.unwrap();
        }
        let write = json!({"box_id": "stopped", "path": "/tmp/f", "data": "aGk="});
        host.call::<FileWrite>(write).await.unwrap();
        let stop = json!({"box_id": "stopped", "to": "stopped"});
        host.call::<BoxTransition>(stop).await.unwrap();
        let at = UnixMs::now().0 + 500;
        let expires = json!({"box_id": "expired", "lifetime": {"expires_at": at}});
        host.call::<BoxUpdate>(expires).await.unwrap();
        host.kill().await;
        eventually("the box has expired", async || UnixMs::now().0 > at).await;
        // The adoption of this one takes longer than the end of the expired one.
        kill_process(stuck, Signal::STOP).unwrap();
        let host = Host::start(machine, state.path()).await.unwrap();
        let gone = host.call::<BoxGet>(json!({"box_id": "expired"})).await;
        assert_eq!(code(gone.unwrap_err()), Code::NotFound);
        let read = json!({"box_id": "stopped", "paths": ["/tmp/f"]});
        let start = json!({"box_id": "stopped", "to": "running"});
        host.call::<BoxTransition>(start).await.unwrap();
        let found = host.call::<FileStat>(read).await.unwrap();
        let found = serde_json::to_value(found).unwrap().to_string();
        assert!(found.contains("\"size\":2"), "{found}");
        for id in ["stuck", "stopped"] {
            delete(&host, id).await;
        }
        host.kill().await;
    })
    .await;
}

/// The cgroups of boxes below this parent, in every hierarchy.
fn groups(parent: &str) -> usize {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let places = mounts.lines().filter(|line| line.contains(" - cgroup"));
    let places = places.filter_map(|line| line.split(' ').nth(4));
    let below = places.filter_map(|place| std::fs::read_dir(Path::new(place).join(parent)).ok());
    let names = below.flatten().flatten().map(|entry| entry.file_name());
    names
        .filter(|name| name.to_string_lossy().starts_with('b'))
        .count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cgroups_of_adopted_boxes_are_removed_with_them() {
    on_each_machine(async |machine| {
        let (state, parent) = (machine.directory(), cgroup_parent(machine));
        let host = Host::start(machine, state.path()).await.unwrap();
        for id in ["one", "two", "three"] {
            let spec = json!({"spec": {"box_id": id}});
            host.call::<BoxCreate>(spec).await.unwrap();
        }
        let made = groups(&parent);
        host.kill().await;
        let host = Host::start(machine, state.path()).await.unwrap();
        host.adopts(3).await;
        // The fork server of the killed runtime has removed its own cgroup.
        eventually("only the cgroups of the boxes are left", async || {
            groups(&parent) < made.max(1)
        })
        .await;
        for id in ["one", "two", "three"] {
            delete(&host, id).await;
        }
        eventually("the cgroups are removed without another box", async || {
            groups(&parent) == 0
        })
        .await;
        host.kill().await;
    })
    .await;
}

/// A program that listens in place of an agent and sends no greeting.
const LISTEN: &str = "import os, socket, sys, time
os.unlink(sys.argv[1])
s = socket.socket(socket.AF_UNIX)
s.bind(sys.argv[1])
s.listen(4)
time.sleep(86400)
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_impersonates_an_agent_is_not_killed() {
    on_each_machine(async |machine| {
        let state = machine.directory();
        let host = Host::start(machine, state.path()).await.unwrap();
        let spec = json!({"spec": {"box_id": "taken"}});
        host.call::<BoxCreate>(spec).await.unwrap();
        let agent = agents(state.path()).await[0];
        host.kill().await;
        // The box stays, and another process listens at its socket, as a compromised agent could
        // arrange.
        let socket = directories(state.path())[0].join("agent.sock");
        let mut bystander = Command::new("python3");
        let bystander = bystander.args(["-c", LISTEN]).arg(&socket);
        let mut bystander = bystander.kill_on_drop(true).spawn().unwrap();
        let pid = i32::try_from(bystander.id().unwrap()).unwrap();
        eventually("it listens", async || is_listening(&socket, pid)).await;
        let host = Host::start(machine, state.path()).await.unwrap();
        assert_eq!(host.adopted, 0);
        assert_eq!(state_of(&host, "taken").await, BoxState::Unreachable);
        // The control: the deletion ends the box itself.
        delete(&host, "taken").await;
        eventually("the box is ended", async || {
            kill_process(agent, Signal::CONT).is_err()
        })
        .await;
        assert!(
            bystander.try_wait().unwrap().is_none(),
            "the unrelated process still runs"
        );
        host.kill().await;
        bystander.kill().await.unwrap();
    })
    .await;
}

/// Whether this process listens at the socket.
fn is_listening(socket: &Path, pid: i32) -> bool {
    let connected = std::os::unix::net::UnixStream::connect(socket);
    connected.is_ok_and(|stream| {
        let peer = rustix::net::sockopt::socket_peercred(&stream).unwrap().pid;
        Some(peer) == Pid::from_raw(pid)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_into_a_stuck_box_fails_with_the_reason() {
    on_each_machine(async |machine| {
        let state = machine.directory();
        let host = Host::start(machine, state.path()).await.unwrap();
        let spec = json!({"spec": {"box_id": "stuck"}});
        host.call::<BoxCreate>(spec).await.unwrap();
        let agent = agents(state.path()).await[0];
        kill_process(agent, Signal::STOP).unwrap();
        let write = json!({"box_id": "stuck", "path": "/tmp/a", "data": ""});
        let start = json!({"box_id": "stuck", "program": {"text": "true"}});
        let (file, command) = tokio::join!(
            host.call::<FileWrite>(write.clone()),
            host.call::<CommandStart>(start)
        );
        for refused in [file.map(drop).unwrap_err(), command.map(drop).unwrap_err()] {
            assert!(
                refused.to_string().contains("has not answered"),
                "{refused}"
            );
            assert_eq!(code(refused), Code::Unavailable);
        }
        // The runtime did not give up the box: the box continues when its agent does.
        kill_process(agent, Signal::CONT).unwrap();
        host.call::<FileWrite>(write).await.unwrap();
        delete(&host, "stuck").await;
        host.kill().await;
    })
    .await;
}

/// A version 1 freezer with one process, which no signal ends while it is frozen.
struct FrozenProcess(std::path::PathBuf);

impl FrozenProcess {
    /// `None` without such a freezer, or without permission to use it.
    fn new(name: &str, pid: i32) -> Option<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let is_freezer = |line: &&str| {
            line.contains(" - cgroup ") && line.rsplit([',', ' ']).any(|name| name == "freezer")
        };
        let place = mounts.lines().find(is_freezer)?.split(' ').nth(4)?;
        let frozen = Self(Path::new(place).join(name));
        std::fs::create_dir(&frozen.0).ok()?;
        std::fs::write(frozen.0.join("cgroup.procs"), pid.to_string()).unwrap();
        std::fs::write(frozen.0.join("freezer.state"), "FROZEN").unwrap();
        Some(frozen)
    }

    fn is_frozen(&self) -> bool {
        let state = std::fs::read_to_string(self.0.join("freezer.state")).unwrap();
        state.trim() == "FROZEN"
    }

    fn thaw(&self) {
        std::fs::write(self.0.join("freezer.state"), "THAWED").unwrap();
    }
}

impl Drop for FrozenProcess {
    fn drop(&mut self) {
        self.thaw();
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// A frozen process stands for one in an uninterruptible sleep of the kernel.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn remains_of_a_box_are_removed_when_it_ends_late() {
    on_each_machine(async |machine| {
        let (state, mark) = (machine.directory(), mark());
        let host = Host::start(machine, state.path()).await.unwrap();
        fill(&host, "slow", &mark).await;
        let agent = agents(state.path()).await[0];
        host.kill().await;
        kill_process(agent, Signal::STOP).unwrap();
        let sleeper = pids_with(&mark)[0];
        let name = format!("{}-frozen", cgroup_parent(machine));
        let Some(frozen) = FrozenProcess::new(&name, sleeper) else {
            kill_process(agent, Signal::KILL).unwrap();
            return;
        };
        eventually("it is frozen", async || frozen.is_frozen()).await;
        let host = Host::start(machine, state.path()).await.unwrap();
        assert_eq!(state_of(&host, "slow").await, BoxState::Unreachable);
        let force = json!({"box_id": "slow", "force": true});
        let late = host.call::<BoxDelete>(force).await.unwrap_err();
        assert_eq!(code(late), Code::Timeout, "the caller gets the error");
        assert_eq!(directories(state.path()).len(), 1);
        assert_eq!(pids_with(&mark), [sleeper], "control: it is not ended yet");
        frozen.thaw();
        eventually("nothing is left", async || {
            directories(state.path()).is_empty()
        })
        .await;
        assert_eq!(processes_with(&mark), 0);
        host.kill().await;
    })
    .await;
}
