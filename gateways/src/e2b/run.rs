//! Commands that this gateway itself runs in boxes: the steps of a build, and the check whether a box is ready.

use axum::http::StatusCode;
use box_protocol::Exit;
use box_protocol::actions::{
    AttachOptions, CommandChunk, CommandStartParams, CommandStartResult, StreamName, Until, View,
};

use super::GATEWAY;
use super::error::ApiError;
use crate::http::context::Context;
use crate::http::stream::{Step, StreamedCall};

/// The time in which a new box must become ready, in milliseconds. Clients wait for a minute.
pub(super) const NEW_BOX_MS: u64 = 50_000;

/// The maximum bytes of output that a command returns.
const MAX_OUTPUT_BYTES: usize = 4 * 1024 * 1024;

/// Repeats a command until it succeeds.
const UNTIL: &str = r#"until /bin/bash -l -c "$1"; do sleep 0.2; done"#;

/// Runs a command to its end. Returns its exit code, or `None` if its time limit ended it.
pub(super) async fn run(
    context: &Context,
    params: CommandStartParams,
) -> Result<Option<i32>, ApiError> {
    let mut call = call(context, params, View::None);
    loop {
        if let Step::End(ended) = call.next().await {
            let exit = ended?.info.exit;
            return Ok(exit.as_ref().and_then(Exit::shell_code));
        }
    }
}

/// Runs a command to its end, and returns what it wrote to stdout.
pub(super) async fn output(
    context: &Context,
    params: CommandStartParams,
) -> Result<String, ApiError> {
    let program = params.program.to_string();
    let failed = |problem: &str| {
        let message = format!("{program}: {problem}");
        ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    };
    let mut call = call(context, params, View::Text);
    let mut text = String::new();
    loop {
        match call.next().await {
            Step::Chunk(CommandChunk::Text(piece)) => {
                if matches!(piece.stream, StreamName::Stdout) {
                    text.push_str(&piece.data);
                }
                if text.len() > MAX_OUTPUT_BYTES {
                    return Err(failed("its output is too long"));
                }
            }
            Step::Chunk(_) | Step::Idle => {}
            Step::End(ended) => {
                let exit = ended?.info.exit;
                return match exit.as_ref().and_then(Exit::shell_code) {
                    Some(0) => Ok(text),
                    _ => Err(failed("the command failed")),
                };
            }
        }
    }
}

fn call(
    context: &Context,
    mut params: CommandStartParams,
    view: View,
) -> StreamedCall<CommandChunk, CommandStartResult> {
    params.attach = Some(AttachOptions {
        view,
        until: Until::default(),
    });
    let held = context.clone();
    StreamedCall::new(move |chunks| async move {
        held.start_command(&GATEWAY, params, Some(chunks)).await
    })
}

/// Returns the words that run the ready command of a template until it succeeds.
pub(super) fn until(ready: &str) -> Vec<String> {
    ["/bin/bash", "-c", UNTIL, "ready", ready]
        .map(str::to_owned)
        .into()
}

/// Waits until a box is ready. `params` start the words of [`until`] in it.
pub(super) async fn wait_until_ready(
    context: &Context,
    params: CommandStartParams,
    limit_ms: u64,
) -> Result<(), ApiError> {
    let params = CommandStartParams {
        timeout_ms: Some(limit_ms),
        ..params
    };
    if run(context, params).await? == Some(0) {
        return Ok(());
    }
    let seconds = limit_ms / 1000;
    let message = format!(
        "readyCmd: did not succeed within its time limit, at most {seconds} s; check startCmd"
    );
    Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message))
}
