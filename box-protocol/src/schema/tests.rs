use std::collections::BTreeSet;
use std::sync::LazyLock;

use jsonschema::Validator;
use serde_json::{Value, json};

use super::*;
use crate::actions::{AGENT_ACTIONS, ALL_ACTIONS, BoxCreate, BoxExec};
use crate::model::{BoxSessionInfo, Exit, ExitWhy, SpecDraft};
use crate::{BoxExecutionResult, SessionId, UnixMs};

static CONTRACT: LazyLock<Value> = LazyLock::new(contract);

fn validator(schema: &Value) -> Validator {
    let mut whole = json!({"$schema": CONTRACT["$schema"], "$defs": CONTRACT["$defs"]});
    whole["allOf"] = json!([schema]);
    jsonschema::validator_for(&whole).unwrap()
}

/// The schema of a part of an action: `params`, `result` or `chunk`.
fn part<A: box_rpc::Action>(part: &str) -> Validator {
    let list = if AGENT_ACTIONS.contains(&A::NAME) {
        "agent_actions"
    } else {
        "actions"
    };
    validator(&CONTRACT[list][A::NAME][part])
}

/// Whether a model's schema takes this.
pub(crate) fn assert_fits<T: JsonSchema>(value: &Value) {
    let schema = validator(&json!({"$ref": format!("#/$defs/{}", T::schema_name())}));
    let faults: Vec<_> = schema.iter_errors(value).map(|e| e.to_string()).collect();
    assert!(
        faults.is_empty(),
        "{}: {value}: {faults:?}",
        T::schema_name()
    );
}

/// What may stand where something else should. Deep as it is, the list cannot be read as the members of a struct in
/// their order, which is a way to write one that the decoder takes and nobody should use.
fn oddities() -> [Value; 9] {
    [
        json!(null),
        json!(true),
        json!(-1),
        json!(1.5),
        json!(70_000),
        json!("no such word"),
        json!("a/b"),
        json!([[[]]]),
        json!({"no_such_member": 1}),
    ]
}

/// The same value with each member in turn left out, and replaced by everything odd.
fn variants(value: &Value) -> Vec<Value> {
    let mut all = Vec::new();
    let Value::Object(members) = value else {
        return all;
    };
    for (name, member) in members {
        let mut without = members.clone();
        without.remove(name);
        all.push(Value::Object(without));
        for other in oddities().into_iter().chain(variants(member)) {
            let mut changed = members.clone();
            changed[name] = other;
            all.push(Value::Object(changed));
        }
    }
    let mut stray = members.clone();
    stray.insert("no_such_member".to_owned(), json!(1));
    all.push(Value::Object(stray));
    all
}

/// Whether schema and decoder agree about these parameters and about everything close to them.
pub(crate) fn assert_agrees<A: box_rpc::Action>(params: &Value) {
    let schema = part::<A>("params");
    assert!(schema.is_valid(params), "{}: {params}", A::NAME);
    let mut refused = 0;
    for variant in variants(params) {
        let decoded = serde_json::from_value::<A::Params>(variant.clone());
        // What a spec is asked to be is decoded first and judged when it is built.
        let broken = variant.get("spec").is_some_and(breaks_a_rule);
        let taken = decoded.is_ok() && !broken;
        assert_eq!(
            schema.is_valid(&variant),
            taken,
            "{}: {variant}: {:?}",
            A::NAME,
            decoded.err()
        );
        refused += usize::from(!taken);
    }
    assert!(refused > 0, "{} refuses nothing", A::NAME);
}

fn breaks_a_rule(spec: &Value) -> bool {
    let Ok(mut draft) = serde_json::from_value::<SpecDraft>(spec.clone()) else {
        return true;
    };
    // Whether there must be an id depends on who is asked.
    draft.session_id.get_or_insert_with(|| "s".to_owned());
    draft.build().is_err()
}

#[test]
fn the_committed_schema_is_what_the_types_say() {
    let committed = include_str!("../../../docs/schema/contract.json");
    assert!(
        committed == contract_text(),
        "the wire has changed and docs/schema/contract.json has not: run `cargo xtask schema` and commit what it writes"
    );
}

#[test]
fn the_committed_list_of_actions_is_what_the_contract_says() {
    let wire = include_str!("../../../docs/wire.md");
    assert!(
        wire.contains(&actions_table()),
        "the list of actions in docs/wire.md is not the contract's: run `cargo xtask schema` and commit what it writes"
    );
}

#[test]
fn the_table_of_errors_in_the_document_has_every_code_and_class() {
    let wire = include_str!("../../../docs/wire.md");
    for code in crate::error::Code::ALL {
        let line = wire
            .lines()
            .find(|line| line.starts_with(&format!("| `{code}` | -32")));
        let line = line.unwrap_or_else(|| panic!("docs/wire.md has no line of {code}"));
        let class = crate::error::langbot_class(&crate::BoxError::new(code, ""));
        assert!(line.contains(class), "{line}");
    }
}

