//! Layers: the private files of boxes at one moment, on disk.
//!
//! A layer never changes. Boxes and snapshots share it, and the runtime removes it when neither
//! uses it.
//!
//! # Layout
//! ```text
//! ID/layer.json   the record; a layer without one is unfinished
//! ID/files        the files: a directory, or a file with a file system
//! ```
//!
//! # After a crash
//! A layer gets its record when its files are complete, and a box or a snapshot names it after
//! that. If the machine crashes before the files are on disk, files may be missing: the record then
//! has the boot in which they were copied, and [`Layers::load`] removes the layer. A box that has no
//! other copy of its files waits until all are on disk ([`Layers::synced`]).
//! After the runtime has adopted the boxes of an earlier process, [`Layers::collect`] removes
//! layers that nothing names, whole or not.

mod record;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, LayerId};
use tokio::sync::watch;

use self::record::LayerRecord;
use crate::backend::{Layer, LayerFiles};
use crate::state_directory::StateDirectory;

/// Name of the files in the directory of a layer.
const FILES: &str = "files";

/// Mode of directories. The fork server can have another user, and opens the files by their path.
const DIRECTORY_MODE: u32 = 0o711;

/// Attempts to remove an unfinished layer, which a copy may still write to.
const REMOVALS: usize = 50;
const REMOVAL_PAUSE: Duration = Duration::from_millis(100);

/// The layers of a runtime. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Layers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    directory: PathBuf,
    /// Removed with the last layer, if it is temporary.
    _state: Arc<StateDirectory>,
    known: Mutex<HashMap<LayerId, Known>>,
    /// Whether layers stay that nothing is known to use, because not all boxes are known.
    keeps_unused: AtomicBool,
    /// The number of layers whose files the kernel is writing to disk.
    syncing: watch::Sender<usize>,
}

/// A layer, and the number of its users.
#[derive(Debug, Default)]
struct Known {
    uses: u64,
    record: LayerRecord,
}

impl Known {
    /// A layer that one box or call uses.
    fn used(record: LayerRecord) -> Self {
        Self { uses: 1, record }
    }
}

impl Layers {
    /// The layers in the directory of a runtime.
    pub(crate) fn new(state: Arc<StateDirectory>) -> Self {
        Self(Arc::new(Inner {
            directory: state.layers(),
            _state: state,
            known: Mutex::default(),
            keeps_unused: AtomicBool::new(false),
            syncing: watch::Sender::new(0),
        }))
    }

    /// Finds the layers of an earlier process, and keeps unused ones from now on. Blocks.
    pub(crate) fn load(&self) -> Result<(), BoxError> {
        let inner = &self.0;
        // A box that ends must not remove the layers of boxes that are not adopted yet.
        self.keep_unused(true);
        let entries = match std::fs::read_dir(&inner.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            let Some(id) = name.to_str().and_then(|name| layer_id(name).ok()) else {
                continue;
            };
            let record = match LayerRecord::read(&inner.path(&id)) {
                Ok(record) => record,
                // The layer is unfinished. A box that is being stopped may complete it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => LayerRecord::default(),
                Err(error) => {
                    tracing::warn!(layer = %id, kind = %error.kind(), "cannot read a layer");
                    continue;
                }
            };
            if record.is_incomplete() {
                tracing::error!(layer = %id, "the machine was restarted before a layer was on disk; removing it");
                inner.remove(&id);
                continue;
            }
            let is_unsynced = record.unsynced_since.is_some();
            inner.known().insert(id.clone(), Known { uses: 0, record });
            if is_unsynced {
                inner.sync_later(id);
            }
        }
        Ok(())
    }

    /// Waits until the files of all layers are on disk.
    pub(crate) async fn synced(&self) {
        let mut syncing = self.0.syncing.subscribe();
        let _ = syncing.wait_for(|layers| *layers == 0).await;
    }

    /// Creates the directory of a new layer, which the caller uses. Blocks.
    pub(crate) fn begin(&self) -> Result<LayerUse, BoxError> {
        let inner = &self.0;
        let id = LayerId::fresh();
        let path = inner.path(&id);
        let mut builder = DirBuilder::new();
        builder.mode(DIRECTORY_MODE);
        let made = match builder.create(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => builder
                .recursive(true)
                .create(&inner.directory)
                .and_then(|()| builder.recursive(false).create(&path)),
            made => made,
        };
        made.map_err(failed)?;
        let known = Known::used(LayerRecord::default());
        inner.known().insert(id.clone(), known);
        Ok(LayerUse {
            inner: Arc::clone(inner),
            id,
        })
    }

