//! The routes of a protocol, and how its clients authenticate.
//!
//! boxd mounts [`Routes`] behind its layers: host names, web pages, tokens, capabilities, limits, counters, request
//! ids. A handler therefore finds an authenticated [`Context`](super::context::Context).

use axum::Router;
use axum::http::Uri;
use axum::http::request::Parts;
use axum::routing::MethodRouter;

use super::capability::Scope;
use super::refusal::{ErrorBody, flat_error};

/// Routes of a protocol that share one way to authenticate and one format of errors.
///
/// A protocol has one for each kind of access: usually one for its API, and one for the inside of a box.
#[derive(Debug)]
pub struct Routes {
    /// The name in metrics and logs.
    pub name: &'static str,
    /// The routes with their whole paths.
    pub router: Router,
    /// What the layers need to know of them.
    pub access: RouteAccess,
}

/// How the clients of some routes authenticate.
#[derive(Debug, Clone, Copy)]
pub struct RouteAccess {
    /// The header of a token, besides `Authorization: Bearer`, which all routes accept.
    pub token_header: Option<&'static str>,
    /// The capabilities that open the routes besides a token, if any.
    pub capability: Option<CapabilityAccess>,
    /// Whether the handlers check each request themselves. Their context has the caller
    /// [`Anonymous`](box_rpc::Caller::Anonymous), which sees nothing.
    pub checked_by_handler: bool,
    /// The format of refusals.
    pub errors: ErrorBody,
}

impl RouteAccess {
    /// Routes for callers with a token, with errors of the form `{"code", "message"}`.
    pub const fn new() -> Self {
        Self {
            token_header: None,
            capability: None,
            checked_by_handler: false,
            errors: flat_error,
        }
    }
}

impl Default for RouteAccess {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the routes of a protocol at `/NAME`, for a default box, and at `/boxes/{box}/NAME`, for that box.
///
/// A capability for the whole box opens the second.
pub(crate) fn default_and_one_box<S: Clone + Send + Sync + 'static>(
    (default_name, default): (&'static str, MethodRouter<S>),
    (box_name, one_box): (&'static str, MethodRouter<S>),
    state: S,
) -> Vec<Routes> {
    let router = |path: String, handler| {
        let router = Router::new().route(&path, handler);
        router.with_state(state.clone())
    };
    let capability = CapabilityAccess {
        box_of: box_in_path,
        scope: |_| None,
        header: None,
    };
    vec![
        Routes {
            name: default_name,
            router: router(format!("/{default_name}"), default),
            access: RouteAccess::new(),
        },
        Routes {
            name: box_name,
            router: router(format!("/boxes/{{box}}/{default_name}"), one_box),
            access: RouteAccess {
                capability: Some(capability),
                ..RouteAccess::new()
            },
        },
    ]
}

/// How a request names the box and the capability that opens it.
#[derive(Debug, Clone, Copy)]
pub struct CapabilityAccess {
    /// Returns the box that a request names: `ID`, or `ID~SIGNATURE`, percent-encoded.
    pub box_of: fn(&Parts) -> Option<&str>,
    /// Returns what the request needs; `None` if no capability opens it.
    pub scope: for<'a> fn(&'a Parts) -> Option<Scope<'a>>,
    /// The header of a signature, for clients that do not have it in the path.
    pub header: Option<&'static str>,
}

/// Returns the box of a path `/boxes/{box}/…`.
pub fn box_in_path(parts: &Parts) -> Option<&str> {
    box_segment(&parts.uri)
}

/// Returns the second segment of a path, as sent.
pub(super) fn box_segment(uri: &Uri) -> Option<&str> {
    uri.path().split('/').nth(2).filter(|part| !part.is_empty())
}
