//! Items of the catalog, which outlive boxes.

use box_protocol::actions::{
    CatalogDelete, CatalogDeleteParams, CatalogGet, CatalogGetParams, CatalogList,
    CatalogListParams, CatalogPut, CatalogPutParams, CatalogUpdate, CatalogUpdateParams,
};
use box_protocol::catalog::{CatalogItem, CatalogKind};
use box_protocol::{ItemId, ItemRef};

use crate::client::BoxClient;
use crate::error::ClientError;

impl BoxClient {
    /// Creates an item and returns when boxes can use it; `conflict` if its name is taken.
    pub async fn put_item(&self, item: &CatalogPutParams) -> Result<CatalogItem, ClientError> {
        item.content.check()?;
        self.call::<CatalogPut>(item).await
    }

    /// Returns an item by its id, its name or one of its tags.
    pub async fn item(
        &self,
        kind: CatalogKind,
        item: impl AsRef<str>,
    ) -> Result<CatalogItem, ClientError> {
        let item = ItemRef::new(item)?;
        self.call::<CatalogGet>(&CatalogGetParams { kind, item })
            .await
    }

    /// Lists the items that match a filter, on all pages.
    pub async fn items(
        &self,
        mut filter: CatalogListParams,
    ) -> Result<Vec<CatalogItem>, ClientError> {
        let mut items = Vec::new();
        loop {
            let page = self.call::<CatalogList>(&filter).await?;
            let more = !page.items.is_empty();
            items.extend(page.items);
            match page.next {
                Some(next) if more => filter.after = Some(next),
                _ => return Ok(items),
            }
        }
    }

    /// Changes an item.
    pub async fn update_item(
        &self,
        change: &CatalogUpdateParams,
    ) -> Result<CatalogItem, ClientError> {
        if let Some(content) = &change.content {
            content.check()?;
        }
        self.call::<CatalogUpdate>(change).await
    }

    /// Deletes an item with its data; `conflict` if it is in use.
    pub async fn delete_item(
        &self,
        kind: CatalogKind,
        item: impl AsRef<str>,
    ) -> Result<ItemId, ClientError> {
        let item = ItemRef::new(item)?;
        let params = CatalogDeleteParams { kind, item };
        Ok(self.call::<CatalogDelete>(&params).await?.deleted)
    }
}
