//! `shell.*`: forwards calls about shells to the agent that runs them.
//!
//! The agent owns the shells. The runtime applies the defaults of the box, and starts a run as a
//! command.

use box_protocol::actions::{
    AgentStartParams, CommandChunk, CommandStartResult, ShellCreate, ShellCreateParams,
    ShellCreateResult, ShellDelete, ShellDeleteParams, ShellDeleteResult, ShellInfo, ShellList,
    ShellListParams, ShellListResult, ShellRun, ShellRunParams,
};
use box_protocol::{BoxError, Program, Role, ShellId};
use box_rpc::{Call, Handle};
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::box_actor::agent_access::AgentLease;
use crate::box_actor::agent_violation;
use crate::commands::id_or_new;
use crate::data_plane::ask;
use crate::env_file::environment;
use crate::handlers::{plain, streamed};
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
        let order = self.order(caller, &params.box_id, &params);
        let lease = self.enter(caller, &params.box_id).await?;
        let defaults = lease.defaults().unwrap_or_default();
        let id = match params.shell_id {
            Some(id) => id,
            None => ShellId::new(Uuid::now_v7().simple().to_string())?,
        };
        let (agent, box_id) = (&lease.agent, &params.box_id);
        let env = environment(agent, box_id, &defaults, params.env);
        params.env = lease.attended(lease.outcome(env)).await??;
        params.shell_id = Some(id.clone());
        params.cwd = Some(directory(params.cwd, defaults.cwd, lease.spec()));
        let mut made = lease
            .outcome(ask::<ShellCreate>(&lease, &params, order))
            .await?;
        if made.info.shell_id != id {
            return Err(BoxError::unavailable(agent_violation(
                "answered for another shell",
            )));
        }
        lease.own(&mut made.info);
        Ok(made)
    }

    /// Runs a text in a shell.
    ///
    /// With a channel for chunks and `attach`, the call lasts until reading ends. Dropping the
    /// future then kills the run.
    pub async fn run_in_shell(
        &self,
        caller: &Caller,
        params: ShellRunParams,
        chunks: Option<mpsc::Sender<CommandChunk>>,
    ) -> Result<CommandStartResult, BoxError> {
        let order = self.order(caller, &params.box_id, &params);
        let lease = self.enter(caller, &params.box_id).await?;
        let attach = chunks.and_then(|chunks| Some((chunks, params.attach.clone()?)));
        let (id, text) = (id_or_new(params.command_id)?, Program::text(params.text)?);
        let asked = AgentStartParams {
            env: params.env,
            shell_id: Some(params.shell_id),
            stdin: params.stdin,
            timeout_ms: params.timeout_ms,
            role: Role::Run,
            ..AgentStartParams::new(id, text, params.cwd.unwrap_or_default())
        };
        self.begin(&lease, asked, order, attach).await
    }

    /// Lists the shells of a box, oldest first.
    ///
    /// Does not count as activity and does not wake the box.
    pub async fn list_shells(
        &self,
        caller: &Caller,
        params: ShellListParams,
    ) -> Result<ShellListResult, BoxError> {
        let order = self.order(caller, &params.box_id, &params);
        let lease = self.look(caller, &params.box_id).await?;
        let mut found = lease
            .outcome(ask::<ShellList>(&lease, &params, order))
            .await?;
        for info in &mut found.items {
            lease.own(info);
        }
        Ok(found)
    }

    /// Ends a shell and its runs.
    pub async fn delete_shell(
        &self,
        caller: &Caller,
        params: ShellDeleteParams,
    ) -> Result<ShellDeleteResult, BoxError> {
        let order = self.order(caller, &params.box_id, &params);
        let lease = self.enter(caller, &params.box_id).await?;
        lease
            .outcome(ask::<ShellDelete>(&lease, &params, order))
            .await
    }
}

impl AgentLease {
    /// Sets the box id, which the runtime does not accept from an agent.
    fn own(&self, info: &mut ShellInfo) {
        info.box_id = self.spec().box_id.clone();
    }
}

impl Handle<ShellRun> for BoxRuntime {
    async fn handle(
        &self,
        params: ShellRunParams,
        call: Call<ShellRun>,
    ) -> Result<CommandStartResult, BoxError> {
        let caller = call.caller();
        streamed(call, |chunks| self.run_in_shell(&caller, params, chunks)).await
    }
}

plain! {
    ShellCreate: create_shell(ShellCreateParams) -> ShellCreateResult;
    ShellList: list_shells(ShellListParams) -> ShellListResult;
    ShellDelete: delete_shell(ShellDeleteParams) -> ShellDeleteResult;
}
