//! `/boxes/{box}/port/{port}/…`: HTTP and websockets to a server inside a box.

use std::num::NonZeroU16;

use axum::extract::Request;
use axum::http::request::Parts;
use axum::response::Response;
use box_gateways::http::capability::Scope;
use box_gateways::http::context::{Context, InBox};
use box_gateways::http::proxy::{self, Target};
use box_gateways::http::refusal::{Refusal, RefusalReason};

/// The port of a path, and the path up to and including it, as the client wrote it.
fn split(path: &str) -> Option<(NonZeroU16, &str)> {
    let mut parts = path.splitn(6, '/').skip(4);
    let port = parts.next()?.parse().ok()?;
    let length = path.len() - parts.next().map_or(0, |rest| rest.len() + 1);
    Some((port, &path[..length]))
}

/// Returns the scope of the signature that opens a path.
pub(super) fn scope(request: &Parts) -> Option<Scope<'_>> {
    split(request.uri.path()).map(|(port, _)| Scope::Port(port))
}

/// Forwards a request to the server inside the box.
pub(super) async fn forward(
    context: Context,
    InBox(box_id): InBox,
    request: Request,
) -> Result<Response, Refusal> {
    let (port, prefix) = split(request.uri().path()).ok_or_else(|| {
        let message = "port: must be a number from 1 to 65535";
        Refusal::new(RefusalReason::Malformed, message)
    })?;
    let target = Target::of(&context, box_id, port, prefix, request.uri())?;
    proxy::forward(context, &target, request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_split_without_decoding() {
        for (path, port, prefix) in [
            ("/boxes/b/port/80", 80, "/boxes/b/port/80"),
            ("/boxes/b/port/80/", 80, "/boxes/b/port/80"),
            (
                "/boxes/a%20b/port/8080/x/y%2Fz/",
                8080,
                "/boxes/a%20b/port/8080",
            ),
            ("/boxes/b/port/65535//x", 65535, "/boxes/b/port/65535"),
        ] {
            let found = split(path).map(|(port, prefix)| (port.get(), prefix));
            assert_eq!(found, Some((port, prefix)), "{path}");
        }
        for path in ["/boxes/b/port/0", "/boxes/b/port/65536/", "/boxes/b/port/x"] {
            assert_eq!(split(path), None, "{path}");
        }
    }
}
