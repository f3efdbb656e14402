//! Policy for all commands: `box.exec`, `command.start` and `shell.run`.
//!
//! The profile limits the time of each ([`policy`](crate::policy)). The service checks the workspace quota before the
//! start and after the end, logs the start in the audit log and truncates the output in the result.

use std::marker::PhantomData;

use box_protocol::actions::{
    BoxDelete, BoxDeleteParams, BoxExec, BoxExecParams, BoxGet, BoxGetParams, CommandChunk,
    CommandStart, CommandStartParams, CommandStartResult, ShellRun, ShellRunParams,
};
use box_protocol::error::{Detail, Ended};
use box_protocol::{BoxError, BoxExecutionResult, BoxId, Code, Env, SpecDraft};
use box_rpc::{Action, Call, Handle};
use serde_json::value::RawValue;

use crate::audit::{self, Origin};
use crate::client::RuntimeClient;
use crate::handlers::origin;
use crate::policy;
use crate::quota::{Moment, Quota};
use crate::service::{BoxService, Rules, blocking};
use crate::status::shortened;

/// An action that runs a command. Its chunks are forwarded unparsed.
pub(crate) struct Run<A>(PhantomData<A>);

impl<A: Action<Chunk = CommandChunk>> Action for Run<A> {
    const NAME: &'static str = A::NAME;
    type Params = A::Params;
    type Result = A::Result;
    type Chunk = Box<RawValue>;
}

/// Data that policy needs about a command before its start.
pub(crate) struct Start<'a> {
    box_id: &'a BoxId,
    timeout_ms: &'a mut Option<u64>,
    env: &'a Env,
    /// The command, for the audit log.
    text: String,
    /// Whether the call lasts until the command has ended.
    stays: bool,
}

/// An action that starts a command in an existing box.
pub(crate) trait Starts: Action<Result = CommandStartResult, Chunk = CommandChunk> {
    fn start(params: &mut Self::Params) -> Start<'_>;
}

impl Starts for CommandStart {
    fn start(params: &mut CommandStartParams) -> Start<'_> {
        Start {
            box_id: &params.box_id,
            timeout_ms: &mut params.timeout_ms,
            env: &params.env,
            text: params.program.to_string(),
            stays: params.attach.is_some(),
        }
    }
}

impl Starts for ShellRun {
    fn start(params: &mut ShellRunParams) -> Start<'_> {
        Start {
            box_id: &params.box_id,
            timeout_ms: &mut params.timeout_ms,
            env: &params.env,
            text: params.text.clone(),
            stays: params.attach.is_some(),
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
        self.exec(params, &origin, Some(call)).await
    }
}

impl<A: Starts> Handle<Run<A>> for BoxService
where
    Run<A>: Action<Params = A::Params, Result = CommandStartResult>,
{
    async fn handle(
        &self,
        params: A::Params,
        call: Call<Run<A>>,
    ) -> Result<CommandStartResult, BoxError> {
        let origin = origin(&call);
        let outcome = self.start::<A>(params, &origin, call).await;
        self.recorded(A::NAME, &origin, outcome)
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
        self.recorded(BoxExec::NAME, origin, outcome)
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
        let decision = self.decide(&rules, params.spec, origin).await?;
        if params.program.is_none() {
            decision.spec.require_cmd()?;
        }
        let quota = if rules.policy.shared_filesystem {
            Quota::of(&decision.spec, rules.config.max_workspace_entries)
        } else {
            None
        };
        let bounds = Bounds {
            client: self.client_for(&origin.caller).await?,
            box_id: decision.spec.box_id.clone(),
            quota,
        };
        bounds.check(Moment::Before).await?;
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
            ..params
        };
        let client = &bounds.client;
        let result = match call {
            Some(mut call) => client.forward(&params, &mut call, None).await,
            None => client.call::<BoxExec>(&params).await,
        };
        let mut result = bounds.kept(result).await?;
        result.adjusted = decision.adjusted;
        audit::finished(origin, &result);
        Ok(shortened(result, rules.config.output_limit_chars))
    }

    /// Handles `command.start` and `shell.run` under policy.
    /// It runs after the earlier calls of the same caller.
    async fn start<A: Starts>(
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
        let start = A::start(&mut params);
        let (given, adjusted) =
            policy::decide_time(rules.policy_for(&origin.caller), *start.timeout_ms);
        *start.timeout_ms = given;
        let client = self.client_for(&origin.caller).await?;
        let bounds = Bounds {
            quota: quota_of(&client, &rules, start.box_id).await,
            box_id: start.box_id.clone(),
            client,
        };
        bounds.check(Moment::Before).await?;
        audit::starting(A::NAME, origin, &start.audited(adjusted.as_ref()), &rules);
        let stays = start.stays && call.chunks().is_some();
        turn.comes().await;
        let started = bounds.client.forward(&params, &mut call, Some(turn)).await;
        let mut started = if stays {
            bounds.kept(started).await?
        } else {
            started?
        };
        started.adjusted.extend(adjusted);
        Ok(started)
    }
}

impl Start<'_> {
    fn audited<'a>(&'a self, adjusted: Option<&'a box_protocol::Adjusted>) -> audit::Starting<'a> {
        audit::Starting {
            box_id: self.box_id,
            timeout_ms: *self.timeout_ms,
            adjusted,
            env: self.env,
            text: &self.text,
        }
    }
}

/// Returns the quota of an existing box.
/// If the box cannot be queried, it returns `None`, and the start itself reports the reason.
async fn quota_of(client: &RuntimeClient, rules: &Rules, box_id: &BoxId) -> Option<Quota> {
    if !rules.policy.shared_filesystem {
        return None;
    }
    let params = BoxGetParams {
        box_id: box_id.clone(),
        guest: false,
    };
    let found = client.call::<BoxGet>(&params).await.ok()?;
    Quota::of_box(&found.info, rules.config.max_workspace_entries)
}

/// Limits of one run.
struct Bounds {
    client: RuntimeClient,
    box_id: BoxId,
    quota: Option<Quota>,
}

impl Bounds {
    async fn check(&self, moment: Moment) -> Result<(), BoxError> {
        match self.quota.clone() {
            None => Ok(()),
            Some(quota) => blocking(move || quota.check(moment)).await,
        }
    }

    /// Returns the result if the workspace is within its quota.
    /// Otherwise it deletes the box.
    async fn kept<T>(&self, result: Result<T, BoxError>) -> Result<T, BoxError> {
        if let Err(error) = &result
            && error
                .detail()
                .and_then(|detail: Detail| detail.ended)
                .is_some_and(|ended| ended != Ended::Failed)
        {
            // The record of that box holds the reason of its end.
            return result;
        }
        // The check also runs after a failure, because the command may have written before it failed.
        if let Err(error) = self.check(Moment::After).await {
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
                tracing::error!(%box_id, %error, "a box over its quota is still there");
            }
        }
    }
}
