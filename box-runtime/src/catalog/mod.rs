//! `catalog.*`: volumes, templates and other items that outlive boxes.
//!
//! The store ([`box_catalog::Catalog`]) holds the items on disk. This module decides who sees an
//! item, makes and removes its data, and counts its uses (`uses.rs`).

mod pools;
mod snapshots;
mod templates;
mod uses;
mod volumes;

use std::sync::Arc;

use box_catalog::{Catalog, Filter, NewItem, Viewer};
use box_protocol::actions::{
    CatalogDeleteParams, CatalogDeleteResult, CatalogGetParams, CatalogListParams,
    CatalogListResult, CatalogPutParams, CatalogUpdateParams,
};
use box_protocol::catalog::{
    CatalogItem, CatalogKind, ItemChange, ItemContent, ItemDraft, ItemState, PoolChange,
    SnapshotContent, TemplateContent, VolumeContent,
};
use box_protocol::{BoxError, Code, ItemId, ItemRef};
use box_rpc::Caller;

use crate::caller::Visibility as _;
use crate::runtime::{BoxRuntime, unsupported};
pub(crate) use uses::ItemUse;
use uses::Uses;

/// The catalog of a runtime.
#[derive(Debug, Clone, Default)]
pub(crate) struct Items {
    store: Option<Arc<Catalog>>,
    uses: Uses,
}

impl Items {
    /// The catalog in this store. Without one, the runtime has no items.
    pub(crate) fn new(store: Option<Arc<Catalog>>) -> Self {
        Self {
            store,
            uses: Uses::default(),
        }
    }

    fn store(&self) -> Result<&Arc<Catalog>, BoxError> {
        self.store.as_ref().ok_or_else(|| {
            BoxError::unsupported(
                "catalog: this runtime has no state directory; use a server: boxd serve",
            )
        })
    }
}

impl BoxRuntime {
    /// Creates an item and returns when boxes can use it.
    pub async fn put_item(
        &self,
        caller: &Caller,
        params: CatalogPutParams,
    ) -> Result<CatalogItem, BoxError> {
        caller.check_may_own()?;
        params.content.check()?;
        let (runtime, caller) = (self.clone(), caller.clone());
        completed(async move {
            let CatalogPutParams {
                name,
                tags,
                labels,
                content,
            } = params;
            let new = |content| NewItem {
                owner: caller.name().to_string(),
                name,
                tags,
                labels,
                state: ItemState::Ready,
                size_bytes: None,
                content,
            };
            let item = match content {
                ItemDraft::Template(draft) => {
                    let content = TemplateContent { spec: draft.spec };
                    let new = new(ItemContent::Template(Box::new(content)));
                    runtime.on_store(move |store| store.insert(new)).await?
                }
                ItemDraft::Volume(draft) => {
                    let content = VolumeContent {
                        size_mb: draft.size_mb,
                        shared: draft.shared,
                        enforced: false,
                    };
                    runtime
                        .put_volume(new(ItemContent::Volume(content)))
                        .await?
                }
                ItemDraft::Pool(draft) => runtime.put_pool(&caller, *draft, new).await?,
                ItemDraft::Snapshot(draft) => {
                    let new = new(ItemContent::Snapshot(SnapshotContent::default()));
                    runtime
                        .put_image_snapshot(&caller, draft.image, new)
                        .await?
                }
            };
            Ok(runtime.shown(item))
        })
        .await
    }

    /// Returns an item.
    pub async fn item(
        &self,
        caller: &Caller,
        params: CatalogGetParams,
    ) -> Result<CatalogItem, BoxError> {
        if params.kind == CatalogKind::Image {
            return self.image_item(caller, &params.item).await;
        }
        let mut item = self.find_item(caller, params.kind, params.item).await?;
        if params.kind == CatalogKind::Volume {
            item.size_bytes = self.volume_bytes(&item.id).await;
        }
        Ok(self.shown(item))
    }

