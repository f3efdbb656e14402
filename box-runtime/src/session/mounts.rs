//! Mounts beside the workspace: those that calls ask for, and those that are added to a box that is there.

use std::time::Duration;

use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxMountSpec, BoxSpec, HostPathMode};

use super::Card;
use super::body::{Body, Living, bounded};

impl Body {
    /// Whether there is anything to say about mounts at all.
    pub(super) fn has_mounts(&self, asked: &BoxSpec) -> bool {
        let living = self.living.as_ref();
        !asked.extra_mounts.is_empty()
            || living.is_some_and(|living| !living.mounts.asked.is_empty())
    }

    /// Checks the mounts asked for against those there are, and adds what can be added.
    pub(super) async fn mount(&mut self, asked: &BoxSpec) -> Result<(), BoxError> {
        let Some(living) = &mut self.living else {
            return Ok(());
        };
        let may_add = living.backend.capabilities().adds_mounts;
        let fixed = |mount: &&BoxMountSpec| !(may_add && mount.is_content_addressed());
        let new: Vec<_> = mounted(&asked.extra_mounts)
            .filter(|mount| !living.mounts.has(mount))
            .cloned()
            .collect();
        let has_all = |mut mounts: Vec<&BoxMountSpec>| {
            mounts.retain(fixed);
            mounts
                .into_iter()
                .all(|mount| asked.extra_mounts.contains(mount))
        };
        if new.iter().any(|mount| fixed(&mount)) || !has_all(living.mounts.asked.iter().collect()) {
            return Err(other_mounts(&self.card));
        }
        if new.is_empty() {
            return Ok(());
        }
        living.add(self.shared.config.start_timeout, &new).await?;
        living.mounts.asked.extend(new);
        self.keep();
        Ok(())
    }

    /// Adds mounts to the box that is there. Those it has already are fine; another one in the same place is not.
    pub(super) async fn add_mounts(&mut self, asked: &[BoxMountSpec]) -> Result<(), BoxError> {
        let Some(living) = &mut self.living else {
            let id = &self.card.spec.session_id;
            let error = BoxError::conflict(format!("Box session {id} has no box to mount into"));
            return Err(error.with_detail(&Detail::about(Subject::Box)));
        };
        if !living.backend.capabilities().adds_mounts {
            return Err(BoxError::unsupported(
                "extra_mounts: this backend adds no mounts to a box that runs",
            ));
        }
        let new: Vec<_> = mounted(asked)
            .filter(|mount| !living.mounts.has(mount))
            .cloned()
            .collect();
        if new.iter().any(|mount| living.mounts.covers(mount)) {
            return Err(other_mounts(&self.card));
        }
        let mut added = Ok(());
        for mount in new {
            let one = std::slice::from_ref(&mount);
            added = living.add(self.shared.config.start_timeout, one).await;
            if added.is_err() {
                break;
            }
            living.mounts.added.push(mount);
        }
        self.keep();
        added
    }
}

impl Living {
    async fn add(&self, limit: Duration, mounts: &[BoxMountSpec]) -> Result<(), BoxError> {
        let adding = self.backend.add_mounts(self.id, mounts);
        bounded(&*self.backend, "mount into", limit, adding).await?
    }
}

/// The mounts that are made at all.
pub(super) fn mounted(mounts: &[BoxMountSpec]) -> impl Iterator<Item = &BoxMountSpec> {
    mounts
        .iter()
        .filter(|mount| mount.mode != HostPathMode::None)
}

fn other_mounts(card: &Card) -> BoxError {
    let id = &card.spec.session_id;
    BoxError::conflict(format!(
        "Box session {id} already exists with other extra_mounts"
    ))
    .with_detail(&Detail {
        field: Some("extra_mounts".to_owned()),
        ..Detail::about(Subject::Box)
    })
}
