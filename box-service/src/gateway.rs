//! Policy for gateways, which call the runtime themselves.
//!
//! A gateway asks for a decision and sends the decided parameters to the runtime. Its calls count for
//! the token of its caller as calls over the wire do.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{
    BoxUpdateParams, CommandStart, CommandStartParams, ShellRun, ShellRunParams,
};
use box_protocol::{Adjusted, BoxError, BoxInfo, Code, GatewayName, SpecDraft};
use box_rpc::Caller;

use crate::audit::{self, Origin};
use crate::quota::Quota;
use crate::run::StartsCommand;
use crate::service::BoxService;

impl BoxService {
    /// Decides about a spec for a gateway. Like every decision, it goes to the audit log.
    ///
    /// The profile of the gateway applies, if the configuration has one.
    pub async fn decide_spec(
        &self,
        draft: SpecDraft,
        caller: &Caller,
        gateway: &GatewayName,
    ) -> Result<SpecDraft, BoxError> {
        let decided = self.decide_spec_and_changes(draft, caller, gateway).await;
        decided.map(|(spec, _)| spec)
    }

    /// Decides about a spec for a gateway, and returns the fields that the profile changed too.
    pub async fn decide_spec_and_changes(
        &self,
        draft: SpecDraft,
        caller: &Caller,
        gateway: &GatewayName,
    ) -> Result<(SpecDraft, Vec<Adjusted>), BoxError> {
        let origin = Origin::of(caller);
        let rules = self.rules();
        let policy = rules.policy_through(caller, gateway);
        let outcome = self.decide(&policy, draft, &origin).await;
        let decision = self.record_outcome("box.create", &origin, outcome)?;
        audit::allowed(
            "box.create",
            &origin,
            &decision,
            (&rules, &decision.spec.cmd),
        );
        Ok((SpecDraft::from(decision.spec), decision.adjusted))
    }

    /// Decides about changes of a box for a gateway.
    pub async fn decide_update(
        &self,
        params: BoxUpdateParams,
        caller: &Caller,
        gateway: &GatewayName,
    ) -> Result<BoxUpdateParams, BoxError> {
        let rules = self.rules();
        let policy = rules.policy_through(caller, gateway);
        let outcome = self.check_update(&policy, params).await;
        self.record_outcome("box.update", &Origin::of(caller), outcome)
    }

    /// Decides about a command that a gateway starts in this box, and returns what the profile changed.
    ///
    /// Without the box, nothing is measured: the start itself reports why there is none.
    pub async fn decide_command(
        &self,
        params: &mut CommandStartParams,
        of: Option<&BoxInfo>,
        through: (&Caller, &GatewayName),
    ) -> Result<Option<Adjusted>, BoxError> {
        self.decide_start_through::<CommandStart>(params, of, through)
            .await
    }

    /// Decides about a run in a shell of this box, as about a command.
    pub async fn decide_run(
        &self,
        params: &mut ShellRunParams,
        of: Option<&BoxInfo>,
        through: (&Caller, &GatewayName),
    ) -> Result<Option<Adjusted>, BoxError> {
        self.decide_start_through::<ShellRun>(params, of, through)
            .await
    }

    async fn decide_start_through<A: StartsCommand>(
        &self,
        params: &mut A::Params,
        of: Option<&BoxInfo>,
        (caller, gateway): (&Caller, &GatewayName),
    ) -> Result<Option<Adjusted>, BoxError> {
        let origin = Origin::of(caller);
        let rules = self.rules();
        let policy = rules.policy_through(caller, gateway);
        let of = of.filter(|_| rules.policy.shared_filesystem);
        let quota = of.and_then(|of| Quota::of_box(of, rules.config.max_workspace_entries));
        let decided = self.decide_start::<A>(params, (&origin, &policy), quota);
        self.record_outcome(A::NAME, &origin, decided.await)
    }

    /// Counts a call of this caller until the guard is dropped. Errors: `overloaded`.
    ///
    /// Calls over the wire count as well. [`Caller::Local`] has no limit.
    pub fn begin_call(&self, caller: &Caller) -> Result<CallGuard, BoxError> {
        self.0.calls.begin(caller)
    }
}

/// The running calls by caller.
#[derive(Debug, Clone)]
pub(crate) struct Calls {
    limit: usize,
    running: Arc<Mutex<HashMap<Caller, usize>>>,
}

/// A running call. Dropping it ends the call.
#[derive(Debug)]
#[must_use = "the call counts until the guard is dropped"]
pub struct CallGuard {
    caller: Caller,
    running: Arc<Mutex<HashMap<Caller, usize>>>,
}

impl Calls {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            running: Arc::default(),
        }
    }

    fn begin(&self, caller: &Caller) -> Result<CallGuard, BoxError> {
        let mut running = lock(&self.running);
        let count = running.entry(caller.clone()).or_default();
        if *count >= self.limit && *caller != Caller::Local {
            let what = "the number of calls of this token";
            let limit = "calls_per_token";
            return Err(BoxError::limit(Code::Overloaded, what, limit, self.limit));
        }
        *count += 1;
        Ok(CallGuard {
            caller: caller.clone(),
            running: Arc::clone(&self.running),
        })
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        if let Entry::Occupied(mut count) = lock(&self.running).entry(self.caller.clone()) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// Only assignments run under this lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_beyond_the_limit_of_a_token_are_refused() {
        let calls = Calls::new(2);
        let (ann, bob) = (Caller::token("ann"), Caller::token("bob"));
        let (first, second) = (calls.begin(&ann).unwrap(), calls.begin(&ann).unwrap());
        let error = calls.begin(&ann).unwrap_err();
        assert_eq!(error.code(), Code::Overloaded);
        let other = calls.begin(&bob).unwrap();
        drop(first);
        let third = calls.begin(&ann).unwrap();
        drop((third, second, other));
        assert!(lock(&calls.running).is_empty(), "no caller is remembered");
        let local: Vec<_> = (0..9).map(|_| calls.begin(&Caller::Local)).collect();
        assert!(local.iter().all(Result::is_ok));
    }
}
