//! Handling of each incoming message.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Engine, Started, count};
use crate::action::Entry;
use crate::call::{Answer, Batch, Dispatch};
use crate::codec::{
    self, CallId, Codec, Control, Decoded, Encoded, Ends, Message, Meta, Part, Unreadable,
    parse_params,
};
use crate::error::{Code, Fault, RpcError};
use crate::hello::{self, Hello, HelloParams};
use crate::ledger::{Body, Credit, Delivery, Made, Refusal};
use crate::limits::Limits;
use crate::{Action as _, CloseReason};

/// Maximum characters of an unknown action name that an error repeats.
const SHOWN_CHARS: usize = 300;

/// Time to write the refusal of a caller before the connection is cut.
const DENIED_FLUSH: Duration = Duration::from_secs(1);

fn unknown_action(name: &str) -> RpcError {
    let shown: String = name.chars().take(SHOWN_CHARS).collect();
    RpcError::fault(Fault::UnknownAction, format!("Action {shown} not found"))
}

/// Whether a first message is the request line of an HTTP request.
/// No codec writes a message that begins like one.
fn is_http(text: &str) -> bool {
    let method = text.bytes().take_while(u8::is_ascii_uppercase).count();
    let target = text[method..].strip_prefix(' ').unwrap_or_default();
    // Excludes log lines: an HTTP request target is a path, `*` or an absolute URL.
    method > 0 && (target.starts_with(['/', '*', 'h']) || text.starts_with("CONNECT "))
}

impl Engine {
    /// Returns the current maximum message length and the name of its limit.
    pub(crate) fn longest_message(&self) -> (&'static str, usize) {
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
        if self.settled_codec().is_none() && is_http(head) {
            return self.refuse_http();
        }
        let by_head = || self.codecs.find(|codec| codec.recognises_head(head));
        let Some(codec) = self.settled_codec().or_else(by_head) else {
            let error = RpcError::fault(Fault::Parse, "not JSON");
            return self.refuse_unreadable(Unreadable { id: None, error });
        };
        let (name, max) = self.longest_message();
        let error = RpcError::limit(Code::TooLarge, "message", name, max);
        let id = codec.id_at_start(head, &self.limits);
        if !self.admitted.load(Ordering::Relaxed) {
            let call = id.filter(|_| !codec.is_answer(head));
            let Some(text) = call.and_then(|id| codec.error(Some(&id), &error)) else {
                return self.stop(CloseReason::Denied, Duration::ZERO);
            };
            self.stop(CloseReason::Denied, DENIED_FLUSH);
            return self.push_now(text);
        }
        // An oversized answer or chunk of the peer ends the call that waits for it.
        if codec.is_answer(head) {
            if let Some(id) = id {
                self.give_up(id, error);
            }
            return;
        }
        if let Some(id) = codec.chunk_at_start(head, &self.limits) {
            return self.give_up(id, error);
        }
        if let Some(text) = codec.error(id.as_ref(), &error) {
            self.push_now(text);
        }
    }

    /// Handles one text and adds the calls it starts to `started`.
    pub(crate) fn accept(self: &Arc<Self>, text: String, started: &mut Vec<Started>) {
        if self.settled_codec().is_none() && self.is_stopping() {
            // The engine ignores everything after the request line of an HTTP request.
            return;
        }
        if text.len() > self.longest_message().1 {
            return self.accept_oversized(&text);
        }
        let by_first = || self.codecs.find(|codec| codec.recognises(&text));
        let Some(codec) = self.settled_codec().or_else(by_first) else {
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
            return self.refuse_unreadable(Unreadable { id: None, error });
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
            Err(unreadable) => self.unreadable(codec, &text, unreadable),
            Ok(Message::Call {
                id,
                action,
                params,
                checked,
                meta_inside,
                meta,
            }) => {
                let range = Body::range_of(&text, params);
                if let Some((entry, answer, credit)) = self.admit(id, &action, params, &meta, None)
                {
                    let body = Body::new(text, range, checked);
                    let dispatch = Dispatch {
                        answer,
                        body,
                        meta_inside,
                        meta,
                        credit,
                    };
                    started.push((dispatch.answer.id.clone(), entry.start(dispatch)));
                }
            }
            Ok(Message::Answer {
                id,
                outcome,
                part,
                checked,
            }) => {
                let outcome = outcome.map(|body| Body::range_of(&text, body));
                self.answered(
                    &id,
                    outcome.map(|range| Body::new(text, range, checked)),
                    part,
                );
            }
            Ok(Message::Control {
                ask,
                control,
                context,
            }) => self.obey(ask.as_ref(), &control, context),
            Ok(Message::Ignored) => {}
        }
    }

