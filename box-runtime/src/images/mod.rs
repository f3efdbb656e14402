//! The images of a runtime: `image.*`, and the root file systems of boxes.
//!
//! # Reading order
//! 1. This file: the store and the client of registries, both made at the first use.
//! 2. `resolve.rs`: from `image`, `pull` and `user` of a spec to the root of a box.
//! 3. `actions.rs`: `image.*`, and what a caller may do. `transfer.rs`: imports and exports.
//! 4. `passwords.rs`: the passwords of registries. `progress.rs`: reports about a pull.
//! 5. `archiver.rs`: exports of files that an ordinary user may not read.
//! 6. `config.rs`: the settings. `items.rs`: images as items of the catalog.
//!
//! # Images in use
//! The runtime holds a lease of the store for each box with an image. A lease ends with its process,
//! but a box may outlive it. Before a removal, the runtime therefore also counts the records of boxes
//! on disk that it holds no lease for, and the snapshots.

mod actions;
mod archiver;
mod config;
mod items;
mod passwords;
mod progress;
mod resolve;
mod transfer;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_image::{Dialer, Digest, Lease, Registry, RegistryOptions, Store, Uses};
use box_protocol::catalog::{CatalogKind, ItemContent};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code};
use tokio::sync::Semaphore;
use uuid::Uuid;

use self::passwords::Passwords;
use self::transfer::Uploads;
use crate::backend::Backend;
use crate::box_actor::entry::PersistedBox;
use crate::config::RuntimeConfig;
use crate::egress::Proxy;

pub use self::archiver::archive_if_asked;
pub use self::config::{ImagesConfig, PullRule};
pub(crate) use self::resolve::{HeldImage, ResolvedImage};

/// Maximum number of pulls at the same time. Further ones wait.
const CONCURRENT_PULLS: usize = 8;

/// The images of a runtime. Clones share them.
#[derive(Clone)]
pub(crate) struct Images(Option<Arc<Inner>>);

struct Inner {
    config: ImagesConfig,
    backends: Vec<Arc<dyn Backend>>,
    store: Mutex<Option<Store>>,
    /// The client, and the passwords that it was made with.
    registry: tokio::sync::Mutex<Option<(Passwords, Registry)>>,
    pulls: Semaphore,
    /// Leases by the internal id of the box.
    leases: Mutex<HashMap<Uuid, Lease>>,
    uploads: Uploads,
}

impl Images {
    pub(crate) fn new(config: &RuntimeConfig) -> Self {
        let inner = |images: &ImagesConfig| {
            Arc::new(Inner {
                config: images.clone(),
                backends: config.backends.clone(),
                store: Mutex::default(),
                registry: tokio::sync::Mutex::default(),
                pulls: Semaphore::new(CONCURRENT_PULLS),
                leases: Mutex::default(),
                uploads: Uploads::default(),
            })
        };
        Self(config.images.as_ref().map(inner))
    }

    fn inner(&self) -> Result<&Arc<Inner>, BoxError> {
        self.0
            .as_ref()
            .ok_or_else(|| BoxError::unsupported("image: this runtime has no store of images"))
    }

    /// Removes what an earlier process left in the store, in the background.
    pub(crate) fn clean_up(&self) {
        let Some(inner) = self.0.clone() else { return };
        if !inner.config.directory.exists() {
            return;
        }
        tokio::task::spawn_blocking(move || {
            if let Err(error) = inner.store() {
                tracing::warn!(%error, "cannot open the store of images");
            }
        });
    }

    /// Keeps the lease of a box until [`release`](Self::release).
    pub(crate) fn hold(&self, box_id: Uuid, lease: Option<Lease>) {
        if let (Some(inner), Some(lease)) = (&self.0, lease) {
            lock(&inner.leases).insert(box_id, lease);
        }
    }

    /// Ends the lease of a box that is gone.
    pub(crate) fn release(&self, box_id: Uuid) {
        if let Some(inner) = &self.0 {
            lock(&inner.leases).remove(&box_id);
        }
    }
}

impl Inner {
    /// Opens the store at the first call. Blocks.
    fn store(&self) -> Result<Store, BoxError> {
        let mut store = lock(&self.store);
        if let Some(store) = &*store {
            return Ok(store.clone());
        }
        let opened = Store::open(&self.config.directory, self.config.limits).map_err(failed)?;
        Ok(store.insert(opened).clone())
    }

