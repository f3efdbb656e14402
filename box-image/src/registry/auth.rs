//! Authentication: the challenge of a registry, and tokens.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;

use super::connection::{Failure, Origin};
use super::{Credentials, Registry, Source};
use crate::error::{Error, Result, shown};

/// Maximum size of a token service's answer.
const TOKEN_BYTES: u64 = 1 << 20;
/// Lifetime of a token that states none.
const TOKEN_SECONDS: u64 = 60;
/// A token is not used in its last seconds.
const MARGIN: Duration = Duration::from_secs(10);
/// Maximum lifetime that is believed.
const TOKEN_SECONDS_MAX: u64 = 3600;

const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// Values of the header `Authorization`, by registry and repository.
#[derive(Default)]
pub(super) struct Tokens {
    values: Mutex<HashMap<(String, String), (String, Instant)>>,
    /// Registries of this machine that have no TLS.
    plain: Mutex<HashSet<String>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tokens {
    pub(super) fn get(&self, source: &Source) -> Option<String> {
        let values = locked(&self.values);
        let (value, until) = values.get(&key(source))?;
        (*until > Instant::now()).then(|| value.clone())
    }

    fn set(&self, source: &Source, value: &str, lifetime: Duration) {
        let until = Instant::now() + lifetime.saturating_sub(MARGIN);
        let mut values = locked(&self.values);
        values.retain(|_, (_, until)| *until > Instant::now());
        values.insert(key(source), (value.to_owned(), until));
    }

    pub(super) fn is_plain(&self, authority: &str) -> bool {
        locked(&self.plain).contains(authority)
    }

    pub(super) fn set_plain(&self, authority: &str) {
        locked(&self.plain).insert(authority.to_owned());
    }
}

fn key(source: &Source) -> (String, String) {
    (source.authority.clone(), source.repository.clone())
}

/// What a registry asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    Basic,
    Bearer { realm: String, service: String },
}

#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<u64>,
}

impl Registry {
    /// Returns the value of `Authorization` that answers a challenge.
    pub(super) async fn authorize(
        &self,
        source: &Source,
        origin: &Origin,
        challenge: &Challenge,
    ) -> Result<String, Failure> {
        let credentials = self
            .credentials(&source.authority)
            .await
            .map_err(Failure::Final)?;
        let (value, lifetime) = match challenge {
            Challenge::Basic => {
                let Some(Credentials::Basic { username, password }) = &credentials else {
                    return Err(Failure::Final(Error::Denied(format!(
                        "registry {origin}: it requires a user and a password; log in first"
                    ))));
                };
                (basic(username, password), TOKEN_SECONDS_MAX)
            }
            Challenge::Bearer { realm, service } => {
                self.token(source, origin, realm, service, credentials.as_ref())
                    .await?
            }
        };
        self.inner
            .tokens
            .set(source, &value, Duration::from_secs(lifetime));
        Ok(value)
    }

    async fn token(
        &self,
        source: &Source,
        origin: &Origin,
        realm: &str,
        service: &str,
        credentials: Option<&Credentials>,
    ) -> Result<(String, u64), Failure> {
        let encoded = |text: &str| utf8_percent_encode(text, UNRESERVED).to_string();
        let mut query = format!("service={}", encoded(service));
        if !source.repository.is_empty() {
            let scope = format!("repository:{}:pull", source.repository);
            query = format!("{query}&scope={}", encoded(&scope));
        }
        let (authorization, form) = match credentials {
            Some(Credentials::Basic { username, password }) => {
                (Some(basic(username, password)), None)
            }
            Some(Credentials::IdentityToken(token)) => {
                let form = format!(
                    "grant_type=refresh_token&client_id=box&{query}&refresh_token={}",
                    encoded(token)
                );
                (None, Some(form))
            }
            None => (None, None),
        };
        let answer = self
            .ask_token(realm, origin, &query, authorization.as_deref(), form)
            .await?;
        match answer.status().as_u16() {
            200 => {}
            401 | 403 => {
                return Err(Failure::Final(Error::Denied(format!(
                    "registry {origin}: it refuses the credentials; log in again"
                ))));
            }
            other => {
                let problem = format!(
                    "registry {origin}: its token service answers with status {other}; try again later"
                );
                return Err(Failure::Again(Error::unavailable(problem)));
            }
        }
        let bytes = answer
            .bytes(TOKEN_BYTES, "token")
            .await
            .map_err(Failure::Again)?;
        let invalid = || {
            Failure::Final(Error::unavailable(format!(
                "registry {origin}: its token service gives no token"
            )))
        };
        let found: TokenAnswer = serde_json::from_slice(&bytes).map_err(|_| invalid())?;
        let token = found
            .token
            .or(found.access_token)
            .filter(|token| !token.is_empty());
        let token = token.ok_or_else(invalid)?;
        let seconds = found
            .expires_in
            .unwrap_or(TOKEN_SECONDS)
            .min(TOKEN_SECONDS_MAX);
        Ok((format!("Bearer {token}"), seconds))
    }
}

