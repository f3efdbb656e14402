//! `box.checkpoint`: files that a box keeps under a name.

use std::sync::Arc;

use box_protocol::actions::{BoxCheckpointParams, SINCE_IMAGE, SINCE_WORKSPACE};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Checkpoint, Invalid, Name, UnixMs};
use box_rpc::Caller;

use crate::box_actor::entry::BoxEntry;
use crate::box_actor::files::KeptCheckpoint;
use crate::catalog::completed;
use crate::runtime::BoxRuntime;

/// Maximum number of checkpoints of one box.
const MAX_CHECKPOINTS: usize = 64;

impl BoxRuntime {
    /// Keeps the private files of a box under a name, until the box is deleted.
    pub async fn checkpoint(
        &self,
        caller: &Caller,
        params: BoxCheckpointParams,
    ) -> Result<Checkpoint, BoxError> {
        let entry = self.entry(caller, &params.box_id).await?;
        let runtime = self.clone();
        completed(async move {
            free_name(&entry, params.name.as_ref())?;
            // Nothing is copied if nothing fits any more.
            runtime.check_size(&entry.owner, 1).await?;
            let captured = runtime.capture(&entry).await?;
            let (size_bytes, entries) = captured.size();
            let info = {
                // Another call may have taken the name during the copy.
                let name = free_name(&entry, params.name.as_ref())?;
                let info = Checkpoint {
                    name,
                    created_at: UnixMs::now(),
                    size_bytes,
                    entries,
                    paused_ms: captured.paused_ms(),
                };
                let kept = KeptCheckpoint {
                    info: info.clone(),
                    layers: captured.layers.clone(),
                };
                entry.status().files.checkpoints.push(kept);
                info
            };
            entry.mark_changed();
            let stored = match entry.wait_persisted().await {
                // Checkpoints made at the same time count each other.
                Ok(()) => runtime.check_size(&entry.owner, 0).await,
                failed => failed,
            };
            if let Err(error) = stored {
                let is_other = |kept: &KeptCheckpoint| kept.info.name != info.name;
                entry.status().files.checkpoints.retain(is_other);
                entry.mark_changed();
                let _ = entry.wait_persisted().await;
                // Until now, the record may have named its layers.
                drop(captured);
                runtime.shared().collect_layers();
                return Err(error);
            }
            Ok(info)
        })
        .await
    }

    /// Checks the size of all snapshots and checkpoints of an owner, with this many bytes more.
    pub(super) async fn check_size(&self, owner: &str, more: u64) -> Result<(), BoxError> {
        let entries = self.all_entries().await;
        let mine = entries.iter().filter(|entry| *entry.owner == *owner);
        let bytes = mine.map(|entry| {
            let status = entry.status();
            let kept = status.files.checkpoints.iter();
            kept.map(|kept| kept.info.size_bytes)
                .fold(0, u64::saturating_add)
        });
        let bytes = bytes.fold(more, u64::saturating_add);
        self.items().check_snapshots(owner, bytes)
    }
}

/// Returns the name of a new checkpoint.
fn free_name(entry: &Arc<BoxEntry>, asked: Option<&Name>) -> Result<Name, BoxError> {
    let status = entry.status();
    let existing = &status.files.checkpoints;
    if existing.len() >= MAX_CHECKPOINTS {
        let problem = format!(
            "checkpoints: the box has {MAX_CHECKPOINTS}, which is the maximum; fork the box, because \
             a fork begins with none, or delete it"
        );
        return Err(BoxError::capacity(problem).with_detail(&Detail {
            limit: Some("checkpoints".to_owned()),
            max: u64::try_from(MAX_CHECKPOINTS).ok(),
            ..Detail::about(Subject::Box)
        }));
    }
    let is_taken = |name: &Name| existing.iter().any(|kept| kept.info.name == *name);
    if let Some(name) = asked {
        if [SINCE_IMAGE, SINCE_WORKSPACE].contains(&name.as_str()) {
            let rule = format!("`{name}` is reserved; choose another name");
            return Err(Invalid::new("name", rule).into());
        }
        if is_taken(name) {
            let message = format!("name: {name} is taken by another checkpoint of the box");
            return Err(BoxError::conflict(message)
                .with_detail(&Detail::of_field("name").of(Subject::Snapshot)));
        }
        return Ok(name.clone());
    }
    let mut number = existing.len() + 1;
    loop {
        let name = Name::new(format!("checkpoint-{number}"))?;
        if !is_taken(&name) {
            return Ok(name);
        }
        number += 1;
    }
}
