use super::*;

#[test]
fn details_of_a_newer_peer_are_decoded() {
    let newer = serde_json::json!({"subject": "moon", "lasting": true, "phase": "full"});
    let error = BoxError::unavailable("x").with_detail(&newer);
    let detail: Detail = error.detail().unwrap();
    assert_eq!(detail.subject, Some(Subject::Other));
    assert!(detail.lasting);
}

#[test]
fn empty_detail_members_are_not_written() {
    let text = serde_json::to_string(&Detail::about(Subject::Process)).unwrap();
    assert_eq!(text, r#"{"subject":"process"}"#);
}

#[test]
fn limits_of_the_engine_decode_as_details() {
    let error = BoxError::new(
        Code::Capacity,
        "max_boxes: the limit of 2 is reached; delete a box",
    )
    .with_detail(&serde_json::json!({"limit": "max_boxes", "max": 2}));
    let detail: Detail = error.detail().unwrap();
    assert_eq!(
        (detail.limit.as_deref(), detail.max),
        (Some("max_boxes"), Some(2))
    );
}
