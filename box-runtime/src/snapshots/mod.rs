//! `box.snapshot`, `box.fork`, `box.checkpoint` and `box.rollback`.
//!
//! # Steps of a snapshot
//! 1. The runtime stores an item in the state `building`, so that the name is taken. A server that
//!    starts again marks it as `failed`.
//! 2. [`capture`](BoxRuntime::capture) makes a layer of the live files of the box: the backend
//!    freezes the box, copies the files and thaws it. Of a stopped box, nothing is copied.
//! 3. The item names the new layer and those below it, and is `ready`. The kernel writes the copy to
//!    disk meanwhile; the layer is incomplete if the machine crashes before that (`layers`).
//!
//! The layers below the live files of a running box never change, so the layers of a snapshot are
//! always a state that existed.

mod checkpoint;
mod export;
mod fork;
mod fork_marks;
mod image;
mod rollback;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use box_catalog::NewItem;
use box_protocol::actions::{
    BoxCheckpoint, BoxCheckpointParams, BoxFork, BoxForkParams, BoxForkResult, BoxRollback,
    BoxRollbackParams, BoxSnapshot, BoxSnapshotParams,
};
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemContent, ItemState, SnapshotContent};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxId, BoxInfo, BoxState, Checkpoint, ItemId, Name};
use box_rpc::{Call, Caller, Handle, Peer};

use crate::adoption::unreachable;
use crate::backend::{Backend, Layer, LayerFiles, LayerKind, SnapshotRequest};
use crate::box_actor::entry::{BoxEntry, Location};
use crate::box_actor::{Shared, bounded};
use crate::catalog::completed;
use crate::handlers::plain;
use crate::layers::{self, LayerUse};
use crate::runtime::BoxRuntime;

pub(crate) use self::fork_marks::ForkMarks;

/// Maximum number of layers of a snapshot. The runtime merges more into one.
pub(crate) const MAX_LAYERS: usize = 16;

/// Most layers that one call of a backend merges.
const MERGED_LAYERS: usize = 32;

/// Time beyond the limit of a copy after which the runtime stops waiting for the backend.
const GRACE: Duration = Duration::from_secs(30);

/// Pause between two looks at a box that is starting or stopping.
const STARTING_PAUSE: Duration = Duration::from_millis(5);

plain! {
    BoxSnapshot: snapshot(BoxSnapshotParams) -> CatalogItem;
    BoxFork: fork(BoxForkParams) -> BoxForkResult;
    BoxCheckpoint: checkpoint(BoxCheckpointParams) -> Checkpoint;
    BoxRollback: rollback(BoxRollbackParams) -> BoxInfo;
}

/// The files of a box at one moment.
pub(crate) struct Captured {
    /// Layers, the topmost first.
    pub(crate) layers: Vec<LayerUse>,
    /// Image below the layers.
    pub(crate) image: Option<String>,
    /// How long no process of the box ran.
    pub(crate) paused: Duration,
}

impl Captured {
    fn of_stopped(entry: &BoxEntry, layers: Vec<LayerUse>) -> Self {
        Self {
            layers,
            image: entry.image_below(),
            paused: Duration::ZERO,
        }
    }

    /// The properties of a snapshot of these files.
    fn content(&self, source_box: Option<BoxId>) -> SnapshotContent {
        SnapshotContent {
            source_box,
            image: self.image.clone(),
            entries: self.size().1,
            keep_failed: false,
            paused_ms: self.paused_ms(),
            layers: layers::ids(&self.layers),
        }
    }

    /// Bytes and entries of all layers.
    fn size(&self) -> (u64, u64) {
        let sizes = self.layers.iter().map(LayerUse::files);
        sizes.fold((0, 0), |(bytes, entries), files| {
            (bytes + files.bytes, entries + files.entries)
        })
    }

    fn paused_ms(&self) -> u64 {
        u64::try_from(self.paused.as_millis()).unwrap_or(u64::MAX)
    }
}

/// A box whose files can be copied, at the time of the look.
pub(crate) enum Source {
    /// The box exists.
    Live {
        location: Location,
        peer: Option<Peer>,
        below: Vec<LayerUse>,
    },
    /// Layers are all that is left of the box.
    Layers(Vec<LayerUse>),
}

