use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::error::{BoxError, Code, Detail};

/// A spec with these members beside an id.
fn spec(members: Value) -> Result<BoxSpec, Invalid> {
    let mut all = json!({"box_id": "s1"});
    let Value::Object(members) = members else {
        panic!("members of an object")
    };
    all.as_object_mut().unwrap().extend(members);
    BoxSpec::from_value(all)
}

fn refused(members: Value) -> String {
    spec(members).unwrap_err().to_string()
}

#[test]
fn defaults() {
    let spec = SpecDraft::new("s1").build().unwrap();
    assert_eq!(spec.cmd, "");
    assert_eq!(spec.workdir, "/workspace");
    assert_eq!(spec.timeout_sec, 30);
    assert_eq!(spec.network, Network::Off);
    assert_eq!(spec.image, None);
    assert!(spec.env.is_empty());
    assert_eq!(spec.host_path, None);
    assert_eq!(spec.host_path_mode, HostPathMode::Rw);
    assert_eq!(spec.mount_path, "/workspace");
    assert!(spec.extra_mounts.is_empty());
    assert!(!spec.persistent);
    assert_eq!(spec.cpus.to_string(), "1");
    assert_eq!((spec.memory_mb, spec.pids_limit), (512, 128));
    assert!(spec.read_only_rootfs);
    assert_eq!(spec.workspace_quota_mb, 0);
    assert_eq!(SpecDraft::from(spec).brief(), SpecDraft::new("s1"));
}

#[test]
fn a_captured_spec_decodes() {
    let captured = r#"{"cmd": "echo hi", "workdir": "/workspace", "timeout_sec": 30, "network": "off", "box_id": "s1", "env": {"K": "v"}, "image": "example/sandbox:latest", "host_path": null, "host_path_mode": "rw", "mount_path": "/workspace", "extra_mounts": [], "persistent": false, "cpus": 1.0, "memory_mb": 512, "pids_limit": 128, "read_only_rootfs": true, "workspace_quota_mb": 0}"#;
    let spec: BoxSpec = serde_json::from_str(captured).unwrap();
    assert_eq!(spec.cmd, "echo hi");
    assert_eq!(spec.image.as_deref(), Some("example/sandbox:latest"));
    assert_eq!(spec.env.get("K").map(String::as_str), Some("v"));
    // Every member is written back as it was read.
    let ours = serde_json::to_value(&spec).unwrap();
    let theirs: Value = serde_json::from_str(captured).unwrap();
    for (name, value) in theirs.as_object().unwrap() {
        assert_eq!(ours.get(name).unwrap_or(&Value::Null), value, "{name}");
    }
}

#[test]
fn resource_rules() {
    assert_eq!(refused(json!({"cpus": 0})), "cpus: must be greater than 0");
    assert_eq!(
        refused(json!({"cpus": -0.5})),
        "cpus: must be greater than 0"
    );
    assert_eq!(
        refused(json!({"memory_mb": 10})),
        "memory_mb: 10 is below the minimum of 32"
    );
    assert_eq!(
        refused(json!({"memory_mb": -10})),
        "memory_mb: a negative number is below the minimum of 32"
    );
    assert_eq!(
        refused(json!({"pids_limit": 0})),
        "pids_limit: 0 is below the minimum of 1"
    );
    assert_eq!(
        refused(json!({"workspace_quota_mb": -1})),
        "workspace_quota_mb: must not be negative"
    );
    assert_eq!(
        refused(json!({"timeout_sec": 0})),
        "timeout_sec: 0 is below the minimum of 1"
    );
    assert_eq!(
        refused(json!({"timeout_sec": "-3"})),
        "timeout_sec: a negative number is below the minimum of 1"
    );
    let least = spec(json!({"cpus": 0.01, "memory_mb": 32, "pids_limit": 1, "timeout_sec": 1}));
    assert!(least.is_ok());
    let not_a_number = SpecDraft::new("s1").cpus(f64::NAN).build();
    assert_eq!(not_a_number.unwrap_err().field(), "cpus");
}

#[test]
fn numbers_in_every_notation_are_accepted() {
    for value in [json!("999"), json!(999.0), json!(999)] {
        assert_eq!(
            spec(json!({"timeout_sec": value})).unwrap().timeout_sec,
            999
        );
    }
    let spec =
        spec(json!({"memory_mb": "64", "pids_limit": 8.0, "cpus": "2", "workspace_quota_mb": "1"}));
    let spec = spec.unwrap();
    assert_eq!(
        (spec.memory_mb, spec.pids_limit, spec.workspace_quota_mb),
        (64, 8, 1)
    );
    assert_eq!(spec.cpus.to_string(), "2");
}

#[test]
fn wrong_types_name_the_field() {
    for (name, value) in [
        ("timeout_sec", json!("soon")),
        ("timeout_sec", json!(1.5)),
        ("memory_mb", json!(true)),
        ("cpus", json!("many")),
        ("network", json!("maybe")),
        ("host_path_mode", json!("wr")),
        ("cmd", json!(5)),
        ("env", json!({"K": 5})),
        ("persistent", json!("yes")),
        (
            "extra_mounts",
            json!([{"host_path": "/a", "mount_path": "b"}]),
        ),
        ("note", json!("x".repeat(20_000))),
        ("lifetime", json!({"idle": 1})),
        ("name", json!("")),
    ] {
        let invalid = spec(json!({name: value})).unwrap_err();
        assert_eq!(invalid.field(), name, "{invalid}");
    }
}

