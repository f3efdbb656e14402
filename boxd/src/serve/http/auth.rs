//! Authentication of HTTP requests by token.

use std::borrow::Cow;

use axum::http::HeaderMap;
use axum::http::header::{AUTHORIZATION, SEC_WEBSOCKET_PROTOCOL};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use box_gateways::http::refusal::{Refusal, RefusalReason};
use box_gateways::http::token_filter::TokenFilter;
use box_rpc::Caller;

use super::router::{Access, PageUse, RouteInfo};

pub(super) const LANGBOT_HEADER: &str = "x-langbot-box-control-token";

/// How a sub-protocol begins that is a token in base64url, for browsers, which send no headers with a websocket.
const TOKEN_PROTOCOL: &str = "box.token.";

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
        route: &RouteInfo,
        headers: &HeaderMap,
    ) -> Result<Caller, Refusal> {
        let open = match route.access {
            Access::Public | Access::Unknown => true,
            Access::TokenUnlessLoopback => self.loopback,
            Access::Handler => return Ok(Caller::Anonymous),
            Access::Token => false,
        };
        let tokens = match &self.tokens {
            Some(tokens) if !open => tokens,
            // Not `Local`, which only this user can be: every user of the machine reaches its loopback addresses.
            _ => return Ok(Caller::Loopback),
        };
        let mut presented = false;
        for token in presented_tokens(route, headers) {
            presented = true;
            if let Some(name) = tokens.name_of(&token) {
                return Ok(Caller::Token(name));
            }
        }
        Err(if presented {
            Refusal::new(RefusalReason::WrongToken, "invalid token")
        } else {
            let mut message = "missing token; send Authorization: Bearer TOKEN".to_owned();
            if let Some(name) = route.token_header {
                message.extend([" or ", name]);
            }
            if route.pages == PageUse::Sockets {
                message.extend([" or the sub-protocol ", TOKEN_PROTOCOL, "BASE64URL"]);
            }
            Refusal::new(RefusalReason::NoToken, message)
        })
    }
}

impl Auth {
    /// Returns the filter for requests to boxes. These headers of protocols never reach a box.
    pub(super) fn filter(&self, headers: impl IntoIterator<Item = &'static str>) -> TokenFilter {
        TokenFilter::new(self.tokens.clone(), headers)
    }
}

/// Returns every token that a request offers to a route.
fn presented_tokens<'a>(
    route: &RouteInfo,
    headers: &'a HeaderMap,
) -> impl Iterator<Item = Cow<'a, str>> {
    let bearer = headers
        .get_all(AUTHORIZATION)
        .into_iter()
        .filter_map(|value| value.to_str().ok()?.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, token)| token.trim());
    let special = route
        .token_header
        .into_iter()
        .flat_map(|name| headers.get_all(name))
        .filter_map(|value| value.to_str().ok());
    let in_protocol = (route.pages == PageUse::Sockets)
        .then(|| protocols(headers))
        .into_iter()
        .flatten()
        .filter_map(|protocol| {
            let token = protocol.strip_prefix(TOKEN_PROTOCOL)?;
            String::from_utf8(URL_SAFE_NO_PAD.decode(token).ok()?).ok()
        });
    let in_headers = bearer.chain(special).map(Cow::Borrowed);
    in_headers.chain(in_protocol.map(Cow::Owned))
}

/// Returns the sub-protocols that a websocket client offers.
pub(super) fn protocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    headers
        .get_all(SEC_WEBSOCKET_PROTOCOL)
        .into_iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::http::router::{METRICS, OWN_ROUTES, RPC, RPC_CALL};

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
        for route in OWN_ROUTES {
            let bearer = headers("authorization", &format!("bearer {TOKEN}"));
            let caller = auth.authenticate(route, &bearer).unwrap();
            let public = route.access == Access::Public;
            let expected = if public {
                Caller::Loopback
            } else {
                Caller::token("ann")
            };
            assert_eq!(caller, expected);
            for name in [LANGBOT_HEADER, "x-api-key"] {
                let opened = auth.authenticate(route, &headers(name, TOKEN)).is_ok();
                let its_own = route.token_header == Some(name) || public;
                assert_eq!(opened, its_own, "{route:?} {name}");
                let wrong = headers(name, &TOKEN[1..]);
                assert_eq!(auth.authenticate(route, &wrong).is_ok(), public);
            }
        }
        let basic = headers("authorization", &format!("Basic {TOKEN}"));
        assert!(auth.authenticate(&RPC, &basic).is_err());
    }

    #[test]
    fn a_sub_protocol_is_a_token_for_websockets_only() {
        let auth = auth(true);
        let offered = |token: &str| {
            let token = URL_SAFE_NO_PAD.encode(token);
            headers("sec-websocket-protocol", &format!("box, box.token.{token}"))
        };
        let right = offered(TOKEN);
        let caller = auth.authenticate(&RPC, &right).unwrap();
        assert_eq!(caller, Caller::token("ann"));
        let refused = auth.authenticate(&RPC_CALL, &right).unwrap_err();
        assert_eq!(refused.reason, RefusalReason::NoToken);
        let wrong = auth.authenticate(&RPC, &offered(&TOKEN[1..])).unwrap_err();
        assert_eq!(wrong.reason, RefusalReason::WrongToken);
        for malformed in ["box", "box.token.", "box.token.%%%", TOKEN] {
            let headers = headers("sec-websocket-protocol", malformed);
            assert!(auth.authenticate(&RPC, &headers).is_err(), "{malformed}");
        }
    }

    #[test]
    fn only_metrics_are_public_on_loopback() {
        let none = HeaderMap::new();
        assert!(auth(true).authenticate(&METRICS, &none).is_ok());
        assert!(auth(false).authenticate(&METRICS, &none).is_err());
        let refused = auth(true).authenticate(&RPC, &none).unwrap_err();
        assert_eq!(refused.reason, RefusalReason::NoToken);
        let open = Auth {
            tokens: None,
            loopback: true,
        };
        assert_eq!(open.authenticate(&RPC, &none).unwrap(), Caller::Loopback);
    }
}
