//! A command that is a watch on files: no process, but a task of the agent that writes lines to the command's log.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use box_protocol::BoxError;
use box_protocol::actions::{AgentCommand, AgentWatch, StreamName};
use box_sys::Ended;
use tokio::io::unix::AsyncFd;

use crate::agent::Agent;
use crate::command::Command;
use crate::files::Watched;
use crate::keep::Sum;
use crate::life::KILLED;
use crate::pipe::watched;

/// A watch that runs.
pub(crate) struct Watching {
    agent: Arc<Agent>,
    command: Arc<Command>,
    watched: Watched,
    events: AsyncFd<OwnedFd>,
}

impl Watching {
    /// Begins to watch.
    pub(crate) async fn begin(
        agent: &Arc<Agent>,
        command: &Arc<Command>,
        asked: AgentWatch,
    ) -> Result<Self, BoxError> {
        let (tree, events) = agent.files().watch(asked).await?;
        let events = watched(events);
        Ok(Self {
            agent: Arc::clone(agent),
            command: Arc::clone(command),
            watched: tree,
            events: events.map_err(|_| BoxError::internal("the watch cannot be waited for"))?,
        })
    }

    /// Watches until that is over, or not wanted any more.
    pub(crate) async fn live(self) -> AgentCommand {
        let (agent, command) = (Arc::clone(&self.agent), Arc::clone(&self.command));
        let ended = tokio::select! {
            biased;
            () = command.wanted.notified() => KILLED,
            ended = self.until_over() => Ended {
                pid: 0,
                code: Some(i32::from(ended.is_err())),
                signal: None,
            },
        };
        let exit = command.exit(ended);
        let told = command.telling(Some(exit), Sum::of(&command.log()));
        command.has_ended_as(told.clone());
        agent.ended(&command);
        told
    }

    async fn until_over(self) -> Result<(), BoxError> {
        let Self {
            agent,
            command,
            mut watched,
            events,
        } = self;
        loop {
            let lost = |_| BoxError::internal("the watch cannot be waited for");
            let mut ready = events.readable().await.map_err(lost)?;
            // A full log that somebody reads leaves the events to the kernel, which counts none it drops, but says so.
            command.room().await;
            let seen;
            (watched, seen) = agent.files().look(watched).await?;
            if seen.drained {
                ready.clear_ready();
            }
            if !seen.lines.is_empty() {
                agent.keep_output(&command, StreamName::Stdout, &seen.lines);
            }
            if seen.over {
                return Ok(());
            }
        }
    }
}
