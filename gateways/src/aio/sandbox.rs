//! `/v1/sandbox`: what a box has.

use std::time::Duration;

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{AttachOptions, CommandChunk, CommandStartParams, StreamName};
use box_protocol::{BoxId, Program};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::GATEWAY;
use super::envelope::{Failure, done};
use crate::http::context::{Context, InBox};
use crate::http::refusal::json_response;
use crate::http::stream::{Step, StreamedCall};

/// The time limit of a list of packages.
const LIST_MS: u64 = 60_000;

/// The time limit of a version.
const VERSION_LIMIT: Duration = Duration::from_secs(1);

/// The maximum length of a list of packages.
const MAX_LIST_BYTES: usize = 8 * 1024 * 1024;

/// Describes the box; deer-flow polls it until it is ready.
pub(super) async fn context(context: Context, InBox(box_id): InBox) -> Result<Response, Failure> {
    let info = context.get(&box_id).await?;
    let guest = context.runtime().guest(&context.caller, &box_id).await?;
    let tool = async |language: &str| -> Vec<Value> {
        let Some(path) = guest.interpreters.get(language) else {
            return Vec::new();
        };
        let version = version_of(&context, &box_id, path).await;
        vec![json!({"ver": version, "bin": path, "alias": [language]})]
    };
    let (python, nodejs) = tokio::join!(tool("python"), tool("javascript"));
    let tools: Vec<Value> = guest
        .tools
        .iter()
        .map(|name| json!({"name": name, "description": ""}))
        .collect();
    let ports: Vec<String> = guest.ports.iter().map(u16::to_string).collect();
    let (name, version) = os_of(&guest.os);
    let body = json!({
        "success": true,
        "message": "Operation successful",
        "data": null,
        "home_dir": guest.home,
        "workspace": info.mount_path,
        "version": env!("CARGO_PKG_VERSION"),
        "detail": {
            "system": {
                "os": name,
                "os_version": version,
                "arch": guest.arch,
                "user": guest.user,
                "home_dir": guest.home,
                "timezone": guest.zone,
                "occupied_ports": ports,
            },
            "runtime": {"python": python, "nodejs": nodejs},
            "utils": [{"category": "commands", "tools": tools}],
        },
    });
    Ok(json_response(StatusCode::OK, &body))
}

/// Splits the name of a system before its version: `Debian GNU/Linux` and `12 (bookworm)`.
fn os_of(text: &str) -> (&str, &str) {
    let at = text.match_indices(' ').find(|(at, _)| {
        let rest = &text.as_bytes()[at + 1..];
        rest.first().is_some_and(u8::is_ascii_digit)
    });
    at.map_or((text, ""), |(at, _)| (&text[..at], &text[at + 1..]))
}

/// Returns the version of an interpreter; `None` if it does not print one soon, because clients poll for the answer.
async fn version_of(context: &Context, box_id: &BoxId, path: &str) -> Option<String> {
    let printed = output_of(context, box_id, [path, "--version"]);
    let (output, _) = timeout(VERSION_LIMIT, printed).await.ok()?.ok()?;
    // Python prints its name before it, and Node a letter.
    let version = output.split_whitespace().next_back()?;
    Some(version.trim_start_matches('v').to_owned())
}

/// Lists the packages of Python.
pub(super) async fn python_packages(
    context: Context,
    InBox(box_id): InBox,
) -> Result<Response, Failure> {
    let listing = "import importlib.metadata as m, json; print(json.dumps(sorted({(d.metadata['Name'] or '', d.version) for d in m.distributions()})))";
    let (output, _) = output_of(&context, &box_id, ["python3", "-c", listing]).await?;
    let pairs: Vec<(String, String)> =
        serde_json::from_str(&output).map_err(|_| missing("python3"))?;
    let listed: Vec<Value> = pairs
        .into_iter()
        .map(|(name, version)| json!({"name": name, "version": version}))
        .collect();
    Ok(done(listed))
}

/// Lists the global packages of Node.
pub(super) async fn nodejs_packages(
    context: Context,
    InBox(box_id): InBox,
) -> Result<Response, Failure> {
    let argv = ["npm", "ls", "--global", "--json", "--depth=0"];
    let (output, _) = output_of(&context, &box_id, argv).await?;
    // Without its directory of packages, npm prints an error as JSON.
    let listed: Value = serde_json::from_str(&output).map_err(|_| missing("npm"))?;
    let found = listed["dependencies"].as_object();
    let listed: Vec<Value> = found
        .into_iter()
        .flatten()
        .map(|(name, package)| json!({"name": name, "version": package["version"]}))
        .collect();
    Ok(done(listed))
}

fn missing(program: &str) -> Failure {
    Failure::unserved(format!("{program}: not installed in the box, or failed"))
}

/// Runs a program; returns its stdout and exit code.
pub(super) async fn output_of<const N: usize>(
    context: &Context,
    box_id: &BoxId,
    argv: [&str; N],
) -> Result<(String, Option<i32>), Failure> {
    let params = CommandStartParams {
        timeout_ms: Some(LIST_MS),
        attach: Some(AttachOptions::default()),
        retain_ms: Some(0),
        ..CommandStartParams::new(box_id.clone(), Program::argv(argv)?)
    };
    let of_call = context.clone();
    let mut call = StreamedCall::new(|chunks| async move {
        of_call.start_command(&GATEWAY, params, Some(chunks)).await
    });
    let mut output = String::new();
    loop {
        match call.next().await {
            Step::Chunk(CommandChunk::Text(piece)) if piece.stream == StreamName::Stdout => {
                if output.len() + piece.data.len() > MAX_LIST_BYTES {
                    return Err(Failure::unserved("the list is too long"));
                }
                output.push_str(&piece.data);
            }
            Step::Chunk(_) | Step::Idle => {}
            Step::End(ended) => {
                let exit = ended?.info.exit;
                return Ok((output, exit.and_then(|exit| exit.code)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_a_system_begins_with_a_digit() {
        for (text, parts) in [
            (
                "Debian GNU/Linux 12 (bookworm)",
                ("Debian GNU/Linux", "12 (bookworm)"),
            ),
            ("Alpine Linux v3", ("Alpine Linux v3", "")),
            ("", ("", "")),
        ] {
            assert_eq!(os_of(text), parts);
        }
    }
}