    /// Runs a function that blocks, with the store.
    async fn with_store<T: Send + 'static>(
        self: &Arc<Self>,
        run: impl FnOnce(&Inner, &Store) -> Result<T, BoxError> + Send + 'static,
    ) -> Result<T, BoxError> {
        let inner = Arc::clone(self);
        let work = move || run(&inner, &inner.store()?);
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|_| Err(BoxError::internal("image: the operation failed")))
    }

    /// Returns the client of registries, with the passwords that are stored now.
    async fn registry(self: &Arc<Self>) -> Result<Registry, BoxError> {
        let mut current = self.registry.lock().await;
        let known = current.as_ref().map(|(passwords, _)| passwords.clone());
        let inner = Arc::clone(self);
        let making = tokio::task::spawn_blocking(move || {
            let passwords = Passwords::read(&inner.config.passwords)?;
            if known.as_ref() == Some(&passwords) {
                return Ok(None);
            }
            let registry = inner.client(&passwords)?;
            Ok::<_, BoxError>(Some((passwords, registry)))
        });
        let made = making
            .await
            .unwrap_or_else(|_| Err(BoxError::internal("registry: the client failed")))?;
        if made.is_some() {
            *current = made;
        }
        let registry = current.as_ref().map(|(_, registry)| registry.clone());
        registry.ok_or_else(|| BoxError::internal("registry: no client"))
    }

    /// Creates a client with these passwords. Blocks.
    fn client(&self, passwords: &Passwords) -> Result<Registry, BoxError> {
        let config = &self.config;
        let mut options = RegistryOptions::default();
        options.ca_files.clone_from(&config.ca_files);
        options.plain_http.clone_from(&config.insecure_registries);
        options.mirrors = config.mirrors.clone().into_iter().collect();
        options.credentials = passwords.credentials();
        options.docker_config.clone_from(&config.docker_config);
        options.dialer = config.proxy.clone().map(dialer);
        Registry::new(options).map_err(failed)
    }

    /// Counts snapshots, and the boxes on disk that this process has no lease for. Blocks.
    ///
    /// Fails if an image may have further uses.
    fn uses(&self) -> Result<Uses, BoxError> {
        let (uses, problem) = self.known_uses();
        problem.map_or(Ok(uses), Err)
    }

    /// Counts as [`uses`](Self::uses) what can be read. Returns the first problem beside it. Blocks.
    fn known_uses(&self) -> (Uses, Option<BoxError>) {
        let readable = |record: &str| PersistedBox::read(record).is_some();
        let (mut records, mut problems) = (Vec::new(), Vec::new());
        for backend in &self.backends {
            match backend.records(readable) {
                Ok(found) => {
                    problems.extend(found.skipped.into_iter().map(unknown_uses));
                    let boxes = found.boxes.into_iter();
                    records.extend(boxes.map(|found| (found.id, found.record)));
                }
                Err(error) => problems.push(error),
            }
        }
        match crate::records::list(&self.config.stopped) {
            Ok(stopped) => records.extend(stopped),
            Err(error) => {
                let kind = error.kind();
                let message = format!("image: stopped boxes cannot be read: {kind}");
                problems.push(BoxError::unavailable(message));
            }
        }
        let mut uses = Uses::new();
        let mut count = |digest: Option<String>| {
            if let Some(Ok(digest)) = digest.map(|digest| digest.parse::<Digest>()) {
                *uses.entry(digest).or_default() += 1;
            }
        };
        for (id, record) in records {
            if lock(&self.leases).contains_key(&id) {
                continue;
            }
            match PersistedBox::read(&record) {
                Some(record) => count(record.image_digest()),
                None => problems.push(unknown_uses(id)),
            }
        }
        // Also without a server, whose catalog only one process can open.
        match box_catalog::stored(&self.config.catalog, CatalogKind::Snapshot) {
            Ok(items) => {
                for item in items {
                    if let ItemContent::Snapshot(snapshot) = item.content {
                        count(snapshot.image);
                    }
                }
            }
            Err(error) => problems.push(error.into()),
        }
        (uses, problems.into_iter().next())
    }
}

/// The error of a removal beside a box whose image is unknown.
fn unknown_uses(id: Uuid) -> BoxError {
    let message = format!(
        "image: the record of the box {} is damaged or of another version, so the images in use are unknown; delete that box with its version, or a damaged record in the state directory",
        id.simple()
    );
    BoxError::unavailable(message).with_detail(&Detail::about(Subject::Image))
}

fn dialer(proxy: Proxy) -> Dialer {
    let proxy = Arc::new(proxy);
    Dialer::new(move |host, port| {
        let proxy = Arc::clone(&proxy);
        async move { proxy.dial(&host, port).await }
    })
}

/// Only assignments run under these locks, and the opening of the store.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Converts an error of an image.
#[allow(clippy::needless_pass_by_value, reason = "the argument of `map_err`")]
fn failed(error: box_image::Error) -> BoxError {
    let mut detail = Detail::about(Subject::Image);
    if let box_image::Error::TooLarge { limit, max, .. } = &error {
        detail.limit = Some((*limit).to_owned());
        detail.max = Some(*max);
    }
    if !matches!(error.code(), Code::Conflict | Code::Internal) {
        detail.field = Some("image".to_owned());
    }
    BoxError::new(error.code(), error.to_string()).with_detail(&detail)
}
