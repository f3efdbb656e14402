//! The message that every contestant echoes.

use serde::{Deserialize, Serialize};

/// Five fields, about 220 bytes on the wire with a JSON-RPC envelope.
///
/// The fields are owned, as the parameters of a handler are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Payload {
    pub(crate) session: String,
    pub(crate) command: String,
    pub(crate) directory: String,
    pub(crate) timeout_ms: u64,
    pub(crate) number: u64,
}

impl Payload {
    /// Returns a small message with a number that identifies its answer.
    pub(crate) fn small(number: u64) -> Self {
        Self {
            session: "0199a7c2-5f1e-7b3a-9c41-2b7d8e6f0a13".to_owned(),
            command: "python3 -m pytest --quiet tests".to_owned(),
            directory: "/workspace/project".to_owned(),
            timeout_ms: 30_000,
            number,
        }
    }

    /// Returns a message with this many bytes in one field, which need no escapes.
    pub(crate) fn large(bytes: usize) -> Self {
        Self {
            command: "x".repeat(bytes),
            ..Self::small(0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Payload;

    #[test]
    fn a_request_is_about_220_bytes() {
        let params = serde_json::to_string(&Payload::small(123_456)).unwrap();
        let request =
            format!(r#"{{"jsonrpc":"2.0","id":123456,"method":"echo","params":{params}}}"#);
        assert!((215..=225).contains(&request.len()), "{}", request.len());
    }
}
