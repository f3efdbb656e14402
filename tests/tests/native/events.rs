//! The events of boxes, for their owners only, and the description of a box from inside.

use box_protocol::actions::{
    BoxCreate, BoxDelete, BoxEvent, BoxEvents, BoxEventsResult, BoxGet, BoxGetResult,
};
use box_protocol::{BoxError, Code, SpecDraft};
use box_rpc::{Options, Router, Session};
use box_runtime::{BoxRuntime, Caller};
use box_test_wait::eventually;
use box_tests::machine::{Machine, mark, on_each_machine, params, printed, processes_with, spec};
use box_transports::queue;
use futures::StreamExt as _;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::adoption::Host;

/// All events so far, and the number to continue from.
async fn events(runtime: &BoxRuntime, caller: &str, asked: Value) -> (Vec<BoxEvent>, u64) {
    let (sender, mut chunks) = mpsc::channel(8);
    let asked = serde_json::from_value(asked).unwrap();
    let caller = match caller {
        "local" => Caller::Local,
        name => Caller::token(name),
    };
    let running = runtime.events(&caller, asked, Some(sender));
    let reading = async {
        let mut all = Vec::new();
        while let Some(event) = chunks.recv().await {
            all.push(event);
        }
        all
    };
    let (result, all) = tokio::join!(running, reading);
    let BoxEventsResult { next, lost } = result.unwrap();
    assert_eq!(lost, 0);
    (all, next)
}

fn kinds(events: &[BoxEvent]) -> Vec<(&str, &str)> {
    events
        .iter()
        .map(|event| (event.box_id.as_str(), &*event.kind))
        .collect()
}

async fn delete(machine: &Machine, id: &str) {
    let asked = serde_json::from_value(json!({"box_id": id})).unwrap();
    let deleted = machine.runtime.delete(&Caller::Local, asked).await;
    deleted.unwrap();
}

#[tokio::test]
async fn the_owner_of_a_box_gets_its_events_in_order() {
    on_each_machine(async |machine| {
        let runtime = &machine.runtime;
        let (none, start) = events(runtime, "local", json!({})).await;
        assert!(none.is_empty() && start > 0);
        let (sender, mut followed) = mpsc::channel(64);
        let following = {
            let runtime = runtime.clone();
            let asked = serde_json::from_value(json!({"follow": true, "after": start})).unwrap();
            tokio::spawn(async move { runtime.events(&Caller::Local, asked, Some(sender)).await })
        };
        machine.exec("a", "true").await;
        let alice = Caller::token("alice");
        let hers = params(SpecDraft::new("hers").cmd("true"));
        runtime.exec(&alice, hers).await.unwrap();
        delete(machine, "a").await;
        let slow = spec(json!({"box_id": "slow", "cmd": "sleep 60", "timeout_sec": 1}));
        machine.exec_spec(slow).await.unwrap();
        let short = spec(json!({"box_id": "short", "cmd": "true", "lifetime": {"idle_ms": 50}}));
        machine.exec_spec(short).await.unwrap();
        machine.exec("dies", "true").await;
        // An agent that exits ends its box.
        let start_over = spec(json!({"box_id": "dies", "cmd": "echo alive"}));
        assert_eq!(
            printed(&machine.exec_spec(start_over).await.unwrap()),
            "alive"
        );
        let mut expected = vec![
            ("a", "started"),
            ("hers@alice", "started"),
            ("a", "deleted"),
            ("slow", "started"),
            ("slow", "timeout"),
            ("short", "started"),
            ("short", "expired"),
            ("dies", "started"),
        ];
        let pauses = !machine.lacks("cgroup.freeze").await;
        if pauses {
            for to in ["paused", "running"] {
                let asked = serde_json::from_value(json!({"box_id": "dies", "to": to}));
                let moved = runtime.transition(&Caller::Local, asked.unwrap()).await;
                moved.unwrap();
            }
            expected.extend([("dies", "paused"), ("dies", "resumed")]);
        }
        let sorted = |mut all: Vec<(String, String)>| {
            all.sort();
            all
        };
        let owned = |all: &[(&str, &str)]| {
            let all = all
                .iter()
                .map(|(id, kind)| ((*id).to_owned(), (*kind).to_owned()));
            all.collect::<Vec<_>>()
        };
        eventually("all events are reported", async || {
            events(runtime, "local", json!({})).await.0.len() >= expected.len()
        })
        .await;
        let (all, next) = events(runtime, "local", json!({})).await;
        // The idle box ends at any time, and all others in order.
        assert_eq!(sorted(owned(&kinds(&all))), sorted(owned(&expected)));
        assert!(all.windows(2).all(|two| two[0].seq < two[1].seq));
        assert_eq!(all.last().unwrap().seq, next);
        let (one, _) = events(runtime, "local", json!({"box_id": "slow"})).await;
        assert_eq!(kinds(&one), [("slow", "started"), ("slow", "timeout")]);
        let (later, _) = events(runtime, "local", json!({"after": all[2].seq})).await;
        assert_eq!(later, all[3..]);
        // Only the events of her boxes, and none of them for any other caller.
        assert_eq!(
            kinds(&events(runtime, "alice", json!({})).await.0),
            [("hers", "started")]
        );
        let (bobs, _) = events(runtime, "bob", json!({"box_id": "hers"})).await;
        assert!(bobs.is_empty(), "{bobs:?}");
        let mut live = Vec::new();
        while live.len() < all.len() {
            live.push(followed.recv().await.unwrap());
        }
        assert_eq!(live, all);
        following.abort();
    })
    .await;
}

