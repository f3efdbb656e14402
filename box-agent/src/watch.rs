//! A command that watches files.
//!
//! It has no process: a task of the agent writes the events as lines to the command's log.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use box_protocol::BoxError;
use box_protocol::actions::{AgentCommand, AgentWatch, StreamName};
use box_sys::ChildExit;
use tokio::io::unix::AsyncFd;

use crate::agent::Agent;
use crate::command::Command;
use crate::files::WatchedTree;
use crate::head_buffer::OutputTotals;
use crate::pipe::async_fd;
use crate::supervise::KILLED;

/// A running watch.
pub(crate) struct FileWatch {
    agent: Arc<Agent>,
    command: Arc<Command>,
    watched: WatchedTree,
    events: AsyncFd<OwnedFd>,
}

impl FileWatch {
    /// Starts watching.
    pub(crate) async fn start(
        agent: &Arc<Agent>,
        command: &Arc<Command>,
        params: AgentWatch,
    ) -> Result<Self, BoxError> {
        let (tree, events) = agent.files().watch(params).await?;
        let events = async_fd(events);
        Ok(Self {
            agent: Arc::clone(agent),
            command: Arc::clone(command),
            watched: tree,
            events: events.map_err(|_| BoxError::internal("watch: events cannot be read"))?,
        })
    }

    /// Watches until the watch ends or its end is requested.
    pub(crate) async fn run(self) -> AgentCommand {
        let (agent, command) = (Arc::clone(&self.agent), Arc::clone(&self.command));
        let ended = tokio::select! {
            biased;
            () = command.end_requested.notified() => KILLED,
            ended = self.until_end() => ChildExit {
                pid: 0,
                code: Some(i32::from(ended.is_err())),
                signal: None,
            },
        };
        let exit = command.exit(ended);
        let summary = command.summary(Some(exit), OutputTotals::of_log(&command.log()));
        command.finish(summary.clone());
        agent.record_end(&command);
        summary
    }

    async fn until_end(self) -> Result<(), BoxError> {
        let Self {
            agent,
            command,
            mut watched,
            events,
        } = self;
        loop {
            let lost = |_| BoxError::internal("watch: events cannot be read");
            let mut ready = events.readable().await.map_err(lost)?;
            // While the log is full, events queue in the kernel. The kernel reports dropped events but does not count
            // them.
            command.wait_for_room().await;
            let batch;
            (watched, batch) = agent.files().poll_watch(watched).await?;
            if batch.drained {
                ready.clear_ready();
            }
            if !batch.lines.is_empty() {
                agent.append_output(&command, StreamName::Stdout, &batch.lines);
            }
            if batch.ended {
                return Ok(());
            }
        }
    }
}