    /// Begins to use existing layers.
    pub(crate) fn hold(&self, ids: &[LayerId]) -> Result<Vec<LayerUse>, BoxError> {
        let inner = &self.0;
        let mut known = inner.known();
        if let Some(missing) = ids.iter().find(|id| !known.contains_key(*id)) {
            tracing::error!(layer = %missing, "a layer is missing");
            let message = "snapshot: a part of its files is missing; delete it";
            let detail = Detail::lasting().of(Subject::Snapshot);
            return Err(BoxError::unavailable(message).with_detail(&detail));
        }
        Ok(inner.count(&mut known, ids))
    }

    /// Finds the layer with this path of its files.
    pub(crate) fn at(&self, path: &Path) -> Option<LayerUse> {
        let name = path.parent()?.file_name()?.to_str()?;
        let id = layer_id(name).ok()?;
        self.adopt(&[id]).pop()
    }

    /// Counts the layers of a box that an earlier process started.
    pub(crate) fn adopt(&self, ids: &[LayerId]) -> Vec<LayerUse> {
        let inner = &self.0;
        let mut known = inner.known();
        for id in ids {
            if !known.contains_key(id) && layer_id(id.as_str()).is_ok() {
                tracing::error!(layer = %id, "a layer of a box is missing");
                known.insert(id.clone(), Known::default());
            }
        }
        inner.count(&mut known, ids)
    }

    /// Sets whether [`Layers::collect`] keeps all layers, also those that nothing is known to use.
    pub(crate) fn keep_unused(&self, keeps: bool) {
        self.0.keeps_unused.store(keeps, Ordering::Relaxed);
    }

    /// Removes the layers that nothing uses. `named` returns those of items. Blocks.
    pub(crate) fn collect(&self, named: impl FnOnce() -> BTreeSet<LayerId>) {
        let inner = &self.0;
        if inner.keeps_unused.load(Ordering::Relaxed) {
            return;
        }
        let unused = |known: &HashMap<LayerId, Known>| -> Vec<LayerId> {
            let unused = known.iter().filter(|(_, layer)| layer.uses == 0);
            unused.map(|(id, _)| id.clone()).collect()
        };
        let candidates = unused(&inner.known());
        if candidates.is_empty() {
            return;
        }
        // Later than the candidates: a call holds a layer until its item is stored.
        let named = named();
        for id in candidates.iter().filter(|id| !named.contains(*id)) {
            let mut known = inner.known();
            if known.get(id).is_some_and(|layer| layer.uses == 0) {
                known.remove(id);
                drop(known);
                inner.remove(id);
            }
        }
    }
}

impl Inner {
    /// Only assignments run under this lock.
    fn known(&self) -> MutexGuard<'_, HashMap<LayerId, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, id: &LayerId) -> PathBuf {
        self.directory.join(id.as_str())
    }

    /// Counts one more use of each known layer.
    fn count(
        self: &Arc<Self>,
        known: &mut HashMap<LayerId, Known>,
        ids: &[LayerId],
    ) -> Vec<LayerUse> {
        let mut uses = Vec::with_capacity(ids.len());
        for id in ids {
            if let Some(layer) = known.get_mut(id) {
                layer.uses += 1;
                uses.push(LayerUse {
                    inner: Arc::clone(self),
                    id: id.clone(),
                });
            }
        }
        uses
    }

    /// Writes the files of a layer to disk, in the background.
    fn sync_later(self: &Arc<Self>, id: LayerId) {
        self.syncing.send_modify(|layers| *layers += 1);
        let inner = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            if let Err(error) = inner.sync(&id) {
                tracing::error!(layer = %id, kind = %error.kind(), "cannot write a layer to disk");
            }
            inner.syncing.send_modify(|layers| *layers -= 1);
        });
    }

    fn sync(&self, id: &LayerId) -> io::Result<()> {
        let path = self.path(id);
        let written = File::open(path.join(FILES)).and_then(|files| Ok(rustix::fs::syncfs(files)?));
        let known = self.known().get(id).map(|layer| layer.record);
        // A layer that nothing uses may be gone.
        let Some(record) = known else { return Ok(()) };
        written?;
        let record = LayerRecord::new(record.files);
        record.write(&path)?;
        record::sync(&self.directory)?;
        if let Some(layer) = self.known().get_mut(id) {
            layer.record = record;
        }
        Ok(())
    }

    /// Removes a layer from the disk. The next process removes what is left. Blocks.
    fn remove(&self, id: &LayerId) {
        let path = self.path(id);
        // Without its record, the layer is unfinished.
        LayerRecord::remove(&path);
        for attempt in 1..=REMOVALS {
            match remove_tree(&path) {
                Ok(()) => return,
                // The backend may remove the files at the same time, so that one of them is missing.
                Err(error) if error.kind() == io::ErrorKind::NotFound && is_gone(&path) => return,
                Err(error) if attempt == REMOVALS => {
                    tracing::warn!(layer = %id, kind = %error.kind(), "cannot remove a layer; the next start removes it");
                }
                Err(_) => std::thread::sleep(REMOVAL_PAUSE),
            }
        }
    }
}