impl BoxRuntime {
    /// Makes a snapshot of the private files of a box.
    pub async fn snapshot(
        &self,
        caller: &Caller,
        params: BoxSnapshotParams,
    ) -> Result<CatalogItem, BoxError> {
        let entry = self.entry(caller, &params.box_id).await?;
        let (runtime, owner) = (self.clone(), caller.name().to_string());
        completed(async move {
            let source_box = Some(entry.spec.box_id.clone());
            let mut new = NewItem {
                owner,
                name: params.name,
                tags: params.tags,
                labels: params.labels,
                state: ItemState::Building,
                size_bytes: None,
                content: ItemContent::Snapshot(SnapshotContent {
                    source_box: source_box.clone(),
                    // From now on, the snapshot counts as a user of the image.
                    image: entry.image_below(),
                    keep_failed: params.keep_failed,
                    ..SnapshotContent::default()
                }),
            };
            if let Source::Layers(layers) = source(&entry).await?
                && layers.len() <= MAX_LAYERS
            {
                // Nothing is copied, so one write stores the snapshot.
                let captured = Captured::of_stopped(&entry, layers);
                runtime.check_size(&new.owner, captured.size().0).await?;
                new.state = ItemState::Ready;
                new.size_bytes = Some(captured.size().0);
                new.content = ItemContent::Snapshot(captured.content(source_box));
                return runtime.on_store(move |store| store.insert(new)).await;
            }
            // Nothing is copied if nothing fits any more.
            runtime.check_size(&new.owner, 1).await?;
            let tags = new.tags.clone();
            let item = runtime.on_store(move |store| store.insert(new)).await?;
            let making = async {
                let captured = runtime.capture(&entry).await?;
                runtime.check_size(&item.owner, captured.size().0).await?;
                let id = item.id.clone();
                runtime.complete_snapshot(id, tags, captured).await
            };
            let made = making.await;
            if let Err(error) = &made {
                if let Err(error) = runtime.end_snapshot(item, error).await {
                    tracing::warn!(%error, "cannot end an unfinished snapshot");
                }
                runtime.shared().collect_layers();
            }
            made
        })
        .await
    }

    /// Ends a snapshot that was not made: stores the reason, or removes the item.
    async fn end_snapshot(&self, item: CatalogItem, why: &BoxError) -> Result<(), BoxError> {
        let CatalogItem { id, content, .. } = item;
        let stays = matches!(content, ItemContent::Snapshot(content) if content.keep_failed);
        if stays && self.fail_snapshot(id.clone(), why).await.is_ok() {
            return Ok(());
        }
        // A removal needs no space on the disk, which may be full.
        self.on_store(move |store| store.remove(CatalogKind::Snapshot, &id))
            .await
    }

    /// Stores why a snapshot was not made.
    async fn fail_snapshot(&self, id: ItemId, error: &BoxError) -> Result<(), BoxError> {
        let reason = error.message().to_owned();
        let failing = self.on_store(move |store| {
            store.update(CatalogKind::Snapshot, &id, |item| {
                item.state = ItemState::Failed;
                item.reason = Some(reason);
                if let ItemContent::Snapshot(content) = &mut item.content {
                    // It uses no image any more.
                    content.image = None;
                }
                Ok(())
            })
        });
        failing.await.map(drop)
    }

    /// Stores the layers of a snapshot. From now on it has its tags.
    async fn complete_snapshot(
        &self,
        id: ItemId,
        tags: Vec<Name>,
        captured: Captured,
    ) -> Result<CatalogItem, BoxError> {
        let done = self.on_store(move |store| {
            store.update(CatalogKind::Snapshot, &id, |item| {
                item.state = ItemState::Ready;
                item.tags.extend(tags);
                item.size_bytes = Some(captured.size().0);
                if let ItemContent::Snapshot(content) = &mut item.content {
                    *content = captured.content(content.source_box.take());
                }
                Ok(())
            })
        });
        done.await
    }

    /// Makes layers of the files that a box has now.
    pub(crate) async fn capture(&self, entry: &Arc<BoxEntry>) -> Result<Captured, BoxError> {
        let (below, location, peer) = match source(entry).await? {
            Source::Layers(layers) if layers.len() <= MAX_LAYERS => {
                return Ok(Captured::of_stopped(entry, layers));
            }
            Source::Layers(layers) => {
                let choice = self.shared().selector.choose().await;
                let layers = self.shared().bounded(&**choice.backend()?, layers).await?;
                return Ok(Captured::of_stopped(entry, layers));
            }
            Source::Live {
                location,
                peer,
                below,
            } => (below, location, peer),
        };
        let image = entry.image_below();
        let limit = self.shared().config.snapshot_timeout;
        let (backend, mut paused) = (&*location.backend, Duration::ZERO);
        let silent = entry.expect_silence(peer);
        let copied = self
            .shared()
            .new_layer(LayerUse::finish_unsynced, async |into: &Path| {
                let request = SnapshotRequest::new(into, limit);
                let copying = backend.snapshot(location.id, request);
                let copied = bounded(backend, "snapshot", limit + GRACE, copying).await??;
                paused = copied.paused;
                Ok(LayerFiles {
                    kind: LayerKind::Directory,
                    bytes: copied.bytes,
                    entries: copied.entries,
                })
            });
        let copied = copied.await;
        drop(silent);
        let mut layers = vec![copied?];
        layers.extend(below);
        Ok(Captured {
            layers: self.shared().bounded(backend, layers).await?,
            image,
            paused,
        })
    }
}

