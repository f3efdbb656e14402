//! The client of registries.
//!
//! # Reading order
//! `connection.rs` connects, through `dial.rs` if a proxy is set, and keeps connections, `request.rs` sends with redirects and retries, `auth.rs` answers a
//! registry's challenge, `credentials.rs` finds passwords. This module fetches documents and layers with them.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::header::CONTENT_TYPE;

use crate::digest::Digest;
use crate::error::{Error, Result, shown};
use crate::limits::MANIFEST_BYTES;
use crate::progress::Progress;
use crate::reference::{DOCKER_HUB, Reference};
use crate::spec::{DOCKER_INDEX, DOCKER_MANIFEST, Descriptor, OCI_INDEX, OCI_MANIFEST};

mod auth;
mod connection;
mod credentials;
mod dial;
mod request;

pub(crate) use connection::Answer;
use connection::Connector;
pub use credentials::{Credentials, docker_config_path};
pub use dial::Dialer;

/// Types of documents that a registry may answer with.
const DOCUMENTS: [&str; 4] = [OCI_INDEX, OCI_MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST];

/// Settings of a registry client.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RegistryOptions {
    /// Files with further certificate authorities in PEM.
    pub ca_files: Vec<PathBuf>,
    /// Registries (`HOST[:PORT]`) that are reached without TLS. Those on this machine need no entry.
    pub plain_http: Vec<String>,
    /// Mirrors (`HOST[:PORT]`) of each registry, tried in order before the registry.
    pub mirrors: HashMap<String, Vec<String>>,
    /// Credentials by registry, preferred over those of Docker's configuration.
    pub credentials: HashMap<String, Credentials>,
    /// Docker's `config.json`, with passwords and credential helpers.
    pub docker_config: Option<PathBuf>,
    /// Connects to registries on other machines; without it, the client connects directly.
    pub dialer: Option<Dialer>,
    /// Time for a connection and for the head of an answer.
    pub timeout: Duration,
    /// Time without a byte after which an answer counts as cut.
    pub idle_timeout: Duration,
    /// Longest wait that a registry may ask for.
    pub retry_wait_max: Duration,
    /// Wait before the first repetition; it doubles each time.
    pub retry_wait: Duration,
}

impl Default for RegistryOptions {
    fn default() -> Self {
        Self {
            ca_files: Vec::new(),
            plain_http: Vec::new(),
            mirrors: HashMap::new(),
            credentials: HashMap::new(),
            docker_config: docker_config_path(),
            dialer: None,
            timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_mins(1),
            retry_wait_max: Duration::from_mins(1),
            retry_wait: Duration::from_millis(500),
        }
    }
}

/// Client of registries. Clones share connections and tokens.
#[derive(Clone)]
pub struct Registry {
    inner: Arc<Inner>,
}

struct Inner {
    options: RegistryOptions,
    connector: Connector,
    tokens: auth::Tokens,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry")
            .field("options", &self.inner.options)
            .finish_non_exhaustive()
    }
}

/// Place that offers a repository: a registry or one of its mirrors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    /// `HOST[:PORT]`, as in references and in Docker's configuration.
    pub(crate) authority: String,
    pub(crate) repository: String,
}

/// A document and its digest.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) bytes: Vec<u8>,
    pub(crate) digest: Digest,
    pub(crate) media_type: Option<String>,
}

impl Registry {
    /// Creates a client. It connects when it is used.
    pub fn new(options: RegistryOptions) -> Result<Self> {
        let connector = Connector::new(&options)?;
        let tokens = auth::Tokens::default();
        let inner = Arc::new(Inner {
            options,
            connector,
            tokens,
        });
        Ok(Self { inner })
    }

    /// Checks that a registry accepts the credentials that this client has for it.
    pub async fn check_login(&self, registry: &str) -> Result<()> {
        let source = Source {
            authority: Reference::registry_name(registry)?,
            repository: String::new(),
        };
        let answer = self.get(&source, "/v2/", &[], &Progress::none()).await?;
        answer.bytes(MANIFEST_BYTES, "registry").await.map(drop)
    }

    /// Returns the places of a repository, mirrors first.
    pub(crate) fn sources(&self, reference: &Reference) -> Vec<Source> {
        let mirrors = self.inner.options.mirrors.get(reference.registry());
        let mirrors = mirrors.into_iter().flatten().cloned();
        let authorities = mirrors.chain([reference.registry().to_owned()]);
        let repository = reference.repository();
        authorities
            .map(|authority| Source {
                authority,
                repository: repository.to_owned(),
            })
            .collect()
    }

