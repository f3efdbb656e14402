//! Handling of each incoming message.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Engine, StartedCall, count};
use crate::action::Entry;
use crate::call::{Batch, Dispatch, Responder};
use crate::codec::{
    self, CallId, CallKind, Codec, Control, DecodeError, Decoded, Message, Meta, Part, parse_params,
};
use crate::error::{Code, Fault, RpcError};
use crate::handshake::{self, Hello, HelloParams};
use crate::in_flight::{Body, CallInfo, Credit, Delivery, Refusal};
use crate::limits::Limits;
use crate::{Action as _, CloseReason};

/// Maximum characters of an unknown action name that an error repeats.
const MAX_NAME_CHARS: usize = 300;

/// Time to write the refusal of a caller before the connection is cut.
const DENIED_FLUSH: Duration = Duration::from_secs(1);

pub(super) fn unknown_action(name: &str) -> RpcError {
    let shown: String = name.chars().take(MAX_NAME_CHARS).collect();
    RpcError::fault(
        Fault::UnknownAction,
        format!("method: unknown action {shown}"),
    )
}

/// Whether a first message is the request line of an HTTP request.
/// No codec writes a message that begins like one.
fn is_http(text: &str) -> bool {
    let method = text.bytes().take_while(u8::is_ascii_uppercase).count();
    let target = text[method..].strip_prefix(' ').unwrap_or_default();
    // Excludes log lines: an HTTP request target is a path, `*` or an absolute URL.
    method > 0 && (target.starts_with(['/', '*', 'h']) || text.starts_with("CONNECT "))
}

/// A call within the limits, ready to start.
struct Admitted<'a> {
    entry: &'a Entry,
    responder: Responder,
    credit: Option<Arc<Credit>>,
}

impl Admitted<'_> {
    fn start(self, body: Body, has_meta: bool, meta: Meta) -> StartedCall {
        let id = self.responder.id.clone();
        let dispatch = Dispatch {
            responder: self.responder,
            body,
            has_meta,
            meta,
            credit: self.credit,
        };
        (id, self.entry.start(dispatch))
    }
}

impl Engine {
    /// Returns the current maximum message length and the name of its limit.
    pub(crate) fn max_message_bytes(&self) -> (&'static str, usize) {
        let Limits {
            message_bytes,
            hello_bytes,
            ..
        } = self.limits;
        if hello_bytes < message_bytes && !self.admitted.load(Ordering::Relaxed) {
            ("hello_bytes", hello_bytes)
        } else {
            ("message_bytes", message_bytes)
        }
    }

    /// Handles a message over the length limit; `head` is its beginning.
    pub(crate) fn accept_oversized(self: &Arc<Self>, head: &str) {
        count(&self.counters.oversized);
        if self.known_codec().is_none() && is_http(head) {
            return self.refuse_http();
        }
        let by_head = || self.codecs.find(|codec| codec.recognises_head(head));
        let Some(codec) = self.known_codec().or_else(by_head) else {
            let error = RpcError::fault(Fault::Parse, "not JSON");
            return self.reply_decode_error(DecodeError { id: None, error });
        };
        let (name, max) = self.max_message_bytes();
        let error = RpcError::limit(Code::TooLarge, "message", name, max);
        let id = codec.id_at_start(head, &self.limits);
        if !self.admitted.load(Ordering::Relaxed) {
            let call = id.filter(|_| !codec.is_response(head));
            let Some(text) = call.and_then(|id| codec.error(Some(&id), &error)) else {
                return self.stop(CloseReason::Denied, Duration::ZERO);
            };
            self.stop(CloseReason::Denied, DENIED_FLUSH);
            return self.push_now(text);
        }
        // An oversized response or chunk of the peer ends the call that waits for it.
        if codec.is_response(head) {
            if let Some(id) = id {
                self.fail_call(id, error);
            }
            return;
        }
        if let Some(id) = codec.chunk_at_start(head, &self.limits) {
            return self.fail_call(id, error);
        }
        if let Some(text) = codec.error(id.as_ref(), &error) {
            self.push_now(text);
        }
    }