impl Shared {
    /// Returns layers, or one that they are merged to if they are more than [`MAX_LAYERS`].
    async fn bounded(
        &self,
        backend: &dyn Backend,
        layers: Vec<LayerUse>,
    ) -> Result<Vec<LayerUse>, BoxError> {
        if layers.len() <= MAX_LAYERS {
            return Ok(layers);
        }
        Ok(vec![self.merge_layers(backend, &layers).await?])
    }

    /// Merges layers to one, which the caller uses.
    pub(crate) async fn merge_layers(
        &self,
        backend: &dyn Backend,
        layers: &[LayerUse],
    ) -> Result<LayerUse, BoxError> {
        let mut layers = layers.to_vec();
        // Earlier versions made more layers than a backend merges at once.
        while layers.len() > MERGED_LAYERS {
            let lowest = layers.split_off(layers.len() - MERGED_LAYERS);
            layers.push(self.merge_at_once(backend, &lowest).await?);
        }
        self.merge_at_once(backend, &layers).await
    }

    async fn merge_at_once(
        &self,
        backend: &dyn Backend,
        layers: &[LayerUse],
    ) -> Result<LayerUse, BoxError> {
        let limit = self.config.snapshot_timeout;
        let merged: Vec<Layer> = layers.iter().map(LayerUse::layer).collect();
        self.new_layer(LayerUse::finish, async |into: &Path| {
            let request = SnapshotRequest::new(into, limit);
            let merging = backend.merge_layers(&merged, request);
            bounded(backend, "merge the layers of", limit + GRACE, merging).await?
        })
        .await
    }

    /// Makes a layer, which the caller uses. After a failure, nothing of it stays.
    async fn new_layer(
        &self,
        finish: fn(&LayerUse, LayerFiles) -> Result<(), BoxError>,
        make: impl AsyncFnOnce(&Path) -> Result<LayerFiles, BoxError>,
    ) -> Result<LayerUse, BoxError> {
        let layers = self.layers.clone();
        let new = blocking(move || layers.begin()).await?;
        let finished = match make(&new.path()).await {
            Ok(files) => blocking(move || finish(&new, files).map(|()| new)).await,
            Err(error) => {
                drop(new);
                Err(error)
            }
        };
        finished.inspect_err(|_| self.collect_layers())
    }
}

/// Looks at a box, after its start or stop if one is in progress.
pub(crate) async fn source(entry: &Arc<BoxEntry>) -> Result<Source, BoxError> {
    loop {
        entry.access.wait_started().await;
        if let Some(source) = look(entry)? {
            return Ok(source);
        }
        tokio::time::sleep(STARTING_PAUSE).await;
    }
}

/// Returns the files of a box, or `None` while it is starting or stopping.
fn look(entry: &Arc<BoxEntry>) -> Result<Option<Source>, BoxError> {
    let status = entry.status();
    let id = &entry.spec.box_id;
    Ok(Some(match (status.state, &status.location) {
        (BoxState::Running | BoxState::Paused, Some(location)) => Source::Live {
            location: location.clone(),
            peer: entry.access.peer(),
            below: status.files.layers.clone(),
        },
        // Its processes may still run, and its files become a layer soon.
        (BoxState::Stopped, Some(_)) => return Ok(None),
        (BoxState::Stopped, None) => Source::Layers(status.files.layers.clone()),
        (BoxState::Starting, _) => match entry.access.end_reason() {
            Some(reason) => return Err(reason),
            None => return Ok(None),
        },
        (BoxState::Unreachable, _) => return Err(unreachable(id)),
        (BoxState::Failed, _) => return Err(not_possible(id, "has failed")),
        (BoxState::Running | BoxState::Paused, None) => {
            return Err(not_possible(id, "is ending"));
        }
    }))
}

fn not_possible(id: &BoxId, why: &str) -> BoxError {
    BoxError::conflict(format!("box {id} {why}")).with_detail(&Detail::about(Subject::Box))
}

pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BoxError> + Send + 'static,
) -> Result<T, BoxError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(BoxError::internal("snapshot task failed")))
}
