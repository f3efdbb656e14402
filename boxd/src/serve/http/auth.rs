//! Authentication of HTTP requests by token.

use box_rpc::Caller;
use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;

use super::answer::{Refusal, Why};
use super::routes::Door;

pub(super) const LANGBOT: &str = "x-langbot-box-control-token";

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
    pub(super) fn who(&self, door: Door, headers: &HeaderMap) -> Result<Caller, Refusal> {
        let open = needs_nothing(door) || door == Door::Metrics && self.loopback;
        let tokens = match &self.tokens {
            Some(tokens) if !open => tokens,
            // Not `Local`, which only this user can be: every user of the machine reaches its loopback addresses.
            _ => return Ok(Caller::Loopback),
        };
        let mut given = false;
        for token in offered(door, headers) {
            given = true;
            if let Some(name) = tokens.name_of(token) {
                return Ok(Caller::Token(name));
            }
        }
        let named = accepted(door).join(", ");
        let or = if named.is_empty() { "" } else { " or " };
        Err(if given {
            Refusal::new(Why::WrongToken, "the token is not valid here")
        } else {
            let message = format!("a token is needed, as Authorization: Bearer{or}{named}");
            Refusal::new(Why::NoToken, message)
        })
    }
}

/// Returns whether a route needs no token; its answers must not contain secrets.
pub(super) fn needs_nothing(door: Door) -> bool {
    matches!(
        door,
        Door::Healthz | Door::Readyz | Door::Health | Door::Version
    )
}

/// The token headers of a route, besides `Authorization: Bearer`, which all accept.
fn accepted(door: Door) -> &'static [&'static str] {
    match door {
        Door::Rpc | Door::Relay => &[LANGBOT],
        _ => &[],
    }
}

/// Returns every token that a request offers to a route.
fn offered(door: Door, headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let bearer = headers
        .get_all(AUTHORIZATION)
        .into_iter()
        .filter_map(|value| value.to_str().ok()?.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, token)| token.trim());
    let own = accepted(door)
        .iter()
        .flat_map(|name| headers.get_all(*name))
        .filter_map(|value| value.to_str().ok());
    bearer.chain(own)
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
    fn bearer_opens_every_door_and_other_headers_only_their_own() {
        let auth = auth(false);
        for (_, door) in ROUTES {
            let bearer = headers("authorization", &format!("bearer {TOKEN}"));
            let who = auth.who(*door, &bearer).unwrap();
            let expected = if needs_nothing(*door) {
                Caller::Loopback
            } else {
                Caller::token("ann")
            };
            assert_eq!(who, expected);
            for name in [LANGBOT, "x-api-key"] {
                let opened = auth.who(*door, &headers(name, TOKEN)).is_ok();
                let its_own = accepted(*door).contains(&name) || needs_nothing(*door);
                assert_eq!(opened, its_own, "{door:?} {name}");
                assert_eq!(
                    auth.who(*door, &headers(name, &TOKEN[1..])).is_ok(),
                    needs_nothing(*door)
                );
            }
        }
        let basic = headers("authorization", &format!("Basic {TOKEN}"));
        assert!(auth.who(Door::Rpc, &basic).is_err());
    }

    #[test]
    fn figures_are_open_on_loopback_and_nothing_else_is() {
        let none = HeaderMap::new();
        assert!(auth(true).who(Door::Metrics, &none).is_ok());
        assert!(auth(false).who(Door::Metrics, &none).is_err());
        let refused = auth(true).who(Door::Rpc, &none).unwrap_err();
        assert_eq!(refused.why, Why::NoToken);
        let open = Auth {
            tokens: None,
            loopback: true,
        };
        assert_eq!(open.who(Door::Rpc, &none).unwrap(), Caller::Loopback);
    }
}
