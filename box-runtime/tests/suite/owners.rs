//! A box belongs to whoever made it.

use box_protocol::Code;
use box_protocol::actions::SystemShutdownParams;
use box_runtime::Caller;

use super::world::{code, spec, world};

#[tokio::test(start_paused = true)]
async fn others_boxes_do_not_exist() {
    let w = world();
    let (alice, bob) = (w.seen_by("alice"), w.seen_by("bob"));
    alice.exec("a", "true").await.unwrap();
    bob.exec("b", "true").await.unwrap();
    assert_eq!(
        (alice.ids().await, bob.ids().await),
        (vec!["a".to_owned()], vec!["b".to_owned()])
    );
    assert_eq!(w.ids().await, ["a", "b"]);
    assert_eq!(code(bob.get("a").await), Code::NotFound);
    assert_eq!(code(bob.delete("a").await), Code::NotFound);
    assert_eq!(code(bob.exec("a", "true").await), Code::NotFound);
    assert_eq!(code(bob.create(spec("a", "")).await), Code::NotFound);
    assert_eq!(w.backend.execs().len(), 2);
    w.exec("a", "by local").await.unwrap();
    assert_eq!(alice.ids().await, ["a"]);
    w.delete("a").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_what_its_caller_sees() {
    let w = world();
    let (alice, bob) = (w.seen_by("alice"), w.seen_by("bob"));
    alice.exec("a", "true").await.unwrap();
    bob.exec("b", "true").await.unwrap();
    assert_eq!(alice.shutdown().await.ended, 1);
    assert_eq!(w.ids().await, ["b"]);
    let exit = SystemShutdownParams {
        exit: true,
        within_ms: None,
    };
    assert_eq!(
        code(w.runtime.shutdown(&Caller::named("bob"), exit).await),
        Code::Denied
    );
    assert_eq!(w.ids().await, ["b"]);
    alice.exec("a", "true").await.unwrap();
}
