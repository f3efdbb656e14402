use super::*;

fn about(code: Code, subject: Subject) -> BoxError {
    BoxError::new(code, "text").with_detail(&Detail::about(subject))
}

#[test]
fn every_word_has_exactly_one_row() {
    for code in Code::ALL {
        assert_eq!(mapping(code).code, code);
    }
    assert_eq!(MAPPINGS.len(), Code::ALL.len());
}

#[test]
fn json_rpc_numbers_are_distinct_and_faults_have_their_own() {
    let mut numbers: Vec<_> = MAPPINGS.iter().map(|row| row.json_rpc).collect();
    for (fault, number) in [
        (Fault::Parse, -32700),
        (Fault::InvalidMessage, -32600),
        (Fault::UnknownAction, -32601),
        (Fault::InvalidParams, -32602),
    ] {
        assert_eq!(json_rpc_number(&BoxError::fault(fault, "x")), number);
        numbers.push(number);
    }
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 16);
    assert_eq!(json_rpc_number(&BoxError::validation("x")), -32003);
}

#[test]
fn langbot_classes_are_those_its_client_looks_for() {
    let plain = |code| langbot_class(&BoxError::new(code, "x"));
    assert_eq!(plain(Code::Validation), "BoxValidationError");
    assert_eq!(plain(Code::Conflict), "BoxSessionConflictError");
    assert_eq!(plain(Code::NotFound), "BoxSessionNotFoundError");
    assert_eq!(plain(Code::Unavailable), "BoxBackendUnavailableError");
    assert_eq!(plain(Code::Unsupported), "BoxBackendUnavailableError");
    assert_eq!(plain(Code::Capacity), "BoxCapacityExceededError");
    assert_eq!(plain(Code::Denied), "PermissionError");
    assert_eq!(plain(Code::Internal), "RuntimeError");
    let unknown = BoxError::fault(Fault::UnknownAction, "Action box_fly not found");
    assert_eq!(langbot_class(&unknown), "ValueError");
}

#[test]
fn the_subject_chooses_among_langbot_classes() {
    let class = |code, subject| langbot_class(&about(code, subject));
    assert_eq!(
        class(Code::Conflict, Subject::Process),
        "BoxManagedProcessConflictError"
    );
    assert_eq!(
        class(Code::NotFound, Subject::Process),
        "BoxManagedProcessNotFoundError"
    );
    assert_eq!(
        class(Code::NotFound, Subject::Box),
        "BoxSessionNotFoundError"
    );
    assert_eq!(class(Code::Denied, Subject::Grant), "BoxAdmissionError");
    assert_eq!(
        class(Code::Unavailable, Subject::Readiness),
        "BoxReadinessError"
    );
}

#[test]
fn every_word_has_a_status_in_every_world() {
    for code in Code::ALL {
        for world in [HttpWorld::OpenSandbox, HttpWorld::LangSmith, HttpWorld::Aio] {
            for stage in [Stage::Creating, Stage::Before, Stage::Begun] {
                match http_status(&BoxError::new(code, "x"), world, stage) {
                    Some(status) => assert!((400..600).contains(&status), "{code} {world:?}"),
                    None => assert_eq!(code, Code::Cancelled),
                }
            }
        }
    }
}

#[test]
fn statuses_depend_on_what_the_table_says() {
    use HttpWorld::{Aio, LangSmith, OpenSandbox};
    let status = |error: &BoxError, world, stage| http_status(error, world, stage).unwrap();

    let lasting = BoxError::unavailable("no seccomp").with_detail(&Detail::lasting());
    let passing = BoxError::unavailable("starting");
    assert_eq!(status(&lasting, OpenSandbox, Stage::Before), 501);
    assert_eq!(status(&passing, OpenSandbox, Stage::Before), 503);
    assert_eq!(status(&lasting, LangSmith, Stage::Creating), 422);
    assert_eq!(status(&passing, Aio, Stage::Before), 502);

    let shape = BoxError::fault(Fault::InvalidParams, "x");
    assert_eq!(status(&shape, Aio, Stage::Before), 422);
    assert_eq!(status(&BoxError::validation("x"), Aio, Stage::Before), 400);
    assert_eq!(
        status(&BoxError::validation("x"), LangSmith, Stage::Before),
        422
    );

    let conflict = BoxError::conflict("x");
    assert_eq!(status(&conflict, Aio, Stage::Before), 409);
    assert_eq!(status(&conflict, Aio, Stage::Begun), 400);

    assert_eq!(
        status(&about(Code::Capacity, Subject::Disk), Aio, Stage::Before),
        507
    );
    assert_eq!(status(&BoxError::capacity("x"), Aio, Stage::Before), 503);
    assert_eq!(
        status(&BoxError::timeout("x"), LangSmith, Stage::Creating),
        408
    );
    assert_eq!(
        status(&BoxError::timeout("x"), LangSmith, Stage::Before),
        504
    );
    assert_eq!(
        status(&BoxError::unsupported("x"), LangSmith, Stage::Creating),
        422
    );
}

#[test]
fn detail_of_a_newer_peer_is_still_read() {
    let newer = serde_json::json!({"subject": "moon", "lasting": true, "phase": "full"});
    let error = BoxError::unavailable("x").with_detail(&newer);
    let detail: Detail = error.detail().unwrap();
    assert_eq!(detail.subject, Some(Subject::Other));
    assert!(detail.lasting);
    assert_eq!(langbot_class(&error), "BoxBackendUnavailableError");
}

#[test]
fn empty_detail_members_are_not_written() {
    let text = serde_json::to_string(&Detail::about(Subject::Process)).unwrap();
    assert_eq!(text, r#"{"subject":"process"}"#);
}

#[test]
fn the_engines_limits_are_read_as_details() {
    let error = BoxError::new(Code::Capacity, "Box session capacity reached (2)")
        .with_detail(&serde_json::json!({"limit": "max_sessions", "max": 2}));
    let detail: Detail = error.detail().unwrap();
    assert_eq!(
        (detail.limit.as_deref(), detail.max),
        (Some("max_sessions"), Some(2))
    );
}
