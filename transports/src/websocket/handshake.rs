//! HTTP upgrade to a websocket, for client and server.

use box_rpc::ConnectionError;
use std::io::{Error, ErrorKind};
use tokio::io::{AsyncRead, AsyncWrite};
use tungstenite::{
    error::{CapacityError, Error as LibraryError, ProtocolError},
    handshake::{
        client::{Response, generate_key, generate_request},
        derive_accept_key,
        machine::TryParse,
        server::{self, Request, create_response, write_response},
    },
    http::{
        HeaderMap, HeaderName, HeaderValue,
        header::{
            CONNECTION, HOST, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_EXTENSIONS, SEC_WEBSOCKET_KEY,
            SEC_WEBSOCKET_VERSION, UPGRADE,
        },
    },
};

use super::upgrade_policy::{CheckUpgrade, UpgradeRejection, UpgradeRequest};
use crate::bytes::{ReadBuffer, WriteBuffer};

/// Maximum length of the head of a request or answer.
const HEAD_LIMIT: usize = 16 * 1024;

/// Returns the `Sec-WebSocket-Accept` for a `Sec-WebSocket-Key`.
/// Returns `None` if the key is not sixteen bytes in base64.
pub fn accept_key(key: &str) -> Option<String> {
    let digits = key.strip_suffix("==")?;
    let is_digit = |byte: u8| byte.is_ascii_alphanumeric() || b"+/".contains(&byte);
    let is_valid = digits.len() == 22 && digits.bytes().all(is_digit);
    is_valid.then(|| derive_accept_key(key.as_bytes()))
}

/// Reads the request, checks it with `policy` and answers.
/// Frames may follow when it returns `Ok`.
pub(super) async fn serve<R, W>(
    read_buffer: &mut ReadBuffer<R>,
    write_buffer: &mut WriteBuffer<W>,
    policy: &dyn CheckUpgrade,
) -> Result<(), ConnectionError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let accepted = loop {
        match read_request(head_of(read_buffer.buffered()), policy) {
            Ok(Some((response, size))) => {
                read_buffer.consume(size);
                break Ok(response);
            }
            Ok(None) if read_buffer.buffered().len() > HEAD_LIMIT => {
                break Err(UpgradeRejection::new(
                    431,
                    "request head exceeds 16384 bytes",
                ));
            }
            Ok(None) => {
                let is_partial = !read_buffer.buffered().is_empty();
                if !read_buffer.fill(is_partial).await? {
                    return Err(ConnectionError::Closed);
                }
            }
            Err(rejection) => break Err(rejection),
        }
    };
    read_buffer.message_ended();
    match accepted {
        Ok(response) => {
            write_response(write_buffer.buffer(), &response).map_err(Error::other)?;
            write_buffer.flush().await
        }
        Err(rejection) => {
            write_buffer
                .buffer()
                .extend_from_slice(rejection_response(rejection).as_bytes());
            write_buffer.close().await?;
            Err(Error::new(ErrorKind::PermissionDenied, rejection).into())
        }
    }
}

/// Returns the bytes that may be part of the head.
/// The limit applies to a head that arrives at once as well as to one that arrives in pieces.
fn head_of(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len().min(HEAD_LIMIT)]
}

/// Returns the response and the length of the request's head.
/// `None` if the head is incomplete.
fn read_request(
    bytes: &[u8],
    policy: &dyn CheckUpgrade,
) -> Result<Option<(server::Response, usize)>, UpgradeRejection> {
    let Some((size, request)) = Request::try_parse(bytes).map_err(rejection_of)? else {
        return Ok(None);
    };
    let response = create_response(&request).map_err(rejection_of)?;
    let request = UpgradeRequest::new(&request);
    if request
        .header(SEC_WEBSOCKET_KEY.as_str())
        .and_then(accept_key)
        .is_none()
    {
        return Err(rejection_of(ProtocolError::MissingSecWebSocketKey.into()));
    }
    policy.check(&request)?;
    Ok(Some((response, size)))
}

/// Returns the rejection for an error of the library.
fn rejection_of(error: LibraryError) -> UpgradeRejection {
    let (status, reason) = match error {
        LibraryError::Capacity(CapacityError::TooManyHeaders) => (431, "too many headers"),
        LibraryError::Protocol(error) => match error {
            ProtocolError::WrongHttpMethod | ProtocolError::WrongHttpVersion => {
                (405, "method not allowed; send a GET request of HTTP/1.1")
            }
            ProtocolError::MissingConnectionUpgradeHeader
            | ProtocolError::MissingUpgradeWebSocketHeader => {
                (426, "upgrade required; this path serves a websocket")
            }
            ProtocolError::MissingSecWebSocketVersionHeader => {
                (426, "sec-websocket-version: must be 13")
            }
            ProtocolError::MissingSecWebSocketKey => (400, "sec-websocket-key: missing or invalid"),
            _ => (400, "not an HTTP request"),
        },
        _ => (400, "not an HTTP request"),
    };
    UpgradeRejection::new(status, reason)
}

