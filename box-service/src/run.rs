//! Policy for all commands: `box.exec`, `command.start` and `shell.run`.
//!
//! # Steps
//! 1. `box.exec` takes a policy decision about its spec; the others only limit their timeout by the profile.
//! 2. The service measures the workspace. A workspace over its quota refuses the command.
//! 3. The audit log gets one line: caller, box, timeout, names of environment variables.
//! 4. The service forwards the call to the runtime, and forwards its chunks as unparsed JSON. `command.start` and
//!    `shell.run` keep the order of their caller's calls.
//! 5. If the call lasts until the exit, the service measures the workspace again and deletes a box over its quota.
//!    A gateway asks for steps 1 to 3 (`gateway.rs`), and the runtime alone ends boxes over their quota.
//! 6. `box.exec` also truncates the output in its result.

use std::marker::PhantomData;

use box_protocol::actions::{
    BoxDelete, BoxDeleteParams, BoxExec, BoxExecParams, BoxGet, BoxGetParams, CommandChunk,
    CommandStart, CommandStartParams, CommandStartResult, ShellRun, ShellRunParams,
};
use box_protocol::error::{Detail, Ended};
use box_protocol::{Adjusted, BoxError, BoxExecutionResult, BoxId, Code, Env, SpecDraft};
use box_rpc::{Action, Call, Handle};
use serde_json::value::RawValue;

use crate::audit::{self, Origin};
use crate::client::RuntimeClient;
use crate::handlers::origin;
use crate::policy::{self, Policy};
use crate::quota::{CheckTime, Quota};
use crate::service::{BoxService, Rules, blocking};
use crate::status::truncate_output;

/// An action that runs a command. Its chunks are forwarded unparsed.
pub(crate) struct Run<A>(PhantomData<A>);

impl<A: Action<Chunk = CommandChunk>> Action for Run<A> {
    const NAME: &'static str = A::NAME;
    type Params = A::Params;
    type Result = A::Result;
    type Chunk = Box<RawValue>;
}

/// The parameters of a command start that policy reads or changes.
pub(crate) struct StartFields<'a> {
    pub(crate) box_id: &'a BoxId,
    pub(crate) timeout_ms: &'a mut Option<u64>,
    pub(crate) env: &'a Env,
    /// The command, for the audit log.
    pub(crate) text: String,
    /// Whether the call lasts until the command has ended.
    waits_for_exit: bool,
}

/// An action that starts a command in an existing box.
pub(crate) trait StartsCommand:
    Action<Result = CommandStartResult, Chunk = CommandChunk>
{
    fn start(params: &mut Self::Params) -> StartFields<'_>;
}

impl StartsCommand for CommandStart {
    fn start(params: &mut CommandStartParams) -> StartFields<'_> {
        StartFields {
            box_id: &params.box_id,
            timeout_ms: &mut params.timeout_ms,
            env: &params.env,
            text: params.program.to_string(),
            waits_for_exit: params.attach.is_some(),
        }
    }
}

impl StartsCommand for ShellRun {
    fn start(params: &mut ShellRunParams) -> StartFields<'_> {
        StartFields {
            box_id: &params.box_id,
            timeout_ms: &mut params.timeout_ms,
            env: &params.env,
            text: params.text.clone(),
            waits_for_exit: params.attach.is_some(),
        }
    }
}

impl Handle<Run<BoxExec>> for BoxService {
    async fn handle(
        &self,
        params: BoxExecParams,
        call: Call<Run<BoxExec>>,
    ) -> Result<BoxExecutionResult, BoxError> {
        let origin = origin(&call);
        let _call = self.begin_call(&origin.caller)?;
        self.exec(params, &origin, Some(call)).await
    }
}

impl<A: StartsCommand> Handle<Run<A>> for BoxService
where
    Run<A>: Action<Params = A::Params, Result = CommandStartResult>,
{
    async fn handle(
        &self,
        params: A::Params,
        call: Call<Run<A>>,
    ) -> Result<CommandStartResult, BoxError> {
        let origin = origin(&call);
        let _call = self.begin_call(&origin.caller)?;
        let outcome = self.start::<A>(params, &origin, call).await;
        self.record_outcome(A::NAME, &origin, outcome)
    }
}

impl BoxService {
    /// Handles `box.exec` under policy.
    pub(crate) async fn exec(
        &self,
        params: BoxExecParams,
        origin: &Origin,
        call: Option<Call<Run<BoxExec>>>,
    ) -> Result<BoxExecutionResult, BoxError> {
        let outcome = self.run_exec(params, origin, call).await;
        self.record_outcome(BoxExec::NAME, origin, outcome)
    }

