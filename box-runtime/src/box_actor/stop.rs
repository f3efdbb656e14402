//! Stops and starts of a box whose files are kept.
//!
//! # Stop
//! 1. The agent ends all processes. The runtime asks it for its commands and their output
//!    (`history.rs`).
//! 2. The backend ends the sandbox and makes a layer of its files. From here on, a crash leaves a
//!    stopped box.
//! 3. The runtime writes the record of the stopped box (`records.rs`), and the backend removes its
//!    own.
//!
//! # Start
//! The runtime starts a new sandbox on the layers. A disk that nothing else uses holds the live
//! files again. The record of the stopped box ends after the backend has a new one.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxState, Name};
use tokio::time::timeout;
use uuid::Uuid;

use super::entry::{BoxEntry, BoxStatus};
use super::files::KeptCheckpoint;
use super::instance::{Instance, bounded};
use crate::backend::{Backend, SnapshotRequest};
use crate::history::{self, History};
use crate::layers::LayerUse;
use crate::records::BoxRecords;
use crate::snapshots::{MAX_LAYERS, blocking};

/// Time beyond the limit of a stop after which the runtime stops waiting for the backend.
const GRACE: Duration = Duration::from_secs(30);

/// Own layers of a box at which the runtime merges them to one.
const OWN_LAYERS: usize = 8;

/// Layers of a box beyond which the runtime merges all of them.
///
/// A box has fewer, because it begins with at most [`MAX_LAYERS`]. Boxes and snapshots of earlier
/// versions can have more.
const BOX_LAYERS: usize = MAX_LAYERS + OWN_LAYERS;

impl Instance {
    /// Returns whether the box is stopped: it has no sandbox, and its files are kept.
    pub(super) fn is_stopped(&self) -> bool {
        self.running.is_none() && self.entry.status().stopped.is_some()
    }

    /// Ends the sandbox of a box without processes, and keeps its files.
    pub(super) async fn keep_files(&mut self) -> Result<(), BoxError> {
        let Some(running) = &self.running else {
            return Err(BoxError::internal("the box is not running"));
        };
        let limit = self.shared.config.stop_timeout;
        let agent = running.agent.peer();
        let asking = timeout(limit, history::ended_commands(&agent));
        let ended = asking
            .await
            .unwrap_or_else(|_| Err(BoxError::timeout("no answer")));
        let ended = ended.unwrap_or_else(|error| {
            tracing::warn!(%error, "the commands of a stopped box are lost");
            Vec::new()
        });
        let (backend, id) = (Arc::clone(&running.backend), running.id);
        let layer = self.stopping_layer().await?;
        let limit = self.shared.config.snapshot_timeout;
        let into = layer.path();
        let request = SnapshotRequest::new(&into, limit).of_stopped(true);
        let silence = self.entry.expect_silence(Some(running.agent.peer()));
        let stopping = backend.stop_into_layer(id, request);
        let files = bounded(&*backend, "stop", limit + GRACE, stopping).await;
        drop(silence);
        let files = files.and_then(|files| files)?;
        let history = self.history();
        let (of_layer, kept) = (layer.clone(), history.clone());
        blocking(move || {
            if let Err(error) = kept.add(ended) {
                tracing::warn!(kind = %error.kind(), "the commands of a stopped box are lost");
            }
            of_layer.finish(files)
        })
        .await?;
        // Those below are the only copy of their files, too.
        self.shared.layers.synced().await;
        if let Some(running) = self.running.take() {
            running.agent.cut();
        }
        self.entry
            .set_stopped(&self.shared.records, id, layer, history);
        self.entry.mark_changed();
        match self.entry.wait_persisted().await {
            Ok(()) => {
                let limit = self.shared.config.stop_timeout;
                let stopped = bounded(&*backend, "end", limit, backend.stop(id)).await;
                if let Err(error) = stopped.and_then(|stopped| stopped) {
                    tracing::warn!(backend_id = %id, %error, "cannot remove the rest of a stopped box");
                }
                // Of a start that was dropped before it removed its record.
                self.entry.remove_obsolete_records().await;
            }
            // The record of the backend stays, and names the layer.
            Err(error) => {
                tracing::error!(backend_id = %id, %error, "cannot write the record of a stopped box");
            }
        }
        if let Err(error) = self.bound_layers(&*backend).await {
            let (owner, box_id) = (&self.entry.owner, &self.entry.spec.box_id);
            tracing::warn!(%owner, %box_id, %error, "cannot merge the layers of a box");
        }
        Ok(())
    }

