//! TLS for `tls://` and `wss://`: certificates and configurations.
//!
//! It uses one provider (ring), TLS 1.2 and 1.3, and no resumption across processes. A server with a client CA
//! requires a certificate from every client.
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
    /// Path of a file, which is read on use.
    Path(PathBuf),
    /// The PEM text.
    Bytes(Vec<u8>),
}

impl Pem {
    fn read(&self) -> Result<Vec<u8>, TlsError> {
        match self {
            Self::Path(path) => std::fs::read(path).map_err(TlsError::Unreadable),
            Self::Bytes(bytes) => Ok(bytes.clone()),
        }
    }

    /// Parses the certificates; an error names them as `what`.
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

/// Shows the path, never the content.
impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => f.debug_tuple("Path").field(path).finish(),
            Self::Bytes(bytes) => write!(f, "Bytes({} bytes)", bytes.len()),
        }
    }
}

/// Identity of this end: a certificate chain, leaf first, and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The chain.
    pub certificates: Pem,
    /// The key of the leaf.
    pub key: Pem,
}

/// TLS settings of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTls {
    /// Identity of the server.
    pub identity: Identity,
    /// Client authorities. If set, every client needs a certificate signed by one.
    pub client_ca: Option<Pem>,
}

/// TLS settings of a client. The default trusts the system's authorities.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// Trusted authorities, instead of the system's.
    pub ca: Option<Pem>,
    /// Identity of the client, for servers that request one.
    pub identity: Option<Identity>,
    /// Expected name in the server's certificate, instead of the host.
    pub server_name: Option<String>,
}

/// Error of the TLS setup. Never contains a key or a path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file could not be read.
    #[error("certificate or key file: cannot be read: {}", .0.kind())]
    Unreadable(#[source] io::Error),
    /// A file or text does not contain the expected PEM items.
    #[error("{0}: no PEM item found")]
    NotPem(&'static str),
    /// The system has no trusted authorities, and none were given.
    #[error("certificate authorities: the system has none; configure one")]
    NoAuthorities,
    /// The name of the server is neither a host name nor an address.
    #[error("server_name: neither a host name nor an address")]
    Name,
    /// Certificate and key do not match, or an authority is unusable.
    #[error("certificate or key: unusable: {0}")]
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

/// Returns the crypto provider.
/// Every use names it, so that no other crate can change it for the whole process.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Creates a store that trusts these authorities; all must be usable.
fn root_store(authorities: Vec<CertificateDer<'static>>) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority).map_err(unusable)?;
    }
    Ok(roots)
}

impl ServerTls {
    /// Returns the configuration for accepting.
    pub(crate) fn config(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(unusable)?;
        let builder = match &self.client_ca {
            Some(ca) => {
                let roots = root_store(ca.certificates("certificate authority")?)?;
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
    /// Returns the configuration for connecting.
    fn config(&self) -> Result<Arc<ClientConfig>, TlsError> {
        let roots = match &self.ca {
            Some(ca) => root_store(ca.certificates("certificate authority")?)?,
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

    /// Starts TLS on `stream` with a server that must prove to be `host`.
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

/// Creates a store that trusts the system's authorities.
fn system_roots() -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    // A single broken file in the system's store must not disable the other authorities.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return Err(TlsError::NoAuthorities);
    }
    Ok(roots)
}