    fn accept_batch(
        self: &Arc<Self>,
        items: Vec<(&str, Result<Message<'_>, Unreadable>)>,
        started: &mut Vec<Started>,
    ) {
        let codec = self.codec();
        let answers = |item: &(&str, Result<Message<'_>, Unreadable>)| {
            matches!(item, (_, Ok(Message::Call { .. })))
                || matches!(item, (text, Err(_)) if !codec.is_answer(text))
        };
        let batch = Arc::new(Batch::new(
            items.iter().filter(|item| answers(item)).count(),
        ));
        for (text, item) in items {
            match item {
                Err(unreadable) if codec.is_answer(text) => {
                    self.unreadable(codec, text, unreadable);
                }
                Err(Unreadable { id, error }) => {
                    count(&self.counters.unparsable);
                    let answer = codec.error(id.as_ref(), &error);
                    self.reply(answer.unwrap_or_default(), Some(&batch));
                }
                Ok(Message::Call {
                    id,
                    action,
                    params,
                    checked,
                    meta_inside,
                    meta,
                }) => {
                    let body = Body::new(text.to_owned(), Body::range_of(text, params), checked);
                    if let Some((entry, answer, credit)) =
                        self.admit(id, &action, params, &meta, Some(&batch))
                    {
                        let id = answer.id.clone();
                        let dispatch = Dispatch {
                            answer,
                            body,
                            meta_inside,
                            meta,
                            credit,
                        };
                        started.push((id, entry.start(dispatch)));
                    }
                }
                Ok(Message::Answer {
                    id,
                    outcome,
                    part,
                    checked,
                }) => {
                    let body = |part: &str| {
                        Body::new(text.to_owned(), Body::range_of(text, part), checked)
                    };
                    self.answered(&id, outcome.map(body), part);
                }
                Ok(Message::Control {
                    ask,
                    control,
                    context,
                }) => self.obey(ask.as_ref(), &control, context),
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
    ) -> Option<(&Entry, Answer, Option<Arc<Credit>>)> {
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
                &RpcError::denied("the first call must be a hello with a token"),
            );
        }
        let Some(entry) = self.router.find(action) else {
            return refuse(id, &unknown_action(action));
        };
        let credit = (entry.streams && meta.credit > 0).then(|| Arc::new(Credit::new(meta.credit)));
        let stream = credit.is_some();
        let made = Made {
            action: entry.name,
            context: self
                .control_policy
                .as_ref()
                .and_then(|_| meta.context.clone()),
        };
        let admitted = self
            .incoming()
            .admit(id.clone(), made, credit.clone(), &self.limits);
        match admitted {
            Ok(id) => {
                let batch = batch.cloned();
                Some((
                    entry,
                    Answer {
                        engine: Arc::clone(self),
                        id,
                        stream,
                        batch,
                        given: false,
                    },
                    credit,
                ))
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
                "id is that of a call still in flight",
            ),
            Refusal::TooManyCalls => {
                RpcError::limit(Code::Overloaded, "calls at once", "in_flight", in_flight)
            }
            Refusal::TooManyStreams => RpcError::limit(
                Code::Overloaded,
                "streams at once",
                "open_streams",
                open_streams,
            ),
            Refusal::Closing => RpcError::unavailable("the connection is closing"),
        }
    }

    fn hello(&self, id: &CallId, params: &str) -> Option<String> {
        let inside = params.contains("\"_meta\"");
        let outcome = parse_params::<HelloParams>(params, inside)
            .and_then(|params| hello::answer(&params, &self.auth, &self.limits));
        match outcome {
            Ok((caller, result)) => {
                if let Some(caller) = caller {
                    let _ = self.token.set(caller);
                }
                self.admitted.store(true, Ordering::Relaxed);
                self.answers_pings.store(true, Ordering::Relaxed);
                self.codec().result(id, &result, Ends::Call).ok()
            }
            Err(error) => {
                if !self.admitted.load(Ordering::Relaxed) {
                    self.stop(CloseReason::Denied, DENIED_FLUSH);
                }
                self.codec().error(Some(id), &error)
            }
        }
    }

    /// Sends an answer, alone or as part of its batch. An empty text is no answer.
    fn reply(self: &Arc<Self>, text: String, batch: Option<&Arc<Batch>>) {
        let text = match batch {
            Some(batch) => batch.add(text, self.limits.message_bytes, String::new),
            None => Some(text).filter(|text| !text.is_empty()),
        };
        if let Some(text) = text {
            self.push_now(text);
        }
    }

    /// Fails the call that waits for an answer or chunk that cannot be accepted.
    /// Cancels it at the peer as well, because more chunks of a stream may follow.
    fn give_up(self: &Arc<Self>, id: CallId, error: RpcError) {
        let more = self.outgoing().is_stream(&id);
        self.answered(&id, Err(error), Part::Whole);
        if more {
            self.control(&Control::Cancel { id });
        }
    }

    /// Handles an unreadable text.
    /// An unreadable answer or chunk ends the call that waits for it. The engine refuses any other text.
    fn unreadable(self: &Arc<Self>, codec: &dyn Codec, text: &str, unreadable: Unreadable) {
        let chunk = codec.chunk_at_start(text, &self.limits);
        if chunk.is_none() && !codec.is_answer(text) {
            return self.refuse_unreadable(unreadable);
        }
        count(&self.counters.unparsable);
        let Unreadable { id, mut error } = unreadable;
        if error.written_wrongly() == Some(Fault::Parse) {
            // Most likely the last bytes of a broken connection.
            error = RpcError::unavailable("the answer was cut off");
        }
        let id = chunk.or(id);
        if let Some(id) = id.or_else(|| codec.id_at_start(text, &self.limits)) {
            self.give_up(id, error);
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
    fn refuse_unreadable(self: &Arc<Self>, unreadable: Unreadable) {
        let Unreadable { id, error } = unreadable;
        count(&self.counters.unparsable);
        if !self.admitted.load(Ordering::Relaxed) {
            // The engine does not answer an unidentified peer that does not speak the protocol.
            return self.stop(CloseReason::Denied, Duration::ZERO);
        }
        let codec = self.settled_codec().unwrap_or(self.codecs.preferred());
        if let Some(text) = codec.error(id.as_ref(), &error) {
            self.push_now(text);
        }
    }

    fn answered(self: &Arc<Self>, id: &CallId, outcome: Result<Body, RpcError>, part: Part) {
        // Requests of the codec itself have negative ids, and no call waits for their answers.
        if matches!(id, CallId::Number(..0)) {
            return;
        }
        let delivery = self.outgoing().deliver(id, outcome, part);
        match delivery {
            Delivery::Delivered => {}
            Delivery::Late => {
                count(&self.counters.late_answers);
                tracing::debug!(%id, "late answer ignored");
            }
            Delivery::Overrun => self.control(&Control::Cancel { id: id.clone() }),
        }
    }

    fn obey(self: &Arc<Self>, ask: Option<&CallId>, control: &Control<'_>, context: Option<&str>) {
        if !self.admitted.load(Ordering::Relaxed) {
            return self.stop(CloseReason::Denied, Duration::ZERO);
        }
        let outcome = match &self.control_policy {
            Some(policy) => policy.check(control, context),
            None => Ok(()),
        };
        let outcome = outcome.and_then(|()| self.done(ask, control, context));
        let Some(id) = ask else { return };
        let text = match outcome {
            Ok(body) => self.codec().result(id, &Encoded(body), Ends::Call).ok(),
            Err(error) => self.codec().error(Some(id), &error),
        };
        self.reply(text.unwrap_or_default(), None);
    }

    /// Whether this context may end the call or take its chunks.
    fn may_touch(&self, id: &CallId, context: Option<&str>) -> bool {
        let Some(policy) = &self.control_policy else {
            return true;
        };
        let made = self.incoming().made(id).cloned();
        made.is_some_and(|made| policy.owns(context, made.action, made.context.as_deref()))
    }

    /// Executes a control message and returns the answer, if the peer wants one.
    fn done(
        self: &Arc<Self>,
        ask: Option<&CallId>,
        control: &Control<'_>,
        context: Option<&str>,
    ) -> Result<&'static str, RpcError> {
        match control {
            Control::Cancel { id } => {
                let cancelled = self.may_touch(id, context) && self.incoming().cancel(id);
                Ok(if cancelled {
                    "{\"cancelled\":true}"
                } else {
                    "{\"cancelled\":false}"
                })
            }
            Control::Grant { id, grant } => {
                let accepted = self.may_touch(id, context) && self.incoming().grant(id, *grant);
                Ok(if accepted {
                    "{\"accepted\":true}"
                } else {
                    "{\"accepted\":false}"
                })
            }
            Control::Ping => {
                if ask.is_none() {
                    self.control(&Control::Pong);
                }
                Ok("{}")
            }
            Control::Pong => {
                self.answers_pings.store(true, Ordering::Relaxed);
                Ok("{}")
            }
            Control::Bye { reason, restart } => {
                let _ = self.bye.set(CloseReason::Bye {
                    reason: reason.to_string(),
                    restart: *restart,
                });
                self.outgoing().refuse("the peer is closing");
                Ok("{}")
            }
            Control::Other { name, data } => match &self.control_policy {
                Some(policy) => policy.other(name, data).map(|()| "{}"),
                None => Err(unknown_action(name)),
            },
            Control::Invalid(error) => Err(error.clone()),
        }
    }
}
