//! Parsing of an [`Endpoint`], and formatting of its words.

use std::{fmt, path::PathBuf, str::FromStr};

use super::{Endpoint, HostPort};

/// Error of parsing an endpoint.
/// It does not repeat the text, which may contain a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// The text begins with no known scheme.
    #[error(
        "endpoint: unknown scheme; use queue:NAME, stdio:COMMAND ARGS, tcp://HOST:PORT, \
         tls://HOST:PORT, unix:PATH, ws://HOST:PORT/PATH or wss://HOST:PORT/PATH"
    )]
    Scheme,
    /// A part after the scheme is missing.
    #[error("endpoint: the {0} is missing")]
    Missing(&'static str),
    /// The port is no number up to 65535.
    #[error("port: not a number from 0 to 65535")]
    Port,
    /// The host has invalid characters or unbalanced brackets.
    #[error("host: neither a name nor an address; write IPv6 as [::1]:80")]
    Host,
    /// The endpoint contains `user:password@`.
    #[error("endpoint: user and password are not supported; send secrets in headers")]
    UserInfo,
    /// The path has characters that a path cannot have.
    #[error(
        "path: contains a query, a fragment, a space or a control character; send secrets in headers"
    )]
    Path,
    /// A quote is not closed.
    #[error("command: unterminated quote")]
    Quote,
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let (scheme, rest) = text.split_once(':').ok_or(EndpointError::Scheme)?;
        let after_slashes = rest.strip_prefix("//").ok_or(EndpointError::Missing("//"));
        match scheme {
            "queue" => Ok(Self::Queue {
                name: present(rest, "name")?.to_owned(),
            }),
            "stdio" => Ok(Self::Stdio {
                command: split_words(rest)?,
            }),
            "unix" => Ok(Self::Unix {
                path: PathBuf::from(present(rest, "path")?),
            }),
            "tcp" | "tls" => Ok(Self::Tcp {
                address: host_port(after_slashes?, None)?,
                tls: scheme == "tls",
            }),
            "ws" | "wss" => web_socket(after_slashes?, scheme == "wss"),
            _ => Err(EndpointError::Scheme),
        }
    }
}

fn present<'a>(text: &'a str, what: &'static str) -> Result<&'a str, EndpointError> {
    if text.is_empty() {
        return Err(EndpointError::Missing(what));
    }
    Ok(text)
}

fn web_socket(text: &str, tls: bool) -> Result<Endpoint, EndpointError> {
    let end = text.find(['/', '?', '#']).unwrap_or(text.len());
    let (address, path) = text.split_at(end);
    if path.contains(['?', '#', ' ']) || path.contains(char::is_control) {
        return Err(EndpointError::Path);
    }
    Ok(Endpoint::WebSocket {
        address: host_port(address, Some(if tls { 443 } else { 80 }))?,
        tls,
        path: path.to_owned(),
    })
}

fn host_port(text: &str, default_port: Option<u16>) -> Result<HostPort, EndpointError> {
    if text.contains('@') {
        return Err(EndpointError::UserInfo);
    }
    let (host, port) = if let Some(bracketed) = text.strip_prefix('[') {
        let (host, port) = bracketed.split_once(']').ok_or(EndpointError::Host)?;
        if host.parse::<std::net::Ipv6Addr>().is_err() {
            return Err(EndpointError::Host);
        }
        match port.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if port.is_empty() => (host, None),
            None => return Err(EndpointError::Host),
        }
    } else {
        match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        }
    };
    let in_host = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
    if !present(host, "host")?.chars().all(in_host) {
        return Err(EndpointError::Host);
    }
    let port = match (port, default_port) {
        (Some(port), _) if port.bytes().all(|byte| byte.is_ascii_digit()) => present(port, "port")?
            .parse()
            .map_err(|_| EndpointError::Port)?,
        (Some(port), _) if port.contains(':') => return Err(EndpointError::Host),
        (Some(_), _) => return Err(EndpointError::Port),
        (None, Some(port)) => port,
        (None, None) => return Err(EndpointError::Missing("port")),
    };
    Ok(HostPort {
        host: host.to_owned(),
        port,
    })
}

/// Splits at spaces.
/// Single quotes keep everything, and double quotes everything but `\"` and `\\`. A backslash outside of quotes keeps
/// the next character. Nothing is expanded, because no shell is involved.
fn split_words(text: &str) -> Result<Vec<String>, EndpointError> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            c if c.is_ascii_whitespace() => words.extend(word.take()),
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next().ok_or(EndpointError::Quote)? {
                        '\'' => break,
                        c => word.push(c),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next().ok_or(EndpointError::Quote)? {
                        '"' => break,
                        '\\' => match chars.next().ok_or(EndpointError::Quote)? {
                            c @ ('"' | '\\') => word.push(c),
                            c => word.extend(['\\', c]),
                        },
                        c => word.push(c),
                    }
                }
            }
            '\\' => word
                .get_or_insert_default()
                .push(chars.next().ok_or(EndpointError::Quote)?),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Ok(words)
}

/// Writes words in the form that [`split_words`] parses.
pub(super) fn write_words(f: &mut fmt::Formatter<'_>, words: &[String]) -> fmt::Result {
    for (at, word) in words.iter().enumerate() {
        if at > 0 {
            f.write_str(" ")?;
        }
        let plain = |c: char| c.is_alphanumeric() || "-_./:=@%+,~".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            f.write_str(word)?;
        } else {
            write!(f, "'{}'", word.replace('\'', r"'\''"))?;
        }
    }
    Ok(())
}
