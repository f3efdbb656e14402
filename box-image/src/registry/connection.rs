//! Connections to registries, with or without TLS.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::{Dialer, RegistryOptions};
use crate::error::{Error, Result, shown};
use crate::reference::{host_of, is_loopback};

/// Idle connections that are kept for each origin.
const KEPT: usize = 4;

/// Where a request goes: the unit that credentials belong to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Origin {
    pub(super) tls: bool,
    pub(super) host: String,
    pub(super) port: u16,
}

impl Origin {
    /// Parses `HOST[:PORT]`.
    pub(super) fn new(authority: &str, tls: bool) -> Self {
        let host = host_of(authority);
        let after = authority.rsplit_once(':').map(|(_, port)| port);
        let port = after
            .filter(|port| !port.contains(']'))
            .and_then(|port| port.parse().ok());
        Self {
            tls,
            host: host.to_owned(),
            port: port.unwrap_or(if tls { 443 } else { 80 }),
        }
    }

    /// Returns the value of the header `Host`.
    pub(super) fn authority(&self) -> String {
        let host = if self.host.contains(':') {
            format!("[{}]", self.host)
        } else {
            self.host.clone()
        };
        match (self.tls, self.port) {
            (true, 443) | (false, 80) => host,
            (_, port) => format!("{host}:{port}"),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(&self.authority()))
    }
}

type Sender = SendRequest<Full<Bytes>>;
type Pool = Arc<Mutex<HashMap<Origin, Vec<Sender>>>>;

/// Why a request got no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The peer does not speak TLS.
    NotTls,
    /// It may work later.
    Again(Error),
    /// It will not work.
    Final(Error),
}

/// Maker and keeper of connections.
pub(super) struct Connector {
    tls: Arc<ClientConfig>,
    dialer: Option<Dialer>,
    timeout: Duration,
    idle_timeout: Duration,
    pool: Pool,
}

impl Connector {
    pub(super) fn new(options: &RegistryOptions) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        // A single broken file in the system's store must not disable the other authorities.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        for file in &options.ca_files {
            let bad = || {
                Error::invalid(
                    "images.ca_file: no readable PEM certificate; check the configuration",
                )
            };
            let certificates = CertificateDer::pem_file_iter(file).map_err(|_| bad())?;
            let mut found = 0;
            for certificate in certificates {
                let certificate = certificate.map_err(|_| bad())?;
                roots.add(certificate).map_err(|_| bad())?;
                found += 1;
            }
            if found == 0 {
                return Err(bad());
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|_| Error::unavailable("registry: TLS is not available"))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self {
            tls: Arc::new(tls),
            dialer: options.dialer.clone(),
            timeout: options.timeout,
            idle_timeout: options.idle_timeout,
            pool: Pool::default(),
        })
    }

    /// Sends a request and waits for the head of the answer.
    pub(super) async fn send(
        &self,
        origin: &Origin,
        request: Request<Full<Bytes>>,
    ) -> Result<Answer, Failure> {
        while let Some(mut sender) = self.kept(origin) {
            // A kept connection may have ended; then a new one is made.
            let answer = timeout(self.timeout, async {
                sender.ready().await?;
                sender.send_request(request.clone()).await
            });
            if let Ok(Ok(response)) = answer.await {
                return Ok(self.answer(origin, sender, response));
            }
        }
        let late = || {
            Failure::Again(Error::unavailable(format!(
                "registry {origin}: no answer in time; try again later"
            )))
        };
        let mut sender = timeout(self.timeout, self.connect(origin))
            .await
            .map_err(|_| late())??;
        let sent = timeout(self.timeout, sender.send_request(request))
            .await
            .map_err(|_| late())?;
        let response = sent.map_err(|_| broken(origin))?;
        Ok(self.answer(origin, sender, response))
    }

    fn kept(&self, origin: &Origin) -> Option<Sender> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let senders = pool.get_mut(origin)?;
        while let Some(sender) = senders.pop() {
            if !sender.is_closed() {
                return Some(sender);
            }
        }
        None
    }

    fn answer(&self, origin: &Origin, sender: Sender, response: Response<Incoming>) -> Answer {
        Answer {
            origin: origin.clone(),
            response,
            idle_timeout: self.idle_timeout,
            sender: Some((sender, Arc::clone(&self.pool))),
        }
    }

    async fn connect(&self, origin: &Origin) -> Result<Sender, Failure> {
        let stream = self.stream(origin).await?;
        let _ = stream.set_nodelay(true);
        if !origin.tls {
            return self.handshake(origin, stream).await;
        }
        let name = ServerName::try_from(origin.host.clone()).map_err(|_| {
            Failure::Final(Error::invalid(format!(
                "registry {origin}: the host is invalid"
            )))
        })?;
        let connector = TlsConnector::from(Arc::clone(&self.tls));
        match connector.connect(name, stream).await {
            Ok(stream) => self.handshake(origin, stream).await,
            Err(error) => Err(tls_failure(origin, &error)),
        }
    }

    async fn stream(&self, origin: &Origin) -> Result<TcpStream, Failure> {
        let refused = |how: &str| {
            let problem = format!("registry {origin}: it cannot be reached{how}");
            Failure::Again(Error::unavailable(problem))
        };
        // A proxy on another machine cannot reach a registry on this one.
        let dialer = self.dialer.as_ref();
        if let Some(dialer) = dialer.filter(|_| !is_loopback(&origin.host)) {
            let dialled = dialer.dial(&origin.host, origin.port).await;
            let failed = |_| refused(" through the proxy; check the name and the proxy");
            if let Some(stream) = dialled.map_err(failed)? {
                return Ok(stream);
            }
        }
        TcpStream::connect((origin.host.as_str(), origin.port))
            .await
            .map_err(|_| refused("; check the name and the network"))
    }

    async fn handshake<S>(&self, origin: &Origin, stream: S) -> Result<Sender, Failure>
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|_| broken(origin))?;
        // It ends when the sender and the answer are dropped.
        tokio::spawn(connection);
        Ok(sender)
    }
}

