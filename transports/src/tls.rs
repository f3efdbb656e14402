//! TLS for `tls://` and `wss://`: certificates in, configurations out.
//!
//! One provider (ring), TLS 1.2 and 1.3, no resumption across processes. A server that is given a
//! client CA requires a certificate from every client.
//!
//! ```
//! use box_transports::{
//!     ListenOptions,
//!     tls::{Identity, Pem, ServerTls},
//! };
//!
//! let options = ListenOptions {
//!     tls: Some(ServerTls {
//!         identity: Identity {
//!             certificates: Pem::Path("server.pem".into()),
//!             key: Pem::Path("server.key".into()),
//!         },
//!         client_ca: Some(Pem::Path("clients.pem".into())),
//!     }),
//!     ..ListenOptions::default()
//! };
//! # let _ = options;
//! ```

use std::{fmt, io, path::PathBuf, sync::Arc};

use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsConnector, client};

/// Certificates or a key in PEM form.
#[derive(Clone, PartialEq, Eq)]
pub enum Pem {
    /// A file that holds it, read when it is needed.
    Path(PathBuf),
    /// The text itself.
    Bytes(Vec<u8>),
}

impl Pem {
    fn read(&self) -> Result<Vec<u8>, TlsError> {
        match self {
            Self::Path(path) => std::fs::read(path).map_err(TlsError::Unreadable),
            Self::Bytes(bytes) => Ok(bytes.clone()),
        }
    }

    /// The certificates in it; `what` they are goes into the error.
    fn certificates(&self, what: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let pem = self.read()?;
        let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        match certificates {
            Ok(certificates) if !certificates.is_empty() => Ok(certificates),
            _ => Err(TlsError::NotPem(what)),
        }
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        PrivateKeyDer::from_pem_slice(&self.read()?).map_err(|_| TlsError::NotPem("private key"))
    }
}

/// Shows where it is, never what it is.
impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => f.debug_tuple("Path").field(path).finish(),
            Self::Bytes(bytes) => write!(f, "Bytes({} bytes)", bytes.len()),
        }
    }
}

/// Who this end is: a certificate chain, leaf first, and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The chain.
    pub certificates: Pem,
    /// The key of the leaf.
    pub key: Pem,
}

/// What a listener needs for TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTls {
    /// Who the server is.
    pub identity: Identity,
    /// If set, every client must show a certificate that one of these authorities signed.
    pub client_ca: Option<Pem>,
}

/// What a client needs for TLS. The default trusts the system's authorities.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// The authorities to trust, instead of the system's.
    pub ca: Option<Pem>,
    /// Who the client is, for servers that ask.
    pub identity: Option<Identity>,
    /// The name the server's certificate must have, instead of the host connected to.
    pub server_name: Option<String>,
}

/// Why TLS cannot be set up. Never holds a key or a path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file could not be read.
    #[error("a certificate or key file cannot be read: {}", .0.kind())]
    Unreadable(#[source] io::Error),
    /// A file or text does not hold what it should.
    #[error("no {0} in PEM form where one is expected")]
    NotPem(&'static str),
    /// The system has no authorities to trust, and none were given.
    #[error("no certificate authorities: the system has none, and none were given")]
    NoAuthorities,
    /// The name of the server is neither a host name nor an address.
    #[error("the server's name is neither a host name nor an address")]
    Name,
    /// Certificate and key do not fit, or an authority is unusable.
    #[error("unusable certificate or key: {0}")]
    Unusable(String),
}

impl From<TlsError> for io::Error {
    fn from(error: TlsError) -> Self {
        Self::new(io::ErrorKind::InvalidInput, error)
    }
}

fn unusable(error: impl fmt::Display) -> TlsError {
    TlsError::Unusable(error.to_string())
}

/// Named at every use, so that no other crate can change it for the whole process.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A store that trusts these, all of which must be usable.
fn trusting(authorities: Vec<CertificateDer<'static>>) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority).map_err(unusable)?;
    }
    Ok(roots)
}

impl ServerTls {
    /// The configuration for accepting.
    pub(crate) fn config(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(unusable)?;
        let builder = match &self.client_ca {
            Some(ca) => {
                let roots = trusting(ca.certificates("certificate authority")?)?;
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
                        .build()
                        .map_err(unusable)?;
                builder.with_client_cert_verifier(verifier)
            }
            None => builder.with_no_client_auth(),
        };
        let certificates = self.identity.certificates.certificates("certificate")?;
        let config = builder
            .with_single_cert(certificates, self.identity.key.key()?)
            .map_err(unusable)?;
        Ok(Arc::new(config))
    }
}

impl ClientTls {
    /// The configuration for connecting.
    fn config(&self) -> Result<Arc<ClientConfig>, TlsError> {
        let roots = match &self.ca {
            Some(ca) => trusting(ca.certificates("certificate authority")?)?,
            None => system_roots()?,
        };
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_root_certificates(roots);
        let config = match &self.identity {
            Some(identity) => builder
                .with_client_auth_cert(
                    identity.certificates.certificates("certificate")?,
                    identity.key.key()?,
                )
                .map_err(unusable)?,
            None => builder.with_no_client_auth(),
        };
        Ok(Arc::new(config))
    }

    /// Speaks TLS on `stream`, to a server that must prove to be `host`.
    pub(crate) async fn connect<S>(&self, stream: S, host: &str) -> io::Result<client::TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let name = self.server_name.as_deref().unwrap_or(host).to_owned();
        let name = ServerName::try_from(name).map_err(|_| TlsError::Name)?;
        TlsConnector::from(self.config()?)
            .connect(name, stream)
            .await
    }
}

/// A store that trusts what the system trusts.
fn system_roots() -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    // A single broken file in the system's store is no reason to trust nobody.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return Err(TlsError::NoAuthorities);
    }
    Ok(roots)
}