    /// Lists the items of the caller, sorted by id.
    pub async fn list_items(
        &self,
        caller: &Caller,
        params: CatalogListParams,
    ) -> Result<CatalogListResult, BoxError> {
        if params.kind == CatalogKind::Image {
            return self.image_items(caller, &params).await;
        }
        check_kind(params.kind)?;
        let (kind, caller) = (params.kind, caller.clone());
        let filter = Filter {
            kind,
            name: params.name,
            tag: params.tag,
            state: params.state,
            labels: params.labels,
            source_box: params.source_box,
            after: params.after,
            limit: params.limit.map(|limit| limit as usize),
        };
        let list = move |store: &Catalog| {
            let name = caller.name();
            let viewer = viewer(&caller, &name);
            let damaged = viewer.sees_all.then(|| store.damaged(kind));
            Ok((store.list(viewer, &filter), damaged.unwrap_or_default()))
        };
        let (page, damaged) = self.on_store(list).await?;
        let shown = page.items.into_iter().map(|item| self.shown(item));
        Ok(CatalogListResult {
            items: shown.collect(),
            next: page.next,
            total: page.total as u64,
            damaged,
        })
    }

    /// Changes an item. The runtime applies either all changes or none.
    pub async fn update_item(
        &self,
        caller: &Caller,
        mut params: CatalogUpdateParams,
    ) -> Result<CatalogItem, BoxError> {
        if let Some(content) = &params.content {
            content.check()?;
            if content.kind() != params.kind {
                let problem = format!("must be {}, as the item is", params.kind);
                return Err(box_protocol::Invalid::new("content", problem).into());
            }
        }
        let item = self.find_item(caller, params.kind, params.item.clone());
        let (item, runtime) = (item.await?, self.clone());
        let checked = match &mut params.content {
            Some(ItemChange::Pool(change)) => self.check_pool_change(caller, &item, change)?,
            _ => None,
        };
        if decides_only(&params) {
            self.change_pool(&item, checked);
            return Ok(self.shown(item));
        }
        completed(async move {
            let (kind, id, change) = (params.kind, item.id.clone(), params.clone());
            let preview = runtime.on_store(move |store| {
                store.preview(kind, &id, |item| {
                    apply(item, change);
                    Ok(())
                })
            });
            // The data changes first. After a crash in between, the same call completes the change.
            let _reserved = runtime.resize_volume(&item, &preview.await?).await?;
            let changed = runtime.on_store(move |store| {
                store.update(kind, &item.id, |item| {
                    apply(item, params);
                    Ok(())
                })
            });
            let item = changed.await?;
            match kind {
                CatalogKind::Template => runtime.refresh_pools(&item),
                CatalogKind::Pool => runtime.change_pool(&item, checked),
                CatalogKind::Image | CatalogKind::Volume | CatalogKind::Snapshot => {}
            }
            Ok(runtime.shown(item))
        })
        .await
    }

    /// Deletes an item with its data and returns when it is gone.
    pub async fn delete_item(
        &self,
        caller: &Caller,
        params: CatalogDeleteParams,
    ) -> Result<CatalogDeleteResult, BoxError> {
        let name = params.item.to_string();
        let id = match self.find_item(caller, params.kind, params.item).await {
            Ok(item) => item.id,
            // The owner of a damaged record is unknown.
            Err(error) if error.code() == Code::Unavailable && caller.can_see_all() => {
                ItemId::new(&name)?
            }
            Err(error) => return Err(error),
        };
        let (kind, runtime) = (params.kind, self.clone());
        completed(async move {
            let reserved = runtime.items().uses.reserve(kind, &id, &name)?;
            let record = id.clone();
            let removed = runtime.on_store(move |store| store.remove(kind, &record));
            removed.await?;
            match kind {
                CatalogKind::Volume => runtime.remove_volume(&id).await,
                CatalogKind::Pool => runtime.close_pool(&id).await,
                CatalogKind::Snapshot => runtime.shared().collect_layers(),
                CatalogKind::Image | CatalogKind::Template => {}
            }
            drop(reserved);
            Ok(CatalogDeleteResult { deleted: id })
        })
        .await
    }

