//! Limits on commands and shell runs: time, quota and audit log.

use std::fs;
use std::path::Path;

use box_protocol::actions::{
    AttachOptions, BoxCreate, BoxCreateParams, CommandStart, CommandStartParams,
    CommandStartResult, ShellRun, ShellRunParams,
};
use box_protocol::{BoxId, BoxInfo, Code, GatewayName, Program, SpecDraft, UnixMs};
use box_rpc::{Action, CallError, Caller, Peer};
use box_service::ServiceConfig;
use serde_json::json;

use crate::audit::AuditLines;
use crate::scripted_runtime::{ConnectionEnds, ScriptedRuntime, ServiceFixture, allowing, connect};

const TWO_MIB: usize = 2 * 1024 * 1024;

struct Fixture {
    _ends: ConnectionEnds,
    service: ServiceFixture,
    peer: Peer,
}

/// A client of a service in front of this runtime, which has a box.
async fn fixture(runtime: &ScriptedRuntime, config: ServiceConfig) -> Fixture {
    let service = runtime.ready(config).await;
    let (ends, client) = connect(service.router());
    let peer = client.peer().unwrap();
    let made = BoxCreateParams::new(SpecDraft::new("s"));
    peer.call::<BoxCreate>(&made).await.unwrap();
    Fixture {
        _ends: ends,
        service,
        peer,
    }
}

fn with_quota(workspace: &Path) -> ServiceConfig {
    ServiceConfig {
        default_host_workspace: Some(workspace.to_owned()),
        workspace_quota_mb: Some(1),
        ..allowing(&[workspace])
    }
}

fn command(timeout_ms: Option<u64>) -> CommandStartParams {
    let program = Program::text("echo secret-text").unwrap();
    let mut params = CommandStartParams::new(BoxId::new("s").unwrap(), program);
    params.timeout_ms = timeout_ms;
    params.env.insert("TOKEN", "secret-value").unwrap();
    params
}

fn run(timeout_ms: Option<u64>) -> ShellRunParams {
    let run = json!({"box_id": "s", "shell_id": "one", "text": "echo secret-text",
        "env": {"TOKEN": "secret-value"}, "timeout_ms": timeout_ms});
    serde_json::from_value(run).unwrap()
}

fn code(outcome: Result<CommandStartResult, CallError>) -> Code {
    match outcome.unwrap_err() {
        CallError::Refused(error) => error.code(),
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn the_profile_limits_requested_and_missing_timeouts() {
    let profile = json!({"name": "small", "timeout_sec": 5, "max_timeout_sec": 60});
    let config = ServiceConfig {
        profiles: vec![serde_json::from_value(profile).unwrap()],
        profile: "small".to_owned(),
        ..ServiceConfig::default()
    };
    let runtime = ScriptedRuntime::new();
    let fixture = fixture(&runtime, config).await;
    let peer = &fixture.peer;
    let long = peer.call::<CommandStart>(&command(Some(100_000))).await;
    assert_eq!(long.unwrap().adjusted[0].field, "timeout_ms");
    let long = peer.call::<ShellRun>(&run(Some(100_000))).await;
    assert_eq!(long.unwrap().adjusted[0].field, "timeout_ms");
    let short = peer.call::<CommandStart>(&command(Some(7))).await;
    assert!(short.unwrap().adjusted.is_empty());
    peer.call::<ShellRun>(&run(None)).await.unwrap();
    let times: Vec<_> = runtime.record().commands;
    let times: Vec<_> = times.into_iter().map(|(_, time)| time).collect();
    assert_eq!(times, [Some(60_000), Some(60_000), Some(7), Some(60_000)]);
}

#[tokio::test]
async fn a_workspace_over_its_quota_refuses_commands_and_shell_runs() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = ScriptedRuntime::new();
    let fixture = fixture(&runtime, with_quota(dir.path())).await;
    fixture
        .peer
        .call::<CommandStart>(&command(None))
        .await
        .unwrap();
    fs::write(dir.path().join("too-large"), vec![b'x'; TWO_MIB]).unwrap();
    let refused = fixture.peer.call::<CommandStart>(&command(None)).await;
    assert_eq!(code(refused), Code::Capacity);
    let refused = fixture.peer.call::<ShellRun>(&run(None)).await;
    assert_eq!(code(refused), Code::Capacity);
    assert_eq!(runtime.record().commands.len(), 1, "the one before");
    assert!(runtime.record().deleted.is_empty());
    // Gateways ask for the decision, and call the runtime themselves.
    let directory = dir.path().to_str().unwrap();
    let of_box = |quota_mb: u64| {
        let spec = SpecDraft::new("s").host_path(directory);
        let spec = spec.workspace_quota_mb(quota_mb).build().unwrap();
        BoxInfo::starting(&spec, "fake", "b", UnixMs(0))
    };
    let through = (&Caller::token("ann"), &GatewayName::of("e2b"));
    for (quota_mb, refused) in [(1, Some(Code::Capacity)), (9, None)] {
        let (service, of) = (&fixture.service, of_box(quota_mb));
        let command = &mut command(None);
        let command = service.decide_command(command, Some(&of), through).await;
        let run = &mut run(None);
        let run = service.decide_run(run, Some(&of), through).await;
        for decided in [command, run] {
            assert_eq!(decided.err().map(|error| error.code()), refused);
        }
    }
}

#[tokio::test]
async fn a_box_over_its_quota_is_deleted_when_the_command_ends() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = ScriptedRuntime::new().writing("output.bin", TWO_MIB);
    let fixture = fixture(&runtime, with_quota(dir.path())).await;
    let mut params = command(None);
    params.attach = Some(AttachOptions::default());
    let chunks = fixture.peer.stream::<CommandStart>(&params).await.unwrap();
    assert_eq!(code(chunks.finish().await), Code::Capacity);
    assert_eq!(runtime.record().deleted, ["s"]);
}

#[tokio::test]
async fn starts_are_audited_with_their_text_only_if_configured() {
    for log_commands in [false, true] {
        let audit = AuditLines::default();
        let _guard = tracing::subscriber::set_default(audit.clone());
        let config = ServiceConfig {
            log_commands,
            ..ServiceConfig::default()
        };
        let fixture = fixture(&ScriptedRuntime::new(), config).await;
        fixture
            .peer
            .call::<CommandStart>(&command(None))
            .await
            .unwrap();
        fixture.peer.call::<ShellRun>(&run(None)).await.unwrap();
        let through = (&Caller::token("ann"), &GatewayName::of("e2b"));
        let (service, command) = (&fixture.service, &mut command(None));
        let decided = service.decide_command(command, None, through).await;
        decided.unwrap();
        let run = &mut run(None);
        service.decide_run(run, None, through).await.unwrap();
        let lines = audit.lines();
        for action in [CommandStart::NAME, ShellRun::NAME] {
            let of_action = lines.iter().filter(|line| line.contains(action));
            let allowed: Vec<_> = of_action.collect();
            assert_eq!(allowed.len(), 2, "over the wire and of a gateway");
            assert!(allowed[1].contains("ann"), "{allowed:?}");
            for line in allowed {
                assert!(line.contains("message=allowed"), "{line}");
                assert!(line.contains("TOKEN"), "{line}");
                assert!(!line.contains("secret-value"), "{line}");
                assert_eq!(line.contains("secret-text"), log_commands, "{line}");
            }
        }
    }
}
