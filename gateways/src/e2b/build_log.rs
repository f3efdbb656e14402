//! The log of a build: the output of the commands in its box.

use box_protocol::actions::{CommandAttachParams, CommandChunk, CommandListParams};
use box_protocol::{BoxError, BoxId, Code, UnixMs};
use serde_json::{Value, json};

use super::error::ApiError;
use crate::http::context::Context;
use crate::http::lines::LineCutter;
use crate::http::stream::{Step, StreamedCall};

type Result<T> = std::result::Result<T, ApiError>;

/// The entries of a log that a client asks for.
struct Window {
    skip: usize,
    limit: usize,
    entries: Vec<Value>,
}

impl Window {
    fn push(&mut self, at: UnixMs, message: &str, step: &str) {
        if self.skip > 0 {
            self.skip -= 1;
        } else if !self.is_full() {
            self.entries.push(json!({
                "timestamp": at.to_string(), "message": message, "level": "info", "step": step,
            }));
        }
    }

    fn is_full(&self) -> bool {
        self.entries.len() >= self.limit
    }
}

/// Returns a part of the log of a build; `None` if its box is gone.
pub(super) async fn logs(
    context: &Context,
    build: &str,
    skip: usize,
    limit: usize,
) -> Result<Option<Vec<Value>>> {
    let Ok(id) = BoxId::new(build) else {
        return Ok(None);
    };
    let runtime = context.runtime();
    let listed = runtime.list_commands(&context.caller, CommandListParams::new(id.clone()));
    let listed = match listed.await {
        Ok(listed) => listed.items,
        Err(error) if error.code() == Code::NotFound => return Ok(None),
        // The box of the build is starting or has failed.
        Err(_) => return Ok(Some(Vec::new())),
    };
    let mut window = Window {
        skip,
        limit,
        entries: Vec::new(),
    };
    for info in listed {
        if window.is_full() {
            break;
        }
        let at = info.created_at;
        let step = info
            .command_id
            .as_str()
            .trim_start_matches("step-")
            .trim_start_matches('0')
            .to_owned();
        window.push(at, &format!("[step {step}] {}", info.program), &step);
        let mut params = CommandAttachParams::new(id.clone(), info.command_id.clone());
        params.until.ms = Some(0);
        let held = context.clone();
        let mut call = StreamedCall::<CommandChunk, _>::new(move |chunks| async move {
            held.runtime()
                .attach_command(&held.caller, params, chunks)
                .await
        });
        let mut lines = LineCutter::new(8192);
        let ended: std::result::Result<_, BoxError> = loop {
            match call.next().await {
                Step::Chunk(CommandChunk::Text(piece)) => lines.push(&piece.data, |line| {
                    window.push(piece.at, line, &step);
                }),
                Step::Chunk(_) | Step::Idle => {}
                Step::End(ended) => break ended,
            }
        };
        let is_over = ended.is_ok_and(|ended| ended.info.exit.is_some());
        if let (Some(rest), true) = (lines.finish(), is_over) {
            window.push(at, &rest, &step);
        }
    }
    Ok(Some(window.entries))
}
