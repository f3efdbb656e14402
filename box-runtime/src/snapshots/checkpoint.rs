//! `box.checkpoint`: files that a box keeps under a name.

use std::sync::Arc;

use box_protocol::actions::{BoxCheckpointParams, SINCE_IMAGE, SINCE_WORKSPACE};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Checkpoint, Code, Invalid, Name, UnixMs};
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
                    layers: captured.layers,
                };
                entry.status().files.checkpoints.push(kept);
                info
            };
            entry.mark_changed();
            if let Err(error) = entry.wait_persisted().await {
                let is_other = |kept: &KeptCheckpoint| kept.info.name != info.name;
                entry.status().files.checkpoints.retain(is_other);
                runtime.shared().collect_layers();
                return Err(error);
            }
            Ok(info)
        })
        .await
    }
}

/// Returns the name of a new checkpoint.
fn free_name(entry: &Arc<BoxEntry>, asked: Option<&Name>) -> Result<Name, BoxError> {
    let status = entry.status();
    let existing = &status.files.checkpoints;
    if existing.len() >= MAX_CHECKPOINTS {
        let what = "the number of checkpoints of this box";
        return Err(BoxError::limit(
            Code::Capacity,
            what,
            "checkpoints",
            MAX_CHECKPOINTS,
        ));
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
