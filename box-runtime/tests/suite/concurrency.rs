//! Concurrent calls for few boxes, in any order, with boxes that die and backends that fail.
//!
//! Every call is answered, and the invariants over all boxes hold.

use std::path::Path;
use std::time::Duration;

use box_protocol::actions::{BoxTransitionParams, BoxUpdateParams, OnTimeout, TargetState};
use box_protocol::{BoxError, BoxState, Code, ExecStatus, LifetimeChange, Network};
use box_runtime::Capabilities;
use box_runtime::fake::{InjectedFault, Reply};
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::fixture::{Fixture, exec_of, fixture_with, id, spec};

const MAX_BOXES: usize = 3;

/// The limit for all calls together.
const PATIENCE: Duration = Duration::from_hours(3);

#[derive(Debug, Clone)]
enum Call {
    Exec { takes: u64, limit: u64, kill: bool },
    Create,
    Update { label: u8, idle: u64 },
    To(TargetState),
    Mount { at: u8 },
    Commands,
    Delete { force: bool },
    Die,
    BadStart(u64),
    BadStop(u64),
    BadClear(bool),
    Deaf(bool),
}

fn calls() -> impl Strategy<Value = Vec<(u64, u8, Call)>> {
    let to = prop_oneof![
        Just(TargetState::Running),
        Just(TargetState::Paused),
        Just(TargetState::Stopped)
    ];
    let call = prop_oneof![
        8 => (0..40_u64, 1..30_u64, any::<bool>())
            .prop_map(|(takes, limit, kill)| Call::Exec { takes, limit, kill }),
        3 => Just(Call::Create),
        6 => (any::<u8>(), 5..200_u64).prop_map(|(label, idle)| Call::Update { label, idle }),
        4 => to.prop_map(Call::To),
        2 => (0..4_u8).prop_map(|at| Call::Mount { at }),
        2 => Just(Call::Commands),
        3 => any::<bool>().prop_map(|force| Call::Delete { force }),
        1 => Just(Call::Die),
        1 => (0..200_u64).prop_map(Call::BadStart),
        // Within `stop_timeout`: the backend cleans up a stop that takes longer.
        1 => (0..9_u64).prop_map(Call::BadStop),
        1 => any::<bool>().prop_map(Call::BadClear),
        1 => any::<bool>().prop_map(Call::Deaf),
    ];
    // Most calls start at the same moment as the one before.
    let gap = prop_oneof![3 => Just(0_u64), 1 => 1..20_000_u64];
    proptest::collection::vec((gap, 0..4_u8, call), 1..60)
}

/// Errors that a call may get here. An internal error is never one of them.
fn may_be(error: &BoxError) -> bool {
    !matches!(
        error.code(),
        Code::Internal | Code::Validation | Code::Denied
    )
}

impl Fixture {
    fn clone_of(&self) -> Self {
        let mut clone = self.with_token("");
        clone.caller = self.caller.clone();
        clone
    }

    async fn call(&self, name: &str, call: Call) -> Result<(), BoxError> {
        let mut draft = spec(name, "job");
        draft.network = Some(Network::On);
        let box_id = id(name);
        match call {
            Call::Exec { takes, limit, kill } => {
                let cmd = format!("{takes}");
                let mut params = exec_of(draft.cmd(cmd).timeout_sec(limit));
                if kill {
                    params.on_timeout = OnTimeout::Kill;
                }
                self.runtime.exec(&self.caller, params).await.map(drop)
            }
            Call::Create => self.create(draft.cmd("")).await.map(drop),
            Call::Update { label, idle } => {
                let policy = json!({"allow": [format!("host-{label}.example")]});
                let params = BoxUpdateParams {
                    labels: [("label".to_owned(), Some(label.to_string()))].into(),
                    lifetime: Some(LifetimeChange {
                        idle_ms: Some(Some(idle * 1000)),
                        ..LifetimeChange::default()
                    }),
                    network_policy: Some(serde_json::from_value(policy).unwrap()),
                    ..BoxUpdateParams::of(box_id)
                };
                self.runtime.update(&self.caller, params).await.map(drop)
            }
            Call::To(to) => {
                let params = BoxTransitionParams { box_id, to };
                self.runtime
                    .transition(&self.caller, params)
                    .await
                    .map(drop)
            }
            Call::Mount { at } => {
                let mount =
                    json!({"host_path": "/srv", "mount_path": format!("/m{at}"), "mode": "ro"});
                let params = BoxUpdateParams {
                    extra_mounts: Some(vec![serde_json::from_value(mount).unwrap()]),
                    ..BoxUpdateParams::of(box_id)
                };
                self.runtime.update(&self.caller, params).await.map(drop)
            }
            Call::Commands => self.commands(name).await.map(drop),
            Call::Delete { force: true } => self.force_delete(name).await.map(drop),
            Call::Delete { force: false } => self.delete(name).await.map(drop),
            Call::Die => {
                self.backend.cut_agent(name);
                Ok(())
            }
            Call::BadStart(seconds) => {
                self.backend
                    .next_start(InjectedFault::Slow(Duration::from_secs(seconds)));
                Ok(())
            }
            Call::BadStop(seconds) => {
                self.backend
                    .next_stop(InjectedFault::Slow(Duration::from_secs(seconds)));
                Ok(())
            }
            Call::BadClear(bad) => {
                self.backend
                    .set_clear_trouble(bad.then_some(InjectedFault::Hang));
                Ok(())
            }
            Call::Deaf(deaf) => {
                self.backend.set_health_trouble(
                    deaf.then_some(InjectedFault::Slow(Duration::from_secs(7))),
                );
                Ok(())
            }
        }
    }

