//! LangSmith's sandbox API, so that its SDKs connect unmodified.
//!
//! The API of boxes, templates, volumes, pools and snapshots is below `/v2/sandboxes` and `/api/v2/sandboxes`. The
//! inside of a box is below `/boxes/{box}/langsmith`, which responses name as `dataplane_url`. The gateway keeps no
//! state: names, limits and expiry times belong to the boxes and items of the runtime.
//!
//! # Reading order
//! - `boxes` and `box_view`: the life of a box, and how responses show it. `box_request`: how requests become specs.
//!   `run_config` and `sizes`: their parts.
//! - `catalog`: items that outlive boxes. `templates`, `volumes`, `pools` and `snapshots`: their kinds. `lists`: parts of
//!   lists. `links`: URLs of ports and of files.
//! - `execute`: commands. `files`: files. `tunnel`: connections to ports.
//! - `errors`: error bodies, by which the SDKs choose their exceptions.

mod box_request;
mod box_view;
mod boxes;
mod catalog;
mod errors;
mod execute;
mod files;
mod links;
mod lists;
mod pools;
mod run_config;
mod sizes;
mod snapshots;
mod templates;
mod tunnel;
mod volumes;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{any, get, post};
use box_protocol::GatewayName;

use crate::http::preset::Preset;
use crate::http::refusal::{Refusal, RefusalReason};
use crate::http::routes::{CapabilityAccess, RouteAccess, Routes, box_in_path};

/// The name of this gateway.
pub(crate) const GATEWAY: GatewayName = GatewayName::of("langsmith");

/// The header of a token.
const TOKEN_HEADER: &str = "x-api-key";

/// The header of a capability for a port.
const SERVICE_HEADER: &str = "x-langsmith-sandbox-service-token";

/// The user of every box whose request or template names no other.
const GUEST: &str = "box";

/// What every box has unless its request or template says otherwise.
const PRESET: Preset = Preset {
    guest: Some((GUEST, "/home/box")),
    dirs: &[],
    env: &[],
    env_file: None,
    cwd: None,
};

/// Returns the routes of the protocol.
pub fn routes() -> Vec<Routes> {
    let access = RouteAccess {
        token_header: Some(TOKEN_HEADER),
        errors: errors::refusal_body,
        ..RouteAccess::new()
    };
    // The SDKs have both prefixes, depending on their version.
    let api = Router::new()
        .nest("/v2/sandboxes", api())
        .nest("/api/v2/sandboxes", api());
    // The proxy needs the whole path.
    let inside = Router::new()
        .nest("/boxes/{box}/langsmith", inside())
        .route("/boxes/{box}/langsmith/port/{port}", any(links::port))
        .route("/boxes/{box}/langsmith/port/{port}/", any(links::port))
        .route(
            "/boxes/{box}/langsmith/port/{port}/{*path}",
            any(links::port),
        );
    vec![
        Routes {
            name: "langsmith",
            router: api,
            access,
        },
        Routes {
            name: "langsmith_box",
            router: inside,
            access: RouteAccess {
                capability: Some(CapabilityAccess {
                    box_of: box_in_path,
                    scope: links::scope,
                    header: Some(SERVICE_HEADER),
                }),
                ..access
            },
        },
    ]
}

/// The API of boxes and items.
fn api() -> Router {
    Router::new()
        .route("/boxes", get(boxes::list).post(boxes::create))
        .route(
            "/boxes/{name}",
            get(boxes::get).patch(boxes::update).delete(boxes::delete),
        )
        .route("/boxes/{name}/status", get(boxes::status))
        .route("/boxes/{name}/start", post(boxes::start))
        .route("/boxes/{name}/stop", post(boxes::stop))
        .route("/boxes/{name}/snapshot", post(snapshots::capture))
        .route("/boxes/{name}/service-url", post(links::service_url))
        .route(
            "/boxes/{name}/service-urls",
            get(links::list_service_urls).delete(links::delete_service_url),
        )
        .route("/boxes/{name}/download-url", post(links::download_url))
        .route("/templates", get(templates::list).post(templates::create))
        .route(
            "/templates/{name}",
            get(templates::get)
                .patch(templates::update)
                .delete(templates::delete),
        )
        .route("/volumes", get(volumes::list).post(volumes::create))
        .route(
            "/volumes/{name}",
            get(volumes::get)
                .patch(volumes::update)
                .delete(volumes::delete),
        )
        .route("/pools", get(pools::list).post(pools::create))
        .route(
            "/pools/{name}",
            get(pools::get).patch(pools::update).delete(pools::delete),
        )
        .route("/snapshots", get(snapshots::list).post(snapshots::build))
        .route(
            "/snapshots/{snapshot}",
            get(snapshots::get).delete(snapshots::delete),
        )
        .route("/snapshots-by-name/{name}", get(snapshots::tags))
        .route(
            "/registries",
            get(catalog::list_registries).fallback(catalog::no_registries),
        )
        .route("/registries/{name}", any(catalog::no_registries))
        .route("/usage/costs", any(catalog::no_costs))
        .route("/{*path}", any(unknown_path))
}

/// Every other path, so that its error has the format of this API.
async fn unknown_path() -> Refusal {
    Refusal::new(RefusalReason::NotFound, "path not found")
}

/// The inside of a box.
fn inside() -> Router {
    Router::new()
        .route("/execute", post(execute::http::run))
        .route("/execute/ws", get(execute::socket::upgrade))
        .route("/execute/stream/start", post(execute::sse::start))
        .route("/execute/stream/resume", post(execute::sse::resume))
        .route("/upload", post(files::upload))
        .route("/download", get(files::download))
        .route("/glob", post(files::glob))
        .route("/grep", post(files::grep))
        .route("/tunnel", get(tunnel::upgrade))
        .route("/link/{link}", get(links::download))
        // The layers limit bodies.
        .layer(DefaultBodyLimit::disable())
}