fn broken(origin: &Origin) -> Failure {
    Failure::Again(Error::unavailable(format!(
        "registry {origin}: the connection broke; try again later"
    )))
}

fn tls_failure(origin: &Origin, error: &std::io::Error) -> Failure {
    let inner = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner {
        Some(rustls::Error::InvalidCertificate(problem)) => {
            Failure::Final(Error::unavailable(format!(
                "registry {origin}: untrusted certificate ({}); set images.ca_file to its authority",
                shown(&format!("{problem:?}"))
            )))
        }
        Some(rustls::Error::InvalidMessage(_)) => Failure::NotTls,
        Some(problem) => Failure::Final(Error::unavailable(format!(
            "registry {origin}: TLS failed ({}); check the registry",
            shown(&problem.to_string())
        ))),
        // A server without TLS may also close at once.
        None if is_loopback(&origin.host) && error.kind() == std::io::ErrorKind::UnexpectedEof => {
            Failure::NotTls
        }
        None => broken(origin),
    }
}

/// Answer of a registry; its body is read in pieces and with a limit.
#[derive(Debug)]
pub(crate) struct Answer {
    origin: Origin,
    response: Response<Incoming>,
    idle_timeout: Duration,
    sender: Option<(Sender, Pool)>,
}

impl Answer {
    pub(crate) fn status(&self) -> StatusCode {
        self.response.status()
    }

    /// Returns a header if it is text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }

    /// Returns all headers of a name that are text.
    pub(super) fn headers(&self, name: &str) -> impl Iterator<Item = &str> {
        self.response
            .headers()
            .get_all(name)
            .iter()
            .filter_map(|value| value.to_str().ok())
    }

    /// Returns the length of the body if the registry states it.
    pub(crate) fn length(&self) -> Option<u64> {
        self.response.body().size_hint().exact()
    }

    /// Returns the next piece of the body; `None` at its end.
    pub(crate) async fn piece(&mut self) -> Result<Option<Bytes>> {
        let cut = || {
            Error::unavailable(format!(
                "registry {}: the answer was cut; try again later",
                self.origin
            ))
        };
        loop {
            let frame = timeout(self.idle_timeout, self.response.body_mut().frame()).await;
            match frame.map_err(|_| cut())? {
                Some(Ok(frame)) => {
                    if let Ok(piece) = frame.into_data() {
                        return Ok(Some(piece));
                    }
                }
                Some(Err(_)) => return Err(cut()),
                None => {
                    self.keep();
                    return Ok(None);
                }
            }
        }
    }

    /// Reads the body, of at most `max` bytes.
    pub(crate) async fn bytes(mut self, max: u64, what: &str) -> Result<Vec<u8>> {
        let too_large = || Error::too_large(what, "body_bytes", max);
        if self.length().is_some_and(|length| length > max) {
            return Err(too_large());
        }
        let mut bytes = Vec::new();
        while let Some(piece) = self.piece().await? {
            if (bytes.len() + piece.len()) as u64 > max {
                return Err(too_large());
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    }

    /// Keeps the connection for the next request.
    fn keep(&mut self) {
        let Some((sender, pool)) = self.sender.take() else {
            return;
        };
        let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
        let senders = pool.entry(self.origin.clone()).or_default();
        if senders.len() < KEPT && !sender.is_closed() {
            senders.push(sender);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_has_a_host_and_a_port() {
        for (authority, tls, host, port) in [
            ("a.b", true, "a.b", 443),
            ("a.b", false, "a.b", 80),
            ("a.b:5000", true, "a.b", 5000),
            ("[::1]", true, "::1", 443),
            ("[::1]:5000", false, "::1", 5000),
        ] {
            let origin = Origin::new(authority, tls);
            assert_eq!((origin.host.as_str(), origin.port), (host, port));
            assert_eq!(origin.authority(), authority);
        }
    }
}