/// Returns the response to a refused request.
fn rejection_response(rejection: UpgradeRejection) -> String {
    let UpgradeRejection { status, reason } = rejection;
    let more = match status {
        401 => "WWW-Authenticate: Bearer\r\n",
        426 => "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
        _ => "",
    };
    let length = reason.len() + 1;
    // Clients ignore the text after the status.
    format!(
        "HTTP/1.1 {status} Refused\r\n{more}Content-Type: text/plain\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{reason}\n"
    )
}

/// Status with which a server refused the upgrade.
/// It is inside the [`io::Error`](std::io::Error) of [`ConnectionError::Io`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the server refused the upgrade with status {0}")]
pub struct UpgradeRefused(pub u16);

/// Requests the upgrade and reads the response.
pub(super) async fn request<R, W>(
    read_buffer: &mut ReadBuffer<R>,
    write_buffer: &mut WriteBuffer<W>,
    host: &str,
    path: &str,
    headers: &[(String, String)],
) -> Result<(), ConnectionError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let key = generate_key();
    let request = request_of(host, path, &key, headers)?;
    let accept = derive_accept_key(key.as_bytes());
    write_buffer.buffer().extend_from_slice(&request);
    write_buffer.flush().await?;
    loop {
        if let Some(size) = read_response(head_of(read_buffer.buffered()), &accept)? {
            read_buffer.consume(size);
            read_buffer.message_ended();
            return Ok(());
        }
        if read_buffer.buffered().len() > HEAD_LIMIT {
            return Err(ConnectionError::Framing(
                "upgrade response: head exceeds 16384 bytes",
            ));
        }
        if !read_buffer.fill(true).await? {
            return Err(ConnectionError::Closed);
        }
    }
}

/// Returns the bytes of the request.
fn request_of(
    host: &str,
    path: &str,
    key: &str,
    headers: &[(String, String)],
) -> Result<Vec<u8>, Error> {
    let invalid = |reason| Error::new(ErrorKind::InvalidInput, reason);
    let mut request = Request::new(());
    *request.uri_mut() = path
        .parse()
        .map_err(|_| invalid("path: invalid characters"))?;
    let own = [
        (HOST, host),
        (CONNECTION, "Upgrade"),
        (UPGRADE, "websocket"),
        (SEC_WEBSOCKET_VERSION, "13"),
        (SEC_WEBSOCKET_KEY, key),
    ];
    for (name, value) in own {
        let value = HeaderValue::try_from(value);
        let value = value.map_err(|_| invalid("host: invalid characters"))?;
        request.headers_mut().insert(name, value);
    }
    for (name, value) in headers {
        let (Ok(name), Ok(value)) = (
            HeaderName::try_from(name),
            HeaderValue::from_bytes(value.as_bytes()),
        ) else {
            return Err(invalid("headers: invalid characters in a name or value"));
        };
        request.headers_mut().append(name, value);
    }
    let (request, _) = generate_request(request).map_err(Error::other)?;
    Ok(request)
}

/// Returns the length of the response's head; `None` if it is incomplete.
pub(crate) fn read_response(bytes: &[u8], key: &str) -> Result<Option<usize>, ConnectionError> {
    let (size, response) = match Response::try_parse(bytes) {
        Ok(Some(parsed)) => parsed,
        Ok(None) => return Ok(None),
        Err(_) => {
            return Err(ConnectionError::Framing("upgrade response: not HTTP"));
        }
    };
    let status = response.status().as_u16();
    if status != 101 {
        let kind = match status {
            401 | 403 => ErrorKind::PermissionDenied,
            404 => ErrorKind::NotFound,
            _ => ErrorKind::ConnectionRefused,
        };
        return Err(Error::new(kind, UpgradeRefused(status)).into());
    }
    let headers = response.headers();
    let accept = headers.get(SEC_WEBSOCKET_ACCEPT);
    if !lists(headers, &UPGRADE, "websocket")
        || !lists(headers, &CONNECTION, "upgrade")
        || accept.is_none_or(|accept| accept != key)
        || headers.contains_key(SEC_WEBSOCKET_EXTENSIONS)
    {
        return Err(ConnectionError::Framing(
            "upgrade response: missing or wrong headers",
        ));
    }
    Ok(Some(size))
}

/// Whether a comma-separated header lists `token`, case-insensitively.
fn lists(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    let values = headers.get_all(name).iter();
    values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|part| part.trim().eq_ignore_ascii_case(token))
}
