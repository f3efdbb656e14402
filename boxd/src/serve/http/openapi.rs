//! `/openapi.json`: a description of `/rpc` for other programs.

use axum::http::StatusCode;
use axum::response::Response;
use box_gateways::http::refusal::text_response;

/// The document, which `cargo xtask schema` generates from the contract.
const DOCUMENT: &str = include_str!("../../../../docs/schema/openapi.json");

/// Returns the document.
pub(super) async fn document() -> Response {
    text_response(StatusCode::OK, "application/json", DOCUMENT)
}