#[test]
fn unknown_and_repeated_members_are_refused() {
    let error = BoxError::from(spec(json!({"timeout": 5})).unwrap_err());
    assert_eq!(error.code(), Code::Validation);
    assert_eq!(error.message(), "timeout: not a field of a spec");
    assert_eq!(
        error.detail::<Detail>().unwrap().field.as_deref(),
        Some("timeout")
    );
    let twice = r#"{"box_id":"s1","network":"off","network":"on"}"#;
    let error = serde_json::from_str::<BoxSpec>(twice).unwrap_err();
    assert_eq!(Invalid::from(error).to_string(), "network: given twice");
}

#[test]
fn decoding_alone_applies_the_same_rules() {
    let error = serde_json::from_str::<BoxSpec>(r#"{"box_id":"s1","pids_limit":0}"#).unwrap_err();
    let expected = Invalid::new("pids_limit", "0 is below the minimum of 1");
    assert_eq!(Invalid::from(error), expected);
}

#[test]
fn session_id_is_required_and_trimmed() {
    let id = |value: Value| BoxSpec::from_value(json!({"box_id": value}));
    assert_eq!(id(json!("  req-1 ")).unwrap().box_id.as_str(), "req-1");
    for empty in [json!(""), json!("  "), json!(null)] {
        assert_eq!(
            id(empty).unwrap_err().to_string(),
            "box_id: must not be empty"
        );
    }
    assert_eq!(id(json!("a/b")).unwrap_err().field(), "box_id");
    assert_eq!(
        BoxSpec::from_value(json!({})).unwrap_err().field(),
        "box_id"
    );
}

#[test]
fn cmd_is_trimmed_and_an_exec_needs_one() {
    assert_eq!(
        spec(json!({"cmd": " ls \n"}))
            .unwrap()
            .require_cmd()
            .unwrap(),
        "ls"
    );
    let blank = spec(json!({"cmd": " \n "})).unwrap();
    assert_eq!(
        blank.require_cmd().unwrap_err().to_string(),
        "cmd: must not be empty"
    );
    assert_eq!(refused(json!({"cmd": "a\0b"})), "cmd: must not contain NUL");
}

#[test]
fn workdir_falls_back_to_mount_path() {
    for absent in [json!({}), json!({"workdir": null}), json!({"workdir": " "})] {
        let mut members = absent;
        members["mount_path"] = json!("/project/");
        let spec = spec(members).unwrap();
        assert_eq!(
            (spec.workdir.as_str(), spec.mount_path.as_str()),
            ("/project", "/project")
        );
    }
    assert_eq!(
        refused(json!({"workdir": "src"})),
        "workdir: must be an absolute path inside the sandbox"
    );
    assert_eq!(
        refused(json!({"mount_path": ""})),
        "mount_path: must be an absolute path inside the sandbox"
    );
}

#[test]
fn host_paths_are_absolute_or_absent() {
    assert_eq!(
        refused(json!({"host_path": "data"})),
        "host_path: must be an absolute host path"
    );
    assert_eq!(
        spec(json!({"host_path": " /data "}))
            .unwrap()
            .host_path
            .as_deref(),
        Some("/data")
    );
    assert_eq!(spec(json!({"host_path": ""})).unwrap().host_path, None);
}

#[test]
fn the_workdir_must_be_under_a_mounted_host_path() {
    let at = |mode: &str, mount: &str, workdir: &str| {
        spec(
            json!({"host_path": "/srv/d", "host_path_mode": mode, "mount_path": mount, "workdir": workdir}),
        )
    };
    let rule = "workdir: must stay under mount_path when host_path is provided";
    for mode in ["ro", "rw"] {
        assert_eq!(
            at(mode, "/workspace", "/opt/custom")
                .unwrap_err()
                .to_string(),
            rule
        );
        assert_eq!(
            at(mode, "/project", "/workspace").unwrap_err().to_string(),
            rule
        );
        assert_eq!(
            at(mode, "/workspace", "/workspace-2")
                .unwrap_err()
                .to_string(),
            rule
        );
        assert_eq!(
            at(mode, "/workspace", "/workspace/../etc")
                .unwrap_err()
                .to_string(),
            rule
        );
        assert_eq!(
            at(mode, "/project", "/project/src").unwrap().workdir,
            "/project/src"
        );
        assert_eq!(
            at(mode, "/project", "/project").unwrap().workdir,
            "/project"
        );
    }
    assert_eq!(
        at("none", "/workspace", "/opt/custom").unwrap().workdir,
        "/opt/custom"
    );
    assert_eq!(spec(json!({"workdir": "/tmp"})).unwrap().workdir, "/tmp");
}

#[test]
fn composite_fields_are_validated() {
    for (members, field) in [
        (json!({"dirs": ["data"]}), "dirs"),
        (json!({"defaults": {"cwd": "x"}}), "defaults"),
        (json!({"guest": {"name": "gem", "home": "gem"}}), "guest"),
    ] {
        assert_eq!(spec(members).unwrap_err().field(), field);
    }
    let all = json!({
        "name": "work", "labels": {"a": "b"}, "note": {"any": ["thing"]}, "gateway": "other",
        "lifetime": {"idle_ms": 5, "on_idle": "stop", "wake": true},
        "defaults": {"env": {"A": "1"}, "cwd": "/v"}, "main": {"argv": ["serve"], "ends_box": true},
        "guest": {"name": "gem", "home": "/home/gem"}, "dirs": ["/mnt/x"], "best_effort": ["network"],
    });
    let spec = spec(all).unwrap();
    let text = serde_json::to_string(&spec).unwrap();
    assert_eq!(serde_json::from_str::<BoxSpec>(&text).unwrap(), spec);
}

#[test]
fn debug_shows_names_of_variables_but_no_values() {
    let spec = spec(json!({"env": {"TOKEN": "hunter2"}, "defaults": {"env": {"KEY": "hunter3"}}}));
    let text = format!("{:?}", spec.unwrap());
    assert!(
        text.contains("TOKEN") && text.contains("KEY") && !text.contains("hunter"),
        "{text}"
    );
}

prop_compose! {
    fn any_spec()(
        box_id in "[a-z0-9_.-]{2,20}x",
        cmd in ".{0,40}",
        sub in "[a-z]{0,8}",
        mount in "/[a-z]{1,8}",
        env in proptest::collection::btree_map("[A-Z_]{1,6}", "[^\0]{0,12}", 0..4),
        host in proptest::option::of("/[a-z]{1,8}"),
        mode in prop_oneof![Just(HostPathMode::None), Just(HostPathMode::Ro), Just(HostPathMode::Rw), Just(HostPathMode::Overlay)],
        (timeout, memory, pids, quota) in (1..=u64::MAX, 32..=u64::MAX, 1..=u64::MAX, any::<u64>()),
        cpus in 0.001..1e6,
        (network, persistent, read_only) in (any::<bool>(), any::<bool>(), any::<bool>()),
        dirs in proptest::option::of(proptest::collection::vec("/[a-z]{1,5}", 0..3)),
    ) -> SpecDraft {
        let mut draft = SpecDraft::new(box_id)
            .cmd(cmd.replace('\0', ""))
            .workdir(format!("{mount}/{sub}"))
            .mount_path(mount)
            .timeout_sec(timeout).memory_mb(memory).pids_limit(pids).workspace_quota_mb(quota)
            .cpus(cpus).persistent(persistent).read_only_rootfs(read_only)
            .network(if network { Network::On } else { Network::Off })
            .host_path_mode(mode)
            .env(Env::try_from(env).unwrap());
        draft.host_path = host;
        draft.dirs = dirs;
        draft
    }
}

proptest! {
    #[test]
    fn specs_round_trip_through_json_and_drafts(draft in any_spec()) {
        let spec = draft.build().unwrap();
        let text = serde_json::to_string(&spec).unwrap();
        prop_assert_eq!(&serde_json::from_str::<BoxSpec>(&text).unwrap(), &spec);
        let again = SpecDraft::from(spec.clone());
        let wire = serde_json::to_string(&again).unwrap();
        prop_assert_eq!(&serde_json::from_str::<SpecDraft>(&wire).unwrap(), &again);
        prop_assert_eq!(again.build().unwrap(), spec);
    }

    #[test]
    fn a_brief_draft_builds_the_same_spec(draft in any_spec(), default in any::<[bool; 8]>()) {
        let mut asked = SpecDraft::from(draft.build().unwrap());
        let plain = SpecDraft::from(SpecDraft::new("s").build().unwrap());
        if default[0] {
            (asked.mount_path, asked.workdir) = (plain.mount_path, plain.workdir);
        }
        if default[1] { asked.timeout_sec = plain.timeout_sec; }
        if default[2] { asked.cpus = plain.cpus; }
        if default[3] { asked.memory_mb = plain.memory_mb; }
        if default[4] { asked.pids_limit = plain.pids_limit; }
        if default[5] { asked.image = Some("another".to_owned()); }
        if default[6] { asked.workspace_quota_mb = plain.workspace_quota_mb; }
        if default[7] { asked.host_path_mode = plain.host_path_mode; }
        prop_assert_eq!(asked.clone().brief().build().unwrap(), asked.build().unwrap());
    }

    #[test]
    fn no_json_makes_the_decoder_panic(text in r#"[\[\]{}":,a-z0-9 _.-]{0,60}"#) {
        let _ = serde_json::from_str::<BoxSpec>(&text);
    }
}

#[test]
fn an_error_does_not_quote_a_malformed_environment() {
    for env in [json!("TOKEN=hunter2"), json!({"TOKEN": 991_234})] {
        let error = BoxSpec::from_value(json!({"box_id": "s", "env": env})).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("env") && !text.contains("hunter2") && !text.contains("991234"),
            "{text}"
        );
    }
}