    /// Fetches the document that a reference denotes.
    pub(crate) async fn manifest(
        &self,
        reference: &Reference,
        progress: &Progress,
    ) -> Result<Fetched> {
        let wanted = reference.digest();
        let tag = wanted.map(|digest| digest.to_string());
        let tag = tag
            .or_else(|| reference.tag().map(str::to_owned))
            .unwrap_or_default();
        self.document(reference, &tag, wanted, progress).await
    }

    /// Fetches a document by its digest.
    pub(crate) async fn manifest_by(
        &self,
        reference: &Reference,
        descriptor: &Descriptor,
        progress: &Progress,
    ) -> Result<Fetched> {
        let digest = descriptor.digest;
        self.document(reference, &digest.to_string(), Some(digest), progress)
            .await
    }

    /// Tries each place of a repository; the error is that of the registry itself.
    async fn document(
        &self,
        reference: &Reference,
        tag: &str,
        wanted: Option<Digest>,
        progress: &Progress,
    ) -> Result<Fetched> {
        let mut last = Err(Error::lost());
        for source in self.sources(reference) {
            last = self.document_from(&source, tag, wanted, progress).await;
            match &last {
                Ok(_) => break,
                Err(error) => log_failure(&source, error),
            }
        }
        last.map_err(|error| not_there(error, reference))
    }

    async fn document_from(
        &self,
        source: &Source,
        tag: &str,
        wanted: Option<Digest>,
        progress: &Progress,
    ) -> Result<Fetched> {
        let path = format!("/v2/{}/manifests/{tag}", source.repository);
        let accept = DOCUMENTS.join(", ");
        let answer = self
            .get(source, &path, &[("accept", &accept)], progress)
            .await?;
        let media_type = answer.header(CONTENT_TYPE.as_str()).map(str::to_owned);
        let stated = answer.header("docker-content-digest").map(str::to_owned);
        let bytes = answer.bytes(MANIFEST_BYTES, "manifest").await?;
        let digest = Digest::of(&bytes);
        if let Some(wanted) = wanted {
            wanted.check(&bytes, "manifest")?;
        } else if let Some(Ok(stated)) = stated.map(|stated| stated.parse::<Digest>()) {
            stated.check(&bytes, "manifest")?;
        }
        Ok(Fetched {
            bytes,
            digest,
            media_type,
        })
    }

    /// Fetches a small blob from any place of a repository.
    pub(crate) async fn blob(
        &self,
        reference: &Reference,
        descriptor: &Descriptor,
        max: u64,
        progress: &Progress,
    ) -> Result<Vec<u8>> {
        let mut last = Err(Error::lost());
        for source in self.sources(reference) {
            last = self.blob_from(&source, descriptor, max, progress).await;
            match &last {
                Ok(_) => break,
                Err(error) => log_failure(&source, error),
            }
        }
        last
    }

    async fn blob_from(
        &self,
        source: &Source,
        descriptor: &Descriptor,
        max: u64,
        progress: &Progress,
    ) -> Result<Vec<u8>> {
        let path = blob_path(source, &descriptor.digest);
        let answer = self.get(source, &path, &[], progress).await?;
        let bytes = answer.bytes(max, "configuration").await?;
        descriptor.digest.check(&bytes, "configuration")?;
        Ok(bytes)
    }

    /// Begins to fetch a layer at an offset.
    pub(crate) async fn layer(
        &self,
        source: &Source,
        digest: &Digest,
        offset: u64,
        progress: &Progress,
    ) -> Result<Answer> {
        let range = format!("bytes={offset}-");
        let headers: &[_] = if offset > 0 {
            &[("range", range.as_str())]
        } else {
            &[]
        };
        self.get(source, &blob_path(source, digest), headers, progress)
            .await
    }
}

fn log_failure(source: &Source, error: &Error) {
    tracing::debug!(authority = source.authority, %error, "a place of an image failed");
}

fn blob_path(source: &Source, digest: &Digest) -> String {
    format!("/v2/{}/blobs/{digest}", source.repository)
}

/// Names the image in errors about a missing or private one.
fn not_there(error: Error, reference: &Reference) -> Error {
    let name = shown(&reference.to_string());
    match error {
        Error::NotFound(_) => Error::not_found(format!(
            "image: the registry has no `{name}`; check its name and tag"
        )),
        Error::Denied(problem) => {
            Error::Denied(format!("image: `{name}` is not accessible: {problem}"))
        }
        error => error,
    }
}

/// Returns the host that serves a registry.
fn host_name(authority: &str) -> &str {
    match authority {
        DOCKER_HUB => "registry-1.docker.io",
        other => other,
    }
}
