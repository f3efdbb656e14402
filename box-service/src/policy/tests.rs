use std::collections::BTreeMap;

use box_protocol::error::Detail;
use box_protocol::{Code, Network};
use proptest::prelude::*;
use serde_json::json;

use super::*;

mod path_model;

fn built_in(name: &str) -> BoxProfile {
    BoxProfile::built_in(name).unwrap()
}

fn policy(profile: BoxProfile, roots: &[&str]) -> Policy {
    Policy {
        profile,
        shared_host_root: None,
        allowed_host_mount_roots: roots.iter().map(PathBuf::from).collect(),
        default_host_workspace: None,
        shared_filesystem: true,
        table: None,
        owner_mounts: false,
        private: Vec::new(),
    }
}

/// Facts in which each path is its own target.
fn inputs(paths: &[&str], kind: PathKind) -> PolicyInputs {
    let found = paths.iter().map(|path| {
        let real = Some(PathBuf::from(path));
        (
            (*path).to_owned(),
            HostPath {
                real,
                kind,
                readable: true,
            },
        )
    });
    PolicyInputs {
        host_paths: found.collect(),
        missing: Vec::new(),
    }
}

fn field(error: &BoxError) -> String {
    error.detail::<Detail>().unwrap().field.unwrap()
}

#[test]
fn an_empty_request_gets_the_profile() {
    let policy = policy(built_in("network_extended"), &[]);
    let spec = decide(&policy, SpecDraft::new("s"), &PolicyInputs::default())
        .unwrap()
        .spec;
    assert_eq!(
        (spec.network, spec.cpus, spec.memory_mb, spec.pids_limit),
        (Network::On, 2.0, 1024, 256)
    );
    assert!(!spec.read_only_rootfs);
}

#[test]
fn unlocked_fields_are_kept_and_locked_ones_reported_as_adjusted() {
    let locked = policy(built_in("offline_readonly"), &[]);
    let draft = SpecDraft::new("s")
        .network(Network::On)
        .read_only_rootfs(true)
        .memory_mb(64);
    let decision = decide(&locked, draft.clone(), &PolicyInputs::default()).unwrap();
    assert_eq!(decision.spec.network, Network::Off);
    assert_eq!(decision.spec.memory_mb, 64);
    // An equal value is no adjustment.
    assert_eq!(decision.adjusted, [Adjusted::new("network", &"on", &"off")]);
    let open = policy(built_in("default"), &[]);
    let decision = decide(&open, draft, &PolicyInputs::default()).unwrap();
    assert_eq!(decision.spec.network, Network::On);
    assert!(decision.adjusted.is_empty());
}

#[test]
fn long_timeouts_are_limited_and_invalid_ones_refused() {
    let policy = policy(built_in("default"), &[]);
    let with = |seconds: u64| {
        decide(
            &policy,
            SpecDraft::new("s").timeout_sec(seconds),
            &PolicyInputs::default(),
        )
    };
    let cut = with(999).unwrap();
    assert_eq!(cut.spec.timeout_sec, 120);
    assert_eq!(cut.adjusted, [Adjusted::new("timeout_sec", &999, &120)]);
    let kept = with(120).unwrap();
    assert_eq!((kept.spec.timeout_sec, kept.adjusted), (120, vec![]));
    let error = with(0).unwrap_err();
    assert_eq!(error.message(), "timeout_sec: 0 is below the minimum of 1");
}

#[test]
fn without_roots_every_mount_is_refused() {
    let draft = SpecDraft::new("s").host_path("/data");
    let inputs = inputs(&["/data"], PathKind::Directory);
    let error = decide(&policy(built_in("default"), &[]), draft, &inputs).unwrap_err();
    assert_eq!(error.code(), Code::Validation);
    assert_eq!(
        error.message(),
        "host_path: mounting is disabled, because allowed_host_mount_roots is empty; allow it with boxd serve --allow-mount DIR"
    );
    // The server-wide option has no effect for a caller with a separate table.
    let ann = Policy {
        table: Some("policy.tokens.ann".to_owned()),
        ..policy(built_in("default"), &["/other"])
    };
    let draft = SpecDraft::new("s").host_path("/data");
    let error = decide(&ann, draft, &inputs).unwrap_err();
    assert_eq!(
        error.message(),
        "host_path: outside allowed_host_mount_roots; add it to policy.tokens.ann.allowed_host_mount_roots"
    );
}

