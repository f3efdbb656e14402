use std::cell::RefCell;
use std::collections::BTreeSet;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::model::{PerStream, SpecDraft};
use crate::schema::tests::{assert_agrees, assert_fits};
use crate::{Blob, CommandId, UnixMs};
use box_rpc::Action;

thread_local! {
    /// The actions that the test has covered.
    static COVERED: RefCell<BTreeSet<&'static str>> = RefCell::default();
}

fn round_trip<T>(value: &T) -> Value
where
    T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug + schemars::JsonSchema,
{
    let json = serde_json::to_value(value).unwrap();
    assert!(json.is_object(), "{json}");
    assert_fits::<T>(&json);
    assert_eq!(&serde_json::from_value::<T>(json.clone()).unwrap(), value);
    json
}

/// Asserts that an action accepts these parameters and rejects an unknown member.
fn accepts<A: Action>(params: Value) {
    COVERED.with_borrow_mut(|covered| covered.insert(A::NAME));
    if let Err(error) = serde_json::from_value::<A::Params>(params.clone()) {
        panic!("{}: {error}", A::NAME);
    }
    assert_agrees::<A>(&params);
    let mut stray = params;
    stray["no_such_member"] = json!(1);
    assert!(
        serde_json::from_value::<A::Params>(stray).is_err(),
        "{} accepts an unknown member",
        A::NAME
    );
}

#[test]
fn the_contract_is_closed() {
    // The list does not include `hello`.
    assert_eq!(ALL_ACTIONS.len(), 62);
    let names: BTreeSet<_> = ALL_ACTIONS.iter().chain(AGENT_ACTIONS).collect();
    assert_eq!(names.len(), ALL_ACTIONS.len() + AGENT_ACTIONS.len());
    for name in names {
        let (noun, verb) = name.split_once('.').unwrap();
        assert!(!noun.is_empty() && !verb.is_empty(), "{name}");
        assert_eq!(noun == "agent", AGENT_ACTIONS.contains(name));
    }
}

