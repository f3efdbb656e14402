//! `POST /rpc`: one call of the RPC in one request, for `curl` and for programs without a websocket.
//!
//! The call takes the path of every other: a connection of this caller, in this process. The end of the request ends
//! the connection, and that cancels the call.

use std::sync::Arc;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use box_gateways::http::body::Json;
use box_gateways::http::framing::{SSE_KEEPALIVE, ndjson, sse};
use box_gateways::http::refusal::{Refusal, RefusalReason, text_response};
use box_rpc::{Caller, Connection as _, Limits, Options, ReceiveHalf, SendHalf, Session};
use box_transports::queue;
use futures::stream;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::layers::Client;
use super::state::HttpState;

/// The number of messages that wait between the request and the server.
const QUEUE_MESSAGES: usize = 64;

/// The number of chunks that the server may send ahead of the client.
const CREDIT: u64 = 16;

/// The time without a message after which an event stream gets a comment.
const KEEPALIVE: std::time::Duration = std::time::Duration::from_secs(15);

/// How the client wants the chunks of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    /// As server-sent events.
    Events,
    /// One message per line.
    Lines,
}

impl Framing {
    /// Returns the framing that `Accept` names; `None` for a client that wants only the result.
    fn of(headers: &HeaderMap) -> Option<Self> {
        let accepted = headers.get_all(ACCEPT).iter();
        let mut kinds = accepted
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .map(|kind| kind.split(';').next().unwrap_or_default().trim());
        kinds.find_map(|kind| match kind {
            "text/event-stream" => Some(Self::Events),
            "application/x-ndjson" => Some(Self::Lines),
            _ => None,
        })
    }

    fn content_type(self) -> &'static str {
        match self {
            Self::Events => "text/event-stream",
            Self::Lines => "application/x-ndjson",
        }
    }

    /// Writes a message.
    fn frame(self, kind: &str, message: &RawValue) -> Bytes {
        match self {
            Self::Events => sse(Some(kind), None, message.get()),
            Self::Lines => ndjson(&message),
        }
    }
}

/// A request of JSON-RPC. Its members are checked by the server that it goes to.
#[derive(Debug, Deserialize)]
pub(super) struct RpcRequest {
    #[serde(default = "first_id")]
    id: Value,
    method: String,
    #[serde(default)]
    params: Map<String, Value>,
}

fn first_id() -> Value {
    Value::from(1)
}

/// A call on a connection of its own.
struct RunningCall {
    id: Value,
    to: Box<dyn SendHalf>,
    from: Box<dyn ReceiveHalf>,
    /// The other end, which ends with the call.
    _session: Session,
    _client: Client,
}

/// What the server sends.
#[derive(Deserialize)]
struct Message<'a> {
    method: Option<String>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

/// A message of the call.
enum Received {
    /// The parameters of a chunk.
    Chunk(Box<RawValue>),
    /// The response, and whether it is an error.
    Response(Box<RawValue>, bool),
}

/// Calls an action, and answers with its result, or with its chunks and its result.
pub(super) async fn call(
    State(state): State<Arc<HttpState>>,
    Extension(caller): Extension<Caller>,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    Json(request): Json<RpcRequest>,
) -> Result<Response, Refusal> {
    let framing = Framing::of(&headers);
    let mut call = RunningCall::start(&state, caller, client, request, framing.is_some()).await?;
    let Some(framing) = framing else {
        loop {
            if let Received::Response(message, _) = call.next().await? {
                let message = String::from(Box::<str>::from(message));
                return Ok(text_response(StatusCode::OK, "application/json", message));
            }
        }
    };
    let frames = stream::unfold(Some(call), move |call| async move {
        let mut call = call?;
        let received = match timeout(KEEPALIVE, call.next()).await {
            Err(_) if framing == Framing::Lines => return Some((Ok(Bytes::new()), Some(call))),
            Err(_) => return Some((Ok(SSE_KEEPALIVE), Some(call))),
            Ok(received) => received,
        };
        match received {
            Ok(Received::Chunk(chunk)) => {
                let granted = call.grant().await;
                Some((
                    Ok(framing.frame("chunk", &chunk)),
                    granted.ok().map(|()| call),
                ))
            }
            Ok(Received::Response(message, failed)) => {
                let kind = if failed { "error" } else { "result" };
                Some((Ok(framing.frame(kind, &message)), None))
            }
            Err(refusal) => Some((
                Err(std::io::Error::other(refusal.message().to_owned())),
                None,
            )),
        }
    });
    let kind = [(CONTENT_TYPE, framing.content_type())];
    Ok((kind, Body::from_stream(frames)).into_response())
}