#[test]
fn equal_path_prefixes_and_blocked_paths_are_refused() {
    let policy = policy(built_in("default"), &["/data", "/"]);
    for path in ["/etc", "/", "/proc/self"] {
        let inputs = inputs(&[path], PathKind::Directory);
        let error = decide(&policy, SpecDraft::new("s").host_path(path), &inputs).unwrap_err();
        assert_eq!(error.code(), Code::Validation);
        let rule = "host_path: blocked for security";
        assert!(error.message().starts_with(rule), "{error}");
    }
    let narrow = Policy {
        allowed_host_mount_roots: vec!["/data".into()],
        ..policy
    };
    for (path, allowed) in [("/data", true), ("/data/x", true), ("/database", false)] {
        let inputs = inputs(&[path], PathKind::Directory);
        let decided = decide(&narrow, SpecDraft::new("s").host_path(path), &inputs);
        match decided {
            Ok(_) => assert!(allowed, "{path}"),
            Err(error) => {
                assert!(!allowed, "{path}");
                let rule = "host_path: outside allowed_host_mount_roots";
                assert!(error.message().starts_with(rule), "{error}");
            }
        }
    }
}

#[test]
fn the_owner_mounts_readable_paths_except_blocked_ones() {
    let owner = Policy {
        owner_mounts: true,
        ..policy(built_in("default"), &["/etc/box"])
    };
    let decided = |path: &str, readable: bool| {
        let mut inputs = inputs(&[path], PathKind::Directory);
        inputs.host_paths.get_mut(path).unwrap().readable = readable;
        let draft = SpecDraft::new("s").host_path(path);
        let decided = decide(&owner, draft, &inputs);
        decided
            .map(drop)
            .map_err(|error| error.message().to_owned())
    };
    for path in [
        "/data/x",
        "/home/me",
        "/root/project",
        "/etc/box",
        "/etc/box/x",
    ] {
        decided(path, true).unwrap();
    }
    for path in [
        "/etc", "/etc/ssh", "/root", "/boot", "/run/x", "/proc/1", "/",
    ] {
        let error = decided(path, true).unwrap_err();
        assert!(error.contains("blocked for security"), "{path}: {error}");
    }
    let error = decided("/home/other", false).unwrap_err();
    assert!(error.contains("must be readable"), "{error}");
}

#[test]
fn the_profile_limits_the_time_of_commands() {
    let time = |profile: serde_json::Value, asked| {
        let policy = policy(serde_json::from_value(profile).unwrap(), &[]);
        decide_timeout(&policy, asked)
    };
    let (small, open) = (
        json!({"name": "p", "max_timeout_sec": 60}),
        json!({"name": "p"}),
    );
    let cut = Adjusted::new("timeout_ms", &90_000, &60_000);
    assert_eq!(time(small.clone(), Some(90_000)), (Some(60_000), Some(cut)));
    assert_eq!(time(small.clone(), None), (Some(60_000), None));
    assert_eq!(time(small, Some(5)), (Some(5), None));
    assert_eq!(time(open.clone(), None), (None, None));
    assert_eq!(time(open, Some(900_000)), (Some(900_000), None));
    let own = json!({"name": "p", "max_timeout_sec": 60, "max_command_sec": 0});
    assert_eq!(time(own, None), (None, None));
    let locked = json!({"name": "p", "locked": ["timeout_sec"]});
    let cut = Adjusted::new("timeout_ms", &5, &30_000);
    assert_eq!(time(locked, Some(5)), (Some(30_000), Some(cut)));
    assert_eq!(
        decide_timeout(&policy(built_in("default"), &[]), None).0,
        None
    );
    assert_eq!(
        decide_timeout(&policy(built_in("offline_readonly"), &[]), None).0,
        Some(60_000)
    );
}

#[test]
fn existing_and_missing_paths_outside_the_roots_get_the_same_refusal() {
    let policy = policy(built_in("default"), &["/data"]);
    let draft = SpecDraft::new("s").host_path("/secret");
    let texts: Vec<_> = [PathKind::Directory, PathKind::File, PathKind::Missing]
        .into_iter()
        .map(|kind| {
            decide(&policy, draft.clone(), &inputs(&["/secret"], kind))
                .unwrap_err()
                .to_string()
        })
        .collect();
    assert!(texts.windows(2).all(|pair| pair[0] == pair[1]), "{texts:?}");
    let inside = SpecDraft::new("s").host_path("/data/x");
    let error = decide(&policy, inside, &inputs(&["/data/x"], PathKind::Missing)).unwrap_err();
    assert_eq!(
        error.message(),
        "host_path: must point to an existing directory on the host"
    );
}