#[test]
fn every_action_is_told() {
    for (list, names) in [("actions", ALL_ACTIONS), ("agent_actions", AGENT_ACTIONS)] {
        let told = CONTRACT[list].as_object().unwrap();
        let told: BTreeSet<_> = told.keys().map(String::as_str).collect();
        let mut expected: BTreeSet<_> = names.iter().copied().collect();
        if list == "actions" {
            expected.insert("hello");
        }
        assert_eq!(told, expected);
    }
    for action in CONTRACT["actions"].as_object().unwrap().values() {
        assert!(
            action["params"].is_object() && action["result"].is_object(),
            "{action}"
        );
        assert!(!action["description"].as_str().unwrap().is_empty());
    }
}

#[test]
fn no_description_has_a_link_of_rust() {
    assert!(!contract_text().contains("[`"));
    assert_eq!(prose(" See\n [`a`](b::c), [`d`].\n"), "See `a`, `d`.");
}

#[test]
fn every_member_of_a_spec_is_told() {
    let full = json!({"session_id": " s ", "cmd": "ls", "workdir": "/workspace/a", "timeout_sec": "9", "network": "on",
        "image": "x", "env": {"A": "1"}, "host_path": "/srv", "host_path_mode": "ro", "mount_path": "/workspace",
        "extra_mounts": [{"host_path": "/a", "mount_path": "/b"}], "persistent": true, "cpus": "0.5",
        "memory_mb": 64.0, "pids_limit": 5, "read_only_rootfs": false, "workspace_quota_mb": 0, "name": "n",
        "labels": {"a": "b"}, "note": [1], "world": "langbot", "lifetime": {"idle_ms": 5, "on_idle": "stop"},
        "defaults": {"cwd": "/a", "env": {"B": "2"}}, "main": {"argv": ["ls"]},
        "guest": {"name": "gem", "home": "/home/gem"}, "dirs": ["/a"], "best_effort": ["network"], "network_policy": {"allow": ["*.ok.com:443"], "deny": ["10.0.0.0/8"], "default": "deny"}});
    assert!(!breaks_a_rule(&full));
    let told = CONTRACT["$defs"]["SpecDraft"]["properties"]
        .as_object()
        .unwrap();
    let full_names: BTreeSet<_> = full.as_object().unwrap().keys().collect();
    assert_eq!(told.keys().collect::<BTreeSet<_>>(), full_names);
    assert_agrees::<BoxCreate>(&json!({"spec": full}));
    for (name, value) in [
        ("memory_mb", json!(16)),
        ("timeout_sec", json!(0)),
        ("cpus", json!(0)),
        ("pids_limit", json!(0)),
        ("session_id", json!("")),
        ("mount_path", json!("relative")),
        ("host_path", json!("C:relative")),
        ("main", json!({"argv": []})),
        ("cmd", json!("a\0")),
        ("env", json!({"A=": "1"})),
    ] {
        let spec = json!({"session_id": "s", name: value});
        assert!(breaks_a_rule(&spec) || spec["session_id"] == "", "{spec}");
        assert!(
            !part::<BoxExec>("params").is_valid(&json!({"spec": spec})),
            "{spec}"
        );
    }
}

#[test]
fn results_fit() {
    let spec = SpecDraft::new("s1").build().unwrap();
    let info = BoxSessionInfo::starting(&spec, "fake", "b1", UnixMs(5));
    let created = json!({"info": info, "existed": false, "newer_than_this_build": 1});
    assert!(part::<BoxCreate>("result").is_valid(&created));
    let mut wrong = created;
    wrong["info"]["state"] = json!("asleep");
    assert!(!part::<BoxCreate>("result").is_valid(&wrong));

    let id = SessionId::new("s1").unwrap();
    for exit in [
        Exit::returned(0),
        Exit::by_signal(9, ExitWhy::Oom),
        Exit::by_signal(9, ExitWhy::Timeout),
    ] {
        let result = BoxExecutionResult::new(id.clone(), "fake", exit, 1).unwrap();
        let mut result = serde_json::to_value(result).unwrap();
        assert!(part::<BoxExec>("result").is_valid(&result), "{result}");
        // The other status: its code is the wrong one.
        result["status"] = if result["status"] == "completed" {
            json!("timed_out")
        } else {
            json!("completed")
        };
        assert!(!part::<BoxExec>("result").is_valid(&result), "{result}");
    }
}

#[test]
fn hello_and_the_models_outside_the_actions_fit() {
    let hello = json!({"client": "me/1", "token": "x", "contract": [1, 1]});
    assert!(part::<Hello>("params").is_valid(&hello));
    assert!(!part::<Hello>("params").is_valid(&json!({"contract": [1]})));
    for name in BoxProfile::BUILT_IN {
        let profile = BoxProfile::built_in(name).unwrap();
        assert_fits::<BoxProfile>(&serde_json::to_value(profile).unwrap());
    }
    let process = BoxManagedProcessSpec::new("npx", ["-y"]).unwrap();
    assert_fits::<BoxManagedProcessSpec>(&serde_json::to_value(process).unwrap());
    assert_fits::<Detail>(&json!({"subject": "a word of later", "limit": "depth", "max": 128}));
    assert_fits::<Detail>(&serde_json::to_value(Detail::lasting()).unwrap());
}
