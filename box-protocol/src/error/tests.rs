use super::*;

fn about(code: Code, subject: Subject) -> BoxError {
    BoxError::new(code, "text").with_detail(&Detail::about(subject))
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
