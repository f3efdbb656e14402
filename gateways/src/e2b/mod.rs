//! E2B's protocol, so that its SDKs work unmodified.
//!
//! The API is below `/e2b/api`, and the inside of all boxes below `/e2b/envd`: a request names its box in a header. A
//! signed address of a file is `/files`, because clients lose the path of the server there.
//!
//! # Reading order
//! - `access`: the tokens of a box, and how a request names it. `error`: errors of the API and of boxes.
//! - `sandboxes`: the life of boxes. `spec`: from a request to a spec. `model`: what clients see. `network`: rules.
//! - `catalog`: snapshots, forks and volumes. `templates`: templates. `tags`: their tags. `usage`: metrics and logs.
//! - `build`: builds of templates. `builds`: those that run. `copy`: the files that they copy. `variables`: the
//!   variables in their steps. `build_log`: their logs.
//! - `run`: commands that this gateway itself runs.
//! - `connect`: the framing of calls into a box. `process` and `filesystem`: these calls. `events`: the output of
//!   commands. `body`: streams that break off. `entries`: the attributes of files. `watch`: changes of files. `files`: uploads and downloads.
//! - `code`: the code interpreter. `result`: the values that it shows. [`hosts`]: the host names of boxes.

mod access;
mod body;
mod build;
mod build_log;
mod builds;
mod catalog;
mod code;
mod connect;
mod copy;
mod entries;
mod error;
mod events;
mod files;
mod filesystem;
pub mod hosts;
mod model;
mod network;
mod process;
mod result;
mod run;
mod sandboxes;
mod spec;
mod tags;
mod templates;
mod usage;
mod variables;
mod watch;

use axum::Router;
use axum::routing::{any, get};
use box_protocol::GatewayName;

use crate::http::capability::Scope;
use crate::http::routes::{CapabilityAccess, RouteAccess, Routes};

/// The name of this gateway.
pub const GATEWAY: GatewayName = GatewayName::of("e2b");

/// The path of the API.
const API: &str = "/e2b/api";

/// The path of the inside of boxes.
const ENVD: &str = "/e2b/envd";

/// Returns the routes: the API, the inside of boxes, and signed files.
pub fn routes() -> Vec<Routes> {
    let inside = |errors, capability| RouteAccess {
        token_header: Some(access::API_KEY),
        capability: Some(capability),
        errors,
        ..RouteAccess::new()
    };
    let envd = CapabilityAccess {
        box_of: access::envd_box,
        scope: |_| Some(Scope::E2b),
        header: Some(access::ACCESS_TOKEN),
    };
    let code = CapabilityAccess {
        box_of: access::code_box,
        scope: access::code_scope,
        header: Some(access::TRAFFIC_TOKEN),
    };
    let calls = process::routes().merge(filesystem::routes());
    let signed = get(files::signed_read)
        .post(files::signed_write)
        .put(files::signed_write);
    vec![
        Routes {
            name: "e2b_api",
            router: Router::new().nest(API, api()),
            access: RouteAccess {
                token_header: Some(access::API_KEY),
                errors: error::api_refusal,
                ..RouteAccess::new()
            },
        },
        Routes {
            name: "e2b_rpc",
            router: Router::new().nest(ENVD, calls),
            access: inside(error::rpc_refusal, envd),
        },
        Routes {
            name: "e2b_envd",
            router: Router::new().nest(ENVD, files::routes()),
            access: inside(error::envd_refusal, envd),
        },
        Routes {
            name: "e2b_code",
            router: Router::new().nest(ENVD, code::routes()),
            access: inside(error::envd_refusal, code),
        },
        Routes {
            name: "e2b_port",
            router: hosts::routes(),
            access: RouteAccess {
                checked_by_handler: true,
                errors: error::envd_refusal,
                ..RouteAccess::new()
            },
        },
        Routes {
            name: "e2b_files",
            router: Router::new().route("/files", signed),
            access: RouteAccess {
                checked_by_handler: true,
                errors: error::envd_refusal,
                ..RouteAccess::new()
            },
        },
    ]
}

fn api() -> Router {
    Router::new()
        .merge(sandboxes::routes())
        .merge(catalog::routes())
        .merge(templates::routes())
        .merge(usage::routes())
        .route("/secrets", any(error::no_secrets))
        .route("/secrets/{*path}", any(error::no_secrets))
        .route("/teams", any(error::no_teams))
        .route("/teams/{*path}", any(error::no_teams))
        .route("/{*path}", any(error::unknown))
}