    /// Returns the layer that the files of the box become.
    ///
    /// The record of the box names it, so that a later process keeps it until it knows the state of
    /// the box.
    async fn stopping_layer(&self) -> Result<LayerUse, BoxError> {
        let known = {
            let status = self.entry.status();
            let files = &status.files;
            files.disk.clone().or_else(|| files.stopping.clone())
        };
        if let Some(known) = known {
            return Ok(known);
        }
        let layers = self.shared.layers.clone();
        let new = blocking(move || layers.begin()).await?;
        self.entry.status().files.stopping = Some(new.clone());
        self.entry.mark_changed();
        self.entry.wait_persisted().await?;
        Ok(new)
    }

    fn history(&self) -> History {
        let known = self.entry.status().history.clone();
        known.unwrap_or_else(|| History::new(self.shared.state.new_history()))
    }

    /// Merges the layers of a box without live files, if they are many: its own, or all.
    pub(super) async fn bound_layers(&self, backend: &dyn Backend) -> Result<(), BoxError> {
        let many: Vec<_> = {
            let status = self.entry.status();
            let files = &status.files;
            let (all, own) = (files.layers.len(), files.own());
            let merged = match own {
                _ if all > BOX_LAYERS => all,
                OWN_LAYERS.. => own,
                _ => return Ok(()),
            };
            files.layers.iter().take(merged).cloned().collect()
        };
        let merged = self.shared.merge_layers(backend, &many).await?;
        self.entry
            .status()
            .files
            .layers
            .splice(..many.len(), [merged]);
        self.persist().await;
        drop(many);
        self.shared.collect_layers();
        Ok(())
    }

    /// Starts a stopped box. After a failure it is stopped as before.
    pub(super) async fn start_stopped(&mut self) -> Result<(), BoxError> {
        let mut spec = self.entry.spec.clone();
        let mounts = {
            let mut status = self.entry.status();
            let items = &self.shared.items;
            // With the state: a copy of a stopped box would lack the disk that a start takes.
            status.files.take_disk(|id| items.names_layer(id));
            status.set_state(BoxState::Starting);
            self.entry.access.set_starting();
            let mounts = status.mounts.clone();
            // The host name of the box.
            spec.name.clone_from(&status.name);
            mounts
        };
        spec.extra_mounts = mounts
            .requested
            .iter()
            .chain(&mounts.added)
            .cloned()
            .collect();
        let started = Box::pin(self.start(&spec, true)).await;
        match started {
            Ok(()) => {
                let stopped = self.entry.status().end_stopped();
                // A write that began during the start would bring the record back.
                self.persist().await;
                self.entry.remove_obsolete_records().await;
                if let Some(stopped) = stopped {
                    self.shared.images.release(stopped);
                }
                Ok(())
            }
            Err(error) => {
                {
                    let mut status = self.entry.status();
                    if let Some(disk) = status.files.disk.take() {
                        status.files.layers.insert(0, disk);
                    }
                    status.set_state(BoxState::Stopped);
                    status.mounts = mounts;
                    status.reason = None;
                }
                self.use_items_again();
                self.entry.access.close(self.entry.not_running());
                self.persist().await;
                Err(error)
            }
        }
    }

    /// Counts a stopped box as a user of its items.
    fn use_items_again(&self) {
        let items = &self.shared.items;
        let (volumes, snapshot) = {
            let status = self.entry.status();
            (status.volumes.clone(), status.files.snapshot.clone())
        };
        let mut uses = items.adopt(&self.entry.spec, &volumes);
        uses.extend(snapshot.map(|id| items.adopt_snapshot(&id)));
        self.entry.status().uses = uses;
    }

    /// Returns to a checkpoint, the newest if absent. A box that was not stopped starts again.
    pub(super) async fn rollback(&mut self, name: Option<&Name>) -> Result<Name, BoxError> {
        let (checkpoint, was_stopped) = {
            let status = self.entry.status();
            let mut all = status.files.checkpoints.iter();
            let found = match name {
                Some(name) => all.find(|kept| kept.info.name == *name),
                None => all.next_back(),
            };
            let found = found.cloned();
            (found, status.state == BoxState::Stopped)
        };
        let checkpoint = checkpoint.ok_or_else(|| no_checkpoint(name))?;
        self.roll_back(&checkpoint).await?;
        if !was_stopped {
            self.start_stopped().await?;
        }
        Ok(checkpoint.info.name)
    }

