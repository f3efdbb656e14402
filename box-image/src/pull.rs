//! Pulls an image from a registry into a store.
//!
//! Layers arrive in parallel, each in a file that outlives a crash. One thread applies them in order while they arrive.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::build::{self, Documents};
use crate::digest::Digest;
use crate::error::{Error, Result, shown};
use crate::import::expected;
use crate::limits::CONFIG_BYTES;
use crate::platform::Platform;
use crate::progress::{Event, Progress};
use crate::reference::Reference;
use crate::registry::{Fetched, Registry};
use crate::spec::{ConfigFile, Descriptor, Document, Manifest};
use crate::store::{Image, Name, PullLock, Store};

mod download;

use download::{Cancel, Download};

/// Options of a pull.
#[derive(Debug, Clone)]
pub struct PullOptions {
    /// Layers that are downloaded at the same time.
    pub concurrent_layers: NonZeroUsize,
    /// Receiver of progress.
    pub progress: Progress,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self {
            concurrent_layers: NonZeroUsize::MIN.saturating_add(2),
            progress: Progress::none(),
        }
    }
}

/// How often a pull looks whether another one of the same image has ended.
const LOCK_INTERVAL: Duration = Duration::from_millis(50);

/// A manifest that was chosen for this machine.
struct Resolved {
    /// Digest that the registry gave for the reference.
    top: Digest,
    fetched: Fetched,
    manifest: Manifest,
}

/// Pulls an image, and sets the reference's name to it.
///
/// The registry is asked even if the store has the name, because a tag may have moved; layers of a known image are not
/// fetched again. Dropping the future ends the pull: layers stay for the next one.
pub async fn pull(
    store: &Store,
    registry: &Registry,
    reference: &Reference,
    options: &PullOptions,
) -> Result<Image> {
    let resolved = resolve(registry, reference, &options.progress).await?;
    let name = Name {
        reference: reference.clone(),
        digest: resolved.fetched.digest,
        resolved: resolved.top,
    };
    let layers = resolved.manifest.layers.iter();
    options.progress.report(Event::Resolved {
        digest: name.digest,
        layers: layers.map(|layer| (layer.digest, layer.size)).collect(),
    });
    let _lock = lock(store, name.digest).await?;
    if let Some(image) = known(store, &name).await? {
        return Ok(image);
    }
    check_sizes(store, &resolved.manifest)?;
    match fetch(store, registry, reference, &resolved, &name, options).await {
        // What an earlier attempt left was wrong, so this one starts without it.
        Err(Failed::Resumed(error)) => {
            tracing::debug!(%error, "pulls again without an earlier download");
            let again = fetch(store, registry, reference, &resolved, &name, options).await;
            again.map_err(Failed::into_error)
        }
        fetched => fetched.map_err(Failed::into_error),
    }
}

/// Why an attempt failed.
enum Failed {
    /// The content was wrong, and a part of it came from an earlier attempt.
    Resumed(Error),
    Other(Error),
}

