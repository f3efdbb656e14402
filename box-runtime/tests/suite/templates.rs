//! Templates, and commands that prepare a box.

use box_protocol::error::Detail;
use box_protocol::{BoxError, Code, ItemRef, SpecDraft};
use box_runtime::fake::Reply;
use serde_json::{Value, json};

use super::catalog::{put, update, with_catalog};
use super::fixture::{Fixture, code, seconds};

async fn template(w: &Fixture, name: &str, spec: Value) {
    let content = json!({"template": {"spec": spec}});
    put(w, json!({"name": name, "content": content}))
        .await
        .unwrap();
}

fn of(id: &str, template: &str) -> SpecDraft {
    serde_json::from_value(json!({"box_id": id, "template": template})).unwrap()
}

fn texts(w: &Fixture) -> Vec<String> {
    w.backend
        .execs()
        .into_iter()
        .map(|(_, text)| text)
        .collect()
}

#[tokio::test]
async fn a_request_wins_over_its_template() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    template(
        &w,
        "t",
        json!({"memory_mb": 64, "cpus": 2.0, "labels": {"a": "t", "b": "t"}}),
    )
    .await;
    let mut spec = of("s", "t").memory_mb(128);
    spec.labels = Some([("a".to_owned(), "own".to_owned())].into());
    let info = w.create(spec).await.unwrap().info;
    assert_eq!(
        (info.memory_mb, info.cpus.to_string()),
        (128, "2".to_owned())
    );
    assert_eq!(info.template, Some(ItemRef::new("t").unwrap()));
    assert_eq!(info.labels["a"], "own");
    assert_eq!(info.labels["b"], "t");
    // An existing box keeps its fields after the template has changed.
    let change = json!({"kind": "template", "item": "t",
        "content": {"template": {"spec": {"memory_mb": 256}}}});
    update(&w, change).await.unwrap();
    assert!(w.create(of("s", "t")).await.unwrap().existed);
    w.exec_spec(of("s", "t").cmd("ls")).await.unwrap();
    let info = w.create(of("new", "t")).await.unwrap().info;
    assert_eq!(
        (info.memory_mb, info.cpus.to_string()),
        (256, "1".to_owned())
    );
    w.exec_spec(of("by-exec", "t").cmd("ls")).await.unwrap();
    assert_eq!(w.get("by-exec").await.unwrap().memory_mb, 256);
    let conflict = w.create(of("s", "t").memory_mb(512)).await;
    assert_eq!(code(conflict), Code::Conflict);
}

#[tokio::test]
async fn templates_of_other_owners_and_missing_ones_are_not_found() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    let (alice, bob) = (w.with_token("alice"), w.with_token("bob"));
    template(&alice, "t", json!({})).await;
    let error = bob.create(of("s", "t")).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::NotFound, "template t not found")
    );
    assert_eq!(
        code(bob.exec_spec(of("s", "t").cmd("ls")).await),
        Code::NotFound
    );
    assert!(bob.list().await.is_empty());
    alice.create(of("s", "t")).await.unwrap();
}

fn prepared(id: &str, commands: &[&str]) -> SpecDraft {
    let commands: Vec<_> = commands.iter().map(|text| json!({"text": text})).collect();
    let prepare = json!({"commands": commands, "timeout_sec": 60});
    serde_json::from_value(json!({"box_id": id, "prepare": prepare})).unwrap()
}

#[tokio::test(start_paused = true)]
async fn commands_of_prepare_run_once_before_the_box_is_ready() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    w.exec_spec(prepared("s", &["one", "two"]).cmd("three"))
        .await
        .unwrap();
    assert_eq!(texts(&w), ["one", "two", "three"]);
    w.exec_spec(prepared("s", &["one", "two"]).cmd("four"))
        .await
        .unwrap();
    assert_eq!(texts(&w).len(), 4);
}

async fn refused(w: &Fixture, spec: SpecDraft) -> BoxError {
    let error = w.create(spec).await.unwrap_err();
    assert_eq!(code(w.get("s").await), Code::NotFound, "{error}");
    assert_eq!(w.backend.running(), 0);
    error
}

#[tokio::test(start_paused = true)]
async fn a_command_that_fails_ends_the_box_and_shows_its_last_lines() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    let output = "first\nsecond\n\u{1b}[31mno such package\n";
    w.backend.on_command("two", Reply::stdout(output).exit(3));
    let error = refused(&w, prepared("s", &["one", "two", "three"])).await;
    assert_eq!(texts(&w), ["one", "two"]);
    assert_eq!(
        (error.code(), error.message()),
        (
            Code::Unavailable,
            "prepare: command 2 of 3 exited with code 3: \u{fffd}[31mno such package"
        )
    );
    let detail: Detail = error.detail().unwrap();
    assert_eq!(
        detail.output.as_deref(),
        Some("first\nsecond\n\u{fffd}[31mno such package")
    );
    assert!(detail.lasting);
    assert_eq!(detail.field.as_deref(), Some("prepare"));
    // The next attempt is a new box.
    w.backend.on_command("two", Reply::default());
    w.create(prepared("s", &["one", "two"])).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn prepare_has_a_time_limit() {
    let directory = tempfile::tempdir().unwrap();
    let w = with_catalog(&directory);
    w.backend
        .on_command("slow", Reply::default().takes(seconds(40)));
    w.create(prepared("fine", &["slow"])).await.unwrap();
    w.delete("fine").await.unwrap();
    let error = refused(&w, prepared("s", &["slow", "slow"])).await;
    assert_eq!(
        error.message(),
        "prepare: command 2 of 2 did not end within 60 s"
    );
}