    async fn run_exec(
        &self,
        params: BoxExecParams,
        origin: &Origin,
        call: Option<Call<Run<BoxExec>>>,
    ) -> Result<BoxExecutionResult, BoxError> {
        let rules = self.rules();
        let named = |directory: &str| !directory.trim().is_empty();
        let has_directory = params.spec.workdir.as_deref().is_some_and(named);
        let policy = rules.policy_for(&origin.caller);
        let decision = self.decide(policy, params.spec, origin).await?;
        policy::check_native(&decision.spec)?;
        if params.program.is_none() {
            decision.spec.require_cmd()?;
        }
        let quota = if rules.policy.shared_filesystem {
            Quota::of(&decision.spec, rules.config.max_workspace_entries)
        } else {
            None
        };
        let limits = RunLimits {
            client: self.client_for(&origin.caller).await?,
            box_id: decision.spec.box_id.clone(),
            quota,
        };
        limits.check(CheckTime::Before).await?;
        let text = match &params.program {
            Some(program) => program.to_string(),
            None => decision.spec.cmd.clone(),
        };
        audit::allowed(BoxExec::NAME, origin, &decision, (&rules, &text));
        let params = BoxExecParams {
            spec: SpecDraft {
                // A directory named by the caller overrides the default of the box, even if it is the workspace.
                workdir: has_directory.then(|| decision.spec.workdir.clone()),
                ..SpecDraft::from(decision.spec).brief()
            },
            template_applied: true,
            ..params
        };
        let client = &limits.client;
        let result = match call {
            Some(mut call) => client.forward(&params, &mut call, None).await,
            None => client.call::<BoxExec>(&params).await,
        };
        let mut result = limits.check_after(result).await?;
        result.adjusted = decision.adjusted;
        audit::finished(origin, &result);
        Ok(truncate_output(result, rules.config.output_limit_chars))
    }

    /// Decides about the start of a command in an existing box: its timeout and its workspace.
    ///
    /// Like every decision, it goes to the audit log.
    pub(crate) async fn decide_start<A: StartsCommand>(
        &self,
        params: &mut A::Params,
        (origin, policy): (&Origin, &Policy),
        quota: Option<Quota>,
    ) -> Result<Option<Adjusted>, BoxError> {
        let start = A::start(params);
        let (granted, adjusted) = policy::decide_timeout(policy, *start.timeout_ms);
        *start.timeout_ms = granted;
        check(quota, CheckTime::Before).await?;
        audit::allowed_start(A::NAME, origin, (&start, adjusted.as_ref()), &self.rules());
        Ok(adjusted)
    }

    /// Handles `command.start` and `shell.run` under policy.
    /// It runs after the earlier calls of the same caller.
    async fn start<A: StartsCommand>(
        &self,
        mut params: A::Params,
        origin: &Origin,
        mut call: Call<Run<A>>,
    ) -> Result<CommandStartResult, BoxError>
    where
        Run<A>: Action<Params = A::Params, Result = CommandStartResult>,
    {
        let turn = self.0.turns.take([origin.caller.clone()]);
        let rules = self.rules();
        let client = self.client_for(&origin.caller).await?;
        let start = A::start(&mut params);
        let limits = RunLimits {
            quota: quota_of(&client, &rules, start.box_id).await,
            box_id: start.box_id.clone(),
            client,
        };
        let waits_for_exit = start.waits_for_exit && call.chunks().is_some();
        let policy = rules.policy_for(&origin.caller);
        let quota = limits.quota.clone();
        let adjusted = self
            .decide_start::<A>(&mut params, (origin, policy), quota)
            .await?;
        turn.wait().await;
        let started = limits.client.forward(&params, &mut call, Some(turn)).await;
        let mut started = if waits_for_exit {
            limits.check_after(started).await?
        } else {
            started?
        };
        started.adjusted.extend(adjusted);
        Ok(started)
    }
}

async fn check(quota: Option<Quota>, moment: CheckTime) -> Result<(), BoxError> {
    match quota {
        None => Ok(()),
        Some(quota) => blocking(move || quota.check(moment)).await,
    }
}

/// Returns the quota of an existing box.
/// If the box cannot be queried, it returns `None`, and the start itself reports the reason.
async fn quota_of(client: &RuntimeClient, rules: &Rules, box_id: &BoxId) -> Option<Quota> {
    if !rules.policy.shared_filesystem {
        return None;
    }
    let params = BoxGetParams::new(box_id.clone());
    let found = client.call::<BoxGet>(&params).await.ok()?;
    Quota::of_box(&found.info, rules.config.max_workspace_entries)
}

/// Limits of one run.
struct RunLimits {
    client: RuntimeClient,
    box_id: BoxId,
    quota: Option<Quota>,
}

impl RunLimits {
    async fn check(&self, moment: CheckTime) -> Result<(), BoxError> {
        check(self.quota.clone(), moment).await
    }

    /// Returns the result of a run if the workspace is still within its quota.
    /// Otherwise it deletes the box and returns the error of the quota.
    async fn check_after<T>(&self, result: Result<T, BoxError>) -> Result<T, BoxError> {
        if let Err(error) = &result
            && error
                .detail()
                .and_then(|detail: Detail| detail.ended)
                .is_some_and(|ended| ended != Ended::Failed)
        {
            // The box has ended, and the error names the reason.
            return result;
        }
        // The check also runs after a failure, because the command may have written before it failed.
        if let Err(error) = self.check(CheckTime::After).await {
            self.discard().await;
            return Err(error);
        }
        result
    }

    /// Deletes a box over its quota. A timeout may have deleted it already.
    async fn discard(&self) {
        let delete = BoxDeleteParams {
            box_id: self.box_id.clone(),
            force: true,
        };
        match self.client.call::<BoxDelete>(&delete).await {
            Ok(_) => {}
            Err(error) if error.code() == Code::NotFound => {}
            Err(error) => {
                let box_id = &self.box_id;
                tracing::error!(%box_id, %error, "cannot delete a box over its quota");
            }
        }
    }
}
