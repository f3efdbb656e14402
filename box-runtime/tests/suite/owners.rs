//! A box belongs to the caller that made it.

use box_protocol::actions::{
    BoxListParams, BoxTransitionParams, SystemShutdownParams, TargetState,
};
use box_protocol::{BoxState, Code};
use box_runtime::Caller;
use box_runtime::fake::InjectedFault;

use super::fixture::{code, fixture, id, seconds, settle, spec};

#[tokio::test(start_paused = true)]
async fn boxes_of_other_owners_do_not_exist() {
    let w = fixture();
    let (alice, bob) = (w.with_token("alice"), w.with_token("bob"));
    alice.exec("a", "true").await.unwrap();
    bob.exec("b", "true").await.unwrap();
    assert_eq!(
        (alice.ids().await, bob.ids().await),
        (vec!["a".to_owned()], vec!["b".to_owned()])
    );
    assert_eq!(w.ids().await, ["a@alice", "b@bob"]);
    assert_eq!(code(bob.get("a").await), Code::NotFound);
    assert_eq!(code(bob.delete("a").await), Code::NotFound);
    assert_eq!(code(bob.get("a@alice").await), Code::NotFound);
    assert_eq!(w.backend.execs().len(), 2);
    w.exec("a@alice", "by local").await.unwrap();
    assert_eq!(alice.ids().await, ["a"]);
    assert_eq!(w.get("a@alice").await.unwrap().box_id, id("a@alice"));
    w.delete("a@alice").await.unwrap();
    assert_eq!(code(alice.get("a").await), Code::NotFound);
}