#[tokio::test]
async fn a_box_that_fails_or_runs_out_of_memory_reports_the_reason() {
    on_each_machine(async |machine| {
        if machine.lacks("cgroup.memory").await {
            return;
        }
        let hog = spec(json!({"box_id": "h", "memory_mb": 64, "cmd": "exec tail /dev/zero"}));
        machine.exec_spec(hog).await.unwrap();
        let (all, _) = events(&machine.runtime, "local", json!({"box_id": "h"})).await;
        assert_eq!(kinds(&all), [("h", "started"), ("h", "oom")]);
    })
    .await;
}

#[tokio::test]
async fn a_box_whose_agent_dies_has_failed() {
    on_each_machine(async |machine| {
        let seconds = mark();
        let leave = format!("setsid sleep {seconds} > /dev/null 2>&1 &");
        machine.exec("f", &leave).await;
        eventually("it runs", async || processes_with(&seconds) == 1).await;
        // The first process of the box adopts orphans.
        let agent = std::fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .find_map(|entry| {
                let line = std::fs::read_to_string(entry.path().join("cmdline")).ok()?;
                let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
                let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
                let ours = line.split('\0').any(|word| word == seconds);
                ours.then(|| parent.trim().parse::<i32>().unwrap())
            });
        let agent = rustix::process::Pid::from_raw(agent.unwrap()).unwrap();
        rustix::process::kill_process(agent, rustix::process::Signal::KILL).unwrap();
        let mut all = Vec::new();
        eventually("the end is reported", async || {
            (all, _) = events(&machine.runtime, "local", json!({})).await;
            all.len() > 1
        })
        .await;
        assert_eq!(kinds(&all), [("f", "started"), ("f", "failed")]);
        assert!(all[1].message.contains("agent has disconnected"), "{all:?}");
    })
    .await;
}

#[tokio::test]
async fn an_adopted_box_reports_its_adoption() {
    on_each_machine(async |machine| {
        let state = machine.directory();
        let host = Host::start(machine, state.path()).await.unwrap();
        let made = json!({"spec": {"box_id": "t"}});
        host.call::<BoxCreate>(made).await.unwrap();
        let before = host.call::<BoxEvents>(json!({})).await.unwrap().next;
        host.kill().await;
        let host = Host::start(machine, state.path()).await.unwrap();
        let asked = serde_json::from_value(json!({"after": before})).unwrap();
        let mut chunks = host.peer().stream::<BoxEvents>(&asked).await.unwrap();
        let adopted = chunks.next().await.unwrap().unwrap();
        assert_eq!((adopted.box_id.as_str(), &*adopted.kind), ("t", "adopted"));
        assert!(adopted.seq > before && adopted.lost == 0, "{adopted:?}");
        let gone = json!({"box_id": "t", "force": true});
        host.call::<BoxDelete>(gone).await.unwrap();
        host.kill().await;
    })
    .await;
}

async fn get(machine: &Machine, guest: bool) -> Result<BoxGetResult, BoxError> {
    let (near, far) = queue::pair(16);
    let _server = Session::start(far, machine.runtime.router(), Options::new(Caller::Local));
    let client = Session::start(near, Router::empty(), Options::client());
    let asked = serde_json::from_value(json!({"box_id": "g", "guest": guest})).unwrap();
    let answer = client.peer().call::<BoxGet>(&asked).await;
    answer.map_err(BoxError::from)
}

#[tokio::test]
async fn user_interpreters_and_ports_of_a_box_are_reported() {
    on_each_machine(async |machine| {
        assert_eq!(get(machine, true).await.unwrap_err().code(), Code::NotFound);
        let server = "cd /tmp && python3 -m http.server 8123 > /dev/null 2>&1 & \
            for i in $(seq 200); do python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8123))' \
            2> /dev/null && break; sleep 0.05; done; uname -m; whoami; echo $HOME; command -v python3";
        let ran = machine.exec("g", server).await;
        let answer: Vec<_> = printed(&ran).lines().collect();
        assert_eq!(get(machine, false).await.unwrap().guest, None);
        let facts = get(machine, true).await.unwrap().guest.unwrap();
        assert_eq!([&*facts.arch, &*facts.user, &*facts.home], answer[..3]);
        assert_eq!(facts.ports, [8123]);
        assert_eq!(facts.interpreters["python"], answer[3]);
        assert!(facts.interpreters.contains_key("sh"), "{facts:?}");
        assert!(facts.tools.iter().any(|tool| tool == "tar"), "{facts:?}");
        assert!(!facts.os.is_empty() && !facts.zone.is_empty(), "{facts:?}");
    })
    .await;
}
