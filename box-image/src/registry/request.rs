//! Requests to registries: authentication, redirects, and repetition after a failure.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{AUTHORIZATION, HOST, LOCATION, RETRY_AFTER, USER_AGENT, WWW_AUTHENTICATE};
use hyper::{Request, StatusCode, Uri};

use super::connection::{Answer, Failure, Origin};
use super::{Registry, Source, auth, host_name};
use crate::error::{Error, Result, shown};
use crate::progress::{Event, Progress};
use crate::reference::is_loopback;

/// Repetitions of one request.
const RETRIES: u32 = 5;
/// Redirects of one request.
const REDIRECTS: usize = 5;
/// Size of an answer that is read only to use its connection again.
const DISCARDED: u64 = 64 << 10;
const AGENT: &str = concat!("box/", env!("CARGO_PKG_VERSION"));

type Headers<'a> = [(&'a str, &'a str)];

/// Where a request goes.
#[derive(Debug, Clone)]
struct Target {
    origin: Origin,
    path: String,
}

impl Registry {
    /// Sends a GET, and returns an answer of success.
    ///
    /// Credentials go to the registry and to the token service that it names, and to no other host.
    pub(super) async fn get(
        &self,
        source: &Source,
        path: &str,
        headers: &Headers<'_>,
        progress: &Progress,
    ) -> Result<Answer> {
        let mut retries = 0;
        loop {
            let (error, asked) = match self.attempt(source, path, headers).await {
                Ok(answer) if answer.status().is_success() => return Ok(answer),
                Ok(answer) => {
                    let error = status_error(source, answer.status());
                    if !is_temporary(answer.status()) {
                        return Err(error);
                    }
                    (error, retry_after(&answer))
                }
                Err(Failure::Again(error)) => (error, None),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::NotTls) => {
                    return Err(Error::unavailable(format!(
                        "registry {}: no TLS; if you trust the network, add it to images.insecure_registries",
                        shown(&source.authority)
                    )));
                }
            };
            retries += 1;
            let max = self.inner.options.retry_wait_max;
            let wait = asked.unwrap_or(self.inner.options.retry_wait * 2_u32.pow(retries - 1));
            if retries > RETRIES || wait > max {
                return Err(error);
            }
            progress.report(Event::Retry {
                reason: error.to_string(),
                wait_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
            });
            tokio::time::sleep(wait).await;
        }
    }

    /// Sends a request once, with authentication and redirects.
    async fn attempt(
        &self,
        source: &Source,
        path: &str,
        headers: &Headers<'_>,
    ) -> Result<Answer, Failure> {
        let mut token = self.inner.tokens.get(source);
        let mut refused = false;
        let (origin, mut answer) = loop {
            let (origin, answer) = self
                .send_to_registry(source, path, headers, token.as_deref())
                .await?;
            if answer.status() != StatusCode::UNAUTHORIZED || refused {
                break (origin, answer);
            }
            // A token may have expired; new ones are refused only once.
            refused = true;
            let challenges = answer.headers(WWW_AUTHENTICATE.as_str());
            let challenge = auth::choose(challenges).map_err(Failure::Final)?;
            let _ = answer.bytes(DISCARDED, "registry").await;
            token = Some(self.authorize(source, &origin, &challenge).await?);
        };
        let mut target = Target {
            origin: origin.clone(),
            path: path.to_owned(),
        };
        for _ in 0..REDIRECTS {
            if !answer.status().is_redirection() {
                return Ok(answer);
            }
            let location = answer.header(LOCATION.as_str()).unwrap_or_default();
            target = redirect(&target, location).map_err(Failure::Final)?;
            let same = target.origin == origin;
            let token = token.as_deref().filter(|_| same);
            answer = self.send(&target, headers, token).await?;
        }
        Err(Failure::Final(Error::unavailable(format!(
            "registry {origin}: it redirects more than {REDIRECTS} times; check the registry"
        ))))
    }

    /// Sends a request to a registry, with TLS unless it is on this machine and has none.
    async fn send_to_registry(
        &self,
        source: &Source,
        path: &str,
        headers: &Headers<'_>,
        token: Option<&str>,
    ) -> Result<(Origin, Answer), Failure> {
        let authority = host_name(&source.authority);
        let path = path.to_owned();
        let mut target = Target {
            origin: Origin::new(authority, true),
            path,
        };
        let options = &self.inner.options;
        let plain = options.plain_http.iter().any(|host| host == authority)
            || self.inner.tokens.is_plain(authority);
        if plain {
            target.origin = Origin::new(authority, false);
        }
        match self.send(&target, headers, token).await {
            Err(Failure::NotTls) if is_loopback(&target.origin.host) => {
                target.origin = Origin::new(authority, false);
                let answer = self.send(&target, headers, token).await?;
                self.inner.tokens.set_plain(authority);
                Ok((target.origin, answer))
            }
            answer => Ok((target.origin, answer?)),
        }
    }

    async fn send(
        &self,
        target: &Target,
        headers: &Headers<'_>,
        token: Option<&str>,
    ) -> Result<Answer, Failure> {
        let mut request = Request::get(&target.path)
            .header(HOST, target.origin.authority())
            .header(USER_AGENT, AGENT);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token);
        }
        let request = request
            .body(Full::default())
            .map_err(|_| Failure::Final(invalid(&target.origin)))?;
        self.inner.connector.send(&target.origin, request).await
    }

    /// Asks a token service. Redirects are not followed, because the request contains credentials.
    pub(super) async fn ask_token(
        &self,
        realm: &str,
        registry: &Origin,
        query: &str,
        authorization: Option<&str>,
        form: Option<String>,
    ) -> Result<Answer, Failure> {
        let service = parse(realm).ok_or_else(|| Failure::Final(invalid(registry)))?;
        // A registry with TLS must not make us send a password without it.
        if !service.origin.tls && registry.tls {
            return Err(Failure::Final(Error::unavailable(format!(
                "registry {registry}: its token service has no TLS; check the registry"
            ))));
        }
        let separator = if service.path.contains('?') { '&' } else { '?' };
        let path = match form {
            Some(_) => service.path.clone(),
            None => format!("{}{separator}{query}", service.path),
        };
        let mut request = Request::builder()
            .method(if form.is_some() { "POST" } else { "GET" })
            .uri(path)
            .header(HOST, service.origin.authority())
            .header(USER_AGENT, AGENT);
        if form.is_some() {
            request = request.header("content-type", "application/x-www-form-urlencoded");
        }
        if let Some(value) = authorization {
            request = request.header(AUTHORIZATION, value);
        }
        let body = Full::new(Bytes::from(form.unwrap_or_default()));
        let request = request
            .body(body)
            .map_err(|_| Failure::Final(invalid(registry)))?;
        self.inner.connector.send(&service.origin, request).await
    }
}

