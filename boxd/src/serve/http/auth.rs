//! Authentication of HTTP requests by token.

use box_rpc::Caller;
use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;

use super::response::{Refusal, RefusalReason};
use super::routes::Route;

pub(super) const LANGBOT_HEADER: &str = "x-langbot-box-control-token";

/// The authentication settings of a port.
#[derive(Debug, Clone)]
pub(super) struct Auth {
    /// The valid tokens; `None` on a loopback port without configured tokens.
    pub(super) tokens: Option<box_rpc::Tokens>,
    /// Whether only this machine can connect.
    pub(super) loopback: bool,
}

impl Auth {
    /// Returns the caller of a request, or a refusal if the route needs a valid token.
    pub(super) fn authenticate(
        &self,
        route: Route,
        headers: &HeaderMap,
    ) -> Result<Caller, Refusal> {
        let open = is_public(route) || route == Route::Metrics && self.loopback;
        let tokens = match &self.tokens {
            Some(tokens) if !open => tokens,
            // Not `Local`, which only this user can be: every user of the machine reaches its loopback addresses.
            _ => return Ok(Caller::Loopback),
        };
        let mut presented = false;
        for token in presented_tokens(route, headers) {
            presented = true;
            if let Some(name) = tokens.name_of(token) {
                return Ok(Caller::Token(name));
            }
        }
        let names = token_headers(route).join(", ");
        let or = if names.is_empty() { "" } else { " or " };
        Err(if presented {
            Refusal::new(RefusalReason::WrongToken, "invalid token")
        } else {
            let message = format!("missing token; send Authorization: Bearer TOKEN{or}{names}");
            Refusal::new(RefusalReason::NoToken, message)
        })
    }
}

/// Returns whether a route needs no token; its responses must not contain secrets.
pub(super) fn is_public(route: Route) -> bool {
    matches!(
        route,
        Route::Healthz | Route::Readyz | Route::Health | Route::Version
    )
}

/// The token headers of a route, besides `Authorization: Bearer`, which all accept.
fn token_headers(route: Route) -> &'static [&'static str] {
    match route {
        Route::Rpc | Route::Relay => &[LANGBOT_HEADER],
        _ => &[],
    }
}

/// Returns every token that a request offers to a route.
fn presented_tokens(route: Route, headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let bearer = headers
        .get_all(AUTHORIZATION)
        .into_iter()
        .filter_map(|value| value.to_str().ok()?.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, token)| token.trim());
    let special = token_headers(route)
        .iter()
        .flat_map(|name| headers.get_all(*name))
        .filter_map(|value| value.to_str().ok());
    bearer.chain(special)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::http::routes::ROUTES;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn auth(loopback: bool) -> Auth {
        let tokens = box_rpc::Tokens::new([("ann".to_owned(), TOKEN.to_owned())]);
        let tokens = Some(tokens);
        Auth { tokens, loopback }
    }

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    #[test]
    fn bearer_tokens_work_on_every_route() {
        let auth = auth(false);
        for (_, route) in ROUTES {
            let bearer = headers("authorization", &format!("bearer {TOKEN}"));
            let caller = auth.authenticate(*route, &bearer).unwrap();
            let expected = if is_public(*route) {
                Caller::Loopback
            } else {
                Caller::token("ann")
            };
            assert_eq!(caller, expected);
            for name in [LANGBOT_HEADER, "x-api-key"] {
                let opened = auth.authenticate(*route, &headers(name, TOKEN)).is_ok();
                let its_own = token_headers(*route).contains(&name) || is_public(*route);
                assert_eq!(opened, its_own, "{route:?} {name}");
                assert_eq!(
                    auth.authenticate(*route, &headers(name, &TOKEN[1..]))
                        .is_ok(),
                    is_public(*route)
                );
            }
        }
        let basic = headers("authorization", &format!("Basic {TOKEN}"));
        assert!(auth.authenticate(Route::Rpc, &basic).is_err());
    }

    #[test]
    fn only_metrics_are_public_on_loopback() {
        let none = HeaderMap::new();
        assert!(auth(true).authenticate(Route::Metrics, &none).is_ok());
        assert!(auth(false).authenticate(Route::Metrics, &none).is_err());
        let refused = auth(true).authenticate(Route::Rpc, &none).unwrap_err();
        assert_eq!(refused.reason, RefusalReason::NoToken);
        let open = Auth {
            tokens: None,
            loopback: true,
        };
        assert_eq!(
            open.authenticate(Route::Rpc, &none).unwrap(),
            Caller::Loopback
        );
    }
}
