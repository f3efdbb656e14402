//! `shell.*`: forwards calls about shells to the agent that runs them.
//!
//! 1. `shell.create` applies the defaults of the box and asks the agent for a shell with this id. The
//!    agent returns an existing shell with the same id.
//! 2. `shell.run` starts a text in a shell as a command with the role `run`. Reading, killing and the
//!    log of such a command are those of every command (`commands.rs`).
//! 3. The agent runs the texts of one shell one after another. Displayed media of a Python or
//!    JavaScript run come as chunks after all its output.
//! 4. `shell.delete` ends the shell and its runs.

use box_protocol::actions::{
    AgentStartParams, CommandChunk, CommandStartResult, OnDisconnect, ShellCreate,
    ShellCreateParams, ShellCreateResult, ShellDelete, ShellDeleteParams, ShellDeleteResult,
    ShellInfo, ShellList, ShellListParams, ShellListResult, ShellRun, ShellRunParams,
};
use box_protocol::{BoxError, Program, Role, ShellId};
use box_rpc::{Call, Handle};
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::box_actor::agent_access::AgentLease;
use crate::box_actor::agent_violation;
use crate::commands::id_or_new;
use crate::data_plane::call_agent;
use crate::environment::command_environment;
use crate::handlers::{plain, streaming};
use crate::runtime::BoxRuntime;
use crate::start::directory;
use box_rpc::Caller;

impl BoxRuntime {
    /// Creates a shell, or finds the shell that has its id.
    pub async fn create_shell(
        &self,
        caller: &Caller,
        mut params: ShellCreateParams,
    ) -> Result<ShellCreateResult, BoxError> {
        let ticket = self.order_ticket(caller, &params.box_id, &params);
        let lease = self.acquire(caller, &params.box_id).await?;
        let defaults = lease.defaults();
        let id = match params.shell_id {
            Some(id) => id,
            None => ShellId::new(Uuid::now_v7().simple().to_string())?,
        };
        let (agent, box_id) = (&lease.agent, &params.box_id);
        let env = command_environment(agent, box_id, &defaults, params.env);
        params.env = lease.with_health_checks(lease.outcome(env)).await??;
        params.shell_id = Some(id.clone());
        params.cwd = Some(directory(params.cwd, defaults.cwd, lease.spec()));
        let mut created = lease
            .outcome(call_agent::<ShellCreate>(&lease, &params, ticket))
            .await?;
        if created.info.shell_id != id {
            return Err(BoxError::unavailable(agent_violation(
                "answered for another shell",
            )));
        }
        lease.set_box_id(&mut created.info);
        Ok(created)
    }

    /// Runs a text in a shell.
    ///
    /// With a channel for chunks and `attach`, the call lasts until reading ends. Dropping the
    /// future then kills the run, unless its `on_disconnect` is `keep`.
    pub async fn run_in_shell(
        &self,
        caller: &Caller,
        params: ShellRunParams,
        chunks: Option<mpsc::Sender<CommandChunk>>,
    ) -> Result<CommandStartResult, BoxError> {
        let ticket = self.order_ticket(caller, &params.box_id, &params);
        let lease = self.acquire(caller, &params.box_id).await?;
        let attach = chunks.and_then(|chunks| Some((chunks, params.attach.clone()?)));
        let (id, text) = (id_or_new(params.command_id)?, Program::text(params.text)?);
        let agent_params = AgentStartParams {
            env: params.env,
            shell_id: Some(params.shell_id),
            cwd_stays: params.cwd_stays,
            stdin: params.stdin,
            timeout_ms: params.timeout_ms,
            log_bytes: params.log_bytes,
            keep: params.on_disconnect == OnDisconnect::Keep,
            detached_ms: params.detached_ms,
            retain_ms: params.retain_ms,
            role: Role::Run,
            note: params.note,
            ..AgentStartParams::new(id, text, params.cwd.unwrap_or_default())
        };
        self.begin(&lease, agent_params, ticket, attach).await
    }

    /// Lists the shells of a box, oldest first.
    ///
    /// Does not count as activity and does not wake the box.
    pub async fn list_shells(
        &self,
        caller: &Caller,
        params: ShellListParams,
    ) -> Result<ShellListResult, BoxError> {
        let ticket = self.order_ticket(caller, &params.box_id, &params);
        let lease = self.acquire_readonly(caller, &params.box_id).await?;
        let mut found = lease
            .outcome(call_agent::<ShellList>(&lease, &params, ticket))
            .await?;
        for info in &mut found.items {
            lease.set_box_id(info);
        }
        Ok(found)
    }

    /// Ends a shell and its runs.
    pub async fn delete_shell(
        &self,
        caller: &Caller,
        params: ShellDeleteParams,
    ) -> Result<ShellDeleteResult, BoxError> {
        let ticket = self.order_ticket(caller, &params.box_id, &params);
        let lease = self.acquire(caller, &params.box_id).await?;
        lease
            .outcome(call_agent::<ShellDelete>(&lease, &params, ticket))
            .await
    }
}

impl AgentLease {
    /// Sets the box id, which the runtime does not accept from an agent.
    fn set_box_id(&self, info: &mut ShellInfo) {
        info.box_id = self.spec().box_id.clone();
    }
}

streaming! {
    ShellRun: run_in_shell(ShellRunParams) -> CommandStartResult;
}

plain! {
    ShellCreate: create_shell(ShellCreateParams) -> ShellCreateResult;
    ShellList: list_shells(ShellListParams) -> ShellListResult;
    ShellDelete: delete_shell(ShellDeleteParams) -> ShellDeleteResult;
}
