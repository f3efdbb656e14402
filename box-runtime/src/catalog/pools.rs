//! Pools: their items, and which pool can serve a request.

use std::sync::Arc;
use std::time::Duration;

use box_catalog::{NewItem, Viewer};
use box_protocol::catalog::{
    CatalogItem, CatalogKind, ItemContent, PoolChange, PoolContent, PoolDraft, TemplateContent,
};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxSpec, Invalid, ItemId, ItemRef, SpecDraft};
use box_rpc::Caller;

use super::uses::{ItemUse, Refusal};
use super::{Items, viewer};
use crate::pools::{self, Pool, PoolSettings, Pools, member_spec};
use crate::runtime::BoxRuntime;

/// Longest age of a waiting box, within the range of the clock.
const LONGEST_AGE: Duration = Duration::from_hours(24 * 365);

/// The change of a pool, with its template reserved.
pub(super) struct CheckedChange {
    template: ItemUse,
    spec: Option<BoxSpec>,
    /// Why the policy layer refuses its boxes.
    refused: Option<String>,
}

impl Items {
    /// Returns the pools that may have a box for a request.
    pub(crate) fn pools_for(
        &self,
        pools: &Pools,
        owner: &str,
        spec: &BoxSpec,
    ) -> Result<Vec<Arc<Pool>>, BoxError> {
        let viewer = Viewer {
            owner,
            sees_all: false,
        };
        if let Some(pool) = &spec.pool {
            let item = self.store()?.find(viewer, CatalogKind::Pool, pool)?;
            return Ok(pools.get(&item.id).into_iter().collect());
        }
        let (Some(template), Some(store)) = (&spec.template, &self.store) else {
            return Ok(Vec::new());
        };
        let Ok(item) = store.find(viewer, CatalogKind::Template, template) else {
            return Ok(Vec::new());
        };
        let mut of_template = pools.of_template(&item.id);
        of_template.retain(|pool| *pool.owner == *owner);
        Ok(of_template)
    }

    /// Finds a template and reserves it for a pool.
    fn template_of_pool(
        &self,
        viewer: Viewer<'_>,
        template: &ItemRef,
    ) -> Result<(CatalogItem, ItemUse), BoxError> {
        let item = self
            .store()?
            .find(viewer, CatalogKind::Template, template)?;
        let acquired = self.uses.acquire(&item.id, None, true);
        let reserved = acquired.map_err(|refusal| match refusal {
            Refusal::Reserved | Refusal::Writer(_) => {
                let name = &item.name;
                BoxError::conflict(format!("template: another call deletes {name}"))
                    .with_detail(&Detail::of_field("template").of(Subject::Template))
            }
        })?;
        Ok((item, reserved))
    }
}

impl BoxRuntime {
    /// Creates a pool and begins to fill it.
    pub(super) async fn put_pool(
        &self,
        caller: &Caller,
        draft: PoolDraft,
        new: impl FnOnce(ItemContent) -> NewItem,
    ) -> Result<CatalogItem, BoxError> {
        let name = caller.name();
        let found = self
            .items()
            .template_of_pool(viewer(caller, &name), &draft.template)?;
        let (template, reserved) = found;
        let spec = self.spec_of_pool(draft.spec, &template)?;
        let content = PoolContent {
            template: template.id.clone(),
            size: draft.size,
            max_age_sec: draft.max_age_sec,
            ready: 0,
        };
        let settings = settings(&content);
        let new = new(ItemContent::Pool(content));
        let item = self.on_store(move |store| store.insert(new)).await?;
        let owner = item.owner.as_str().into();
        let pool = Pool::new(
            item.id.clone(),
            owner,
            item.name.clone(),
            reserved,
            settings,
        );
        self.open_pool(pool, spec);
        Ok(item)
    }