#[test]
fn minimal_parameters_are_accepted_and_unknown_members_rejected() {
    let s = "s1";
    accepts::<SystemShutdown>(json!({}));
    accepts::<BoxCreate>(json!({"spec": {"box_id": s}}));
    accepts::<BoxExec>(json!({"spec": {"box_id": s, "cmd": "ls", "timeout_sec": "999"}}));
    accepts::<BoxGet>(json!({"box_id": s}));
    accepts::<BoxList>(json!({}));
    accepts::<BoxUpdate>(json!({"box_id": s, "labels": {"old": null, "new": "x"}}));
    accepts::<BoxTransition>(json!({"box_id": s, "to": "paused"}));
    accepts::<BoxDelete>(json!({"box_id": s}));
    accepts::<BoxStats>(json!({"box_id": s}));
    accepts::<BoxEvents>(json!({}));
    accepts::<BoxDiff>(json!({"box_id": "s"}));
    accepts::<BoxApply>(json!({"box_id": "s"}));
    accepts::<BoxDiscard>(json!({"box_id": "s"}));
    accepts::<BoxSnapshot>(json!({"box_id": s, "name": "n", "tags": ["t"]}));
    accepts::<BoxFork>(json!({"box_id": s, "count": 2, "prefix": "p"}));
    accepts::<BoxCheckpoint>(json!({"box_id": s}));
    accepts::<BoxRollback>(json!({"box_id": s, "name": "n"}));
    accepts::<SnapshotExport>(json!({"snapshot": "n"}));
    accepts::<CommandStart>(json!({"box_id": s, "program": {"text": "ls"}}));
    accepts::<CommandAttach>(json!({"box_id": s, "command_id": "c", "from": {"tail": 10}}));
    accepts::<CommandGet>(json!({"box_id": s, "command_id": "c"}));
    accepts::<CommandList>(json!({"box_id": s, "role": "process"}));
    accepts::<CommandInput>(json!({"box_id": s, "command_id": "c", "data": "aGk="}));
    accepts::<CommandKill>(json!({"box_id": s, "command_id": "c"}));
    accepts::<ShellCreate>(json!({"box_id": s}));
    accepts::<ShellRun>(json!({"box_id": s, "shell_id": "sh", "text": "ls"}));
    accepts::<ShellList>(json!({"box_id": s}));
    accepts::<ShellDelete>(json!({"box_id": s, "shell_id": "sh"}));
    accepts::<FileRead>(json!({"box_id": s, "path": "/a", "part": {"lines": {"start": 2}}}));
    accepts::<FileWrite>(json!({"box_id": s, "path": "/a", "data": ""}));
    accepts::<FileStat>(json!({"box_id": s, "paths": ["/a"]}));
    accepts::<FileList>(json!({"box_id": s, "path": "/a"}));
    accepts::<FileFind>(json!({"box_id": s, "path": "/a", "glob": "*", "match": "name"}));
    accepts::<FileGrep>(json!({"box_id": s, "path": "/a", "pattern": "x"}));
    accepts::<FileReplace>(json!({"box_id": s, "path": "/a", "old": "x", "new": "y"}));
    accepts::<FileMove>(json!({"box_id": s, "src": "/a", "dest": "/b"}));
    accepts::<FileRemove>(json!({"box_id": s, "paths": ["/a"]}));
    accepts::<FileMkdir>(json!({"box_id": s, "path": "/a"}));
    accepts::<FileAttributes>(json!({"box_id": s, "path": "/a", "mode": 420}));
    accepts::<FileWatch>(json!({"box_id": s, "path": "/a"}));
    accepts::<FilePack>(json!({"box_id": s, "path": "/a"}));
    accepts::<FileUnpack>(json!({"box_id": s, "path": "/a", "data": "",
        "upload": {"id": "u", "offset": 0}}));
    accepts::<PortOpen>(json!({"box_id": s, "port": 80}));
    accepts::<PortSend>(json!({"box_id": s, "conn_id": "c"}));
    accepts::<PortShare>(json!({"box_id": s, "port": 80, "for_ms": 1000}));
    accepts::<CatalogPut>(json!({"name": "v", "content": {"volume": {"size_mb": 64}}}));
    accepts::<CatalogPut>(json!({"name": "p", "content": {"pool": {"template": "t", "size": 2}}}));
    accepts::<CatalogGet>(json!({"kind": "volume", "item": "v"}));
    accepts::<CatalogList>(json!({"kind": "template", "limit": 5, "state": ["ready"]}));
    accepts::<CatalogUpdate>(json!({"kind": "volume", "item": "v", "labels": {"a": null},
        "content": {"volume": {"size_mb": 64, "shared": true}}}));
    accepts::<CatalogDelete>(json!({"kind": "volume", "item": "v"}));
    accepts::<ImagePull>(json!({"reference": "debian", "policy": "missing"}));
    accepts::<ImageImport>(json!({"name": "mine:1", "data": "",
        "upload": {"id": "u", "offset": 0}}));
    accepts::<ImageExport>(json!({"image": "debian"}));
    accepts::<ImageList>(json!({}));
    accepts::<ImageGet>(json!({"image": "debian"}));
    accepts::<ImageRemove>(json!({"image": "debian"}));
    accepts::<ImagePrune>(json!({}));
    accepts::<ImageLogin>(json!({"registry": "ghcr.io", "username": "u", "password": "p"}));
    accepts::<ImageLogout>(json!({"registry": "ghcr.io"}));
    accepts::<AgentStart>(
        json!({"command_id": "c", "program": {"argv": ["ls"]}, "env": {}, "cwd": "/"}),
    );
    accepts::<AgentOutput>(json!({"command_id": "c"}));
    accepts::<AgentList>(json!({}));
    accepts::<AgentInput>(json!({"command_id": "c", "data": "aGk=", "close": true}));
    accepts::<AgentKill>(json!({"command_id": "c"}));
    accepts::<AgentHealth>(json!({"cwd": "/"}));
    accepts::<AgentEnds>(json!({"acknowledged": 7}));
    accepts::<AgentAllow>(json!({"path": "/mnt"}));
    let file = json!({"box_id": s, "path": "/a"});
    accepts::<AgentRead>(json!({"read": file, "slot": 1}));
    accepts::<AgentPack>(json!({"pack": file, "slot": 1}));
    accepts::<AgentWrite>(
        json!({"write": {"box_id": s, "path": "/a", "data": ""}, "slot": 1, "bytes": 5}),
    );
    accepts::<AgentUnpack>(json!({"unpack": {"box_id": s, "path": "/a", "data": "",
        "upload": {"id": "u", "offset": 0}}, "slot": 1, "bytes": 5}));
    let any = ["system.health", "system.status", "system.configure"];
    let any = any
        .into_iter()
        .chain(["agent.clear", "agent.disk", "agent.guest"]);
    let all: BTreeSet<_> = ALL_ACTIONS.iter().chain(AGENT_ACTIONS).copied().collect();
    let covered =
        COVERED.with_borrow(|covered| covered.iter().copied().chain(any).collect::<BTreeSet<_>>());
    assert_eq!(covered, all);
}

#[test]
fn configuration_accepts_any_member() {
    let params: SystemConfigureParams =
        serde_json::from_value(json!({"backend": "docker", "not_defined": [1]})).unwrap();
    assert_eq!(params.0["not_defined"], json!([1]));
    round_trip(&params);
}

