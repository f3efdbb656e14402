use std::collections::BTreeSet;
use std::sync::LazyLock;

use jsonschema::Validator;
use serde_json::{Value, json};

use super::*;
use crate::actions::{AGENT_ACTIONS, ALL_ACTIONS, BoxCreate, BoxExec};
use crate::model::{BoxInfo, Exit, ExitWhy, SpecDraft};
use crate::{BoxExecutionResult, BoxId, UnixMs};

static CONTRACT: LazyLock<Value> = LazyLock::new(contract);

fn validator(schema: &Value) -> Validator {
    let mut whole = json!({"$schema": CONTRACT["$schema"], "$defs": CONTRACT["$defs"]});
    whole["allOf"] = json!([schema]);
    jsonschema::validator_for(&whole).unwrap()
}

/// Returns the schema of `params`, `result` or `chunk` of an action.
fn part<A: box_rpc::Action>(part: &str) -> Validator {
    let list = if AGENT_ACTIONS.contains(&A::NAME) {
        "agent_actions"
    } else {
        "actions"
    };
    validator(&CONTRACT[list][A::NAME][part])
}

/// Asserts that the schema of a model accepts a value.
pub(crate) fn assert_fits<T: JsonSchema>(value: &Value) {
    let schema = validator(&json!({"$ref": format!("#/$defs/{}", T::schema_name())}));
    let errors: Vec<_> = schema.iter_errors(value).map(|e| e.to_string()).collect();
    assert!(
        errors.is_empty(),
        "{}: {value}: {errors:?}",
        T::schema_name()
    );
}

