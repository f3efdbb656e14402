//! An end of a connection that sends any text, for messages that a correct client never sends.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::time::Duration;

use box_rpc::{Code, Connection, ConnectionError, Fault, ReceiveHalf, SendHalf};
use serde_json::{Value, json};

use crate::fixture::{Dialect, RunningServer};

/// An end of a connection that sends any text, for messages that a correct client never sends.
#[allow(missing_docs)]
pub struct Raw {
    send: Box<dyn SendHalf>,
    receive: Box<dyn ReceiveHalf>,
    pub dialect: Dialect,
    _server: Option<RunningServer>,
}

impl Debug for Raw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Raw")
            .field("dialect", &self.dialect)
            .finish_non_exhaustive()
    }
}

/// An answer, in either dialect.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct RawAnswer {
    pub id: Value,
    pub outcome: Result<Value, RawError>,
}

/// A received error.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct RawError {
    pub code: Code,
    pub protocol_fault: Option<Fault>,
    pub message: String,
}

impl RawAnswer {
    /// The result.
    pub fn result(&self) -> Value {
        self.outcome.clone().expect("a result")
    }

    /// The error.
    pub fn error(&self) -> RawError {
        self.outcome.clone().expect_err("an error")
    }
}

impl Raw {
    /// Wraps this connection.
    pub fn over(
        connection: Box<dyn Connection>,
        dialect: Dialect,
        running: Option<RunningServer>,
    ) -> Self {
        let (send, receive) = connection.split();
        Self {
            send,
            receive,
            dialect,
            _server: running,
        }
    }

    /// Sends a text as it is.
    pub async fn send_text(&mut self, text: &str) {
        self.try_send_text(text).await.expect("sent");
    }

    async fn try_send_text(&mut self, text: &str) -> Result<(), ConnectionError> {
        let mut batch = VecDeque::from([text.to_owned()]);
        let sent = self.send.send_all(&mut batch);
        tokio::time::timeout(Duration::from_mins(1), sent)
            .await
            .unwrap_or(Err(ConnectionError::Closed))
    }

    /// The text of a call.
    pub fn request(&self, id: i64, action: &str, params: &Value) -> String {
        match self.dialect {
            Dialect::JsonRpc => {
                format!(
                    "{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"{action}\",\"params\":{params}}}"
                )
            }
            Dialect::LangBot => {
                format!("{{\"seq_id\": {id}, \"action\": \"{action}\", \"data\": {params}}}")
            }
        }
    }

    /// Sends a call.
    pub async fn call(&mut self, id: i64, action: &str, params: &Value) {
        self.try_call(id, action, params).await.expect("sent");
    }

    /// Sends a call, and returns the error of the connection if it fails.
    pub async fn try_call(
        &mut self,
        id: i64,
        action: &str,
        params: &Value,
    ) -> Result<(), ConnectionError> {
        self.try_send_text(&self.request(id, action, params)).await
    }

    /// Sends a call that asks for chunks.
    pub async fn stream_call(&mut self, id: i64, action: &str, params: &Value) {
        let mut params = params.clone();
        let text = match self.dialect {
            Dialect::JsonRpc => {
                params["_meta"] = json!({"credit": 8});
                self.request(id, action, &params)
            }
            Dialect::LangBot => {
                json!({"seq_id": id, "action": action, "data": params, "stream_flow_control": 1})
                    .to_string()
            }
        };
        self.send_text(&text).await;
    }

    /// Cancels a call.
    pub async fn cancel(&mut self, id: i64) {
        let text = match self.dialect {
            Dialect::JsonRpc => {
                json!({"jsonrpc": "2.0", "method": "$/cancel", "params": {"id": id}})
            }
            Dialect::LangBot => {
                json!({"seq_id": 900_000 + id, "action": "__cancel_action", "data": {"seq_id": id}})
            }
        };
        self.send_text(&text.to_string()).await;
    }

    /// Answers a call.
    pub async fn answer_with(&mut self, id: i64, result: &Value) {
        let text = match self.dialect {
            Dialect::JsonRpc => json!({"jsonrpc": "2.0", "id": id, "result": result}),
            Dialect::LangBot => {
                json!({"seq_id": id, "code": 0, "message": "success", "data": result, "chunk_status": "continue"})
            }
        };
        self.send_text(&text.to_string()).await;
    }

    /// The next text.
    pub async fn receive_text(&mut self) -> String {
        let received = match self.receive.receive_ready() {
            Some(text) => Ok(Some(text)),
            None => self.receive.receive().await,
        };
        received
            .expect("the connection is open")
            .expect("a message")
    }

    /// The next message.
    pub async fn receive(&mut self) -> Value {
        serde_json::from_str(&self.receive_text().await).expect("JSON")
    }

    /// The next answer.
    pub async fn answer(&mut self) -> RawAnswer {
        let message = self.receive().await;
        match self.dialect {
            Dialect::JsonRpc => {
                let outcome = match message.get("error") {
                    None => Ok(message["result"].clone()),
                    Some(error) => Err(RawError {
                        code: serde_json::from_value(error["data"]["code"].clone())
                            .expect("a word"),
                        protocol_fault: match error["code"].as_i64() {
                            Some(-32700) => Some(Fault::Parse),
                            Some(-32600) => Some(Fault::InvalidMessage),
                            Some(-32601) => Some(Fault::UnknownAction),
                            Some(-32602) => Some(Fault::InvalidParams),
                            _ => None,
                        },
                        message: error["message"].as_str().expect("a text").to_owned(),
                    }),
                };
                RawAnswer {
                    id: message["id"].clone(),
                    outcome,
                }
            }
            Dialect::LangBot => {
                let members = ["seq_id", "code", "message", "data", "chunk_status"];
                assert!(
                    members.iter().all(|member| message.get(member).is_some()),
                    "all five: {message}"
                );
                let text = message["message"].as_str().expect("a text").to_owned();
                let outcome = if message["code"] == json!(0) {
                    Ok(message["data"].clone())
                } else {
                    Err(langbot_error(text))
                };
                RawAnswer {
                    id: message["seq_id"].clone(),
                    outcome,
                }
            }
        }
    }

    /// Closes the sending direction.
    pub async fn close_input(&mut self) {
        self.send.close().await.expect("closed");
    }

    /// Reads to the end of the connection, of whatever kind, and counts the messages.
    pub async fn receive_end(&mut self) -> usize {
        let mut count = 0;
        loop {
            let received = match self.receive.receive_ready() {
                Some(text) => Ok(Some(text)),
                None => self.receive.receive().await,
            };
            match received {
                Ok(Some(_)) => count += 1,
                Ok(None) | Err(_) => return count,
            }
        }
    }
}

/// Parses LangBot's error prefixes, independently of the engine.
fn langbot_error(text: String) -> RawError {
    let starts = |prefix: &str| text.starts_with(prefix);
    let (code, protocol_fault) = if starts("ValueError: Action ") {
        (Code::Unsupported, Some(Fault::UnknownAction))
    } else if starts("ValueError: Runtime message exceeds") {
        (Code::TooLarge, None)
    } else if starts("Runtime connection is busy") {
        (Code::Overloaded, None)
    } else if ["BoxValidationError:", "ValidationError:", "KeyError:"]
        .into_iter()
        .any(starts)
    {
        (Code::Validation, None)
    } else if starts("BoxBackendUnavailableError:") {
        (Code::Unavailable, None)
    } else if starts("PermissionError:") {
        (Code::Denied, None)
    } else {
        (Code::Internal, None)
    };
    RawError {
        code,
        protocol_fault,
        message: text,
    }
}
