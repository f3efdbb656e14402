//! Mounts besides the workspace: requested by calls or added to a running box.

use std::time::Duration;

use box_protocol::actions::{AgentAllow, AgentAllowParams};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxMountSpec, BoxSpec, BoxState, HostPathMode};

use super::instance::{Instance, RunningBox, bounded};
use super::{BoxEntry, agents_error};

impl Instance {
    /// Returns whether the call or the box has mounts.
    pub(super) fn has_mounts(&self, requested: &BoxSpec) -> bool {
        !requested.extra_mounts.is_empty() || !self.entry.status().mounts.requested.is_empty()
    }

    /// Checks the requested mounts against the existing ones and adds missing ones.
    pub(super) async fn mount(&mut self, requested: &BoxSpec) -> Result<(), BoxError> {
        let Some(running) = &self.running else {
            return Ok(());
        };
        let existing = self.entry.status().mounts.clone();
        let may_add = running.backend.capabilities().adds_mounts;
        let fixed = |mount: &&BoxMountSpec| !(may_add && mount.is_content_addressed());
        let new: Vec<_> = mounted(&requested.extra_mounts)
            .filter(|mount| !existing.has(mount))
            .cloned()
            .collect();
        let has_all = |mut mounts: Vec<&BoxMountSpec>| {
            mounts.retain(fixed);
            mounts
                .into_iter()
                .all(|mount| requested.extra_mounts.contains(mount))
        };
        if new.iter().any(|mount| fixed(&mount)) || !has_all(existing.requested.iter().collect()) {
            return Err(other_mounts(&self.entry));
        }
        if new.is_empty() {
            return Ok(());
        }
        existing.check_room_for(new.len())?;
        running.add(self.shared.config.start_timeout, &new).await?;
        self.entry.status().mounts.requested.extend(new);
        self.persist().await;
        Ok(())
    }

    /// Adds mounts to a running box.
    ///
    /// Identical mounts are accepted; a different mount at the same path is an error.
    pub(super) async fn add_mounts(&mut self, requested: &[BoxMountSpec]) -> Result<(), BoxError> {
        let Some(running) = &self.running else {
            return Err(self.entry.not_running());
        };
        if !running.backend.capabilities().adds_mounts {
            return Err(BoxError::unsupported(
                "extra_mounts: this backend cannot add mounts to a running box",
            ));
        }
        let existing = self.entry.status().mounts.clone();
        let new: Vec<_> = mounted(requested)
            .filter(|mount| !existing.has(mount))
            .cloned()
            .collect();
        if new.iter().any(|mount| existing.covers(mount)) {
            return Err(other_mounts(&self.entry));
        }
        existing.check_room_for(new.len())?;
        if new.iter().any(|mount| mount.mode == HostPathMode::Rw) {
            self.check_writable_mount()?;
        }
        let mut added = Ok(());
        for mount in new {
            let one = std::slice::from_ref(&mount);
            added = running.add(self.shared.config.start_timeout, one).await;
            if added.is_err() {
                break;
            }
            self.entry.status().mounts.added.push(mount);
        }
        self.persist().await;
        added
    }
}

impl Instance {
    /// Returns an error if the box cannot get another writable mount.
    fn check_writable_mount(&self) -> Result<(), BoxError> {
        let id = &self.entry.spec.box_id;
        // The quota was set up for the mounts that existed at the start.
        if self.entry.spec.workspace_quota_mb > 0 {
            let message =
                "extra_mounts: a box with workspace_quota_mb cannot get more writable mounts";
            return Err(BoxError::unsupported(message));
        }
        if self.entry.status().state == BoxState::Paused {
            let message = format!("box {id} is paused; resume it to add a writable mount");
            return Err(BoxError::conflict(message).with_detail(&Detail::about(Subject::Box)));
        }
        Ok(())
    }
}

impl RunningBox {
    async fn add(&self, limit: Duration, mounts: &[BoxMountSpec]) -> Result<(), BoxError> {
        let adding = self.backend.add_mounts(self.id, mounts);
        bounded(&*self.backend, "mount into", limit, adding).await??;
        // Running commands keep the access rules that they started with.
        for mount in mounts.iter().filter(|mount| mount.mode == HostPathMode::Rw) {
            let path = mount.mount_path.clone();
            let agent = self.agent.peer();
            let params = AgentAllowParams { path };
            let allowing = agent.call::<AgentAllow>(&params);
            let allowed = bounded(&*self.backend, "allow writing in", limit, allowing).await?;
            allowed.map_err(agents_error)?;
        }
        Ok(())
    }
}

/// Returns the mounts with a mode other than `none`.
pub(super) fn mounted(mounts: &[BoxMountSpec]) -> impl Iterator<Item = &BoxMountSpec> {
    mounts
        .iter()
        .filter(|mount| mount.mode != HostPathMode::None)
}

fn other_mounts(entry: &BoxEntry) -> BoxError {
    let id = &entry.spec.box_id;
    BoxError::conflict(format!(
        "extra_mounts: box {id} has others; omit extra_mounts or use another box_id"
    ))
    .with_detail(&Detail::of_field("extra_mounts").of(Subject::Box))
}