    /// Each box has the same reported, stored and enforced settings.
    async fn is_consistent(&self, state: &Path) {
        let kept = self.backend.persisted();
        let applied = self.backend.policies();
        for box_id in self.ids().await {
            let box_id = box_id.as_str();
            // A box that is being deleted may be gone by now.
            let Ok(info) = self.get(box_id).await else {
                continue;
            };
            let lasts = !matches!(info.state, BoxState::Starting | BoxState::Failed);
            if !lasts || info.status == ExecStatus::Closing {
                continue;
            }
            let record: Value = if info.state == BoxState::Stopped {
                stopped_record(state, box_id)
            } else {
                let (_, record) = kept.iter().rfind(|(of, _)| of == box_id).unwrap();
                serde_json::from_str(record).unwrap()
            };
            let info_json = serde_json::to_value(&info).unwrap();
            for member in ["labels", "lifetime", "network_policy"] {
                assert_eq!(record[member], info_json[member], "{box_id} {member}");
            }
            assert_eq!(record["paused"], info.state == BoxState::Paused, "{box_id}");
            assert_eq!(
                record["stopped"],
                info.state == BoxState::Stopped,
                "{box_id}"
            );
            // A stopped box has no network.
            if info.state == BoxState::Stopped {
                continue;
            }
            let (_, policy) = applied.iter().rfind(|(of, _)| of == box_id).unwrap();
            let policy = serde_json::to_value(policy).unwrap();
            let wanted = &info_json["network_policy"];
            assert!(
                *wanted == policy || wanted.is_null(),
                "{box_id}: {policy} is not {wanted}"
            );
        }
    }
}

/// Reads the record of a stopped box.
fn stopped_record(state: &Path, box_id: &str) -> Value {
    let records = std::fs::read_dir(state.join("stopped")).unwrap().flatten();
    let texts = records.map(|record| std::fs::read_to_string(record.path()).unwrap());
    let mut records = texts.map(|text| serde_json::from_str::<Value>(&text).unwrap());
    let found = records.find(|record| record["spec"]["box_id"] == box_id);
    found.unwrap_or_else(|| panic!("{box_id} has no record"))
}

async fn check(calls: Vec<(u64, u8, Call)>) {
    let state = tempfile::tempdir().unwrap();
    let w = fixture_with(|config| {
        config.state_dir = Some(state.path().to_owned());
        config.idle_ttl = Duration::from_secs(100);
        config.max_boxes = MAX_BOXES;
        config.queued_calls = 4;
    });
    let capabilities = Capabilities::default().with_network();
    w.backend
        .set_capabilities(capabilities.with_added_mounts().with_outliving(true));
    w.backend.answer_with(|text| {
        let seconds = text.parse().unwrap_or_default();
        Reply::stdout(text).takes(Duration::from_secs(seconds))
    });
    let mut running = Vec::new();
    for (gap, box_id, call) in calls {
        if gap > 0 {
            sleep(Duration::from_millis(gap)).await;
        }
        let w = w.clone_of();
        running.push(tokio::spawn(async move {
            let made = call.clone();
            (made, w.call(&format!("s{box_id}"), call).await)
        }));
    }
    for call in running {
        let Ok(answered) = timeout(PATIENCE, call).await else {
            panic!("a call is never answered");
        };
        let (call, answer) = answered.unwrap();
        if let Err(error) = answer {
            assert!(may_be(&error), "{call:?}: {error:?}");
        }
    }
    assert!(
        w.backend.max_concurrent_execs() <= 1,
        "execs of one box overlap"
    );
    assert!(w.backend.max_concurrent_boxes() <= MAX_BOXES);
    sleep(Duration::from_secs(1)).await;
    w.is_consistent(state.path()).await;
    w.backend.set_clear_trouble(None);
    w.backend.set_health_trouble(None);
    w.shutdown().await;
    assert_eq!(w.backend.running(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 128,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn concurrent_calls_are_answered_and_leave_a_consistent_state(calls in calls()) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(check(calls));
    }
}