fn basic(username: &str, password: &str) -> String {
    format!(
        "Basic {}",
        STANDARD.encode(format!("{username}:{password}"))
    )
}

/// Chooses a challenge that this client can answer, preferably for a token.
pub(super) fn choose<'a>(headers: impl Iterator<Item = &'a str>) -> Result<Challenge> {
    let mut offered = Vec::new();
    let mut is_basic = false;
    for header in headers {
        let (scheme, rest) = header.split_once(' ').unwrap_or((header, ""));
        if scheme.eq_ignore_ascii_case("bearer") {
            let parameters = parameters(rest);
            let find = |name: &str| {
                parameters
                    .iter()
                    .find(|(key, _)| key == name)
                    .map(|(_, value)| value.clone())
            };
            if let Some(realm) = find("realm") {
                let service = find("service").unwrap_or_default();
                return Ok(Challenge::Bearer { realm, service });
            }
        }
        is_basic |= scheme.eq_ignore_ascii_case("basic");
        offered.push(shown(scheme));
    }
    if is_basic {
        return Ok(Challenge::Basic);
    }
    Err(Error::Denied(format!(
        "registry: unsupported authentication scheme `{}`; use a registry with basic or bearer",
        offered.join(", ")
    )))
}

/// Parses `key="value", …`. A value may contain commas and escaped quotes.
fn parameters(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut rest = text.trim_start();
    while let Some((key, after)) = rest.split_once('=') {
        let key = key.trim_matches([' ', ',', '\t']).to_ascii_lowercase();
        let (value, after) = if let Some(quoted) = after.strip_prefix('"') {
            unquoted(quoted)
        } else {
            let end = after.find(',').unwrap_or(after.len());
            (after[..end].trim().to_owned(), &after[end..])
        };
        found.push((key, value));
        rest = after.trim_start_matches([' ', ',', '\t']);
    }
    found
}

fn unquoted(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            other => value.push(other),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read_with_their_quotes() {
        let bearer = |realm: &str, service: &str| Challenge::Bearer {
            realm: realm.to_owned(),
            service: service.to_owned(),
        };
        for (headers, challenge) in [
            (
                vec![r#"Bearer realm="https://a/t",service="s",scope="repository:x:pull,push""#],
                bearer("https://a/t", "s"),
            ),
            (
                vec![r#"bearer scope="a,b=c" , REALM="https://a/\"t" "#],
                bearer("https://a/\"t", ""),
            ),
            (
                vec!["Bearer realm=https://a/t, service=s"],
                bearer("https://a/t", "s"),
            ),
            (vec![r#"Basic realm="x""#], Challenge::Basic),
            (
                vec!["Negotiate", r#"Basic realm="x""#, r#"Bearer realm="r""#],
                bearer("r", ""),
            ),
        ] {
            assert_eq!(choose(headers.into_iter()).unwrap(), challenge);
        }
        let error = choose(["Negotiate abc"].into_iter()).unwrap_err();
        assert!(error.to_string().contains("`Negotiate`"), "{error}");
        for broken in [
            "Bearer",
            "Bearer realm",
            "Bearer service=x",
            r#"Bearer ="x"#,
        ] {
            assert!(choose([broken].into_iter()).is_err(), "{broken}");
        }
    }
}
