//! The values that a profile sets, and those that a caller cannot change.

use box_protocol::actions::{BoxUpdateParams, CommandStartParams, IfExists};
use box_protocol::{
    BoxId, BoxProfile, Code, GatewayName, HostPathMode, Network, NetworkPolicy, Program, SpecDraft,
};
use box_rpc::Caller;
use box_service::{BoxService, ServiceConfig};
use serde_json::{Value, json};

use crate::scripted_runtime::{ScriptedRuntime, connect, object, query};

fn profile(name: &str) -> ServiceConfig {
    ServiceConfig {
        profile: name.to_owned(),
        ..ServiceConfig::default()
    }
}

async fn run_tool(config: ServiceConfig, parameters: Value) -> ScriptedRuntime {
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(config).await;
    let result = service.execute_tool(object(parameters), &query(30)).await;
    assert!(result.unwrap().ok);
    runtime
}

async fn run_payload(config: ServiceConfig, payload: Value) -> ScriptedRuntime {
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(config).await;
    let result = service
        .execute_spec_payload(object(payload), &query(31))
        .await;
    assert!(result.unwrap().ok);
    runtime
}

#[tokio::test]
async fn the_default_profile_fills_in_unset_fields() {
    let runtime = run_tool(profile("default"), json!({"command": "echo hi"})).await;
    let spec = runtime.first_spec();
    assert_eq!(spec.network, Network::Off);
    assert_eq!(spec.image, None, "the host's directories");
    assert_eq!(spec.timeout_sec, 30);
}

#[tokio::test]
async fn the_default_profile_sets_the_limits_of_the_box() {
    let runtime = run_tool(profile("default"), json!({"command": "echo hi"})).await;
    let spec = runtime.first_spec();
    let profile = BoxProfile::built_in("default").unwrap();
    assert!((spec.cpus - profile.cpus).abs() < f64::EPSILON);
    assert_eq!(
        (
            spec.memory_mb,
            spec.pids_limit,
            spec.read_only_rootfs,
            spec.workspace_quota_mb
        ),
        (
            profile.memory_mb,
            profile.pids_limit,
            profile.read_only_rootfs,
            profile.workspace_quota_mb
        )
    );
}

#[tokio::test]
async fn a_caller_can_set_an_unlocked_field() {
    let payload = json!({"cmd": "echo hi", "timeout_sec": 60, "network": "on", "session_id": "31"});
    let runtime = run_payload(profile("default"), payload).await;
    let spec = runtime.first_spec();
    assert_eq!((spec.timeout_sec, spec.network), (60, Network::On));
}

#[tokio::test]
async fn a_caller_cannot_set_a_locked_field() {
    let payload =
        json!({"cmd": "echo hi", "network": "on", "host_path_mode": "rw", "session_id": "32"});
    let runtime = run_payload(profile("offline_readonly"), payload).await;
    let spec = runtime.first_spec();
    assert_eq!(
        (spec.network, spec.host_path_mode),
        (Network::Off, HostPathMode::Ro)
    );
}

#[tokio::test]
async fn offline_readonly_locks_the_read_only_rootfs() {
    let payload = json!({"cmd": "echo hi", "read_only_rootfs": false, "session_id": "41"});
    let runtime = run_payload(profile("offline_readonly"), payload).await;
    assert!(runtime.first_spec().read_only_rootfs);
}

#[tokio::test]
async fn network_extended_has_higher_limits() {
    let runtime = run_tool(profile("network_extended"), json!({"command": "echo hi"})).await;
    let spec = runtime.first_spec();
    assert_eq!(
        (spec.network, spec.memory_mb, spec.read_only_rootfs),
        (Network::On, 1024, false)
    );
    assert!((spec.cpus - 2.0).abs() < f64::EPSILON);
}

#[tokio::test]
async fn a_timeout_is_limited_to_the_profiles_maximum() {
    for asked in [json!(999), json!("999"), json!(999.0)] {
        let parameters = json!({"command": "echo hi", "timeout_sec": asked});
        let runtime = run_tool(profile("default"), parameters).await;
        assert_eq!(runtime.first_spec().timeout_sec, 120, "{asked}");
    }
}

#[tokio::test]
async fn an_unknown_profile_is_refused_at_construction() {
    let (_connection, client) = connect(ScriptedRuntime::new().router());
    let error = BoxService::with_client(profile("nonexistent"), client).unwrap_err();
    assert_eq!(error.code(), Code::Validation);
    assert!(
        error.message().starts_with("profile: unknown profile"),
        "{error}"
    );
}

