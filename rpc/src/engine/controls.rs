//! Execution of control messages: cancel, credit, ping and the announced end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Engine;
use super::incoming::unknown_action;
use crate::CloseReason;
use crate::codec::{CallId, CallKind, Control, Encoded};
use crate::error::RpcError;

impl Engine {
    /// Checks and executes a control message, and answers it under `reply_to`.
    pub(super) fn handle_control(
        self: &Arc<Self>,
        reply_to: Option<&CallId>,
        control: &Control<'_>,
        context: Option<&str>,
    ) {
        if !self.admitted.load(Ordering::Relaxed) {
            return self.stop(CloseReason::Denied, Duration::ZERO);
        }
        let outcome = match &self.control_policy {
            Some(policy) => policy.check(control, context),
            None => Ok(()),
        };
        let outcome = outcome.and_then(|()| self.execute_control(reply_to, control, context));
        let Some(id) = reply_to else { return };
        let text = match outcome {
            Ok(body) => self
                .codec()
                .result(id, &Encoded(body), CallKind::Plain)
                .ok(),
            Err(error) => self.codec().error(Some(id), &error),
        };
        self.reply(text.unwrap_or_default(), None);
    }

    /// Whether this context may end the call or take its chunks.
    fn may_control(&self, id: &CallId, context: Option<&str>) -> bool {
        let Some(policy) = &self.control_policy else {
            return true;
        };
        let info = self.incoming().info(id).cloned();
        info.is_some_and(|info| policy.owns(context, info.action, info.context.as_deref()))
    }

    /// Executes a control message and returns the response, if the peer wants one.
    fn execute_control(
        self: &Arc<Self>,
        reply_to: Option<&CallId>,
        control: &Control<'_>,
        context: Option<&str>,
    ) -> Result<&'static str, RpcError> {
        match control {
            Control::Cancel { id } => {
                let cancelled = self.may_control(id, context) && self.incoming().cancel(id);
                Ok(if cancelled {
                    "{\"cancelled\":true}"
                } else {
                    "{\"cancelled\":false}"
                })
            }
            Control::Grant { id, grant } => {
                let accepted = self.may_control(id, context) && self.incoming().grant(id, *grant);
                Ok(if accepted {
                    "{\"accepted\":true}"
                } else {
                    "{\"accepted\":false}"
                })
            }
            Control::Ping => {
                if reply_to.is_none() {
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
                self.outgoing().refuse_new("the peer is closing");
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