fn invalid(origin: &Origin) -> Error {
    Error::unavailable(format!(
        "registry {origin}: it names an invalid address; check the registry"
    ))
}

/// Resolves the target of a redirect. TLS is never given up.
fn redirect(from: &Target, location: &str) -> Result<Target> {
    let target = if location.starts_with('/') && !location.starts_with("//") {
        let path = location.to_owned();
        let valid = path.parse::<Uri>().is_ok();
        valid.then(|| Target {
            origin: from.origin.clone(),
            path,
        })
    } else {
        parse(location)
    };
    let target = target.ok_or_else(|| invalid(&from.origin))?;
    if from.origin.tls && !target.origin.tls {
        return Err(Error::unavailable(format!(
            "registry {}: it redirects to {} without TLS; check the registry",
            from.origin, target.origin
        )));
    }
    Ok(target)
}

/// Parses an absolute address without credentials.
fn parse(address: &str) -> Option<Target> {
    let uri: Uri = address.parse().ok()?;
    let tls = match uri.scheme_str()? {
        "https" => true,
        "http" => false,
        _ => return None,
    };
    let authority = uri.authority()?.as_str();
    if authority.contains('@') || uri.host()?.is_empty() {
        return None;
    }
    Some(Target {
        origin: Origin::new(authority, tls),
        path: uri
            .path_and_query()
            .map_or("/", |path| path.as_str())
            .to_owned(),
    })
}

fn is_temporary(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504)
}

/// Returns the wait that a registry asks for, in seconds or until a date.
fn retry_after(answer: &Answer) -> Option<Duration> {
    let value = answer.header(RETRY_AFTER.as_str())?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let until = httpdate::parse_http_date(value).ok()?;
    Some(until.duration_since(SystemTime::now()).unwrap_or_default())
}

fn status_error(source: &Source, status: StatusCode) -> Error {
    let registry = shown(&source.authority);
    match status.as_u16() {
        401 => Error::Denied(format!(
            "registry {registry}: it requires a login, or the repository does not exist; log in and check the name"
        )),
        403 => Error::Denied(format!(
            "registry {registry}: it refuses access; log in as another user"
        )),
        404 => Error::not_found(format!(
            "registry {registry}: the content does not exist; check the name"
        )),
        416 => Error::corrupt(format!(
            "registry {registry}: it refuses the range; try again"
        )),
        429 => Error::unavailable(format!(
            "registry {registry}: too many requests; try again later or log in"
        )),
        other => Error::unavailable(format!(
            "registry {registry}: it answers with status {other}; try again later"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_never_gives_up_tls_and_never_contains_credentials() {
        let from = Target {
            origin: Origin::new("r.example", true),
            path: "/v2/".to_owned(),
        };
        let to = |location: &str| redirect(&from, location);
        assert_eq!(to("/x?y").unwrap().origin, from.origin);
        assert_eq!(
            to("https://cdn.example:8443/a?b=c").unwrap().origin.port,
            8443
        );
        assert_eq!(to("https://cdn.example:8443/a?b=c").unwrap().path, "/a?b=c");
        for location in [
            "http://r.example/",
            "//evil/x",
            "",
            "ftp://x/",
            "https://u:p@x/",
            "file:///etc/passwd",
            "x y",
        ] {
            assert!(to(location).is_err(), "{location}");
        }
    }
}