    /// Handles one text and adds the calls it starts to `started`.
    pub(crate) fn accept(self: &Arc<Self>, text: String, started: &mut Vec<StartedCall>) {
        if self.known_codec().is_none() && self.is_stopping() {
            // The engine ignores everything after the request line of an HTTP request.
            return;
        }
        if text.len() > self.max_message_bytes().1 {
            return self.accept_oversized(&text);
        }
        let by_first = || self.codecs.find(|codec| codec.recognises(&text));
        let Some(codec) = self.known_codec().or_else(by_first) else {
            if is_http(&text) {
                return self.refuse_http();
            }
            let json = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
            let fault = if json {
                Fault::InvalidMessage
            } else {
                Fault::Parse
            };
            let error = RpcError::fault(fault, format!("not a message of {}", self.codecs.names()));
            return self.reply_decode_error(DecodeError { id: None, error });
        };
        let admitted = self.admitted.load(Ordering::Relaxed);
        if !admitted && self.is_stopping() {
            // The engine reads nothing more from a refused caller.
            return;
        }
        let _ = self.codec.set(codec);
        let one = match codec::decode(codec, &text, &self.limits) {
            Decoded::One(message)
                if admitted || matches!(message, Ok(Message::Call { id: Some(_), .. })) =>
            {
                message
            }
            // Before its hello, an unidentified peer may only send calls with an id.
            _ if !admitted => return self.stop(CloseReason::Denied, Duration::ZERO),
            Decoded::One(message) => message,
            Decoded::Batch(items) => return self.accept_batch(items, started),
        };
        match one {
            Err(failure) => self.handle_decode_error(codec, &text, failure),
            Ok(Message::Call {
                id,
                action,
                params,
                checked,
                has_meta,
                meta,
            }) => {
                let range = Body::range_of(&text, params);
                if let Some(admitted) = self.admit(id, &action, params, &meta, None) {
                    let body = Body::new(text, range, checked);
                    started.push(admitted.start(body, has_meta, meta));
                }
            }
            Ok(Message::Response {
                id,
                outcome,
                part,
                checked,
            }) => {
                let outcome = outcome.map(|body| Body::range_of(&text, body));
                self.deliver(
                    &id,
                    outcome.map(|range| Body::new(text, range, checked)),
                    part,
                );
            }
            Ok(Message::Control {
                reply_to,
                control,
                context,
            }) => self.handle_control(reply_to.as_ref(), &control, context),
            Ok(Message::Ignored) => {}
        }
    }

    fn accept_batch(
        self: &Arc<Self>,
        items: Vec<(&str, Result<Message<'_>, DecodeError>)>,
        started: &mut Vec<StartedCall>,
    ) {
        let codec = self.codec();
        let answers = |item: &(&str, Result<Message<'_>, DecodeError>)| {
            matches!(item, (_, Ok(Message::Call { .. })))
                || matches!(item, (text, Err(_)) if !codec.is_response(text))
        };
        let batch = Arc::new(Batch::new(
            items.iter().filter(|item| answers(item)).count(),
        ));
        for (text, item) in items {
            match item {
                Err(failure) if codec.is_response(text) => {
                    self.handle_decode_error(codec, text, failure);
                }
                Err(DecodeError { id, error }) => {
                    count(&self.counters.unparsable);
                    let response = codec.error(id.as_ref(), &error);
                    self.reply(response.unwrap_or_default(), Some(&batch));
                }
                Ok(Message::Call {
                    id,
                    action,
                    params,
                    checked,
                    has_meta,
                    meta,
                }) => {
                    let body = Body::new(text.to_owned(), Body::range_of(text, params), checked);
                    if let Some(admitted) = self.admit(id, &action, params, &meta, Some(&batch)) {
                        started.push(admitted.start(body, has_meta, meta));
                    }
                }
                Ok(Message::Response {
                    id,
                    outcome,
                    part,
                    checked,
                }) => {
                    let body = |part: &str| {
                        Body::new(text.to_owned(), Body::range_of(text, part), checked)
                    };
                    self.deliver(&id, outcome.map(body), part);
                }
                Ok(Message::Control {
                    reply_to,
                    control,
                    context,
                }) => self.handle_control(reply_to.as_ref(), &control, context),
                Ok(Message::Ignored) => {}
            }
        }
    }

    /// Admits a call, or answers with the reason for the refusal.
    fn admit(
        self: &Arc<Self>,
        id: Option<CallId>,
        action: &str,
        params: &str,
        meta: &Meta,
        batch: Option<&Arc<Batch>>,
    ) -> Option<Admitted<'_>> {
        let refuse = |id: Option<CallId>, error: &RpcError| {
            let text = id.and_then(|id| self.codec().error(Some(&id), error));
            self.reply(text.unwrap_or_default(), batch);
            None
        };
        if action == Hello::NAME {
            let text = id.and_then(|id| self.hello(&id, params));
            self.reply(text.unwrap_or_default(), batch);
            return None;
        }
        if !self.admitted.load(Ordering::Relaxed) {
            self.stop(CloseReason::Denied, DENIED_FLUSH);
            return refuse(
                id,
                &RpcError::denied("hello: must be the first call and carry a token"),
            );
        }
        let Some(entry) = self.router.find(action) else {
            return refuse(id, &unknown_action(action));
        };
        let credit = (entry.streams && meta.credit > 0).then(|| Arc::new(Credit::new(meta.credit)));
        let stream = credit.is_some();
        let info = CallInfo {
            action: entry.name,
            context: self
                .control_policy
                .as_ref()
                .and_then(|_| meta.context.clone()),
        };
        let admitted = self
            .incoming()
            .admit(id.clone(), info, credit.clone(), &self.limits);
        match admitted {
            Ok(id) => {
                let responder = Responder {
                    engine: Arc::clone(self),
                    id,
                    stream,
                    batch: batch.cloned(),
                    sent: false,
                };
                Some(Admitted {
                    entry,
                    responder,
                    credit,
                })
            }
            Err(refusal) => {
                count(&self.counters.refused);
                refuse(id, &self.refusal(&refusal))
            }
        }
    }

