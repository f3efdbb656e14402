//! Boxes are reused by id, started once, and keep their spec.

use box_protocol::actions::{BoxCreateParams, BoxListParams, BoxUpdateParams, IfExists};
use box_protocol::error::Detail;
use box_protocol::{
    BoxMountSpec, BoxSpec, BoxState, Code, ExecStatus, GatewayName, HostPathMode, Name, SpecDraft,
};
use box_runtime::Capabilities;
use box_runtime::fake::{InjectedFault, Reply};
use serde_json::json;

use super::fixture::{code, exec_of, fixture, fixture_with, id, seconds, settle, spec};

#[tokio::test(start_paused = true)]
async fn a_box_is_reused_by_its_id() {
    let w = fixture();
    assert_eq!(
        w.exec("req-1", "echo first").await.unwrap().stdout,
        "executed: echo first"
    );
    w.exec("req-1", "echo second").await.unwrap();
    assert_eq!(w.backend.starts(), ["req-1"]);
    let ran = [("req-1", "echo first"), ("req-1", "echo second")];
    assert_eq!(
        w.backend.execs(),
        ran.map(|(id, cmd)| (id.to_owned(), cmd.to_owned()))
    );
}

#[tokio::test(start_paused = true)]
async fn concurrent_first_calls_start_the_box_once_and_run_in_order() {
    let w = fixture();
    w.backend.next_start(InjectedFault::Slow(seconds(3)));
    let calls = (0..20).map(|at| w.exec_spec(spec("s", &format!("echo {at}"))));
    let results = futures::future::join_all(calls).await;
    assert!(results.iter().all(Result::is_ok));
    assert_eq!(w.backend.starts(), ["s"]);
    let texts: Vec<_> = w
        .backend
        .execs()
        .into_iter()
        .map(|(_, text)| text)
        .collect();
    assert_eq!(
        texts,
        (0..20).map(|at| format!("echo {at}")).collect::<Vec<_>>()
    );
}

#[tokio::test(start_paused = true)]
async fn all_calls_that_wait_for_a_start_get_its_error() {
    let w = fixture();
    let full = box_protocol::BoxError::capacity("no room on this machine");
    w.backend.next_start(InjectedFault::Fail(full));
    let calls = (0..5).map(|_| w.exec("s", "true"));
    let results = futures::future::join_all(calls).await;
    assert!(
        results
            .into_iter()
            .all(|result| code(result) == Code::Capacity)
    );
    assert_eq!(w.backend.starts(), ["s"]);
    assert_eq!(w.ids().await, [""; 0]);
    w.exec("s", "true").await.unwrap();
}

/// The fields in the order of comparison, each with a value other than the default.
fn differences() -> Vec<(&'static str, serde_json::Value)> {
    vec![
        ("network", json!("on")),
        ("image", json!("alpine")),
        ("user", json!("root")),
        ("host_path", json!("/srv")),
        ("host_path_mode", json!("none")),
        ("mount_path", json!("/project")),
        ("persistent", json!(true)),
        ("cpus", json!(2.0)),
        ("memory_mb", json!(1024)),
        ("pids_limit", json!(64)),
        ("read_only_rootfs", json!(false)),
        ("disk_mb", json!(1)),
        ("workspace_quota_mb", json!(1)),
    ]
}