    /// Ends the sandbox, and replaces the files of the box. The box is stopped afterwards.
    async fn roll_back(&mut self, to: &KeptCheckpoint) -> Result<(), BoxError> {
        let running = self.running.as_ref().map(|running| running.id);
        let earlier = self
            .entry
            .status()
            .stopped
            .as_ref()
            .map(|record| record.id());
        let place = self
            .shared
            .records
            .place(running.or(earlier).unwrap_or_else(Uuid::now_v7));
        // The record comes first: after a crash, a box that still lives counts, and otherwise the
        // record.
        self.shared.layers.synced().await;
        let (record, of_record) = (self.entry.record_on(&to.layers)?, place.clone());
        if self.running.is_some() {
            // Until the box is stopped.
            self.entry.status().obsolete_records.push(place.clone());
        }
        let written = blocking(move || of_record.write(&record)).await;
        let mounts = self.entry.status().mounts.clone();
        let stopped = match written {
            Ok(()) if self.running.is_some() => {
                self.entry.access.close(self.entry.not_running());
                self.stop().await
            }
            written => written,
        };
        if let Err(error) = stopped {
            self.entry.remove_obsolete_records().await;
            return Err(error);
        }
        {
            let mut status = self.entry.status();
            status.mounts = mounts;
            status.location = None;
            status.set_state(BoxState::Stopped);
            status.reason = None;
            status.keep_record(&place);
            status.stopped = Some(Box::new(place));
            let history = status.history.take();
            let history = history.unwrap_or_else(|| History::new(self.shared.state.new_history()));
            status.history = Some(history);
            let files = &mut status.files;
            files.layers.clone_from(&to.layers);
            (files.disk, files.stopping) = (None, None);
        }
        self.use_items_again();
        self.entry.access.close(self.entry.not_running());
        self.persist().await;
        self.shared.collect_layers();
        Ok(())
    }
}

fn no_checkpoint(name: Option<&Name>) -> BoxError {
    let message = match name {
        Some(name) => format!("name: the box has no checkpoint {name}"),
        None => "name: the box has no checkpoint; make one with box.checkpoint".to_owned(),
    };
    BoxError::not_found(message).with_detail(&Detail::of_field("name").of(Subject::Snapshot))
}

impl BoxStatus {
    /// Makes the record of a stopped box obsolete, and returns its internal id.
    pub(super) fn end_stopped(&mut self) -> Option<Uuid> {
        let place = *self.stopped.take()?;
        let id = place.id();
        self.obsolete_records.push(place);
        Some(id)
    }
}

impl BoxEntry {
    /// Records that the box is stopped, and that its files are a layer.
    pub(crate) fn set_stopped(
        &self,
        records: &BoxRecords,
        id: Uuid,
        layer: LayerUse,
        history: History,
    ) {
        {
            let mut status = self.status();
            status.set_state(BoxState::Stopped);
            status.location = None;
            let place = records.place(id);
            status.keep_record(&place);
            status.stopped = Some(Box::new(place));
            status.history = Some(history);
            let files = &mut status.files;
            files.disk = None;
            files.stopping = None;
            files.layers.retain(|other| other.id() != layer.id());
            files.layers.insert(0, layer);
        }
        self.access.close(self.not_running());
    }

    /// Returns the error of a call to a box that is not running.
    pub(crate) fn not_running(&self) -> BoxError {
        let state = self.status().state;
        self.wrong_state(state)
    }

    /// Returns the error of a call that a box in this state refuses.
    pub(super) fn wrong_state(&self, state: BoxState) -> BoxError {
        let id = &self.spec.box_id;
        let problem = match state {
            BoxState::Starting => "is starting; try again later",
            BoxState::Running => "is running; stop it",
            BoxState::Paused => "is paused; resume it",
            BoxState::Stopped => "is stopped; start it",
            BoxState::Failed => "has failed; delete it",
            BoxState::Unreachable => "is unreachable; try again later",
        };
        let error = BoxError::conflict(format!("box {id}: {problem}"));
        error.with_detail(&Detail::about(Subject::Box))
    }
}
