//! AIO Sandbox: the API of its container, and the provisioner of deer-flow.
//!
//! A sandbox is a box. Its API is below `/boxes/{box}/aio`, where a capability in the path replaces a header. The same
//! routes without that prefix serve the default box of the caller, which the first request creates.
//!
//! # Reading order
//! - `provisioner`: deer-flow creates, finds and deletes boxes. `spec`: what its boxes have. `default_box`.
//! - `sessions`: sessions are shells. `run`: one run in a session, until its end or a limit. `shell`, `bash`: the APIs of
//!   these. `code_run`: one run of code; `code`, `jupyter` and `nodejs`: the APIs of that. `terminal`: the websocket.
//! - `file`, `search`, `grep`, `editor`, `watch` with `watch_filter`: files. `sandbox`: the context, packages. `mcp`: tools.
//! - `envelope`: the format of answers and errors. `path`: parameters in paths. `wake`: boxes that a call starts.

mod bash;
mod code;
mod code_run;
mod default_box;
mod editor;
mod envelope;
mod file;
mod grep;
mod jupyter;
mod mcp;
mod nodejs;
mod path;
mod provisioner;
mod run;
mod sandbox;
mod search;
mod sessions;
mod shell;
mod spec;
mod terminal;
mod wake;
mod watch;
mod watch_filter;

use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::middleware::from_fn;
use axum::routing::{any, delete, get, post};
use axum::{Extension, Router};
use box_protocol::GatewayName;

use crate::http::capability::Scope;
use crate::http::routes::{CapabilityAccess, RouteAccess, Routes, box_in_path};
use envelope::Failure;
use sessions::Kind;

/// The name of the protocol in records of boxes.
const GATEWAY: GatewayName = GatewayName::of("aio");

/// The path of a box's API below `/boxes/{box}`.
const FACE: &str = "/aio";

/// The header of a token in requests of the SDK.
const TOKEN_HEADER: &str = "x-aio-api-key";

/// The header of a token in requests of deer-flow.
const PROVISIONER_HEADER: &str = "x-api-key";

/// Returns all routes.
pub fn routes() -> Vec<Routes> {
    let access = RouteAccess {
        token_header: Some(TOKEN_HEADER),
        errors: envelope::refused,
        ..RouteAccess::new()
    };
    let scope: fn(&Parts) -> Option<Scope<'_>> = |_| Some(Scope::Aio);
    vec![
        Routes {
            name: "aio_provisioner",
            router: provisioner::routes(),
            access: RouteAccess {
                token_header: Some(PROVISIONER_HEADER),
                ..access
            },
        },
        Routes {
            name: "aio_default",
            router: inside().layer(from_fn(default_box::choose)),
            access,
        },
        Routes {
            name: "aio",
            router: Router::new().nest(
                &format!("/boxes/{{box}}{FACE}"),
                inside().route("/{*path}", any(unknown)),
            ),
            access: RouteAccess {
                capability: Some(CapabilityAccess {
                    box_of: box_in_path,
                    scope,
                    header: None,
                }),
                ..access
            },
        },
    ]
}

/// Returns the routes of one box.
fn inside() -> Router {
    Router::new()
        .merge(shells().layer(Extension(Kind::Shell)))
        .merge(bash_sessions().layer(Extension(Kind::Bash)))
        .merge(files())
        .merge(notebooks().layer(Extension(Kind::Python)))
        .merge(node_sessions().layer(Extension(Kind::Node)))
        .route("/v1/code/execute", post(code::execute))
        .route("/v1/code/info", get(code::info))
        .route("/v1/sandbox", get(sandbox::context))
        .route("/v1/sandbox/packages/python", get(sandbox::python_packages))
        .route("/v1/sandbox/packages/nodejs", get(sandbox::nodejs_packages))
        .route("/v1/mcp/servers", get(mcp::servers))
        .route("/v1/mcp/{server}/tools", get(mcp::tools))
        .route("/v1/mcp/{server}/tools/{tool}", post(mcp::call))
        .layer(from_fn(wake::wake))
        .merge(unserved())
}