#[tokio::test(start_paused = true)]
async fn each_fixed_field_conflicts_and_leaves_the_box_unchanged() {
    let w = fixture();
    w.exec("s", "true").await.unwrap();
    for (field, value) in differences() {
        let spec =
            BoxSpec::from_value(json!({"box_id": "s", "cmd": "true", field: value})).unwrap();
        let error = w.exec_spec(spec.clone().into()).await.unwrap_err();
        assert_eq!(error.code(), Code::Conflict, "{field}");
        assert_eq!(
            error.detail::<Detail>().unwrap().field.as_deref(),
            Some(field)
        );
        assert!(!error.message().contains("/srv"));
        assert_eq!(code(w.create(spec.into()).await), Code::Conflict);
    }
    assert_eq!(w.backend.starts(), ["s"]);
    assert_eq!(w.backend.execs().len(), 1);
    w.exec("s", "true").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_reported_without_waiting_for_a_running_exec() {
    let w = fixture();
    w.backend.on_command("sleep", Reply::hang());
    let running = w.begin("s", "sleep").await;
    let asked = tokio::time::Instant::now();
    assert_eq!(
        code(w.exec_spec(spec("s", "true").cpus(2.0)).await),
        Code::Conflict
    );
    assert!(asked.elapsed() < seconds(1));
    assert!(!running.is_finished());
}

#[tokio::test(start_paused = true)]
async fn fields_of_a_single_call_may_differ() {
    let w = fixture();
    w.exec("s", "true").await.unwrap();
    w.exec_spec(spec("s", "ls").workdir("/tmp").timeout_sec(5))
        .await
        .unwrap();
    assert_eq!(w.backend.starts(), ["s"]);
    assert_eq!(w.backend.commands()[1].cwd, "/tmp");
}

#[tokio::test(start_paused = true)]
async fn another_compatibility_mode_conflicts() {
    let w = fixture();
    w.exec("s", "true").await.unwrap();
    let mut other = spec("s", "true");
    other.gateway = Some(box_protocol::GatewayName::of("other"));
    let error = w.exec_spec(other).await.unwrap_err();
    assert_eq!(error.code(), Code::Conflict);
    assert_eq!(
        error.detail::<Detail>().unwrap().field.as_deref(),
        Some("gateway")
    );
}

fn mount(path: &str) -> BoxMountSpec {
    BoxMountSpec::new("/srv/data", path, HostPathMode::Ro).unwrap()
}

#[tokio::test(start_paused = true)]
async fn extra_mounts_cannot_change_after_the_first_call() {
    let w = fixture();
    let with = |mounts: Vec<BoxMountSpec>| spec("s", "true").extra_mounts(mounts);
    w.exec_spec(with(vec![mount("/a"), mount("/b")]))
        .await
        .unwrap();
    w.exec_spec(with(vec![mount("/b"), mount("/a")]))
        .await
        .unwrap();
    let unmounted = BoxMountSpec::new("/srv/data", "/n", HostPathMode::None).unwrap();
    w.exec_spec(with(vec![mount("/b"), mount("/a"), unmounted]))
        .await
        .unwrap();
    for mounts in [
        vec![],
        vec![mount("/a")],
        vec![mount("/a"), mount("/b"), mount("/c")],
    ] {
        let error = w.exec_spec(with(mounts)).await.unwrap_err();
        assert_eq!(error.code(), Code::Conflict);
        assert_eq!(
            error.detail::<Detail>().unwrap().field.as_deref(),
            Some("extra_mounts")
        );
        assert!(!error.message().contains("/srv"));
    }
    assert_eq!(w.backend.starts(), ["s"]);
}

#[tokio::test(start_paused = true)]
async fn a_backend_with_support_adds_content_addressed_mounts() {
    let w = fixture();
    let artifact = |digit: &str| {
        let digest = format!("sha256:{}", digit.repeat(64));
        BoxMountSpec::content_addressed("/srv/a", "/opt/a", digest, "/srv/a.json").unwrap()
    };
    let with = |mounts: Vec<BoxMountSpec>| spec("s", "true").extra_mounts(mounts);
    w.exec_spec(with(vec![artifact("a")])).await.unwrap();
    assert_eq!(
        code(w.exec_spec(with(vec![artifact("b")])).await),
        Code::Conflict
    );
    w.backend
        .set_capabilities(Capabilities::default().with_network().with_added_mounts());
    w.exec_spec(with(vec![artifact("b")])).await.unwrap();
    w.exec_spec(with(vec![artifact("b")])).await.unwrap();
    assert_eq!(w.backend.added_mounts(), [artifact("b")]);
    assert_eq!(
        code(w.exec_spec(with(vec![mount("/a")])).await),
        Code::Conflict
    );
}

#[tokio::test(start_paused = true)]
async fn a_dead_box_is_replaced() {
    let w = fixture();
    w.exec("s", "one").await.unwrap();
    w.backend.kill_box("s");
    w.exec("s", "two").await.unwrap();
    assert_eq!(w.backend.starts(), ["s", "s"]);
    assert_eq!(w.backend.stops(), ["s"]);
    assert_eq!(w.ids().await, ["s"]);
}

#[tokio::test(start_paused = true)]
async fn create_returns_the_info_and_whether_the_box_existed() {
    let w = fixture();
    let made = w.create(SpecDraft::new("c-1")).await.unwrap();
    assert!(!made.existed);
    assert_eq!(made.info.backend_name, "fake");
    assert_eq!(made.info.backend_id, "backend-c-1");
    assert_eq!(
        (made.info.state, made.info.status),
        (BoxState::Running, ExecStatus::Idle)
    );
    assert!(made.info.created_at.0 > 0);
    let found = w.create(SpecDraft::new("c-1")).await.unwrap();
    assert!(found.existed);
    assert_eq!(found.info.created_at, made.info.created_at);
    assert_eq!(w.backend.starts(), ["c-1"]);
    let params = BoxCreateParams {
        if_exists: IfExists::Fail,
        ..BoxCreateParams::new(SpecDraft::new("c-1"))
    };
    assert_eq!(
        code(w.runtime.create(&w.caller, params).await),
        Code::Conflict
    );
}

#[tokio::test(start_paused = true)]
async fn create_does_not_wait_for_a_running_exec() {
    let w = fixture();
    w.backend.on_command("sleep", Reply::hang());
    let running = w.begin("s", "sleep").await;
    let found = w.create(SpecDraft::new("s")).await.unwrap();
    assert!(found.existed && !running.is_finished());
    assert_eq!(found.info.status, ExecStatus::Running);
}

#[tokio::test(start_paused = true)]
async fn capacity_is_named_and_freed() {
    let w = fixture_with(|config| config.max_boxes = 2);
    w.exec("a", "true").await.unwrap();
    w.exec("b", "true").await.unwrap();
    let error = w.exec("c", "true").await.unwrap_err();
    assert_eq!(error.code(), Code::Capacity);
    assert_eq!(
        error.message(),
        "max_boxes: the limit of 2 is reached; delete a box"
    );
    let detail: Detail = error.detail().unwrap();
    assert_eq!(
        (detail.limit.as_deref(), detail.max),
        (Some("max_boxes"), Some(2))
    );
    w.exec("a", "true").await.unwrap();
    w.delete("b").await.unwrap();
    w.exec("c", "true").await.unwrap();
    assert_eq!(w.backend.starts(), ["a", "b", "c"]);
}

#[tokio::test]
async fn a_caller_can_have_a_separate_limit() {
    let w = fixture_with(|config| config.max_boxes_per_caller = Some(5));
    let mut ann = w.with_token("ann");
    ann.runtime = ann.runtime.with_max_boxes(1);
    ann.exec("a", "true").await.unwrap();
    let error = ann.exec("b", "true").await.unwrap_err();
    assert_eq!(
        error.message(),
        "max_boxes_per_caller: the limit of 1 is reached; delete a box"
    );
    let bob = w.with_token("bob");
    bob.exec("b", "true").await.unwrap();
    bob.exec("c", "true").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn starting_and_ending_boxes_count() {
    let w = fixture_with(|config| config.max_boxes = 1);
    w.backend.next_start(InjectedFault::Slow(seconds(5)));
    let making = w.begin("a", "true").await;
    assert_eq!(code(w.exec("b", "true").await), Code::Capacity);
    making.await.unwrap().unwrap();
    w.backend.next_stop(InjectedFault::Slow(seconds(5)));
    let (deleted, refused) = tokio::join!(w.delete("a"), async {
        settle().await;
        w.exec("b", "true").await
    });
    deleted.unwrap();
    assert_eq!(code(refused), Code::Capacity);
    w.exec("b", "true").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn calls_waiting_for_one_box_are_bounded() {
    let w = fixture_with(|config| config.queued_calls = 3);
    w.backend
        .on_command("sleep", Reply::default().takes(seconds(10)));
    let mut calls = vec![w.begin("s", "sleep").await];
    for _ in 0..3 {
        calls.push(w.begin("s", "true").await);
    }
    let error = w.exec("s", "true").await.unwrap_err();
    assert_eq!(error.code(), Code::Capacity);
    let detail: Detail = error.detail().unwrap();
    assert_eq!(
        (detail.limit.as_deref(), detail.max),
        (Some("queued_calls"), Some(3))
    );
    for call in calls {
        call.await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn lists_are_sorted_filtered_and_paged() {
    let w = fixture();
    for box_id in ["b", "a", "d", "c"] {
        let mut spec = SpecDraft::new(box_id);
        spec.labels = Some([("even".to_owned(), (box_id > "b").to_string())].into());
        w.create(spec).await.unwrap();
    }
    assert_eq!(w.ids().await, ["a", "b", "c", "d"]);
    let first = BoxListParams {
        limit: Some(3),
        ..BoxListParams::default()
    };
    let page = w.runtime.list(&w.caller, &first).await.unwrap();
    assert_eq!(
        (page.items.len(), page.total, page.next.clone()),
        (3, 4, Some(id("c")))
    );
    let rest = BoxListParams {
        after: page.next,
        ..BoxListParams::default()
    };
    let page = w.runtime.list(&w.caller, &rest).await.unwrap();
    assert_eq!(
        (page.items[0].box_id.as_str(), page.items.len(), page.next),
        ("d", 1, None)
    );
    let labelled = BoxListParams {
        labels: [("even".to_owned(), "true".to_owned())].into(),
        ..BoxListParams::default()
    };
    assert_eq!(w.runtime.list(&w.caller, &labelled).await.unwrap().total, 2);
    let other = BoxListParams {
        gateway: Some(box_protocol::GatewayName::of("other")),
        ..BoxListParams::default()
    };
    assert_eq!(w.runtime.list(&w.caller, &other).await.unwrap().total, 0);
    let failed = BoxListParams {
        state: vec![BoxState::Failed],
        ..BoxListParams::default()
    };
    assert_eq!(w.runtime.list(&w.caller, &failed).await.unwrap().total, 0);
}

#[tokio::test(start_paused = true)]
async fn names_labels_and_notes_change_and_names_stay_unique() {
    let w = fixture();
    let named = |box_id: &str, name: &str| {
        let mut spec = SpecDraft::new(box_id);
        spec.name = Some(box_protocol::Name::new(name).unwrap());
        spec
    };
    w.create(named("a", "first")).await.unwrap();
    assert_eq!(code(w.create(named("b", "first")).await), Code::Conflict);
    w.create(named("b", "second")).await.unwrap();
    let update = |box_id: &str, name: Option<&str>| BoxUpdateParams {
        box_id: id(box_id),
        name: name.map(|name| box_protocol::Name::new(name).unwrap()),
        labels: [
            ("k".to_owned(), Some("v".to_owned())),
            ("gone".to_owned(), None),
        ]
        .into(),
        note: Some(box_protocol::Note::new(&7).unwrap()),
        lifetime: None,
        extra_mounts: None,
        defaults: None,
        network_policy: None,
    };
    assert_eq!(
        code(
            w.runtime
                .update(&w.caller, update("b", Some("first")))
                .await
        ),
        Code::Conflict
    );
    let info = w
        .runtime
        .update(&w.caller, update("b", Some("third")))
        .await
        .unwrap();
    assert_eq!(info.name.unwrap().as_str(), "third");
    assert_eq!(info.labels["k"], "v");
    assert_eq!(info.note.unwrap().as_json(), "7");
    w.create(named("c", "second")).await.unwrap();
    w.delete("a").await.unwrap();
    w.create(named("d", "first")).await.unwrap();
    assert_eq!(
        code(w.runtime.update(&w.caller, update("z", None)).await),
        Code::NotFound
    );
}

#[tokio::test(start_paused = true)]
async fn bad_input_starts_nothing() {
    let w = fixture();
    for (bad, field) in [
        (spec("s", " "), "cmd"),
        (spec("s", "true").cpus(0.0), "cpus"),
        (spec("", "true"), "box_id"),
        (spec("s", "true").memory_mb(1), "memory_mb"),
    ] {
        let error = w.exec_spec(bad).await.unwrap_err();
        assert_eq!(error.code(), Code::Validation);
        assert_eq!(
            error.detail::<Detail>().unwrap().field.as_deref(),
            Some(field)
        );
    }
    assert!(w.backend.starts().is_empty() && w.ids().await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn every_admitted_call_is_served_by_the_next_box() {
    let w = fixture_with(|config| config.queued_calls = 4);
    w.backend.next_command(Reply::hang());
    w.backend.next_stop(InjectedFault::Slow(seconds(5)));
    let slow = w
        .begin_exec(exec_of(spec("s", "slow").timeout_sec(3)))
        .await;
    let mut waiting = Vec::new();
    // As many calls as the queue takes, and as many as the mailbox takes while the box stops.
    for _ in 0..4 {
        waiting.push(w.begin("s", "later").await);
    }
    tokio::time::sleep(seconds(4)).await;
    assert!(!slow.is_finished());
    for _ in 0..4 {
        waiting.push(w.begin("s", "later").await);
    }
    for call in waiting {
        assert_eq!(call.await.unwrap().unwrap().stdout, "executed: later");
    }
    assert_eq!(w.backend.starts(), ["s", "s"]);
}

#[tokio::test(start_paused = true)]
async fn a_box_is_found_by_the_name_that_its_owner_gave_it() {
    let w = fixture();
    let (ann, bob) = (w.with_token("ann"), w.with_token("bob"));
    let named = |box_id: &str, gateway: &'static str| {
        let name = Some(Name::new("web").unwrap());
        SpecDraft {
            name,
            gateway: Some(GatewayName::of(gateway)),
            ..SpecDraft::new(box_id)
        }
    };
    ann.create(named("a", "native")).await.unwrap();
    ann.create(named("b", "e2b")).await.unwrap();
    bob.create(named("c", "native")).await.unwrap();
    let find = async |who: &super::fixture::Fixture, gateway: &'static str, name: &str| {
        let (gateway, name) = (GatewayName::of(gateway), Name::new(name).unwrap());
        let found = who.runtime.get_named(&who.caller, gateway, name).await;
        found.map(|info| info.box_id.to_string())
    };
    assert_eq!(find(&ann, "native", "web").await.unwrap(), "a");
    assert_eq!(find(&ann, "e2b", "web").await.unwrap(), "b");
    assert_eq!(find(&bob, "native", "web").await.unwrap(), "c");
    assert_eq!(code(find(&bob, "e2b", "web").await), Code::NotFound);
    let rename = BoxUpdateParams {
        name: Some(Name::new("db").unwrap()),
        ..BoxUpdateParams::of(id("a"))
    };
    ann.runtime.update(&ann.caller, rename).await.unwrap();
    assert_eq!(code(find(&ann, "native", "web").await), Code::NotFound);
    assert_eq!(find(&ann, "native", "db").await.unwrap(), "a");
    ann.delete("a").await.unwrap();
    assert_eq!(code(find(&ann, "native", "db").await), Code::NotFound);
}