#[tokio::test(start_paused = true)]
async fn ids_are_per_owner() {
    let w = fixture();
    let (alice, bob) = (w.with_token("alice"), w.with_token("bob"));
    // Neither owner can take an id from the other or from the administrator, or learn its owner.
    for owner in [&alice, &bob, &w] {
        assert!(!owner.create(spec("x", "")).await.unwrap().existed);
        assert_eq!(owner.get("x").await.unwrap().box_id, id("x"));
    }
    assert_eq!(w.ids().await, ["x", "x@alice", "x@bob"]);
    assert_eq!(
        (alice.ids().await, bob.ids().await),
        (vec!["x".to_owned()], vec!["x".to_owned()])
    );
    // Each owner addresses its own box.
    bob.delete("x").await.unwrap();
    assert_eq!(w.ids().await, ["x", "x@alice"]);
    w.delete("x").await.unwrap();
    assert_eq!(w.ids().await, ["x@alice"]);
    assert_eq!(code(w.get("x").await), Code::NotFound);
    // A page may end at any box.
    bob.create(spec("x", "")).await.unwrap();
    let mut params = BoxListParams {
        limit: Some(1),
        ..BoxListParams::default()
    };
    let first = w.runtime.list(&w.caller, &params).await.unwrap();
    params.after = first.next;
    let second = w.runtime.list(&w.caller, &params).await.unwrap();
    assert_eq!(second.items[0].box_id, id("x@bob"));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_the_boxes_visible_to_its_caller() {
    let w = fixture();
    let (alice, bob) = (w.with_token("alice"), w.with_token("bob"));
    alice.exec("a", "true").await.unwrap();
    bob.exec("b", "true").await.unwrap();
    assert_eq!(alice.shutdown().await.ended, 1);
    assert_eq!(w.ids().await, ["b@bob"]);
    let exit = SystemShutdownParams {
        exit: true,
        within_ms: None,
    };
    assert_eq!(
        code(w.runtime.shutdown(&Caller::token("bob"), exit).await),
        Code::Denied
    );
    assert_eq!(w.ids().await, ["b@bob"]);
    alice.exec("a", "true").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_token_named_local_has_no_administrator_rights() {
    let w = fixture();
    let token = w.with_token("local");
    w.exec("a", "true").await.unwrap();
    token.exec("b", "true").await.unwrap();
    assert_eq!(token.ids().await, ["b"]);
    for id in ["a", "a@local"] {
        assert_eq!(code(token.get(id).await), Code::NotFound);
    }
    let exit = SystemShutdownParams {
        exit: true,
        ..SystemShutdownParams::default()
    };
    let refused = token.runtime.shutdown(&token.caller, exit).await;
    assert_eq!(code(refused), Code::Denied);
    assert_eq!(w.ids().await, ["a", "b@token:local"], "control");
}

#[tokio::test(start_paused = true)]
async fn the_holder_of_a_capability_sees_one_box() {
    let w = fixture();
    let (alice, bob) = (w.with_token("alice"), w.with_token("bob"));
    for (owner, name) in [(&alice, "x"), (&bob, "y"), (&w, "z")] {
        owner.create(spec(name, "")).await.unwrap();
    }
    let unique = alice.get("x").await.unwrap().unique_id;
    let holder = w.with_caller(Caller::only(unique.as_str()));
    // The box has its unique id and no other.
    assert_eq!(holder.ids().await, std::slice::from_ref(&unique));
    assert_eq!(holder.get(&unique).await.unwrap().unique_id, unique);
    holder.exec(&unique, "by capability").await.unwrap();
    let others = w.get("z").await.unwrap().unique_id;
    for other in ["x", "x@alice", "y@bob", "z", &others] {
        assert_eq!(code(holder.get(other).await), Code::NotFound, "{other}");
        assert_eq!(code(holder.delete(other).await), Code::NotFound, "{other}");
    }
    // It owns nothing, and ends nothing.
    assert_eq!(code(holder.create(spec("new", "")).await), Code::Denied);
    assert_eq!(code(holder.exec("new", "true").await), Code::Denied);
    assert_eq!(holder.shutdown().await.ended, 0);
    assert_eq!(w.ids().await, ["x@alice", "y@bob", "z"]);
    // A token with the holder's name does not see the box.
    let named = w.with_token(&holder.caller.name());
    assert!(named.ids().await.is_empty());
    alice.delete("x").await.unwrap();
    assert!(holder.ids().await.is_empty());
    assert_eq!(code(holder.get(&unique).await), Code::NotFound);
}

#[tokio::test(start_paused = true)]
async fn a_box_has_one_unique_id_from_its_creation_to_its_deletion() {
    let w = fixture();
    w.backend.next_start(InjectedFault::Slow(seconds(9)));
    let creating = w.create(spec("x", ""));
    let early = async {
        settle().await;
        w.get("x").await.unwrap()
    };
    let (created, early) = tokio::join!(creating, early);
    let unique = created.unwrap().info.unique_id;
    assert_eq!(
        (early.state, &early.unique_id),
        (BoxState::Starting, &unique)
    );
    let holder = w.with_caller(Caller::only(unique.as_str()));
    for to in [TargetState::Stopped, TargetState::Running] {
        let params = BoxTransitionParams {
            box_id: id("x"),
            to,
        };
        w.runtime.transition(&w.caller, params).await.unwrap();
        assert_eq!(holder.get(&unique).await.unwrap().unique_id, unique);
    }
    // A new box has another one, also if it takes the place of a dead box.
    w.backend.kill_box("x");
    w.exec("x", "true").await.unwrap();
    let replaced = w.get("x").await.unwrap().unique_id;
    w.delete("x").await.unwrap();
    w.create(spec("x", "")).await.unwrap();
    let later = w.get("x").await.unwrap().unique_id;
    assert!(unique != replaced && replaced != later && unique != later);
    assert_eq!(code(holder.get(&unique).await), Code::NotFound);
    assert_eq!(w.get(&later).await.unwrap().unique_id, later);
}

#[tokio::test(start_paused = true)]
async fn an_administrator_names_boxes_of_others_by_owner_and_by_unique_id() {
    let w = fixture();
    let (first, second) = (w.with_token("b@c"), w.with_token("c"));
    first.create(spec("a", "")).await.unwrap();
    second.create(spec("a@b@x", "")).await.unwrap();
    for (id, owner, own) in [("a@b@c", &first, "a"), ("a@b@x@c", &second, "a@b@x")] {
        let expected = owner.get(own).await.unwrap().unique_id;
        assert_eq!(w.get(id).await.unwrap().unique_id, expected, "{id}");
        assert_eq!(w.get(&expected).await.unwrap().unique_id, expected);
        for stranger in [&first, &second] {
            assert_eq!(code(stranger.get(id).await), Code::NotFound, "{id}");
            let by_unique = stranger.get(&expected).await;
            assert_eq!(code(by_unique), Code::NotFound, "{expected}");
        }
    }
    // An id without an owner, or with one that has no such box.
    for id in ["a", "a@c", "a@b", "@c", "a@b@x@"] {
        assert_eq!(code(w.get(id).await), Code::NotFound, "{id}");
    }
}