    /// Changes the waiting boxes of a pool after its item has changed.
    pub(super) fn change_pool(&self, item: &CatalogItem, checked: Option<CheckedChange>) {
        let (ItemContent::Pool(content), Some(pool)) =
            (&item.content, self.shared().pools.get(&item.id))
        else {
            return;
        };
        pool.configure(item.name.clone(), settings(content));
        let Some(checked) = checked else {
            return;
        };
        pool.set_template(checked.template);
        if let Some(reason) = checked.refused {
            pool.refuse(reason);
        } else if let Some(spec) = checked.spec {
            pool.set_spec(spec);
        }
    }

    /// Checks the change of a pool: its new template and the spec of its boxes.
    pub(super) fn check_pool_change(
        &self,
        caller: &Caller,
        item: &CatalogItem,
        change: &mut PoolChange,
    ) -> Result<Option<CheckedChange>, BoxError> {
        let ItemContent::Pool(content) = &item.content else {
            return Ok(None);
        };
        let name = caller.name();
        let template = match &change.template {
            Some(template) => template.clone(),
            None => ItemRef::new(&content.template)?,
        };
        let items = self.items();
        let (item, template) = items.template_of_pool(viewer(caller, &name), &template)?;
        if change.template.is_some() {
            change.template = Some(ItemRef::new(&item.id)?);
        }
        let spec = self.spec_of_pool(change.spec.take(), &item)?;
        Ok(Some(CheckedChange {
            template,
            spec,
            refused: change.refused.take(),
        }))
    }

    /// Gives the pools of a template its new spec, unless a policy layer decides their specs.
    pub(super) fn refresh_pools(&self, template: &CatalogItem) {
        for pool in self.shared().pools.of_template(&template.id) {
            match self.spec_of_pool(None, template) {
                Ok(Some(spec)) => pool.set_spec(spec),
                Ok(None) => {}
                Err(error) => pool.refuse(error.message().to_owned()),
            }
        }
    }

    /// Returns the spec of a pool's boxes; `None` if a policy layer has not decided it.
    fn spec_of_pool(
        &self,
        decided: Option<Box<SpecDraft>>,
        template: &CatalogItem,
    ) -> Result<Option<BoxSpec>, BoxError> {
        let draft = match (decided, &template.content) {
            (Some(decided), _) => *decided,
            (None, ItemContent::Template(content)) if !self.shared().config.decided_pools => {
                let TemplateContent { spec } = &**content;
                spec.clone()
            }
            _ => return Ok(None),
        };
        let spec = member_spec(draft)?;
        if !spec.volumes.is_empty() {
            let rule = "its boxes mount volumes, so they cannot wait in a pool";
            return Err(Invalid::new("template", rule).into());
        }
        Ok(Some(spec))
    }

    /// Opens the pools of an earlier process.
    pub(crate) fn open_pools(&self) {
        let Some(store) = &self.items().store else {
            return;
        };
        for item in store.all(CatalogKind::Pool) {
            let ItemContent::Pool(content) = &item.content else {
                continue;
            };
            let reserved = self.items().uses.adopt(&content.template, None);
            let (owner, name) = (item.owner.as_str().into(), item.name.clone());
            let pool = Pool::new(item.id.clone(), owner, name, reserved, settings(content));
            let spec = match store.get(CatalogKind::Template, &content.template) {
                Ok(template) => self.spec_of_pool(None, &template),
                Err(error) => Err(error.into()),
            };
            if let Err(error) = &spec {
                pool.refuse(error.message().to_owned());
            }
            self.open_pool(pool, spec.ok().flatten());
        }
    }

    fn open_pool(&self, pool: Arc<Pool>, spec: Option<BoxSpec>) {
        if let Some(spec) = spec {
            pool.set_spec(spec);
        }
        self.shared().pools.insert(Arc::clone(&pool));
        pools::start(self.shared_arc(), self.registry().downgrade(), pool);
    }

    /// Ends the waiting boxes of a deleted pool.
    pub(super) async fn close_pool(&self, id: &ItemId) {
        if let Some(pool) = self.shared().pools.remove(id) {
            pool.ended().await;
        }
    }
}

fn settings(content: &PoolContent) -> PoolSettings {
    PoolSettings {
        size: content.size as usize,
        max_age: Duration::from_secs(content.max_age_sec).min(LONGEST_AGE),
    }
}