    fn refusal(&self, refusal: &Refusal) -> RpcError {
        let Limits {
            in_flight,
            open_streams,
            ..
        } = self.limits;
        match refusal {
            Refusal::Duplicate => RpcError::fault(
                Fault::InvalidMessage,
                "id: already used by a call in flight; use another id",
            ),
            Refusal::TooManyCalls => RpcError::limit(
                Code::Overloaded,
                "number of concurrent calls",
                "in_flight",
                in_flight,
            ),
            Refusal::TooManyStreams => RpcError::limit(
                Code::Overloaded,
                "number of concurrent streams",
                "open_streams",
                open_streams,
            ),
            Refusal::Closing => RpcError::unavailable("the connection is closing"),
        }
    }

    fn hello(&self, id: &CallId, params: &str) -> Option<String> {
        let inside = params.contains("\"_meta\"");
        let outcome = parse_params::<HelloParams>(params, inside)
            .and_then(|params| handshake::answer(&params, &self.auth, &self.limits));
        match outcome {
            Ok((caller, result)) => {
                if let Some(caller) = caller {
                    let _ = self.token.set(caller);
                }
                self.admitted.store(true, Ordering::Relaxed);
                self.answers_pings.store(true, Ordering::Relaxed);
                self.codec().result(id, &result, CallKind::Plain).ok()
            }
            Err(error) => {
                if !self.admitted.load(Ordering::Relaxed) {
                    self.stop(CloseReason::Denied, DENIED_FLUSH);
                }
                self.codec().error(Some(id), &error)
            }
        }
    }

    /// Sends a response, alone or as part of its batch. An empty text is no response.
    pub(super) fn reply(self: &Arc<Self>, text: String, batch: Option<&Arc<Batch>>) {
        let text = match batch {
            Some(batch) => batch.add(text, self.limits.message_bytes, String::new),
            None => Some(text).filter(|text| !text.is_empty()),
        };
        if let Some(text) = text {
            self.push_now(text);
        }
    }

    /// Fails the call that waits for a response or chunk that cannot be accepted.
    /// Cancels it at the peer as well, because more chunks of a stream may follow.
    fn fail_call(self: &Arc<Self>, id: CallId, error: RpcError) {
        let is_stream = self.outgoing().is_stream(&id);
        self.deliver(&id, Err(error), Part::Whole);
        if is_stream {
            self.control(&Control::Cancel { id });
        }
    }

    /// Handles an unreadable text.
    /// An unreadable response or chunk ends the call that waits for it. The engine refuses any other text.
    fn handle_decode_error(self: &Arc<Self>, codec: &dyn Codec, text: &str, failure: DecodeError) {
        let chunk = codec.chunk_at_start(text, &self.limits);
        if chunk.is_none() && !codec.is_response(text) {
            return self.reply_decode_error(failure);
        }
        count(&self.counters.unparsable);
        let DecodeError { id, mut error } = failure;
        if error.protocol_fault() == Some(Fault::Parse) {
            // Most likely the last bytes of a broken connection.
            error = RpcError::unavailable("the response was cut off");
        }
        let id = chunk.or(id);
        if let Some(id) = id.or_else(|| codec.id_at_start(text, &self.limits)) {
            self.fail_call(id, error);
        }
    }

    /// Closes the connection of a peer that speaks HTTP.
    ///
    /// A page in a browser can send requests with arbitrary bodies to every local port. The engine must not read those
    /// bodies as messages, and the page must not learn that a server listens.
    fn refuse_http(&self) {
        count(&self.counters.unparsable);
        let reason = "the peer speaks HTTP".to_owned();
        self.stop(CloseReason::Broken(reason), Duration::ZERO);
    }

    /// Answers a text that is no message, under its id or `null`.
    fn reply_decode_error(self: &Arc<Self>, failure: DecodeError) {
        let DecodeError { id, error } = failure;
        count(&self.counters.unparsable);
        if !self.admitted.load(Ordering::Relaxed) {
            // The engine does not answer an unidentified peer that does not speak the protocol.
            return self.stop(CloseReason::Denied, Duration::ZERO);
        }
        let codec = self.known_codec().unwrap_or(self.codecs.preferred());
        if let Some(text) = codec.error(id.as_ref(), &error) {
            self.push_now(text);
        }
    }

    fn deliver(self: &Arc<Self>, id: &CallId, outcome: Result<Body, RpcError>, part: Part) {
        // Requests of the codec itself have negative ids, and no call waits for their responses.
        if matches!(id, CallId::Number(..0)) {
            return;
        }
        let delivery = self.outgoing().deliver(id, outcome, part);
        match delivery {
            Delivery::Delivered => {}
            Delivery::Late => {
                count(&self.counters.late_responses);
                tracing::debug!(%id, "late response ignored");
            }
            Delivery::CreditExceeded => self.control(&Control::Cancel { id: id.clone() }),
        }
    }
}
