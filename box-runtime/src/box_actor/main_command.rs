//! Main command of a box (`main` in its spec), which may also end the box.

use std::sync::Arc;

use box_protocol::actions::{
    AgentOutput, AgentOutputParams, AgentStart, AgentStartParams, ReadFrom, Until, View,
};
use box_protocol::{BoxError, CommandId, Env, ExitWhy, Program, Role};
use box_rpc::Peer;
use futures::StreamExt as _;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::agents_error;
use super::instance::Instance;
use crate::env_file::environment;
use crate::start::directory;

/// Command id of the main command.
const ID: &str = "main";

impl Instance {
    /// Starts the main command, if the spec has one, within the start timeout.
    ///
    /// The start of the box fails if the main command cannot start.
    pub(super) async fn enter_main(&self) -> Result<(), BoxError> {
        let limit = self.shared.config.start_timeout;
        let entering = timeout(limit, self.enter_main_at_leisure());
        entering.await.unwrap_or_else(|_| {
            let limit = limit.as_secs_f64();
            Err(BoxError::timeout(format!(
                "main: the box's agent did not start it within {limit} s"
            )))
        })
    }

    async fn enter_main_at_leisure(&self) -> Result<(), BoxError> {
        let spec = &self.entry.spec;
        let (Some(main), Some(living)) = (&spec.main, &self.living) else {
            return Ok(());
        };
        let agent = living.agent.peer();
        let defaults = self.entry.live().defaults.as_deref().cloned();
        let defaults = defaults.unwrap_or_default();
        let env = environment(&agent, &spec.box_id, &defaults, Env::new()).await?;
        let cwd = directory(None, defaults.cwd, spec);
        let program = Program::argv(main.argv.iter().cloned())?;
        let asked = AgentStartParams {
            env,
            user: defaults.user,
            file_bytes: spec.file_bytes(),
            keep: true,
            replace: true,
            retain_ms: Some(-1),
            role: Role::Main,
            ..AgentStartParams::new(CommandId::new(ID)?, program, cwd)
        };
        let (audit, owner) = (&living.audit, &self.entry.owner);
        audit.started(owner, &asked, &agent, &self.entry);
        let started = agent.call::<AgentStart>(&asked).await;
        let started = started.map_err(agents_error);
        started
            .inspect_err(|error| audit.not_started(&asked.command_id, Some(error), &self.entry))?;
        self.watch_main();
        Ok(())
    }

    /// Watches for the end of the main command, if the box ends with it.
    pub(super) fn watch_main(&self) {
        let ends_box = |main: &box_protocol::Main| main.ends_box;
        if let Some(living) = &self.living
            && self.entry.spec.main.as_ref().is_some_and(ends_box)
        {
            let (agent, over) = (living.agent.peer(), Arc::clone(&living.over));
            tokio::spawn(async move { watch(&agent, &over).await });
        }
    }
}

/// Signals the end of the command, unless the box ended it or the end is unknown.
async fn watch(agent: &Peer, over: &Notify) {
    let Ok(command_id) = CommandId::new(ID) else {
        return;
    };
    let asked = AgentOutputParams {
        command_id,
        from: ReadFrom::default(),
        view: View::None,
        until: Until::default(),
        exclusive: None,
        pty: None,
        spool: None,
    };
    let Ok(mut stream) = agent.stream::<AgentOutput>(&asked).await else {
        return;
    };
    while stream.next().await.is_some() {}
    let exit = stream.finish().await.ok().and_then(|told| told.exit);
    if exit.is_some_and(|exit| exit.why != ExitWhy::BoxEnded) {
        over.notify_one();
    }
}