#[test]
fn mode_none_needs_no_workspace_and_checks_none() {
    let mut policy = policy(built_in("default"), &["/data"]);
    policy.default_host_workspace = Some("/data/default".into());
    let none = SpecDraft::new("s").host_path_mode(HostPathMode::None);
    assert!(host_paths(&policy, &none).is_empty());
    let spec = decide(&policy, none.clone(), &PolicyInputs::default())
        .unwrap()
        .spec;
    assert_eq!(spec.host_path, None);
    let anywhere = none.host_path("/secret").workdir("/opt/custom");
    let spec = decide(&policy, anywhere, &PolicyInputs::default())
        .unwrap()
        .spec;
    assert_eq!(spec.host_path.as_deref(), Some("/secret"));
}

#[test]
fn extra_mounts_and_manifests_are_checked_like_the_workspace() {
    let policy = policy(built_in("default"), &["/data"]);
    let mount = |path: &str| BoxMountSpec::new(path, "/mnt/x", HostPathMode::Rw).unwrap();
    let with = |mounts: Vec<BoxMountSpec>, inputs: &PolicyInputs| {
        decide(&policy, SpecDraft::new("s").extra_mounts(mounts), inputs)
    };
    let inputs = inputs(&["/data/a", "/secret"], PathKind::Directory);
    with(vec![mount("/data/a")], &inputs).unwrap();
    let error = with(vec![mount("/data/a"), mount("/secret")], &inputs).unwrap_err();
    assert_eq!(field(&error), "host_path");
    let digest = format!("sha256:{}", "a".repeat(64));
    let artifact = BoxMountSpec::content_addressed("/data/a", "/opt/a", digest, "/secret").unwrap();
    let error = with(vec![artifact], &inputs).unwrap_err();
    assert_eq!(field(&error), "manifest_path");
}

#[test]
fn a_locked_mode_applies_to_extra_mounts() {
    let policy = policy(built_in("offline_readonly"), &["/data"]);
    let mount = BoxMountSpec::new("/data/a", "/mnt/x", HostPathMode::Rw).unwrap();
    let inputs = inputs(&["/data/a"], PathKind::Directory);
    let draft = SpecDraft::new("s").extra_mounts(vec![mount]);
    let spec = decide(&policy, draft, &inputs).unwrap().spec;
    assert_eq!(spec.extra_mounts[0].mode, HostPathMode::Ro);
}

#[test]
fn an_overlay_needs_a_readable_directory_and_an_apply_the_right_to_write() {
    let inputs = inputs(&["/data/a", "/secret"], PathKind::Directory);
    let open = policy(built_in("default"), &["/data"]);
    let draft = SpecDraft::new("s")
        .host_path("/data/a")
        .host_path_mode(HostPathMode::Overlay);
    let spec = decide(&open, draft.clone(), &inputs).unwrap().spec;
    assert_eq!(spec.host_path_mode, HostPathMode::Overlay);
    decide_apply(&open, "/data/a", &inputs).unwrap();
    let error = decide_apply(&open, "/secret", &inputs).unwrap_err();
    assert_eq!(field(&error), "host_path");
    for mode in ["ro", "overlay", "none"] {
        let locked: BoxProfile = serde_json::from_value(json!({"name": "locked",
            "host_path_mode": mode, "locked": ["host_path_mode"]}))
        .unwrap();
        let locked = policy(locked, &["/data"]);
        let error = decide_apply(&locked, "/data/a", &inputs).unwrap_err();
        assert_eq!(
            (error.code(), field(&error)),
            (Code::Denied, "host_path_mode".to_owned())
        );
        // No mount of the caller writes to the host either.
        let writable = BoxMountSpec::new("/data/a", "/mnt/x", HostPathMode::Rw).unwrap();
        let both = draft.clone().extra_mounts(vec![writable]);
        let spec = decide(&locked, both, &inputs).unwrap().spec;
        assert_eq!(spec.host_path_mode.as_str(), mode);
        assert_ne!(spec.extra_mounts[0].mode, HostPathMode::Rw);
    }
}

#[test]
fn a_strict_profile_refuses_a_machine_with_missing_protections() {
    let strict: BoxProfile =
        serde_json::from_value(json!({"name": "hard", "strict": true})).unwrap();
    let inputs = PolicyInputs {
        missing: vec!["landlock".into()],
        ..PolicyInputs::default()
    };
    let error = decide(&policy(strict, &[]), SpecDraft::new("s"), &inputs).unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("landlock"), "{error}");
    assert!(error.detail::<Detail>().unwrap().lasting);
    let open = policy(built_in("default"), &[]);
    decide(&open, SpecDraft::new("s"), &inputs).unwrap();
}

