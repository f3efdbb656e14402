//! Main command of a box (`main` in its spec), which may also end the box.

use std::sync::Arc;

use box_protocol::actions::{
    AgentOutput, AgentOutputParams, AgentStart, AgentStartParams, ReadFrom, Until, View,
};
use box_protocol::error::Detail;
use box_protocol::{BoxError, CommandId, Env, ExitWhy, Program, Role};
use box_rpc::Peer;
use futures::StreamExt as _;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::agents_error;
use super::instance::Instance;
use crate::environment::command_environment;
use crate::start::directory;

/// Command id of the main command.
const ID: &str = "main";

impl Instance {
    /// Starts the main command, if the spec has one, within the start timeout.
    ///
    /// The start of the box fails if the main command cannot start.
    pub(super) async fn start_main(&self) -> Result<(), BoxError> {
        let limit = self.shared.config.start_timeout;
        let starting = timeout(limit, self.start_main_now());
        starting.await.unwrap_or_else(|_| {
            let limit = limit.as_secs_f64();
            Err(BoxError::timeout(format!(
                "main: the box's agent did not start it within {limit} s"
            )))
        })
    }

    async fn start_main_now(&self) -> Result<(), BoxError> {
        let spec = &self.entry.spec;
        let (Some(main), Some(running)) = (&spec.main, &self.running) else {
            return Ok(());
        };
        let agent = running.agent.peer();
        let defaults = self.entry.command_defaults();
        let env = command_environment(&agent, &spec.box_id, &defaults, Env::new()).await?;
        let cwd = directory(None, defaults.cwd, spec);
        let argv = if main.argv.is_empty() {
            let image = self.entry.status().image.clone();
            image.map(|image| image.argv).unwrap_or_default()
        } else {
            main.argv.clone()
        };
        if argv.is_empty() {
            let message = "main: the image has no command; set argv";
            return Err(BoxError::validation(message).with_detail(&Detail::of_field("main")));
        }
        let program = Program::argv(argv)?;
        let agent_params = AgentStartParams {
            env,
            user: defaults.user,
            file_bytes: spec.file_bytes(),
            keep: true,
            replace: true,
            retain_ms: Some(-1),
            role: Role::Main,
            ..AgentStartParams::new(CommandId::new(ID)?, program, cwd)
        };
        let (audit, owner) = (&running.audit, &self.entry.owner);
        audit.started(owner, &agent_params, &agent, &self.entry);
        let started = agent.call::<AgentStart>(&agent_params).await;
        let started = started.map_err(agents_error);
        started.inspect_err(|error| {
            audit.not_started(&agent_params.command_id, Some(error), &self.entry);
        })?;
        self.watch_main();
        Ok(())
    }

    /// Watches for the end of the main command, if the box ends with it.
    pub(super) fn watch_main(&self) {
        let ends_box = |main: &box_protocol::Main| main.ends_box;
        if let Some(running) = &self.running
            && self.entry.spec.main.as_ref().is_some_and(ends_box)
        {
            let (agent, main_ended) = (running.agent.peer(), Arc::clone(&running.main_ended));
            tokio::spawn(async move { watch(&agent, &main_ended).await });
        }
    }
}

/// Signals the end of the command, unless the box ended it or the end is unknown.
async fn watch(agent: &Peer, main_ended: &Notify) {
    let Ok(command_id) = CommandId::new(ID) else {
        return;
    };
    let agent_params = AgentOutputParams {
        command_id,
        from: ReadFrom::default(),
        view: View::None,
        until: Until::default(),
        exclusive: None,
        pty: None,
        slot: None,
    };
    let Ok(mut stream) = agent.stream::<AgentOutput>(&agent_params).await else {
        return;
    };
    while stream.next().await.is_some() {}
    let exit = stream.finish().await.ok().and_then(|answer| answer.exit);
    if exit.is_some_and(|exit| exit.why != ExitWhy::BoxEnded) {
        main_ended.notify_one();
    }
}