impl RunningCall {
    async fn start(
        state: &HttpState,
        caller: Caller,
        client: Client,
        mut request: RpcRequest,
        is_streamed: bool,
    ) -> Result<Self, Refusal> {
        if request.method.starts_with("$/") {
            let message = "method: names that begin with $/ belong to a connection; call an action, or use /rpc/ws";
            return Err(Refusal::new(RefusalReason::Malformed, message));
        }
        set_credit(&mut request.params, is_streamed)?;
        let (near, far) = queue::pair(QUEUE_MESSAGES);
        let options = Options {
            limits: Limits::in_process(),
            ..Options::new(caller)
        };
        let session = Session::start(far, state.router.clone(), options);
        let (to, from) = Box::new(near).split();
        let RpcRequest { id, method, params } = request;
        let message = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        let mut call = Self {
            id,
            to,
            from,
            _session: session,
            _client: client,
        };
        call.send(message.to_string()).await?;
        Ok(call)
    }

    async fn send(&mut self, message: String) -> Result<(), Refusal> {
        let sent = async {
            self.to.send(message).await?;
            self.to.flush().await
        };
        sent.await.map_err(|_| ended())
    }

    /// Lets the server send another chunk.
    async fn grant(&mut self) -> Result<(), Refusal> {
        let params = json!({"id": self.id, "credit": 1});
        let message = json!({"jsonrpc": "2.0", "method": "$/credit", "params": params});
        self.send(message.to_string()).await
    }

    /// Returns the next message of the call.
    async fn next(&mut self) -> Result<Received, Refusal> {
        loop {
            let text = self.from.receive().await.ok().flatten().ok_or_else(ended)?;
            let message: Message<'_> = serde_json::from_str(&text).map_err(|_| ended())?;
            let is_chunk = message.method.as_deref() == Some("$/chunk");
            if is_chunk && let Some(params) = message.params {
                return Ok(Received::Chunk(params.to_owned()));
            }
            if message.result.is_some() || message.error.is_some() {
                let failed = message.error.is_some();
                let message = RawValue::from_string(text).map_err(|_| ended())?;
                return Ok(Received::Response(message, failed));
            }
        }
    }
}

/// Sets the number of chunks that the server may send before this module grants more.
///
/// A response without a stream has no chunks, and the server would wait for further credit forever.
fn set_credit(params: &mut Map<String, Value>, is_streamed: bool) -> Result<(), Refusal> {
    let malformed = |message| Refusal::new(RefusalReason::Malformed, message);
    if is_streamed {
        params.entry("_meta").or_insert_with(|| json!({}));
    }
    let Some(meta) = params.get_mut("_meta") else {
        return Ok(());
    };
    let meta = meta.as_object_mut();
    let meta = meta.ok_or_else(|| malformed("params._meta: must be an object"))?;
    if is_streamed {
        meta.insert("credit".into(), CREDIT.into());
    } else if meta.contains_key("credit") {
        return Err(malformed(
            "params._meta.credit: requires a stream; send Accept: application/x-ndjson or text/event-stream",
        ));
    }
    Ok(())
}

/// Returns the refusal of a call whose connection ended before its response.
fn ended() -> Refusal {
    Refusal::new(RefusalReason::NotReady, "the server is stopping")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_stream_has_credit() {
        let set = |params: Value, is_streamed| {
            let Value::Object(mut params) = params else {
                panic!("no object")
            };
            set_credit(&mut params, is_streamed).map(|()| Value::Object(params))
        };
        let credited = json!({"_meta": {"credit": CREDIT}});
        for params in [
            json!({}),
            json!({"_meta": {}}),
            json!({"_meta": {"credit": 1}}),
        ] {
            assert_eq!(set(params, true), Ok(credited.clone()));
        }
        let keyed = json!({"_meta": {"key": "k"}});
        for params in [json!({}), keyed] {
            assert_eq!(set(params.clone(), false), Ok(params));
        }
        assert!(set(json!({"_meta": {"credit": 1}}), false).is_err());
        for is_streamed in [true, false] {
            assert!(set(json!({"_meta": 1}), is_streamed).is_err());
        }
    }

    #[test]
    fn accept_names_the_framing() {
        let of = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT, value.parse().unwrap());
            Framing::of(&headers)
        };
        assert_eq!(of("*/*"), None);
        assert_eq!(of("application/json"), None);
        assert_eq!(of("application/x-ndjson"), Some(Framing::Lines));
        assert_eq!(
            of("text/html, text/event-stream;q=0.9"),
            Some(Framing::Events)
        );
    }
}
