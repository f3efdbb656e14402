//! Messages: one JSON object each, as in JSON-RPC but without its version.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use box_protocol::error::Detail;
use box_protocol::{BoxError, Code, Invalid};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// The id of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum RequestId {
    Number(i64),
    Text(String),
}

/// The id in the answer to a message without a valid one.
const NO_REQUEST: RequestId = RequestId::Number(-1);

/// A message of the client.
#[derive(Debug, Deserialize)]
pub(super) struct Message<'a> {
    /// Absent in a notification.
    #[serde(default, deserialize_with = "present")]
    pub(super) id: Option<RequestId>,
    pub(super) method: String,
    /// Not parsed: a request has large members that this server does not use.
    #[serde(borrow, default)]
    params: Option<&'a RawValue>,
}

/// Reads an id that must not be null.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<RequestId>, D::Error> {
    RequestId::deserialize(deserializer).map(Some)
}

impl<'a> Message<'a> {
    pub(super) fn read(text: &'a str) -> Result<Self, Fault> {
        serde_json::from_str(text).map_err(|error| {
            Fault::invalid_request(format!("message: not a JSON-RPC message: {error}"))
        })
    }

    pub(super) fn params<P: DeserializeOwned>(&self) -> Result<P, Fault> {
        let text = self.params.map_or("null", RawValue::get);
        let read = serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_str(text));
        read.map_err(|error| {
            let problem = error.inner().to_string();
            // The client has no lines, and the parameters are a part of its message.
            let problem = problem.split(" at line ").next().unwrap_or_default();
            let path = error.path().to_string();
            let member = if path == "." { "params" } else { &path };
            Fault::invalid_params(format!("{member}: {problem}"))
        })
    }
}

/// Returns the answer to a request.
pub(super) fn answer(id: Option<RequestId>, answer: Result<Value, Fault>) -> String {
    let id = id.unwrap_or(NO_REQUEST);
    let message = match answer {
        Ok(result) => json!({"id": id, "result": result}),
        Err(Fault { code, message }) => {
            json!({"id": id, "error": {"code": code, "message": message}})
        }
    };
    message.to_string()
}

/// Returns a notification to the client.
pub(super) fn notification(method: &str, params: &Value) -> String {
    json!({"method": method, "params": params}).to_string()
}

/// An error that the client gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) code: i64,
    pub(super) message: String,
}

impl Fault {
    fn new(code: i64, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { code, message }
    }

    pub(super) fn invalid_request(message: impl Into<String>) -> Self {
        Self::new(-32600, message)
    }

    pub(super) fn unknown_method(method: &str) -> Self {
        Self::new(-32601, format!("method: {method:?} is not served by a box"))
    }

    pub(super) fn invalid_params(message: impl Into<String>) -> Self {
        Self::new(-32602, message)
    }

    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(-32603, message)
    }

    /// A file or a handle that does not exist.
    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self::new(-32004, message)
    }

    /// A session that another connection uses.
    pub(super) fn attached(message: impl Into<String>) -> Self {
        Self::new(-32010, message)
    }

    /// The error of a file access; clients tell missing files and refused accesses from others.
    pub(super) fn of_file(error: &BoxError) -> Self {
        let errno = error.detail::<Detail>().and_then(|detail| detail.errno);
        let message = error.message();
        match (errno.as_deref(), error.code()) {
            (Some("ENOENT"), _) => Self::not_found(message),
            (Some("EACCES" | "EPERM" | "EINVAL" | "ELOOP"), _)
            | (None, Code::Validation | Code::Denied) => Self::invalid_request(message),
            _ => Self::internal(message),
        }
    }
}

/// Errors of commands and of the box itself.
impl From<BoxError> for Fault {
    fn from(error: BoxError) -> Self {
        Self::internal(error.message())
    }
}

impl From<Invalid> for Fault {
    fn from(error: Invalid) -> Self {
        Self::invalid_params(error.to_string())
    }
}

/// Bytes in base64.
#[derive(Debug)]
pub(super) struct Bytes(pub(super) Vec<u8>);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        STANDARD.decode(text).map(Self).map_err(D::Error::custom)
    }
}

/// Writes bytes in base64.
pub(super) fn encoded(bytes: impl AsRef<[u8]>) -> String {
    STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_parameters_names_the_member() {
        let read = |text: &str| {
            let text = format!(r#"{{"id":1,"method":"a","params":{text}}}"#);
            let params = Message::read(&text).unwrap().params::<Vec<u8>>();
            params.map_err(|fault| fault.message)
        };
        assert_eq!(read("[1,2]"), Ok(vec![1, 2]));
        let wrong = "[1]: invalid type: string \"x\", expected u8";
        assert_eq!(read(r#"[1,"x"]"#), Err(wrong.to_owned()));
        let missing = "params: invalid type: null, expected a sequence";
        assert_eq!(read("null"), Err(missing.to_owned()));
    }

    #[test]
    fn only_a_request_with_a_valid_id_gets_it_back() {
        let read = |text| Message::read(text).map(|message| message.id);
        assert_eq!(read(r#"{"method":"a"}"#), Ok(None));
        let number = RequestId::Number(7);
        assert_eq!(read(r#"{"id":7,"method":"a","x":1}"#), Ok(Some(number)));
        for bad in [
            r#"{"id":null,"method":"a"}"#,
            r#"{"id":1.5,"method":"a"}"#,
            "[1]",
            "{",
            r#"{"id":1}"#,
        ] {
            assert_eq!(read(bad).unwrap_err().code, -32600, "{bad}");
        }
        let failed = answer(None, Err(Fault::internal("x")));
        assert!(failed.contains(r#""id":-1"#), "{failed}");
    }
}
