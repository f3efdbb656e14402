//! `box.fork`: boxes with the spec and the files of another one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use box_protocol::actions::{BoxDeleteParams, BoxForkParams, BoxForkResult};
use box_protocol::catalog::{CatalogKind, ItemContent};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxId, BoxInfo, BoxSpec, MAX_ID_BYTES, check_labels};
use box_rpc::Caller;
use futures::StreamExt as _;
use uuid::Uuid;

use crate::box_actor::entry::BoxEntry;
use crate::box_actor::files::Origin;
use crate::box_actor::{Create, Request};
use crate::catalog::completed;
use crate::runtime::BoxRuntime;

use super::blocking;
use super::fork_marks::{ForkMark, ForkMarks};

/// Boxes that one call starts at the same time.
const CONCURRENT_STARTS: usize = 8;

impl BoxRuntime {
    /// Creates boxes with the spec and the files of a box: all of them, or none.
    pub async fn fork(
        &self,
        caller: &Caller,
        params: BoxForkParams,
    ) -> Result<BoxForkResult, BoxError> {
        params.check()?;
        let entry = self.entry(caller, &params.box_id).await?;
        let (runtime, caller) = (self.clone(), caller.clone());
        completed(async move {
            runtime.check_volumes(&entry).await?;
            let specs = specs(&entry, &params)?;
            let captured = runtime.capture(&entry).await?;
            let (snapshot, volumes, applies) = {
                let status = entry.status();
                let files = &status.files;
                let applies = files.applies.clone();
                (files.snapshot.clone(), status.volumes.clone(), applies)
            };
            // One box is all or none already.
            let forks = runtime.shared().state.forks();
            let marks = ForkMarks::new(forks.filter(|_| specs.len() > 1));
            let mark = blocking(move || marks.begin()).await?;
            let origin = Origin {
                snapshot,
                volumes,
                layers: captured.layers.clone(),
                image: captured.image.clone(),
                applies,
                fork: Some(mark.id),
            };
            let made = runtime.create_all(&caller, specs, &origin, mark).await;
            drop(origin);
            let paused_ms = captured.paused_ms();
            drop(captured);
            if made.is_err() {
                runtime.shared().collect_layers();
            }
            Ok(BoxForkResult {
                items: made?,
                paused_ms,
            })
        })
        .await
    }

    /// Refuses a box with a volume that only one box may write to.
    async fn check_volumes(&self, entry: &Arc<BoxEntry>) -> Result<(), BoxError> {
        let ids = entry.status().volumes.clone();
        let mounts = entry.spec.volumes.iter().zip(ids);
        let written: Vec<_> = mounts
            .filter(|(mount, _)| !mount.ro)
            .map(|(_, id)| id)
            .collect();
        for id in written {
            let item = self.on_store(move |store| store.get(CatalogKind::Volume, &id));
            let item = item.await?;
            if let ItemContent::Volume(volume) = &item.content
                && !volume.shared
            {
                let name = &item.name;
                return Err(BoxError::conflict(format!(
                    "volumes: {name} is mounted read-write, and only one box may write to it; make \
                     the volume shared"
                ))
                .with_detail(&Detail::of_field("volumes").of(Subject::Volume)));
            }
        }
        Ok(())
    }

    /// Creates boxes from these files. After a failure, it deletes those that it made.
    async fn create_all(
        &self,
        caller: &Caller,
        specs: Vec<BoxSpec>,
        origin: &Origin,
        mark: ForkMark,
    ) -> Result<Vec<BoxInfo>, BoxError> {
        let has_failed = AtomicBool::new(false);
        let (mut made, mut failure) = (Vec::with_capacity(specs.len()), None);
        let create = |spec| {
            let has_failed = &has_failed;
            async move {
                if has_failed.load(Ordering::Relaxed) {
                    return Ok(None);
                }
                self.create_from(caller, spec, origin).await.map(Some)
            }
        };
        let creating = futures::stream::iter(specs.into_iter().map(create));
        let mut creating = creating.buffered(CONCURRENT_STARTS);
        while let Some(created) = creating.next().await {
            match created {
                Ok(info) => made.extend(info),
                Err(error) => {
                    has_failed.store(true, Ordering::Relaxed);
                    failure.get_or_insert(error);
                }
            }
        }
        let completing = mark.clone();
        let complete = || blocking(move || completing.complete());
        let error = match failure {
            // The next server would end the boxes of a fork with a mark.
            None => match complete().await {
                Ok(()) => return Ok(made),
                Err(error) => error,
            },
            Some(error) => error,
        };
        for info in made {
            let params = BoxDeleteParams {
                box_id: info.box_id,
                force: true,
            };
            if let Err(error) = self.delete(caller, params).await {
                tracing::warn!(%error, "cannot delete a box of a failed fork");
            }
        }
        let _ = blocking(move || mark.complete()).await;
        Err(error)
    }

    async fn create_from(
        &self,
        caller: &Caller,
        spec: BoxSpec,
        origin: &Origin,
    ) -> Result<BoxInfo, BoxError> {
        let create = |reply| Create {
            caller: caller.clone(),
            max_boxes: self.max_boxes(),
            spec,
            must_be_new: true,
            keep_failed: false,
            origin: Some(Box::new(origin.clone())),
            reply,
        };
        let created = self
            .request(|reply| Request::Create(Box::new(create(reply))))
            .await?;
        Ok(created.info)
    }
}

/// The specs of the new boxes: that of the box with its present settings.
fn specs(entry: &BoxEntry, params: &BoxForkParams) -> Result<Vec<BoxSpec>, BoxError> {
    let mut spec = entry.spec.clone();
    // The files are prepared already.
    spec.prepare = None;
    {
        let status = entry.status();
        let mut labels = status.labels.clone();
        labels.extend(params.labels.clone());
        check_labels(&labels)?;
        spec.labels = (!labels.is_empty()).then_some(labels);
        spec.note.clone_from(&status.note);
        spec.lifetime = status.lifetime.as_deref().cloned();
        spec.defaults = status.defaults.as_deref().cloned();
        spec.network_policy.clone_from(&status.network_policy);
        let mounts = status.mounts.requested.iter().chain(&status.mounts.added);
        spec.extra_mounts = mounts.cloned().collect();
    }
    let prefix = match &params.prefix {
        Some(prefix) => prefix.to_string(),
        None => generated_prefix(&spec.box_id),
    };
    let numbered = |number: u32| -> Result<BoxSpec, BoxError> {
        let mut spec = spec.clone();
        spec.box_id = BoxId::new(format!("{prefix}-{number}"))?;
        Ok(spec)
    };
    (1..=params.count).map(numbered).collect()
}

/// Returns a prefix for the ids of forks, with the id of the box if it is short enough.
fn generated_prefix(id: &BoxId) -> String {
    let unique = Uuid::now_v7().as_u128() & 0xffff_ffff;
    let prefix = format!("{id}-{unique:08x}");
    if prefix.len() + 4 <= MAX_ID_BYTES {
        prefix
    } else {
        format!("fork-{unique:08x}")
    }
}
