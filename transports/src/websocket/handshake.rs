//! HTTP upgrade to a websocket, for client and server.

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use box_rpc::ConnectionError;
use httparse::{EMPTY_HEADER, Request, Response, Status};
use sha1::{Digest, Sha1};
use std::io::{Error, ErrorKind};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{
    frame::fill_random,
    upgrade_policy::{CheckUpgrade, UpgradeRejection, UpgradeRequest},
};
use crate::bytes::{ReadBuffer, WriteBuffer};

/// Maximum length of the head of a request or answer.
const HEAD_LIMIT: usize = 16 * 1024;

/// Maximum number of headers of a request or answer.
const HEADERS: usize = 64;

/// Suffix that the protocol appends to a key before it is hashed.
const KEY_SUFFIX: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// Returns the `Sec-WebSocket-Accept` for a `Sec-WebSocket-Key`.
pub fn accept_key(key: &str) -> String {
    let mut hash = Sha1::new();
    hash.update(key.as_bytes());
    hash.update(KEY_SUFFIX);
    BASE64.encode(hash.finalize())
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
            Ok(Some((key, size))) => {
                read_buffer.consume(size);
                break Ok(key);
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
        Ok(key) => {
            let answer = format!(
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
                 Sec-WebSocket-Accept: {key}\r\n\r\n"
            );
            write_buffer.buffer().extend_from_slice(answer.as_bytes());
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

/// Returns the key to answer with and the length of the head.
/// `None` if the head is incomplete.
fn read_request(
    bytes: &[u8],
    policy: &dyn CheckUpgrade,
) -> Result<Option<(String, usize)>, UpgradeRejection> {
    let mut headers = [EMPTY_HEADER; HEADERS];
    let mut parsed = Request::new(&mut headers);
    let size = match parsed.parse(bytes) {
        Ok(Status::Complete(size)) => size,
        Ok(Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => {
            return Err(UpgradeRejection::new(431, "too many headers"));
        }
        Err(_) => return Err(UpgradeRejection::new(400, "not an HTTP request")),
    };
    let request = UpgradeRequest::new(parsed.path.unwrap_or_default(), parsed.headers);
    if parsed.method != Some("GET") || parsed.version != Some(1) {
        return Err(UpgradeRejection::new(
            405,
            "method not allowed; send a GET request of HTTP/1.1",
        ));
    }
    if !request.lists("upgrade", "websocket") || !request.lists("connection", "upgrade") {
        return Err(UpgradeRejection::new(
            426,
            "upgrade required; this path serves a websocket",
        ));
    }
    if request.header("sec-websocket-version") != Some("13") {
        return Err(UpgradeRejection::new(
            426,
            "sec-websocket-version: must be 13",
        ));
    }
    let key = request
        .header("sec-websocket-key")
        .filter(|key| BASE64.decode(key).is_ok_and(|key| key.len() == 16))
        .ok_or(UpgradeRejection::new(
            400,
            "sec-websocket-key: missing or invalid",
        ))?;
    policy.check(&request)?;
    Ok(Some((accept_key(key), size)))
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
    let mut random = [0; 16];
    fill_random(&mut random)?;
    let key = BASE64.encode(random);
    let mut request = format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
    );
    for (name, value) in headers {
        if !is_header(name, value) {
            let reason = "headers: invalid characters in a name or value";
            return Err(Error::new(ErrorKind::InvalidInput, reason).into());
        }
        request.extend([name, ": ", value, "\r\n"]);
    }
    request.push_str("\r\n");
    write_buffer.buffer().extend_from_slice(request.as_bytes());
    write_buffer.flush().await?;
    loop {
        if let Some(size) = read_response(head_of(read_buffer.buffered()), &accept_key(&key))? {
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

/// Whether name and value form a single valid header.
/// This prevents header injection.
fn is_header(name: &str, value: &str) -> bool {
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !name.is_empty()
        && name.bytes().all(token)
        && !value.bytes().any(|byte| byte.is_ascii_control())
}

/// Returns the length of the response's head; `None` if it is incomplete.
pub(crate) fn read_response(bytes: &[u8], key: &str) -> Result<Option<usize>, ConnectionError> {
    let mut headers = [EMPTY_HEADER; HEADERS];
    let mut answer = Response::new(&mut headers);
    let size = match answer.parse(bytes) {
        Ok(Status::Complete(size)) => size,
        Ok(Status::Partial) => return Ok(None),
        Err(_) => {
            return Err(ConnectionError::Framing("upgrade response: not HTTP"));
        }
    };
    let status = answer.code.unwrap_or_default();
    if status != 101 {
        let kind = match status {
            401 | 403 => ErrorKind::PermissionDenied,
            404 => ErrorKind::NotFound,
            _ => ErrorKind::ConnectionRefused,
        };
        return Err(Error::new(kind, UpgradeRefused(status)).into());
    }
    let answer = UpgradeRequest::new("", answer.headers);
    if !answer.lists("upgrade", "websocket")
        || !answer.lists("connection", "upgrade")
        || answer.header("sec-websocket-accept") != Some(key)
        || answer.count("sec-websocket-extensions") > 0
    {
        return Err(ConnectionError::Framing(
            "upgrade response: missing or wrong headers",
        ));
    }
    Ok(Some(size))
}
