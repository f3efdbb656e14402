//! OpenSandbox: its lifecycle API and the API of its daemon inside a sandbox, execd.
//!
//! A sandbox is a box. The lifecycle API is below `/v1`. execd is not a process: its routes are below `/boxes/{box}/execd`,
//! and the same routes are reached through the proxy of the lifecycle API, as port 44772.
//!
//! # Reading order
//! - The lifecycle API: `create`, then `lifecycle`, with `model`: the JSON of both. `endpoints`: addresses of ports, and
//!   the proxy. `snapshots`, `policy`, `diagnostics`.
//! - execd: `execd` has its routes. `events`: the event stream of commands. `command`, `session`, `code`, `pty`: what runs.
//!   `files`, `pages` and `transfer`: files. `metrics`.
//! - `error`: the statuses and codes of errors.

mod code;
mod command;
mod create;
mod diagnostics;
mod endpoints;
mod error;
mod events;
mod execd;
mod files;
mod lifecycle;
mod metrics;
mod model;
mod pages;
mod policy;
mod pty;
mod session;
mod snapshots;
mod transfer;

use axum::Router;
use axum::http::request::Parts;
use axum::middleware::map_response;
use axum::routing::{any, get, patch, post};
use box_protocol::GatewayName;

use crate::http::capability::Scope;
use crate::http::routes::{CapabilityAccess, RouteAccess, Routes, box_in_path};

/// The name of the protocol in records of boxes.
const GATEWAY: GatewayName = GatewayName::of("opensandbox");

/// The header of a token of this server.
const TOKEN_HEADER: &str = "open-sandbox-api-key";

/// The header of a capability for execd.
const EXECD_HEADER: &str = "x-execd-access-token";

/// The header of a capability for the network policy.
const EGRESS_HEADER: &str = "opensandbox-egress-auth";

/// The port of execd in addresses.
const EXECD_PORT: u16 = 44772;

/// The port of the network policy in addresses.
const EGRESS_PORT: u16 = 18080;

/// Returns all routes.
pub fn routes() -> Vec<Routes> {
    let inside = |name, face: &'static str, router: Router, header, scope| Routes {
        name,
        router: Router::new().nest(face, router),
        access: RouteAccess {
            token_header: Some(TOKEN_HEADER),
            capability: Some(CapabilityAccess {
                box_of: box_in_path,
                scope,
                header: Some(header),
            }),
            errors: error::execd_error,
            ..RouteAccess::new()
        },
    };
    let execd: fn(&Parts) -> Option<Scope<'_>> = |_| Some(Scope::Execd);
    let egress: fn(&Parts) -> Option<Scope<'_>> = |_| Some(Scope::Egress);
    vec![
        Routes {
            name: "opensandbox",
            router: api(),
            access: RouteAccess {
                token_header: Some(TOKEN_HEADER),
                errors: error::lifecycle_error,
                ..RouteAccess::new()
            },
        },
        inside(
            "opensandbox_execd",
            "/boxes/{box}/execd",
            execd::routes(),
            EXECD_HEADER,
            execd,
        ),
        inside(
            "opensandbox_egress",
            "/boxes/{box}/egress",
            policy::egress_routes(),
            EGRESS_HEADER,
            egress,
        ),
    ]
}

/// Returns the routes of the lifecycle API.
fn api() -> Router {
    Router::new()
        .route("/v1/sandboxes", post(create::create).get(lifecycle::list))
        .route(
            "/v1/sandboxes/{id}",
            get(lifecycle::get).delete(lifecycle::delete),
        )
        .route(
            "/v1/sandboxes/{id}/metadata",
            patch(lifecycle::patch_metadata),
        )
        .route("/v1/sandboxes/{id}/pause", post(lifecycle::pause))
        .route("/v1/sandboxes/{id}/resume", post(lifecycle::resume))
        .route(
            "/v1/sandboxes/{id}/renew-expiration",
            post(lifecycle::renew),
        )
        .route(
            "/v1/sandboxes/{id}/endpoints/{port}",
            get(endpoints::endpoint),
        )
        .route(
            "/v1/sandboxes/{id}/networkpolicy",
            get(policy::get)
                .put(policy::put)
                .patch(policy::patch)
                .delete(policy::delete),
        )
        .route(
            "/v1/sandboxes/{id}/diagnostics/{kind}",
            get(diagnostics::get),
        )
        .route("/v1/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/v1/snapshots", get(snapshots::list))
        .route(
            "/v1/snapshots/{id}",
            get(snapshots::get).delete(snapshots::delete),
        )
        .route("/v1/templates", any(unserved_templates))
        .route("/v1/templates/{id}", any(unserved_templates))
        .route("/v1/pools", any(unserved_pools))
        .route("/v1/pools/{name}", any(unserved_pools))
        .route("/v1/metrics/events", post(metrics::event))
        .layer(map_response(error::lifecycle_code))
        // The proxy passes on the errors of execd.
        .route("/v1/sandboxes/{id}/proxy/{port}", any(endpoints::proxy))
        .route("/v1/sandboxes/{id}/proxy/{port}/", any(endpoints::proxy))
        .route(
            "/v1/sandboxes/{id}/proxy/{port}/{*path}",
            any(endpoints::proxy),
        )
}

async fn unserved_templates() -> error::Error {
    error::Error::unsupported("templates: this server has none; create a sandbox of an image")
}

async fn unserved_pools() -> error::Error {
    error::Error::unsupported("pools: the operator makes pools; set extensions.poolRef to use one")
}
