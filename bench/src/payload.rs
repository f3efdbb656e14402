//! What every contestant echoes.

use serde::{Deserialize, Serialize};

/// Five fields, about 220 bytes on the wire with a JSON-RPC envelope. Owned, as a handler gets its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Payload {
    pub(crate) session: String,
    pub(crate) command: String,
    pub(crate) directory: String,
    pub(crate) timeout_ms: u64,
    pub(crate) number: u64,
}

impl Payload {
    /// A small message, numbered so that an answer can be told from another's.
    pub(crate) fn small(number: u64) -> Self {
        Self {
            session: "0199a7c2-5f1e-7b3a-9c41-2b7d8e6f0a13".to_owned(),
            command: "python3 -m pytest --quiet tests".to_owned(),
            directory: "/workspace/project".to_owned(),
            timeout_ms: 30_000,
            number,
        }
    }

    /// A message of so many bytes in one field, none of which needs an escape.
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
