//! `box.update` is atomic, is on disk before its answer, and never blocks other calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use box_protocol::actions::BoxUpdateParams;
use box_protocol::{BoxError, BoxInfo, Code, Name, Network, NetworkPolicy, SpecDraft};
use box_runtime::Capabilities;
use box_runtime::fake::Reply;
use serde_json::{Value, json};

use super::fixture::{Fixture, code, exec_of, fixture, id, spec};

fn outliving() -> Fixture {
    let w = fixture();
    let capabilities = Capabilities::default().with_network();
    w.backend
        .set_capabilities(capabilities.with_added_mounts().with_outliving(true));
    w
}

fn online(box_id: &str) -> SpecDraft {
    let mut spec = spec(box_id, "true");
    spec.network = Some(Network::On);
    spec
}

fn allowing(host: &str) -> NetworkPolicy {
    serde_json::from_value(json!({"default": "deny", "allow": [host]})).unwrap()
}

fn update(box_id: &str) -> BoxUpdateParams {
    BoxUpdateParams::of(id(box_id))
}

impl Fixture {
    async fn update(&self, params: BoxUpdateParams) -> Result<BoxInfo, BoxError> {
        self.runtime.update(&self.caller, params).await
    }

    /// The record of this box that a later process would find.
    fn record(&self, box_id: &str) -> Value {
        let kept = self.backend.persisted();
        let last = kept.iter().rfind(|(of, _)| of == box_id).unwrap();
        serde_json::from_str(&last.1).unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn an_update_is_on_disk_before_its_answer_during_an_exec() {
    let w = outliving();
    w.create(online("s")).await.unwrap();
    w.backend.on_command("job", Reply::hang());
    let params = exec_of(online("s").cmd("job").timeout_sec(3600));
    let running = w.begin_exec(params).await;
    let narrowed = BoxUpdateParams {
        network_policy: Some(allowing("ok.example")),
        name: Some(Name::new("renamed").unwrap()),
        ..update("s")
    };
    w.update(narrowed).await.unwrap();
    assert!(!running.is_finished());
    let record = w.record("s");
    assert_eq!(record["network_policy"]["allow"], json!(["ok.example"]));
    assert_eq!(record["name"], "renamed");
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_update_is_stored() {
    let w = outliving();
    w.create(online("s")).await.unwrap();
    let narrowed = BoxUpdateParams {
        network_policy: Some(allowing("ok.example")),
        ..update("s")
    };
    let asked = tokio::time::timeout(Duration::ZERO, w.update(narrowed)).await;
    assert!(asked.is_err());
    while w.backend.policies().last().unwrap().1 != allowing("ok.example") {
        tokio::task::yield_now().await;
    }
    while w.record("s")["network_policy"].is_null() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_update_that_cannot_be_stored_fails() {
    let w = outliving();
    w.create(spec("s", "")).await.unwrap();
    w.backend
        .set_persist_error(Some(BoxError::capacity("the disk is full")));
    let renamed = BoxUpdateParams {
        name: Some(Name::new("renamed").unwrap()),
        ..update("s")
    };
    assert_eq!(code(w.update(renamed).await), Code::Capacity);
    w.backend.set_persist_error(None);
    w.update(update("s")).await.unwrap();
    assert_eq!(w.record("s")["name"], "renamed");
}

#[tokio::test(start_paused = true)]
async fn a_box_without_a_record_is_not_created() {
    let w = outliving();
    let full = BoxError::capacity("the disk is full");
    w.backend.set_persist_error(Some(full));
    assert_eq!(code(w.create(spec("s", "")).await), Code::Capacity);
    assert_eq!(w.backend.stops(), ["s"], "nothing is left of it");
    w.backend.set_persist_error(None);
    w.create(spec("s", "")).await.unwrap();
    assert_eq!(w.record("s")["version"], 1);
}

#[tokio::test(start_paused = true)]
async fn a_failed_record_write_is_retried_and_reported_as_degraded() {
    let w = outliving();
    w.create(spec("s", "")).await.unwrap();
    let full = BoxError::capacity("the disk is full");
    w.backend.set_persist_error(Some(full));
    let renamed = BoxUpdateParams {
        name: Some(Name::new("renamed").unwrap()),
        ..update("s")
    };
    assert_eq!(code(w.update(renamed).await), Code::Capacity);
    assert_eq!(w.get("s").await.unwrap().degraded, ["record"]);
    assert_ne!(w.record("s")["name"], "renamed");
    w.backend.set_persist_error(None);
    while w.record("s")["name"] != "renamed" {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    while !w.get("s").await.unwrap().degraded.is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn many_updates_do_not_block_the_queue_and_combine_writes() {
    let w = outliving();
    w.create(spec("s", "")).await.unwrap();
    w.backend.on_command("job", Reply::hang());
    let params = exec_of(spec("s", "job").timeout_sec(3600));
    let _running = w.begin_exec(params).await;
    let before = w.backend.persisted().len();
    let renames = (0..2000).map(|number| {
        w.update(BoxUpdateParams {
            name: Some(Name::new(format!("name-{number}")).unwrap()),
            ..update("s")
        })
    });
    for answer in futures::future::join_all(renames).await {
        answer.unwrap();
    }
    let written = w.backend.persisted().len() - before;
    assert!(written < 1000, "{written} records for 2000 updates");
    let name = w.get("s").await.unwrap().name.unwrap();
    assert_eq!(w.record("s")["name"], name.as_str());
    // The queue keeps its whole capacity.
    let mut waiting = Vec::new();
    for _ in 0..128 {
        waiting.push(w.begin("s", "later").await);
    }
    assert!(waiting.iter().all(|exec| !exec.is_finished()));
    assert_eq!(code(w.exec("s", "one call too many").await), Code::Capacity);
}

#[tokio::test(start_paused = true)]
async fn an_update_that_is_refused_changes_nothing() {
    let w = outliving();
    w.create(online("s")).await.unwrap();
    let mut other = spec("other", "");
    other.name = Some(Name::new("taken").unwrap());
    w.create(other).await.unwrap();
    let before = (w.get("s").await.unwrap(), w.backend.policies().len());
    let mount = json!({"host_path": "/srv/x", "mount_path": "/x", "mode": "ro"});
    let refused = BoxUpdateParams {
        name: Some(Name::new("taken").unwrap()),
        network_policy: Some(allowing("wider.example")),
        labels: [("a".to_owned(), Some("b".to_owned()))].into(),
        extra_mounts: Some(vec![serde_json::from_value(mount).unwrap()]),
        ..update("s")
    };
    assert_eq!(code(w.update(refused).await), Code::Conflict);
    assert_eq!(w.get("s").await.unwrap(), before.0);
    assert_eq!(w.backend.policies().len(), before.1);
    assert_eq!(w.backend.added_mounts(), []);
}

#[tokio::test(start_paused = true)]
async fn the_number_of_labels_is_limited() {
    let w = outliving();
    w.create(spec("s", "")).await.unwrap();
    let labelled = |number: usize, bytes: usize| BoxUpdateParams {
        labels: [(format!("label-{number}"), Some("x".repeat(bytes)))].into(),
        ..update("s")
    };
    for number in 0..64 {
        w.update(labelled(number, 100)).await.unwrap();
    }
    let before = w.get("s").await.unwrap();
    assert_eq!(code(w.update(labelled(64, 1)).await), Code::Validation);
    assert_eq!(code(w.update(labelled(0, 16_000)).await), Code::Validation);
    assert_eq!(w.get("s").await.unwrap(), before);
    w.update(labelled(63, 1)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_lifetime_and_defaults_are_changed_member_by_member() {
    let w = outliving();
    let mut draft = online("s");
    draft.lifetime = serde_json::from_value(json!({"idle_ms": 5000, "wake": true})).unwrap();
    draft.defaults =
        serde_json::from_value(json!({"env": {"A": "1", "B": "2"}, "cwd": "/a"})).unwrap();
    draft.network_policy = Some(Box::new(allowing("ok.example")));
    w.create(draft).await.unwrap();
    let later = box_protocol::UnixMs(box_protocol::UnixMs::now().0 + 60_000);
    let changed = BoxUpdateParams {
        lifetime: serde_json::from_value(json!({"expires_at": later})).unwrap(),
        defaults: serde_json::from_value(json!({"env": {"B": null, "C": "3"}})).unwrap(),
        ..update("s")
    };
    w.update(changed).await.unwrap();
    let info = w.get("s").await.unwrap();
    let lifetime = info.lifetime.unwrap();
    assert_eq!(
        (lifetime.expires_at, lifetime.idle_ms, lifetime.wake),
        (Some(later), Some(5000), true)
    );
    let defaults = serde_json::to_value(info.defaults.unwrap()).unwrap();
    assert_eq!(defaults, json!({"env": {"A": "1", "C": "3"}, "cwd": "/a"}));
    assert_eq!(info.network_policy, Some(Box::new(allowing("ok.example"))));
    let listed = w.list().await.remove(0);
    assert_eq!((listed.defaults, listed.network_policy), (None, None));
}

#[tokio::test(start_paused = true)]
async fn a_list_is_never_longer_than_a_message() {
    let w = super::fixture::fixture_with(|config| config.max_boxes = 1000);
    for number in 0..200 {
        let mut draft = spec(&format!("s{number:0>3}"), "");
        draft.labels = Some([("mark".to_owned(), "\u{1}".repeat(16_000))].into());
        w.create(draft).await.unwrap();
    }
    let (mut params, mut seen) = (box_protocol::actions::BoxListParams::default(), 0);
    loop {
        let page = w.runtime.list(&w.caller, &params).await.unwrap();
        assert!(serde_json::to_string(&page).unwrap().len() < 12 << 20);
        assert_eq!(page.total, 200);
        seen += page.items.len();
        params.after = page.next;
        if params.after.is_none() {
            break;
        }
    }
    assert_eq!(seen, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_set_during_a_start_applies() {
    let w = outliving();
    let (entered, is_entered) = tokio::sync::oneshot::channel();
    let entered = std::sync::Mutex::new(Some(entered));
    let done = Arc::new(AtomicBool::new(false));
    let is_done = Arc::clone(&done);
    // The start applies the first policy, which lasts until the second is applied or a long time.
    w.backend.before_policy(move |_| {
        if let Some(entered) = entered.lock().unwrap().take() {
            entered.send(()).unwrap();
            for _ in 0..50 {
                if is_done.load(Ordering::Relaxed) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        } else {
            is_done.store(true, Ordering::Relaxed);
        }
    });
    let mut draft = online("s");
    draft.network_policy = Some(Box::new(allowing("old.example")));
    let starting = w.create(draft);
    let updating = async {
        is_entered.await.unwrap();
        let narrowed = BoxUpdateParams {
            network_policy: Some(allowing("new.example")),
            ..update("s")
        };
        w.update(narrowed).await.unwrap();
    };
    let (started, ()) = tokio::join!(starting, updating);
    started.unwrap();
    let applied = w.backend.policies();
    assert_eq!(applied.last().unwrap().1, allowing("new.example"));
    assert_eq!(
        w.record("s")["network_policy"]["allow"],
        json!(["new.example"])
    );
}