#[test]
fn the_rules_of_a_spec_apply() {
    let policy = policy(built_in("default"), &["/data"]);
    let inputs = inputs(&["/data/a"], PathKind::Directory);
    let draft = SpecDraft::new("s").host_path("/data/a").workdir("/opt");
    let error = decide(&policy, draft, &inputs).unwrap_err();
    assert_eq!(
        error.message(),
        "workdir: must stay under mount_path when host_path is provided"
    );
}

#[test]
fn an_unresolved_path_is_refused() {
    let policy = policy(built_in("default"), &["/data"]);
    let draft = SpecDraft::new("s").host_path("/data/a");
    let error = decide(&policy, draft, &PolicyInputs::default()).unwrap_err();
    assert_eq!(error.code(), Code::Internal);
}

const LOCKABLE: [&str; 11] = [
    "image",
    "pull",
    "network",
    "timeout_sec",
    "host_path_mode",
    "cpus",
    "memory_mb",
    "pids_limit",
    "read_only_rootfs",
    "workspace_quota_mb",
    "disk_mb",
];

prop_compose! {
    /// Values for every field a profile can lock.
    fn values()(
        image in "[a-z]{1,4}", pull in prop::sample::select(vec!["missing", "always", "never"]),
        network in prop::sample::select(vec!["off", "on"]),
        timeout_sec in 1_u64..500, mode in prop::sample::select(vec!["none", "ro", "rw"]),
        cpus in 1_u32..8, memory_mb in 32_u64..4096, pids_limit in 1_u64..512,
        read_only_rootfs: bool, quota in 0_u64..64, disk in 0_u64..64,
    ) -> BTreeMap<&'static str, serde_json::Value> {
        LOCKABLE.into_iter().zip([json!(image), json!(pull), json!(network), json!(timeout_sec), json!(mode),
            json!(cpus), json!(memory_mb), json!(pids_limit), json!(read_only_rootfs), json!(quota), json!(disk)]).collect()
    }
}

fn rank(mode: &str) -> usize {
    ["none", "ro", "rw"]
        .iter()
        .position(|known| *known == mode)
        .unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_locked_field_is_never_widened(
        own in values(), asked in values(), max in 1_u64..500,
        locked in prop::sample::subsequence(LOCKABLE.to_vec(), 0..=9),
        wanted in prop::sample::subsequence(LOCKABLE.to_vec(), 0..=9),
        extra in prop::sample::select(vec!["none", "ro", "rw"]),
    ) {
        let mut profile = json!({"name": "p", "locked": locked, "max_timeout_sec": max});
        for (name, value) in &own {
            profile[*name] = value.clone();
        }
        profile["timeout_sec"] = json!(own["timeout_sec"].as_u64().unwrap().min(max));
        let profile: BoxProfile = serde_json::from_value(profile).unwrap();
        let mut draft = json!({"box_id": "s", "extra_mounts": [
            {"host_path": "/data/a", "mount_path": "/mnt/a", "mode": extra}]});
        for name in &wanted {
            draft[*name] = asked[*name].clone();
        }
        let draft: SpecDraft = serde_json::from_value(draft).unwrap();
        let inputs = inputs(&["/data/a"], PathKind::Directory);
        let spec = decide(&policy(profile.clone(), &["/data"]), draft, &inputs).unwrap().spec;
        let (spec_json, profile_json) = (json!(spec), json!(profile));
        for name in LOCKABLE {
            let is_wish = wanted.contains(&name) && !locked.contains(&name);
            let mut expected = if is_wish { asked[name].clone() } else { profile_json[name].clone() };
            if name == "timeout_sec" {
                expected = json!(expected.as_u64().unwrap().min(max));
            }
            // `cpus` is an integer on one side and a decimal on the other.
            prop_assert_eq!(spec_json[name].as_f64(), expected.as_f64(), "{}", name);
            if !expected.is_number() {
                prop_assert_eq!(&spec_json[name], &expected, "{}", name);
            }
        }
        let mode = spec.extra_mounts[0].mode.as_str();
        let most = if locked.contains(&"host_path_mode") { profile.host_path_mode.as_str() } else { "rw" };
        prop_assert_eq!(rank(mode), rank(extra).min(rank(most)));
    }
}