    /// Returns an item as callers see it.
    fn shown(&self, mut item: CatalogItem) -> CatalogItem {
        item.used_by = self.items().uses.count(&item.id);
        if let ItemContent::Pool(content) = &mut item.content
            && let Some(pool) = self.shared().pools.get(&item.id)
        {
            let figures = pool.figures();
            content.ready = figures.ready;
            if let Some(error) = figures.error {
                (item.state, item.reason) = (ItemState::Failed, Some(error));
            }
        }
        item
    }

    pub(super) fn items(&self) -> &Items {
        &self.shared().items
    }

    /// Finds an item of the caller.
    async fn find_item(
        &self,
        caller: &Caller,
        kind: CatalogKind,
        item: ItemRef,
    ) -> Result<CatalogItem, BoxError> {
        check_kind(kind)?;
        let caller = caller.clone();
        self.on_store(move |store| {
            let name = caller.name();
            store.find(viewer(&caller, &name), kind, &item)
        })
        .await
    }

    /// Runs a change of the store on a thread for blocking work.
    pub(crate) async fn on_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Catalog) -> box_catalog::Result<T> + Send + 'static,
    ) -> Result<T, BoxError> {
        let store = Arc::clone(self.items().store()?);
        let done = tokio::task::spawn_blocking(move || work(&store)).await;
        let done = done.map_err(|_| BoxError::internal("catalog task failed"))?;
        Ok(done?)
    }
}

/// Completes work even if the caller stops waiting.
pub(crate) async fn completed<T: Send + 'static>(
    work: impl Future<Output = Result<T, BoxError>> + Send + 'static,
) -> Result<T, BoxError> {
    let done = tokio::spawn(work).await;
    done.unwrap_or_else(|_| Err(BoxError::internal("catalog task failed")))
}

fn viewer<'a>(caller: &Caller, name: &'a str) -> Viewer<'a> {
    Viewer {
        owner: name,
        sees_all: caller.can_see_all(),
    }
}

/// Whether a change is only the decision of the policy layer about a pool, which is not stored.
fn decides_only(params: &CatalogUpdateParams) -> bool {
    let nothing = CatalogUpdateParams {
        content: params.content.clone(),
        ..CatalogUpdateParams::of(params.kind, params.item.clone())
    };
    let Some(ItemChange::Pool(change)) = &params.content else {
        return false;
    };
    **change == PoolChange::default() && *params == nothing
}

fn check_kind(kind: CatalogKind) -> Result<(), BoxError> {
    match kind {
        CatalogKind::Volume | CatalogKind::Template | CatalogKind::Snapshot | CatalogKind::Pool => {
            Ok(())
        }
        CatalogKind::Image => Err(unsupported("kind", "image.* makes and removes images")),
    }
}

/// Applies the changes of a call to an item.
fn apply(item: &mut CatalogItem, params: CatalogUpdateParams) {
    if let Some(name) = params.name {
        item.name = name;
    }
    item.tags.retain(|tag| !params.untag.contains(tag));
    item.tags.extend(params.tags);
    for (label, value) in params.labels {
        match value {
            Some(value) => item.labels.insert(label, value),
            None => item.labels.remove(&label),
        };
    }
    match (&mut item.content, params.content) {
        (ItemContent::Template(template), Some(ItemChange::Template(draft))) => {
            template.spec = draft.spec;
        }
        (ItemContent::Volume(volume), Some(ItemChange::Volume(change))) => {
            volume.size_mb = change.size_mb.unwrap_or(volume.size_mb);
            volume.shared = change.shared.unwrap_or(volume.shared);
        }
        (ItemContent::Pool(pool), Some(ItemChange::Pool(change))) => {
            pool.size = change.size.unwrap_or(pool.size);
            pool.max_age_sec = change.max_age_sec.unwrap_or(pool.max_age_sec);
            // The runtime has replaced the name by the id.
            let template = change.template.and_then(|id| ItemId::new(&id).ok());
            pool.template = template.unwrap_or_else(|| pool.template.clone());
        }
        _ => {}
    }
}
