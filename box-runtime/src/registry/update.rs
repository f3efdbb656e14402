//! `box.update` and `system.configure`: changes of stored settings.

use std::sync::Arc;

use box_protocol::actions::BoxUpdateParams;
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxState, Defaults, Invalid, Lifetime, Network, check_labels};
use box_rpc::Caller;
use serde_json::{Map, Value};

use super::{Registry, UpdateStage};
use crate::adoption::unreachable;
use crate::box_actor::entry::BoxEntry;

/// Maximum size of the configuration stored for one caller.
const CONFIGURATION_BYTES: usize = 256 * 1024;

impl Registry {
    /// Updates the entry of a box after validating every change.
    ///
    /// The returned entry's [`wait_persisted`](BoxEntry::wait_persisted) completes when the change is on disk.
    pub(super) fn update(
        &mut self,
        caller: &Caller,
        params: BoxUpdateParams,
        stage: UpdateStage,
    ) -> Result<Arc<BoxEntry>, BoxError> {
        let entry = Arc::clone(&self.find(&params.box_id, caller)?.entry);
        let box_state = entry.status().state;
        if box_state == BoxState::Unreachable {
            return Err(unreachable(&params.box_id));
        }
        if box_state == BoxState::Failed {
            let message = format!("box {} has failed", params.box_id);
            return Err(BoxError::conflict(message).with_detail(&Detail::about(Subject::Box)));
        }
        if params.network_policy.is_some() && entry.spec.network == Network::Off {
            let rule = "requires a box with network on";
            return Err(Invalid::new("network_policy", rule).into());
        }
        let old = entry.status().name.clone();
        let name = params.name.filter(|name| old.as_ref() != Some(name));
        let key = |name| (Arc::clone(&entry.owner), entry.gateway(), name);
        if let Some(name) = &name {
            self.check_name_free(&key(name.clone()))?;
        }
        let (mut labels, mut lifetime, mut defaults) = {
            let status = entry.status();
            (
                status.labels.clone(),
                status.lifetime.clone(),
                status.defaults.clone(),
            )
        };
        for (label, value) in params.labels {
            match value {
                Some(value) => labels.insert(label, value),
                None => labels.remove(&label),
            };
        }
        check_labels(&labels)?;
        if let Some(change) = params.lifetime {
            let before = lifetime.map_or_else(Lifetime::default, |before| *before);
            lifetime = Some(Box::new(before.changed(change)));
        }
        if let Some(change) = params.defaults {
            let before = defaults.map_or_else(Defaults::default, |before| *before);
            defaults = Some(Box::new(before.changed(change)?));
        }
        if stage == UpdateStage::Validate {
            return Ok(entry);
        }
        // Only this change can fail, so it comes before the others.
        if let Some(policy) = params.network_policy {
            entry.set_policy(policy)?;
        }
        if let Some(name) = name {
            if let Some(old) = old {
                self.names.remove(&key(old));
            }
            self.names
                .insert(key(name.clone()), entry.spec.box_id.clone());
            entry.status().name = Some(name);
        }
        {
            let mut status = entry.status();
            status.labels = labels;
            status.note = params.note.or(status.note.take());
            status.lifetime = lifetime;
            status.defaults = defaults;
        }
        entry.lifetime_changed.notify_one();
        entry.mark_changed();
        Ok(entry)
    }

    pub(super) fn configure(
        &mut self,
        caller: &Caller,
        members: Map<String, Value>,
    ) -> Result<(), BoxError> {
        let stored = self.configuration.entry(caller.name()).or_default();
        let mut merged = stored.clone();
        merged.extend(members);
        let size = serde_json::to_string(&merged).map_or(usize::MAX, |text| text.len());
        if size > CONFIGURATION_BYTES {
            return Err(BoxError::limit(
                box_protocol::Code::TooLarge,
                "the configuration",
                "configuration_bytes",
                CONFIGURATION_BYTES,
            ));
        }
        *stored = merged;
        Ok(())
    }
}
