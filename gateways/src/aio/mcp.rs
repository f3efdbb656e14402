//! `/v1/mcp`: the tools of the box, those of its MCP server, without a session.

use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::GATEWAY;
use super::envelope::{Failure, done};
use super::path::Path;
use crate::http::body::OptionalJson;
use crate::http::context::{Context, InBox};
use crate::mcp::BoxTools;

/// The name of the only server.
const SERVER: &str = "box";

/// Lists the servers.
pub(super) async fn servers(InBox(_): InBox) -> Response {
    done([SERVER])
}

/// A server in the path.
#[derive(Debug, Deserialize)]
pub(super) struct ServerPath {
    server: String,
}

/// Lists the tools of a server.
pub(super) async fn tools(
    context: Context,
    InBox(box_id): InBox,
    Path(path): Path<ServerPath>,
) -> Result<Response, Failure> {
    check(&path.server)?;
    let tools = BoxTools::new(context, box_id, &GATEWAY);
    Ok(done(json!({"tools": tools.list()})))
}

/// A tool in the path.
#[derive(Debug, Deserialize)]
pub(super) struct ToolPath {
    server: String,
    tool: String,
}

/// Calls a tool. A tool that fails is no error of the request: its result has `isError`.
pub(super) async fn call(
    context: Context,
    InBox(box_id): InBox,
    Path(path): Path<ToolPath>,
    OptionalJson(mut arguments): OptionalJson<Map<String, Value>>,
) -> Result<Response, Failure> {
    check(&path.server)?;
    // A client may send null for an option that it does not set.
    arguments.retain(|_, value| !value.is_null());
    let tools = BoxTools::new(context, box_id, &GATEWAY);
    let result = tools.call(&path.tool, arguments).await;
    let missing = || Failure::new(StatusCode::NOT_FOUND, "MCP tool not found");
    Ok(done(result.ok_or_else(missing)?))
}

fn check(server: &str) -> Result<(), Failure> {
    if server == SERVER {
        return Ok(());
    }
    Err(Failure::new(StatusCode::NOT_FOUND, "MCP server not found"))
}