#[tokio::test]
async fn a_custom_profile_is_read_from_the_configuration() {
    let config: ServiceConfig = serde_json::from_value(json!({"profile": "ci", "profiles": [
        {"name": "ci", "image": "ci:1", "memory_mb": 2048, "max_timeout_sec": 900, "locked": ["image"]}]}))
    .unwrap();
    let payload = json!({"cmd": "make", "image": "other", "timeout_sec": 5000, "session_id": "s"});
    let runtime = run_payload(config, payload).await;
    let spec = runtime.first_spec();
    assert_eq!(
        (spec.image.as_deref(), spec.memory_mb, spec.timeout_sec),
        (Some("ci:1"), 2048, 900)
    );
}

#[tokio::test]
async fn a_strict_profile_asks_the_runtime_what_is_missing() {
    let config: ServiceConfig = serde_json::from_value(
        json!({"profile": "hard", "profiles": [{"name": "hard", "strict": true}]}),
    )
    .unwrap();
    let runtime = ScriptedRuntime::new().missing("cgroup.memory");
    let service = runtime.ready(config).await;
    let error = service
        .execute_tool(object(json!({"command": "ls"})), &query(1))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("cgroup.memory"), "{error}");
    assert!(runtime.record().started.is_empty());
}

#[tokio::test]
async fn a_gateway_decides_with_its_own_profile_and_a_caller_cannot_choose_it() {
    let config = json!({"profiles": [{"name": "wide", "network": "on", "max_timeout_sec": 600},
        {"name": "closed", "locked": ["network_policy"], "max_command_sec": 5}],
        "gateways": {"e2b": "wide", "aio": "closed"}});
    let config: ServiceConfig = serde_json::from_value(config).unwrap();
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(config).await;
    let caller = Caller::token("ann");
    let draft = || SpecDraft::new("b").gateway(GatewayName::of("e2b"));
    let decide = async |gateway: &'static str| {
        let gateway = GatewayName::of(gateway);
        let decided = service.decide_spec(draft(), &caller, &gateway).await;
        decided.unwrap().network
    };
    assert_eq!(decide("e2b").await, Some(Network::On));
    assert_eq!(decide("native").await, Some(Network::Off));
    let policy = BoxUpdateParams {
        network_policy: Some(NetworkPolicy::default()),
        ..BoxUpdateParams::of(BoxId::new("b").unwrap())
    };
    let update = async |gateway: &'static str| {
        let gateway = GatewayName::of(gateway);
        let decided = service.decide_update(policy.clone(), &caller, &gateway);
        decided.await.map_err(|error| error.code())
    };
    assert_eq!(update("aio").await, Err(Code::Validation));
    assert_eq!(update("e2b").await, Ok(policy.clone()));
    let start = async |gateway: &'static str| {
        let program = Program::text("true").unwrap();
        let mut params = CommandStartParams::new(BoxId::new("b").unwrap(), program);
        params.timeout_ms = Some(9000);
        let through = (&caller, &GatewayName::of(gateway));
        let decided = service.decide_command(&mut params, None, through).await;
        (params.timeout_ms, decided.unwrap())
    };
    let (timeout_ms, adjusted) = start("aio").await;
    assert_eq!(timeout_ms, Some(5000));
    assert_eq!(adjusted.unwrap().field, "timeout_ms");
    assert_eq!(start("e2b").await, (Some(9000), None));
}

#[tokio::test]
async fn a_caller_cannot_create_boxes_in_the_name_of_a_gateway() {
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(ServiceConfig::default()).await;
    let create = async |gateway: GatewayName| {
        let draft = SpecDraft::new("b").gateway(gateway);
        let query = query(1);
        let created = service.create(draft, IfExists::Fail, &query).await;
        created
            .map(drop)
            .map_err(|error| error.message().to_owned())
    };
    let refused = Err("gateway: set by the server; omit it".to_owned());
    assert_eq!(create(GatewayName::of("e2b")).await, refused);
    assert_eq!(create(GatewayName::NATIVE).await, Ok(()));
    let exec = json!({"cmd": "true", "box_id": "b", "gateway": "e2b"});
    let ran = service.execute_spec_payload(object(exec), &query(2)).await;
    assert!(ran.unwrap_err().message().starts_with("gateway: "));
    assert_eq!(runtime.record().started, ["b"], "only the native one");
}