#[test]
fn ids_are_checked_in_parameters() {
    let bad = serde_json::from_value::<BoxGetParams>(json!({"box_id": "a/b"})).unwrap_err();
    assert_eq!(crate::Invalid::from(bad).field(), "box_id");
    assert!(serde_json::from_value::<PortOpenParams>(json!({"box_id": "s", "port": 0})).is_err());
    assert!(
        serde_json::from_value::<PortOpenParams>(json!({"box_id": "s", "port": 65536})).is_err()
    );
}

#[test]
fn an_exec_does_not_add_absent_members() {
    let params: BoxExecParams =
        serde_json::from_value(json!({"spec": {"box_id": "s", "cmd": "ls"}})).unwrap();
    assert_eq!(params.spec, SpecDraft::new("s").cmd("ls"));
    assert_eq!(params.on_timeout, OnTimeout::Kill, "the box stays");
    assert_eq!(params.on_disconnect, OnDisconnect::Kill);
    let json = round_trip(&params);
    assert_eq!(json["spec"], json!({"box_id": "s", "cmd": "ls"}));
}

#[test]
fn chunks_are_objects_named_after_their_kind() {
    let piece = |data| OutputPiece {
        stream: StreamName::Stderr,
        offset: 3,
        pos: 9,
        at: UnixMs(5),
        data,
    };
    let text = round_trip(&CommandChunk::Text(piece("hé".to_owned())));
    assert_eq!(
        text,
        json!({"text": {"stream": "stderr", "offset": 3, "pos": 9, "at": 5, "data": "hé"}})
    );
    let bytes = OutputPiece {
        stream: StreamName::Stdout,
        offset: 0,
        pos: 0,
        at: UnixMs(0),
        data: Blob::from(vec![255]),
    };
    assert_eq!(
        round_trip(&CommandChunk::Bytes(bytes.clone()))["bytes"]["data"],
        "/w=="
    );
    round_trip(&AgentChunk::Bytes(bytes));
    let gap = OutputGap {
        stream: StreamName::Stdout,
        offset: 1,
        bytes: 2,
    };
    round_trip(&CommandChunk::Gap(gap));
    let data = [("text/plain".to_owned(), "1".to_owned())].into();
    assert_eq!(
        round_trip(&CommandChunk::Display(Displayed { data, main: true })),
        json!({"display": {"data": {"text/plain": "1"}, "main": true}})
    );
    assert_eq!(
        round_trip(&AgentChunk::Started { pid: 7, info: None }),
        json!({"started": {"pid": 7}})
    );
    round_trip(&PortChunk::Data(Blob::from("x")));
    assert_eq!(round_trip(&PullProgress::Saving {}), json!({"saving": {}}));
    round_trip(&PullProgress::Layer {
        digest: "sha256:1".to_owned(),
        phase: LayerPhase::Download,
        done: 1,
        total: 2,
    });
    round_trip(&FileChunk {
        offset: 0,
        data: Blob::from("x"),
    });
}

#[test]
fn the_result_of_an_agent_round_trips() {
    let ended = AgentCommand {
        exit: Some(crate::Exit::returned(3)),
        duration_ms: 4,
        size: PerStream {
            stdout: 5,
            stderr: 0,
        },
        collected: Some(Collected {
            stdout: Blob::from("hello"),
            stderr: Blob::default(),
        }),
        ..AgentCommand::new(CommandId::new("c").unwrap(), 12)
    };
    assert_eq!(round_trip(&ended)["collected"]["stdout"], "aGVsbG8=");
    let reply: AgentReply = serde_json::from_value(json!({"collected": {"bytes": 1024}})).unwrap();
    assert_eq!(reply, AgentReply::Collected { bytes: 1024 });
}

#[test]
fn secrets_stay_out_of_debug() {
    let params: CommandStartParams = serde_json::from_value(json!({"box_id": "s",
        "program": {"text": "env"}, "env": {"TOKEN": "hunter2"}}))
    .unwrap();
    assert!(!format!("{params:?}").contains("hunter2"));
    let input: CommandInputParams = serde_json::from_value(json!({"box_id": "s",
        "command_id": "c", "data": "aHVudGVyMg=="}))
    .unwrap();
    assert!(!format!("{input:?}").contains("hunter2"));
    let login: ImageLoginParams = serde_json::from_value(
        json!({"registry": "ghcr.io", "username": "u", "password": "hunter2"}),
    )
    .unwrap();
    assert!(!format!("{login:?}").contains("hunter2"));
    let config: SystemConfigureParams =
        serde_json::from_value(json!({"e2b": {"api_key": "hunter2"}})).unwrap();
    assert_eq!(format!("{config:?}"), r#"{"e2b"}"#);
}