impl Failed {
    fn into_error(self) -> Error {
        match self {
            Self::Resumed(error) | Self::Other(error) => error,
        }
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// Finds the manifest for this machine.
async fn resolve(
    registry: &Registry,
    reference: &Reference,
    progress: &Progress,
) -> Result<Resolved> {
    let mut fetched = registry.manifest(reference, progress).await?;
    let top = fetched.digest;
    let mut nested = 0;
    loop {
        match Document::parse(&fetched.bytes, fetched.media_type.as_deref())? {
            Document::Manifest(manifest) => {
                return Ok(Resolved {
                    top,
                    fetched,
                    manifest,
                });
            }
            Document::Index(index) => {
                nested += 1;
                if nested > 2 {
                    return Err(Error::invalid(format!(
                        "image: `{}` is an index of an index; use a plain one",
                        shown(&reference.to_string())
                    )));
                }
                let descriptor = index.choose(&Platform::host())?;
                fetched = registry
                    .manifest_by(reference, descriptor, progress)
                    .await?;
                if fetched.bytes.len() as u64 != descriptor.size {
                    return Err(Error::corrupt(
                        "manifest: it does not have its stated size; push the image again",
                    ));
                }
            }
        }
    }
}

/// Waits until no other pull of the same image runs.
async fn lock(store: &Store, digest: Digest) -> Result<PullLock> {
    loop {
        let store = store.clone();
        if let Some(lock) = blocking(move || store.try_pull_lock(&digest)).await? {
            return Ok(lock);
        }
        tokio::time::sleep(LOCK_INTERVAL).await;
    }
}

/// Names an image that the store has.
async fn known(store: &Store, name: &Name) -> Result<Option<Image>> {
    let (store, name) = (store.clone(), name.clone());
    blocking(move || store.name_known(&name)).await
}

fn check_sizes(store: &Store, manifest: &Manifest) -> Result<()> {
    let max = store.limits().compressed_bytes;
    let sizes = manifest.layers.iter().map(|layer| layer.size);
    let total = sizes.fold(0, u64::saturating_add);
    if total > max {
        return Err(Error::too_large("image", "compressed_bytes", max));
    }
    Ok(())
}

/// Downloads and unpacks an image.
async fn fetch(
    store: &Store,
    registry: &Registry,
    reference: &Reference,
    resolved: &Resolved,
    name: &Name,
    options: &PullOptions,
) -> Result<Image, Failed> {
    let progress = &options.progress;
    let manifest = &resolved.manifest;
    let config = registry
        .blob(reference, &manifest.config, CONFIG_BYTES, progress)
        .await?;
    let parsed = ConfigFile::parse(&config, manifest, &Platform::host())?;
    let expected = expected(manifest, &parsed);
    let (work, downloads) = {
        let (store, layers) = (store.clone(), manifest.layers.clone());
        blocking(move || {
            let work = store.work()?;
            let downloads = open_downloads(&store, &work, &layers)?;
            Ok((work, downloads))
        })
        .await?
    };
    let resumed = downloads.values().any(|download| download.resumed() > 0);
    let layers: Vec<_> = manifest
        .layers
        .iter()
        .map(|layer| Arc::clone(&downloads[&layer.digest]))
        .collect();
    let cancel = Cancel::new(downloads.into_values().collect());
    let mut tasks = start_downloads(registry, reference, &layers, options);
    let unpacked = {
        let (store, limits, name) = (store.clone(), store.limits(), name.clone());
        let (progress, manifest) = (progress.clone(), resolved.fetched.bytes.clone());
        let (layers, source) = (layers.clone(), reference.to_string());
        blocking(move || {
            let unpacked = build::unpack(&work, limits, &expected, &progress, |number| {
                Ok(layers[number].reader())
            })?;
            let documents = Documents {
                manifest,
                config,
                parsed,
            };
            let digest = build::save(
                work,
                &unpacked,
                documents,
                Some(source),
                Some(&name),
                &progress,
            )?;
            store.get(&digest.to_string())
        })
        .await
    };
    tasks.abort_all();
    while tasks.join_next().await.is_some() {}
    match unpacked {
        Ok(image) => {
            cancel.remove_files();
            Ok(image)
        }
        // Content is unpacked before its digest is known, so any fault in it may be one of the download.
        Err(
            error @ (Error::Corrupt(_)
            | Error::Invalid(_)
            | Error::Unsupported(_)
            | Error::TooLarge { .. }),
        ) => {
            cancel.remove_files();
            Err(if resumed {
                Failed::Resumed(error)
            } else {
                Failed::Other(error)
            })
        }
        Err(error) => Err(Failed::Other(error)),
    }
}

/// Opens the file of each layer; a layer that occurs twice is fetched once.
fn open_downloads(
    store: &Store,
    work: &crate::store::Work,
    layers: &[Descriptor],
) -> Result<HashMap<Digest, Arc<Download>>> {
    let mut downloads = HashMap::new();
    for layer in layers {
        if let Entry::Vacant(place) = downloads.entry(layer.digest) {
            let partial = store.partial(work, &layer.digest, layer.size)?;
            place.insert(Arc::new(Download::new(layer, partial)));
        }
    }
    Ok(downloads)
}

/// Starts to download the layers in order, a few at a time.
fn start_downloads(
    registry: &Registry,
    reference: &Reference,
    layers: &[Arc<Download>],
    options: &PullOptions,
) -> JoinSet<()> {
    let permits = Arc::new(Semaphore::new(options.concurrent_layers.get()));
    let sources = registry.sources(reference);
    let mut tasks = JoinSet::new();
    for (number, layer) in layers.iter().enumerate() {
        if layers[..number]
            .iter()
            .any(|earlier| Arc::ptr_eq(earlier, layer))
        {
            continue;
        }
        let (registry, layer, sources) = (registry.clone(), Arc::clone(layer), sources.clone());
        let (permits, progress) = (Arc::clone(&permits), options.progress.clone());
        let all = layers.to_vec();
        tasks.spawn(async move {
            let Ok(_permit) = permits.acquire().await else {
                return;
            };
            if let Err(error) = layer.run(&registry, &sources, &progress).await {
                // The pull fails now, not when it needs this layer.
                for layer in all {
                    layer.fail(error.clone());
                }
            }
        });
    }
    tasks
}

/// Runs a function that blocks.
async fn blocking<T: Send + 'static>(
    run: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(run)
        .await
        .unwrap_or_else(|_| Err(Error::lost()))
}
