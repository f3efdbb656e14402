//! Unreadable messages: the fault of each, and the parts that are still known.

use super::*;

fn fault(text: &str) -> (Option<CallId>, Option<Fault>, Code) {
    match decode(text) {
        Err(DecodeError { id, error }) => (id, error.protocol_fault(), error.code()),
        Ok(message) => panic!("{text} was read as {message:?}"),
    }
}

#[test]
fn each_json_rpc_fault_has_its_kind_and_id() {
    let v = Code::Validation;
    let seven = Some(CallId::Number(7));
    assert_eq!(fault("{\"jsonrpc\":"), (None, Some(Fault::Parse), v));
    assert_eq!(fault("nonsense"), (None, Some(Fault::Parse), v));
    assert_eq!(fault("7"), (None, Some(Fault::InvalidMessage), v));
    assert_eq!(
        fault("{\"jsonrpc\":\"1.0\",\"id\":7,\"method\":\"a\"}"),
        (seven.clone(), Some(Fault::InvalidMessage), v)
    );
    assert_eq!(
        fault("{\"jsonrpc\":\"2.0\",\"id\":null,\"method\":\"a\"}"),
        (None, Some(Fault::InvalidMessage), v)
    );
    assert_eq!(
        fault("{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"a\"}"),
        (None, Some(Fault::InvalidMessage), v)
    );
    for params in ["3", "[]", "[1]", "\"a\"", "true"] {
        let text = format!("{{\"jsonrpc\":\"2.0\",\"id\":7,\"method\":\"a\",\"params\":{params}}}");
        let expected = (seven.clone(), Some(Fault::InvalidParams), v);
        assert_eq!(fault(&text), expected, "{params}");
        let notification = text.replace("\"id\":7,", "");
        let read = decode(&notification);
        assert!(matches!(read, Ok(Message::Ignored)), "{notification}");
    }
    assert_eq!(
        fault("{\"jsonrpc\":\"2.0\",\"id\":7}"),
        (seven.clone(), Some(Fault::InvalidMessage), v)
    );
    let bad_meta = "{\"jsonrpc\":\"2.0\",\"id\":7,\"method\":\"a\",\"params\":{\"_meta\":{\"deadline_ms\":-1}}}";
    assert_eq!(fault(bad_meta), (seven, Some(Fault::InvalidParams), v));
    let long = format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":\"{}\",\"method\":\"a\"}}",
        "x".repeat(300)
    );
    assert_eq!(fault(&long), (None, Some(Fault::InvalidMessage), v));
    assert_eq!(fault("[]"), (None, Some(Fault::InvalidMessage), v));
    let many = format!("[{}1]", "1,".repeat(200));
    assert_eq!(fault(&many), (None, None, Code::TooLarge));
}

#[test]
fn depth_is_limited_outside_strings_only() {
    let deep = format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":7,\"method\":\"a\",\"params\":{{\"x\":{}{}}}}}",
        "[".repeat(200),
        "]".repeat(200)
    );
    let Err(DecodeError { id, error }) = decode(&deep) else {
        panic!()
    };
    assert_eq!(id, Some(CallId::Number(7)));
    assert!(error.message().contains("depth of 128"), "{error}");
    let text = format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":7,\"method\":\"a\",\"params\":{{\"x\":\"{}\\\"{}\"}}}}",
        "[".repeat(200),
        "{".repeat(200)
    );
    assert!(decode(&text).is_ok());
}

#[test]
fn the_id_of_an_unreadable_message_is_found_at_its_start() {
    let id = |head: &str| JsonRpc.id_at_start(head, &limits());
    assert_eq!(
        id("{\"jsonrpc\":\"2.0\",\"id\":7,\"method\""),
        Some(CallId::Number(7))
    );
    assert_eq!(
        id("{\"id\" : \"x\", \"params\""),
        Some(CallId::Token("\"x\"".into()))
    );
    assert_eq!(
        id("{\"params\":{\"id\":9"),
        None,
        "the id of a nested object"
    );
    assert_eq!(id(""), None);
    assert_eq!(id("{\"id\":7"), None, "the number may be incomplete");
}
