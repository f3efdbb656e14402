//! Policy of pools: the spec of boxes that start before a caller asks for them.
//!
//! The service decides that spec as it decides a request: the template, then the profile of the
//! owner. A runtime starts no box of a pool before. The service decides again when a template or
//! the policy changes, and when it starts.

use box_protocol::actions::{
    CatalogGet, CatalogGetParams, CatalogList, CatalogListParams, CatalogPut, CatalogPutParams,
    CatalogUpdate, CatalogUpdateParams,
};
use box_protocol::catalog::{
    CatalogItem, CatalogKind, ItemChange, ItemContent, ItemDraft, PoolChange, PoolContent,
};
use box_protocol::{BoxError, Code, ItemId, ItemRef, SpecDraft};
use box_rpc::{Call, Caller, Handle};

use crate::client::RuntimeClient;
use crate::policy::Policy;
use crate::service::BoxService;

impl Handle<CatalogPut> for BoxService {
    async fn handle(
        &self,
        mut params: CatalogPutParams,
        mut call: Call<CatalogPut>,
    ) -> Result<CatalogItem, BoxError> {
        let caller = call.caller();
        let _call = self.begin_call(&caller)?;
        self.decide_item(&mut params, &caller).await?;
        let client = self.client_for(&caller).await?;
        client.forward(&params, &mut call, None).await
    }
}

impl Handle<CatalogUpdate> for BoxService {
    async fn handle(
        &self,
        mut params: CatalogUpdateParams,
        mut call: Call<CatalogUpdate>,
    ) -> Result<CatalogItem, BoxError> {
        let caller = call.caller();
        let _call = self.begin_call(&caller)?;
        self.decide_item_change(&mut params, &caller).await?;
        let client = self.client_for(&caller).await?;
        let item: CatalogItem = client.forward(&params, &mut call, None).await?;
        if params.kind == CatalogKind::Template {
            self.decide_pools_of(&item.id, &client, &caller).await;
        }
        Ok(item)
    }
}

impl BoxService {
    /// Decides about a new item: the spec of a pool. A gateway calls it before the runtime.
    pub async fn decide_item(
        &self,
        params: &mut CatalogPutParams,
        caller: &Caller,
    ) -> Result<(), BoxError> {
        if let ItemDraft::Pool(pool) = &mut params.content {
            let rules = self.rules();
            let spec = self.pool_spec(rules.policy_for(caller), &pool.template, caller);
            pool.spec = Some(Box::new(spec.await?));
        }
        Ok(())
    }

    /// Decides about changes of an item: the spec of a pool. A gateway calls it before the runtime.
    pub async fn decide_item_change(
        &self,
        params: &mut CatalogUpdateParams,
        caller: &Caller,
    ) -> Result<(), BoxError> {
        if params.kind != CatalogKind::Pool {
            return Ok(());
        }
        let client = self.client_for(caller).await?;
        let mut change = match params.content.take() {
            None => Box::new(PoolChange::default()),
            Some(ItemChange::Pool(change)) => change,
            other => {
                // The runtime refuses a change of another kind.
                params.content = other;
                return Ok(());
            }
        };
        let get = CatalogGetParams {
            kind: CatalogKind::Pool,
            item: params.item.clone(),
        };
        let item = client.call::<CatalogGet>(&get).await?;
        let template = match &change.template {
            Some(template) => template.clone(),
            None => ItemRef::new(&pool_of(&item)?.template)?,
        };
        let rules = self.rules();
        let spec = self.pool_spec(rules.policy_of(&item.owner), &template, caller);
        change.spec = Some(Box::new(spec.await?));
        change.refused = None;
        params.content = Some(ItemChange::Pool(change));
        Ok(())
    }

    /// Decides the specs of the pools of a template that has changed.
    async fn decide_pools_of(&self, template: &ItemId, client: &RuntimeClient, caller: &Caller) {
        let rules = self.rules();
        let pools = match all_pools(client).await {
            Ok(pools) => pools,
            Err(error) => return tracing::warn!(%error, "cannot list the pools of a template"),
        };
        for item in pools {
            if pool_of(&item).is_ok_and(|pool| pool.template == *template) {
                let policy = rules.policy_of(&item.owner);
                self.decide_pool(policy, &item, client, caller).await;
            }
        }
    }

    /// Decides the specs of all pools, after a start or a change of policy.
    pub(crate) async fn decide_pools(&self) {
        let Ok(client) = self.client().await else {
            return;
        };
        let rules = self.rules();
        let pools = match all_pools(&client).await {
            Ok(pools) => pools,
            Err(error) if error.code() == Code::Unsupported => return,
            Err(error) => return tracing::warn!(%error, "cannot list the pools"),
        };
        for item in pools {
            let policy = rules.policy_of(&item.owner);
            self.decide_pool(policy, &item, &client, &Caller::Local)
                .await;
        }
    }

    async fn decide_pool(
        &self,
        policy: &Policy,
        item: &CatalogItem,
        client: &RuntimeClient,
        caller: &Caller,
    ) {
        let decided = async {
            let template = ItemRef::new(&pool_of(item)?.template)?;
            let decided = self.pool_spec(policy, &template, caller).await;
            let refused = decided
                .as_ref()
                .err()
                .map(|error| error.message().to_owned());
            let change = PoolChange {
                spec: decided.ok().map(Box::new),
                refused,
                ..PoolChange::default()
            };
            let params = CatalogUpdateParams {
                content: Some(ItemChange::Pool(Box::new(change))),
                ..CatalogUpdateParams::of(CatalogKind::Pool, ItemRef::new(&item.id)?)
            };
            client.call::<CatalogUpdate>(&params).await
        };
        if let Err(error) = decided.await {
            let (owner, pool) = (&item.owner, &item.name);
            tracing::warn!(owner, %pool, %error, "cannot decide the spec of a pool; it stays empty");
        }
    }

    /// Decides the spec of a pool's boxes.
    async fn pool_spec(
        &self,
        policy: &Policy,
        template: &ItemRef,
        caller: &Caller,
    ) -> Result<SpecDraft, BoxError> {
        let mut draft = SpecDraft {
            template: Some(template.clone()),
            ..SpecDraft::default()
        };
        self.apply_template(&mut draft, caller).await?;
        // Every box of the pool gets an id of its own.
        draft.box_id = Some("pool".to_owned());
        let decision = self.decide_under(policy, draft, caller).await?;
        Ok(SpecDraft {
            box_id: None,
            ..SpecDraft::from(decision.spec).brief()
        })
    }
}

fn pool_of(item: &CatalogItem) -> Result<&PoolContent, BoxError> {
    match &item.content {
        ItemContent::Pool(pool) => Ok(pool),
        _ => Err(BoxError::internal(
            "the runtime returned another kind of item",
        )),
    }
}

/// Returns all pools that the caller of the client sees.
async fn all_pools(client: &RuntimeClient) -> Result<Vec<CatalogItem>, BoxError> {
    let mut params = CatalogListParams::of(CatalogKind::Pool);
    let mut pools = Vec::new();
    loop {
        let page = client.call::<CatalogList>(&params).await?;
        pools.extend(page.items);
        match page.next {
            Some(next) => params.after = Some(next),
            None => return Ok(pools),
        }
    }
}