/// The use of a layer by a box or a call. Dropping it ends the use.
///
/// The files stay until [`Layers::collect`].
pub(crate) struct LayerUse {
    inner: Arc<Inner>,
    id: LayerId,
}

impl LayerUse {
    pub(crate) fn id(&self) -> &LayerId {
        &self.id
    }

    /// The path of the files, which a new layer does not have yet.
    pub(crate) fn path(&self) -> PathBuf {
        self.inner.path(&self.id).join(FILES)
    }

    /// Writes the record of a layer whose files are on disk. Blocks.
    pub(crate) fn finish(&self, files: LayerFiles) -> Result<(), BoxError> {
        self.write(LayerRecord::new(files))
            .and_then(|()| record::sync(&self.inner.directory))
            .map_err(failed)
    }

    /// Writes the record of a layer with complete files, which the kernel then writes to disk. Blocks.
    pub(crate) fn finish_unsynced(&self, files: LayerFiles) -> Result<(), BoxError> {
        LayerRecord::unsynced(files)
            .and_then(|record| self.write(record))
            .map_err(failed)?;
        self.inner.sync_later(self.id.clone());
        Ok(())
    }

    fn write(&self, record: LayerRecord) -> io::Result<()> {
        record.write(&self.inner.path(&self.id))?;
        if let Some(layer) = self.inner.known().get_mut(&self.id) {
            layer.record = record;
        }
        Ok(())
    }

    /// Returns whether no other box and no call uses the layer.
    pub(crate) fn is_sole(&self) -> bool {
        let known = self.inner.known();
        known.get(&self.id).is_some_and(|layer| layer.uses == 1)
    }

    /// The layer as the backend uses it.
    pub(crate) fn layer(&self) -> Layer {
        Layer::new(self.path(), self.files().kind)
    }

    /// The form and size of the files.
    pub(crate) fn files(&self) -> LayerFiles {
        let known = self.inner.known();
        let record = known.get(&self.id).map(|layer| layer.record);
        record.unwrap_or_default().files
    }
}

impl Clone for LayerUse {
    fn clone(&self) -> Self {
        if let Some(layer) = self.inner.known().get_mut(&self.id) {
            layer.uses += 1;
        }
        Self {
            inner: Arc::clone(&self.inner),
            id: self.id.clone(),
        }
    }
}

impl Drop for LayerUse {
    fn drop(&mut self) {
        if let Some(layer) = self.inner.known().get_mut(&self.id) {
            layer.uses = layer.uses.saturating_sub(1);
        }
    }
}

impl fmt::Debug for LayerUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LayerUse").field(&self.id).finish()
    }
}

/// The ids of layers.
pub(crate) fn ids(layers: &[LayerUse]) -> Vec<LayerId> {
    layers.iter().map(|layer| layer.id.clone()).collect()
}

/// Reads an id that this module has generated, so that it can be part of a path.
fn layer_id(text: &str) -> Result<LayerId, BoxError> {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() == 32 && text.bytes().all(is_hex) {
        return Ok(LayerId::new(text)?);
    }
    Err(BoxError::internal("not the id of a layer"))
}

fn is_gone(path: &Path) -> bool {
    let found = std::fs::symlink_metadata(path);
    found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

#[cfg(feature = "native")]
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    box_sys::walk::remove_all(path)
}

#[cfg(not(feature = "native"))]
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    std::fs::remove_dir_all(path)
}

/// Converts an error of the file system.
#[allow(clippy::needless_pass_by_value, reason = "the argument of `map_err`")]
fn failed(error: io::Error) -> BoxError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            BoxError::capacity("snapshot: the server's disk has no room for it")
                .with_detail(&Detail::about(Subject::Disk))
        }
        kind => BoxError::unavailable(format!("snapshot: cannot store it: {kind}")),
    }
}

#[cfg(test)]
mod tests;
