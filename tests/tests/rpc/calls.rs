//! A call returns a result or a typed error in both directions, and a failed call affects no other.

use box_rpc::{CallError, Code, Empty, Fault};
use box_test_wait::eventually;
use box_tests::actions::{Back, Echo, Fail, Failure, Note, Number, Panic, Probe, Text, Wait};
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Setup};
use futures::future::join_all;
use serde_json::json;

every_transport!(
    a_call_returns_its_result,
    text_of_every_kind_survives,
    every_error_keeps_its_code,
    both_ends_call,
    a_notification_runs_without_an_answer,
    a_panic_is_that_calls_own,
    an_unknown_action_is_named,
    bad_parameters_name_the_field,
    many_calls_at_once_each_get_their_own_answer,
);

async fn a_call_returns_its_result(setup: Setup) {
    let fixture = setup.start().await;
    let answer = fixture
        .peer
        .call::<Echo>(&Text::new("hello"))
        .await
        .unwrap();
    assert_eq!(answer, Text::new("hello"));
}

async fn text_of_every_kind_survives(setup: Setup) {
    let fixture = setup.start().await;
    let long = "ünï©ode 日本 ".repeat(8000);
    for text in [
        "",
        "line\nbreak\r\n\ttab",
        "quote\" back\\slash",
        "\u{0}\u{7f}\u{2028}",
        "🦀é\u{301}",
        &long,
    ] {
        let answer = fixture.peer.call::<Echo>(&Text::new(text)).await.unwrap();
        assert_eq!(answer.text, text);
    }
}

async fn every_error_keeps_its_code(setup: Setup) {
    let dialect = setup.dialect;
    let fixture = setup.start().await;
    for code in Code::ALL {
        // LangBot has no error text for these codes without a limit, nor for permanent failures.
        let expected = match (dialect, code) {
            (Dialect::LangBot, Code::TooLarge | Code::Overloaded) => Code::Internal,
            (Dialect::LangBot, Code::Unsupported) => Code::Unavailable,
            _ => code,
        };
        let failure = Failure {
            code,
            message: "because".into(),
        };
        let error = fixture.peer.call::<Fail>(&failure).await.unwrap_err();
        let CallError::Refused(refused) = &error else {
            panic!("{error:?}")
        };
        assert_eq!(error.code(), expected);
        assert!(refused.message().ends_with("because"), "{refused}");
    }
}

async fn both_ends_call(setup: Setup) {
    let fixture = setup.start().await;
    let answers = join_all((0..20).map(|n| {
        let peer = fixture.peer.clone();
        async move { peer.call::<Back>(&Text::new(n.to_string())).await }
    }));
    for (n, answer) in answers.await.into_iter().enumerate() {
        assert_eq!(answer.unwrap().text, n.to_string());
    }
}

async fn a_notification_runs_without_an_answer(setup: Setup) {
    let fixture = setup.start().await;
    fixture
        .peer
        .notify::<Note>(&Text::new("noted"))
        .await
        .unwrap();
    eventually("the note arrives", async || {
        fixture.peer.call::<Probe>(&Empty {}).await.unwrap().notes == ["noted"]
    })
    .await;
    assert_eq!(fixture.peer.stats().late_responses, 0);
}

async fn a_panic_is_that_calls_own(setup: Setup) {
    let fixture = setup.start().await;
    let other = fixture.peer.clone();
    let waiting = tokio::spawn(async move { other.call::<Wait>(&Number { n: 200 }).await });
    for n in [0, 20] {
        let error = fixture.peer.call::<Panic>(&Number { n }).await.unwrap_err();
        assert_eq!(error.code(), Code::Internal, "{error}");
        assert!(
            !error.to_string().contains("panic on request"),
            "a panic's text is not for the caller: {error}"
        );
    }
    assert_eq!(waiting.await.unwrap().unwrap().n, 200);
    fixture
        .peer
        .call::<Echo>(&Text::new("still here"))
        .await
        .unwrap();
}

async fn an_unknown_action_is_named(setup: Setup) {
    let mut raw = setup.raw().await;
    raw.call(1, "no.such", &json!({})).await;
    let error = raw.answer().await.error();
    assert_eq!(error.protocol_fault, Some(Fault::UnknownAction));
    assert!(error.message.contains("no.such"), "{error:?}");
    raw.call(2, "echo", &json!({"text": "on"})).await;
    assert_eq!(raw.answer().await.result(), json!({"text": "on"}));
}

async fn bad_parameters_name_the_field(setup: Setup) {
    let mut raw = setup.raw().await;
    for (params, named) in [
        (json!({}), "text"),
        (json!({"text": 3}), "text: invalid type"),
        (json!({"text": "x", "other": 1}), "other"),
    ] {
        raw.call(1, "echo", &params).await;
        let error = raw.answer().await.error();
        assert_eq!(error.code, Code::Validation);
        assert!(error.message.contains(named), "{error:?}");
    }
    raw.call(2, "echo", &json!({"text": "on"})).await;
    assert_eq!(raw.answer().await.result(), json!({"text": "on"}));
}

async fn many_calls_at_once_each_get_their_own_answer(setup: Setup) {
    let fixture = setup.start().await;
    let calls = (0..100).map(|n: u64| {
        let peer = fixture.peer.clone();
        async move {
            let wait = peer
                .call::<Wait>(&Number { n: (n * 7) % 30 })
                .await
                .unwrap();
            assert_eq!(wait.n, (n * 7) % 30);
            peer.call::<Echo>(&Text::new(n.to_string()))
                .await
                .unwrap()
                .text
        }
    });
    let answers = join_all(calls).await;
    assert_eq!(answers, (0..100).map(|n| n.to_string()).collect::<Vec<_>>());
}
