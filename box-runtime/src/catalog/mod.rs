//! `catalog.*`: volumes, templates and other items that outlive boxes.
//!
//! The store ([`box_catalog::Catalog`]) holds the items on disk. This module decides who sees an
//! item, makes and removes its data, and counts its uses (`uses.rs`).

mod uses;
mod volumes;

use std::sync::Arc;

use box_catalog::{Catalog, Filter, NewItem, Viewer};
use box_protocol::actions::{
    CatalogDeleteParams, CatalogDeleteResult, CatalogGetParams, CatalogListParams,
    CatalogListResult, CatalogPutParams, CatalogUpdateParams,
};
use box_protocol::catalog::{
    CatalogItem, CatalogKind, ItemChange, ItemContent, ItemDraft, ItemState, TemplateContent,
    VolumeContent,
};
use box_protocol::{BoxError, Code, ItemId, ItemRef};
use box_rpc::Caller;

use crate::caller::Visibility as _;
use crate::runtime::{BoxRuntime, unsupported};
pub(crate) use uses::ItemUse;
use uses::Uses;

/// The catalogue of a runtime.
#[derive(Debug, Default)]
pub(crate) struct Items {
    store: Option<Arc<Catalog>>,
    uses: Uses,
}

impl Items {
    /// The catalogue in this store. Without one, the runtime has no items.
    pub(crate) fn new(store: Option<Arc<Catalog>>) -> Self {
        Self {
            store,
            uses: Uses::default(),
        }
    }

    fn store(&self) -> Result<&Arc<Catalog>, BoxError> {
        self.store.as_ref().ok_or_else(|| {
            BoxError::unsupported(
                "catalogue: this runtime has no state directory; use a server: boxd serve",
            )
        })
    }

    /// Returns an item as callers see it.
    fn shown(&self, mut item: CatalogItem) -> CatalogItem {
        item.used_by = self.uses.count(&item.id);
        item
    }
}

impl BoxRuntime {
    /// Creates an item and returns when boxes can use it.
    pub async fn put_item(
        &self,
        caller: &Caller,
        params: CatalogPutParams,
    ) -> Result<CatalogItem, BoxError> {
        params.content.check()?;
        let (runtime, owner) = (self.clone(), caller.name().to_string());
        completed(async move {
            let CatalogPutParams {
                name,
                tags,
                labels,
                content,
            } = params;
            let content = match content {
                ItemDraft::Template(draft) => {
                    ItemContent::Template(Box::new(TemplateContent { spec: draft.spec }))
                }
                ItemDraft::Volume(draft) => ItemContent::Volume(VolumeContent {
                    size_mb: draft.size_mb,
                    shared: draft.shared,
                    enforced: false,
                }),
            };
            let new = NewItem {
                owner,
                name,
                tags,
                labels,
                state: ItemState::Ready,
                content,
            };
            let item = match new.content {
                ItemContent::Volume(_) => runtime.put_volume(new).await?,
                _ => runtime.on_store(move |store| store.insert(new)).await?,
            };
            Ok(runtime.items().shown(item))
        })
        .await
    }

    /// Returns an item.
    pub async fn item(
        &self,
        caller: &Caller,
        params: CatalogGetParams,
    ) -> Result<CatalogItem, BoxError> {
        let mut item = self.find_item(caller, params.kind, params.item).await?;
        if params.kind == CatalogKind::Volume {
            item.size_bytes = self.volume_bytes(&item.id).await;
        }
        Ok(self.items().shown(item))
    }

    /// Lists the items of the caller, sorted by id.
    pub async fn list_items(
        &self,
        caller: &Caller,
        params: CatalogListParams,
    ) -> Result<CatalogListResult, BoxError> {
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
        let shown = page.items.into_iter().map(|item| self.items().shown(item));
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
        params: CatalogUpdateParams,
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
            Ok(runtime.items().shown(changed.await?))
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
            if kind == CatalogKind::Volume {
                runtime.remove_volume(&id).await;
            }
            drop(reserved);
            Ok(CatalogDeleteResult { deleted: id })
        })
        .await
    }

    fn items(&self) -> &Items {
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
    async fn on_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Catalog) -> box_catalog::Result<T> + Send + 'static,
    ) -> Result<T, BoxError> {
        let store = Arc::clone(self.items().store()?);
        let done = tokio::task::spawn_blocking(move || work(&store)).await;
        let done = done.map_err(|_| BoxError::internal("catalogue task failed"))?;
        Ok(done?)
    }
}

/// Completes work even if the caller stops waiting.
async fn completed<T: Send + 'static>(
    work: impl Future<Output = Result<T, BoxError>> + Send + 'static,
) -> Result<T, BoxError> {
    let done = tokio::spawn(work).await;
    done.unwrap_or_else(|_| Err(BoxError::internal("catalogue task failed")))
}

fn viewer<'a>(caller: &Caller, name: &'a str) -> Viewer<'a> {
    Viewer {
        owner: name,
        sees_all: caller.can_see_all(),
    }
}

fn check_kind(kind: CatalogKind) -> Result<(), BoxError> {
    match kind {
        CatalogKind::Volume | CatalogKind::Template | CatalogKind::Snapshot => Ok(()),
        CatalogKind::Image => Err(unsupported("kind", "image.* serves images")),
        CatalogKind::Pool => Err(unsupported("kind", "this runtime has no pools")),
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
        _ => {}
    }
}
