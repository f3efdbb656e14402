//! The output of a command while it runs, and the progress of a call.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use box_protocol::actions::{CommandChunk, CommandStartResult, Displayed};
use box_protocol::{Adjusted, BoxError, CommandInfo};
use rmcp::model::{ProgressNotificationParam, ProgressToken};
use rmcp::{Peer, RoleServer};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::excerpt::Collector;
use crate::http::stream::{Step, StreamedCall};

/// The time between two progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// The last line of output of a running call, for its progress messages.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress(Arc<Mutex<String>>);

impl Progress {
    /// Sets the line of the next message.
    pub(super) fn set(&self, line: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = line;
    }

    fn line(&self) -> String {
        let line = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        line.clone()
    }

    /// Reports the elapsed seconds and the last line twice a second, if the client asked for progress.
    ///
    /// Every call is reported: many clients give up a call that is silent for a minute.
    pub(super) async fn report(
        &self,
        peer: Peer<RoleServer>,
        token: Option<ProgressToken>,
    ) -> Infallible {
        let Some(token) = token else {
            return std::future::pending().await;
        };
        let began = Instant::now();
        let mut ticks = interval_at(began + PROGRESS_INTERVAL, PROGRESS_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let elapsed = began.elapsed().as_secs_f64();
            let mut params = ProgressNotificationParam::new(token.clone(), elapsed);
            params.message = Some(self.line()).filter(|line| !line.is_empty());
            // A client that has gone is noticed by the transport.
            let _ = peer.notify_progress(params).await;
        }
    }
}

/// What a command has done while it was watched.
#[derive(Debug)]
pub(super) struct Followed {
    pub(super) output: Collector,
    pub(super) displayed: Vec<Displayed>,
    pub(super) info: CommandInfo,
    /// The position after the output that was read.
    pub(super) pos: u64,
    /// Fields of the request that the policy of a server changed.
    pub(super) adjusted: Vec<Adjusted>,
}

/// Reads the output of a call until it ends, and sets the line of its progress.
pub(super) async fn follow(
    mut call: StreamedCall<CommandChunk, CommandStartResult>,
    progress: &Progress,
) -> Result<Followed, BoxError> {
    let mut output = Collector::default();
    let mut displayed = Vec::new();
    loop {
        match call.next().await {
            Step::Chunk(CommandChunk::Bytes(piece)) => {
                output.push(piece.pos, &piece.data);
                progress.set(output.last_line());
            }
            Step::Chunk(CommandChunk::Gap(gap)) => output.lose(gap.bytes),
            Step::Chunk(CommandChunk::Display(value)) => displayed.push(value),
            Step::Chunk(CommandChunk::Started(_) | CommandChunk::Text(_)) | Step::Idle => {}
            Step::End(ended) => {
                let ended = ended?;
                return Ok(Followed {
                    output,
                    displayed,
                    pos: ended.read.map_or(0, |read| read.pos),
                    info: ended.info,
                    adjusted: ended.adjusted,
                });
            }
        }
    }
}