/// Returns the routes of shells and terminals.
fn shells() -> Router {
    Router::new()
        .route("/v1/shell/exec", post(shell::exec))
        .route("/v1/shell/view", post(shell::view))
        .route("/v1/shell/wait", post(shell::wait))
        .route("/v1/shell/write", post(shell::write))
        .route("/v1/shell/kill", post(shell::kill))
        .route(
            "/v1/shell/sessions",
            get(shell::list).delete(shell::delete_all),
        )
        .route("/v1/shell/sessions/create", post(shell::create))
        .route("/v1/shell/sessions/update", post(shell::update))
        .route("/v1/shell/sessions/stats", get(shell::stats))
        .route("/v1/shell/sessions/{session}", delete(shell::delete))
        .route("/v1/shell/terminal-url", get(terminal::url))
        .route("/v1/shell/ws", any(terminal::connect))
}

/// Returns the routes of separate commands.
fn bash_sessions() -> Router {
    Router::new()
        .route("/v1/bash/exec", post(bash::exec))
        .route("/v1/bash/output", post(bash::output))
        .route("/v1/bash/write", post(bash::write))
        .route("/v1/bash/kill", post(bash::kill))
        .route("/v1/bash/sessions", get(bash::list))
        .route("/v1/bash/sessions/create", post(bash::create))
        .route("/v1/bash/sessions/{session}/close", post(bash::close))
}

/// Returns the routes of files.
fn files() -> Router {
    Router::new()
        .route("/v1/file/read", post(file::read))
        .route("/v1/file/write", post(file::write))
        .route("/v1/file/replace", post(file::replace))
        .route("/v1/file/upload", post(file::upload))
        .route("/v1/file/download", get(file::download))
        .route("/v1/file/list", post(search::list))
        .route("/v1/file/find", post(search::find))
        .route("/v1/file/glob", post(search::glob))
        .route("/v1/file/grep", post(grep::grep))
        .route("/v1/file/search", post(grep::search))
        .route("/v1/file/str_replace_editor", post(editor::edit))
        .route("/v1/file/watch", get(watch::list).post(watch::create))
        .route("/v1/file/watch/wait", post(watch::wait))
        .route("/v1/file/watch/{watcher}", delete(watch::stop))
        .route("/v1/file/watch/{watcher}/poll", post(watch::poll))
        .route("/v1/file/watch/{watcher}/events", get(watch::events))
}

/// Returns the routes of Python.
fn notebooks() -> Router {
    Router::new()
        .route("/v1/jupyter/execute", post(jupyter::execute))
        .route("/v1/jupyter/info", get(jupyter::info))
        .route(
            "/v1/jupyter/sessions",
            get(jupyter::list).delete(jupyter::delete_all),
        )
        .route("/v1/jupyter/sessions/create", post(jupyter::create))
        .route("/v1/jupyter/sessions/{session}", delete(jupyter::delete))
}

/// Returns the routes of JavaScript.
fn node_sessions() -> Router {
    Router::new()
        .route("/v1/nodejs/execute", post(nodejs::execute))
        .route("/v1/nodejs/info", get(nodejs::info))
        .route(
            "/v1/nodejs/sessions",
            get(nodejs::list).post(nodejs::create),
        )
        .route(
            "/v1/nodejs/sessions/{session}",
            get(nodejs::get)
                .delete(nodejs::delete)
                .patch(nodejs::update),
        )
}

/// Returns the routes of what a box does not have.
fn unserved() -> Router {
    let groups = [
        "browser", "display", "record", "util", "skills", "proxy", "observe",
    ];
    let mut router = Router::new()
        .route("/v1/sandbox/hooks", any(not_served))
        .route("/v1/sandbox/hooks/{name}", any(not_served))
        .route("/tickets", any(not_served))
        .route("/auth", any(not_served));
    for group in groups {
        router = router
            .route(&format!("/v1/{group}"), any(not_served))
            .route(&format!("/v1/{group}/{{*path}}"), any(not_served));
    }
    router
}

async fn not_served() -> Failure {
    Failure::unserved(
        "path: not supported by this server; a box has commands, files and interpreters only",
    )
}

async fn unknown() -> Failure {
    Failure::new(StatusCode::NOT_FOUND, "unknown path; AIO has none like it")
}
