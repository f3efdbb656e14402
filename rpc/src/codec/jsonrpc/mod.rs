//! JSON-RPC 2.0 codec.
//!
//! The messages of the engine itself are notifications with names that begin with `$/`: `$/cancel {id}`, `$/chunk {id,
//! chunk}`, `$/credit {id, credit}`, `$/ping`, `$/pong`, `$/bye {reason, restart}`. The codec ignores an unknown
//! notification with such a name.
//!
//! Reading order: this file, `encode`, `decode`.

mod decode;
mod encode;

use super::{
    CallId, CallKind, Codec, Control, DecodeError, Decoded, Message, Meta, Payload, id_at_start,
    members_at_start,
};
use crate::error::{Code, Fault, RpcError};
use crate::limits::Limits;

/// JSON-RPC 2.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JsonRpc;

impl Codec for JsonRpc {
    fn name(&self) -> &'static str {
        "JSON-RPC 2.0"
    }

    fn recognises(&self, text: &str) -> bool {
        decode::recognises(text)
    }

    fn recognises_head(&self, head: &str) -> bool {
        head.contains("\"jsonrpc\"")
    }

    fn decode<'a>(&self, text: &'a str, limits: &Limits) -> Decoded<'a> {
        decode::decode(text, limits)
    }

    fn decode_fully<'a>(&self, text: &'a str, limits: &Limits) -> Result<Message<'a>, DecodeError> {
        decode::decode_one(text, limits)
    }

    fn id_at_start(&self, head: &str, limits: &Limits) -> Option<CallId> {
        id_at_start(head, "\"id\"", limits)
    }

    fn is_response(&self, head: &str) -> bool {
        let members = members_at_start(head);
        !members.contains("\"method\"")
            && (members.contains("\"result\"") || members.contains("\"error\""))
    }

    fn chunk_at_start(&self, head: &str, limits: &Limits) -> Option<CallId> {
        let (before, call) = head.split_once("\"params\":")?;
        before
            .contains("\"$/chunk\"")
            .then(|| self.id_at_start(call.trim_start(), limits))
            .flatten()
    }

    fn call(
        &self,
        id: Option<i64>,
        action: &str,
        params: &dyn Payload,
        meta: &Meta,
    ) -> Result<String, serde_json::Error> {
        encode::call(id, action, params, meta)
    }

    fn result(
        &self,
        id: &CallId,
        body: &dyn Payload,
        _: CallKind,
    ) -> Result<String, serde_json::Error> {
        encode::result(id, body)
    }

    fn error(&self, id: Option<&CallId>, error: &RpcError) -> Option<String> {
        Some(encode::error(id, error))
    }

    fn chunk(
        &self,
        id: &CallId,
        _: u64,
        body: &dyn Payload,
        capacity: usize,
    ) -> Result<String, serde_json::Error> {
        encode::chunk(id, body, capacity)
    }

    fn control(&self, control: &Control<'_>) -> Option<String> {
        encode::control(control)
    }
}

/// Beginning of a chunk, up to the id of its call.
const CHUNK: &str = "{\"jsonrpc\":\"2.0\",\"method\":\"$/chunk\",\"params\":{\"id\":";

/// Returns the JSON-RPC error number of each code.
fn number(code: Code) -> i64 {
    match code {
        Code::Conflict => -32001,
        Code::NotFound => -32002,
        Code::Validation => -32003,
        Code::Unavailable => -32004,
        Code::Denied => -32005,
        Code::Capacity => -32006,
        Code::Timeout => -32007,
        Code::Cancelled => -32008,
        Code::TooLarge => -32009,
        Code::Overloaded => -32010,
        Code::Unsupported => -32011,
        Code::Internal => -32603,
    }
}

fn code_of(wanted: i64) -> Option<Code> {
    Code::ALL.into_iter().find(|code| number(*code) == wanted)
}

const FAULTS: [(Fault, i64); 4] = [
    (Fault::Parse, -32700),
    (Fault::InvalidMessage, -32600),
    (Fault::UnknownAction, -32601),
    (Fault::InvalidParams, -32602),
];

fn fault_of(number: i64) -> Option<Fault> {
    FAULTS
        .iter()
        .find(|(_, of)| *of == number)
        .map(|(fault, _)| *fault)
}