/// Values of a wrong type or range.
///
/// The list is nested because serde accepts a flat list as the members of a struct.
fn wrong_values() -> [Value; 9] {
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

/// Returns variants of a value: each member in turn removed or replaced by a wrong value.
fn variants(value: &Value) -> Vec<Value> {
    let mut all = Vec::new();
    let Value::Object(members) = value else {
        return all;
    };
    for (name, member) in members {
        let mut without = members.clone();
        without.remove(name);
        all.push(Value::Object(without));
        for other in wrong_values().into_iter().chain(variants(member)) {
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

/// Asserts that schema and decoder agree on these parameters and on all variants.
pub(crate) fn assert_agrees<A: box_rpc::Action>(params: &Value) {
    let schema = part::<A>("params");
    assert!(schema.is_valid(params), "{}: {params}", A::NAME);
    let mut rejected = 0;
    for variant in variants(params) {
        let decoded = serde_json::from_value::<A::Params>(variant.clone());
        // The decoder accepts a draft; building the spec validates it.
        let broken = variant.get("spec").is_some_and(breaks_a_rule);
        let accepted = decoded.is_ok() && !broken;
        assert_eq!(
            schema.is_valid(&variant),
            accepted,
            "{}: {variant}: {:?}",
            A::NAME,
            decoded.err()
        );
        rejected += usize::from(!accepted);
    }
    assert!(rejected > 0, "{} accepts every variant", A::NAME);
}

fn breaks_a_rule(spec: &Value) -> bool {
    let Ok(mut draft) = serde_json::from_value::<SpecDraft>(spec.clone()) else {
        return true;
    };
    // Only the runtime requires an id.
    draft.box_id.get_or_insert_with(|| "s".to_owned());
    // The schema does not describe that a snapshot excludes an image.
    if draft.snapshot.is_some() {
        draft.image = None;
    }
    draft.build().is_err()
}

#[test]
fn the_committed_files_are_up_to_date() {
    for (file, committed, generated) in [
        (
            "schema/contract.json",
            include_str!("../../../docs/schema/contract.json"),
            contract_text(),
        ),
        (
            "schema/openapi.json",
            include_str!("../../../docs/schema/openapi.json"),
            openapi_text(),
        ),
        (
            "contract.md",
            include_str!("../../../docs/contract.md"),
            page(),
        ),
    ] {
        assert!(
            committed == generated,
            "docs/{file} is out of date: run `cargo xtask schema` and commit the result"
        );
    }
}

#[test]
fn examples_are_valid_parameters() {
    for (name, action) in CONTRACT["actions"].as_object().unwrap() {
        let example = example::example(&CONTRACT, &action["params"]);
        let errors: Vec<_> = validator(&action["params"])
            .iter_errors(&example)
            .map(|error| error.to_string())
            .collect();
        assert!(errors.is_empty(), "{name}: {example}: {errors:?}");
    }
}

#[test]
fn every_reference_of_the_documents_has_a_target() {
    fn check(document: &Value, part: &Value) {
        match part {
            Value::Object(members) => {
                if let Some(Value::String(target)) = members.get("$ref") {
                    let found = document.pointer(target.strip_prefix('#').unwrap());
                    assert!(found.is_some(), "{target}");
                }
                members.values().for_each(|member| check(document, member));
            }
            Value::Array(items) => items.iter().for_each(|item| check(document, item)),
            _ => {}
        }
    }
    let document = openapi();
    check(&document, &document);
    let page = page();
    for link in page.split("](#").skip(1) {
        let (anchor, _) = link.split_once(')').unwrap();
        let mut headings = page.lines().filter_map(|line| line.strip_prefix("### "));
        let found = headings.any(|heading| heading.to_lowercase() == anchor);
        assert!(found, "#{anchor}");
    }
}

#[test]
fn the_committed_list_of_actions_is_up_to_date() {
    let wire = include_str!("../../../docs/wire.md");
    assert!(
        wire.contains(&actions_table()),
        "the list of actions in docs/wire.md is out of date: run `cargo xtask schema` and commit the result"
    );
}

#[test]
fn the_table_of_errors_in_the_document_has_every_code() {
    let wire = include_str!("../../../docs/wire.md");
    for code in crate::error::Code::ALL {
        let line = wire
            .lines()
            .find(|line| line.starts_with(&format!("| `{code}` | -32")));
        assert!(line.is_some(), "docs/wire.md has no line of {code}");
    }
}

#[test]
fn every_action_is_described() {
    for (list, names) in [("actions", ALL_ACTIONS), ("agent_actions", AGENT_ACTIONS)] {
        let described = CONTRACT[list].as_object().unwrap();
        let described: BTreeSet<_> = described.keys().map(String::as_str).collect();
        let mut expected: BTreeSet<_> = names.iter().copied().collect();
        if list == "actions" {
            expected.insert("hello");
        }
        assert_eq!(described, expected);
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
fn no_description_contains_a_rustdoc_link() {
    assert!(!contract_text().contains("[`"));
    assert_eq!(prose(" See\n [`a`](b::c), [`d`].\n"), "See `a`, `d`.");
}

#[test]
fn every_member_of_a_spec_is_described() {
    let mut full = json!({"box_id": " s ", "cmd": "ls", "workdir": "/workspace/a", "timeout_sec": "9", "network": "on",
        "image": "x", "pull": "never", "user": "root", "env": {"A": "1"}, "host_path": "/srv", "host_path_mode": "ro", "mount_path": "/workspace",
        "extra_mounts": [{"host_path": "/a", "mount_path": "/b"}],
        "volumes": [{"volume": "v", "mount_path": "/v", "sub_path": "a/b", "ro": true}], "persistent": true, "cpus": "0.5",
        "memory_mb": 64.0, "pids_limit": 5, "read_only_rootfs": false, "workspace_quota_mb": 0, "name": "n",
        "labels": {"a": "b"}, "note": [1], "gateway": "other", "lifetime": {"idle_ms": 5, "on_idle": "stop", "on_expiry": "pause"},
        "defaults": {"cwd": "/a", "env": {"B": "2"}}, "main": {"argv": ["ls"]}, "template": "t", "pool": "p", "prepare": {"commands": [{"text": "ls"}], "timeout_sec": 5},
        "guest": {"name": "gem", "home": "/home/gem"}, "dirs": ["/a"], "best_effort": ["network"], "network_policy": {"allow": ["*.ok.com:443"], "deny": ["10.0.0.0/8"], "default": "deny"}});
    let described = CONTRACT["$defs"]["SpecDraft"]["properties"]
        .as_object()
        .unwrap();
    for name in full.as_object().unwrap().keys() {
        assert!(described.contains_key(name), "{name}");
    }
    for (name, schema) in described {
        if full.get(name).is_none() {
            full[name] = schema["default"].clone();
        }
    }
    assert!(!breaks_a_rule(&full));
    assert_agrees::<BoxCreate>(&json!({"spec": full}));
    for (name, value) in [
        ("memory_mb", json!(16)),
        ("timeout_sec", json!(0)),
        ("cpus", json!(0)),
        ("pids_limit", json!(0)),
        ("box_id", json!("")),
        ("mount_path", json!("relative")),
        ("host_path", json!("C:relative")),
        ("cmd", json!("a\0")),
        ("env", json!({"A=": "1"})),
    ] {
        let spec = json!({"box_id": "s", name: value});
        assert!(breaks_a_rule(&spec) || spec["box_id"] == "", "{spec}");
        assert!(
            !part::<BoxExec>("params").is_valid(&json!({"spec": spec})),
            "{spec}"
        );
    }
}

#[test]
fn results_fit() {
    let spec = SpecDraft::new("s1").build().unwrap();
    let info = BoxInfo::starting(&spec, "fake", "b1", UnixMs(5));
    let created = json!({"info": info, "existed": false, "newer_than_this_build": 1});
    assert!(part::<BoxCreate>("result").is_valid(&created));
    let mut wrong = created;
    wrong["info"]["state"] = json!("asleep");
    assert!(!part::<BoxCreate>("result").is_valid(&wrong));

    let id = BoxId::new("s1").unwrap();
    for exit in [
        Exit::returned(0),
        Exit::by_signal(9, ExitWhy::Oom),
        Exit::by_signal(9, ExitWhy::Timeout),
    ] {
        let result = BoxExecutionResult::new(id.clone(), "fake", exit, 1).unwrap();
        let mut result = serde_json::to_value(result).unwrap();
        assert!(part::<BoxExec>("result").is_valid(&result), "{result}");
        // The exit code does not fit the other status.
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
    assert_fits::<Detail>(&json!({"subject": "a word of later", "limit": "depth", "max": 128}));
    assert_fits::<Detail>(&serde_json::to_value(Detail::lasting()).unwrap());
}
