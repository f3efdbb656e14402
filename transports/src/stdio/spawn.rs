//! Parent's side: starts a command and connects to its standard streams.

use std::{collections::VecDeque, process::Stdio as Redirect, sync::Arc};

use async_trait::async_trait;
use box_rpc::{Connection, ConnectionError, Limits, ReceiveHalf, SendHalf};
use rustix::process::Signal;
use tokio::process::{ChildStdin, ChildStdout, Command};

use super::group::{GRACE, Group};
use crate::line::{Line, LineReceive, LineSend, SkippedLines};

/// A started command, connected by its standard streams.
///
/// It leads a process group. Closing the connection ends the group in steps: it closes the input, sends `SIGTERM`
/// after two seconds and `SIGKILL` after two more. Dropping the connection, or both halves of it, kills the group at
/// once. When the command itself ends, the rest of its group is killed as well.
#[derive(Debug)]
pub struct Child {
    streams: Line<ChildStdout, ChildStdin>,
    group: Arc<KillOnDrop>,
    id: Option<u32>,
    skipped_lines: SkippedLines,
}

impl Child {
    /// Returns the process id of the command, which is also its group id.
    pub fn id(&self) -> Option<u32> {
        self.id
    }

    /// Returns the counter of skipped output lines, which cannot be messages.
    pub fn skipped_lines(&self) -> SkippedLines {
        self.skipped_lines.clone()
    }
}

/// Starts `command` with piped input and output. Needs a tokio runtime.
/// Its standard error stays as configured; by default the command inherits it.
pub fn spawn(mut command: Command, limits: &Limits) -> Result<Child, ConnectionError> {
    let mut child = command
        .stdin(Redirect::piped())
        .stdout(Redirect::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()?;
    let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(ConnectionError::Closed);
    };
    let id = child.id();
    let mut streams = Line::new(output, input, limits);
    let skipped_lines = streams.skip_non_messages();
    Ok(Child {
        streams,
        group: Arc::new(KillOnDrop(Group::watch(child))),
        id,
        skipped_lines,
    })
}

impl Connection for Child {
    fn split(self: Box<Self>) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
        let (send, receive) = self.streams.into_parts();
        let send = ChildSend {
            streams: send,
            group: Arc::clone(&self.group),
        };
        let receive = ChildReceive {
            streams: receive,
            _group: self.group,
        };
        (Box::new(send), Box::new(receive))
    }
}

/// Held by both halves; dropping the last one kills the group.
#[derive(Debug)]
struct KillOnDrop(Arc<Group>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.signal(Signal::KILL);
    }
}

#[derive(Debug)]
struct ChildSend {
    streams: LineSend<ChildStdin>,
    group: Arc<KillOnDrop>,
}

#[async_trait]
impl SendHalf for ChildSend {
    async fn send(&mut self, message: String) -> Result<(), ConnectionError> {
        self.streams.send(message).await
    }

    async fn flush(&mut self) -> Result<(), ConnectionError> {
        self.streams.flush().await
    }

    async fn send_all(&mut self, messages: &mut VecDeque<String>) -> Result<(), ConnectionError> {
        self.streams.send_all(messages).await
    }

    /// Returns when the command has ended, which takes at most a few seconds.
    async fn close(&mut self) -> Result<(), ConnectionError> {
        // A command that no longer reads its input must not delay its own end.
        let closed = tokio::time::timeout(GRACE, self.streams.close())
            .await
            .unwrap_or(Err(ConnectionError::Closed));
        self.group.0.end().await;
        closed
    }
}

#[derive(Debug)]
struct ChildReceive {
    streams: LineReceive<ChildStdout>,
    _group: Arc<KillOnDrop>,
}

#[async_trait]
impl ReceiveHalf for ChildReceive {
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError> {
        self.streams.receive().await
    }

    fn receive_ready(&mut self) -> Option<String> {
        self.streams.receive_ready()
    }

    fn set_message_limit(&mut self, bytes: usize) {
        self.streams.set_message_limit(bytes);
    }
}
