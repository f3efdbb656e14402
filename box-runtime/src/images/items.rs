//! Images as items of the catalog: `catalog.get` and `catalog.list`.

use box_protocol::actions::{
    CatalogListParams, CatalogListResult, ImageGetParams, ImageInfo, ImageListParams,
};
use box_protocol::catalog::{CatalogItem, ImageContent, ItemContent, ItemState};
use box_protocol::{BoxError, ItemId, ItemRef, Labels, Name};
use box_rpc::Caller;

use crate::runtime::BoxRuntime;

/// The owner of images, which all callers share.
const OWNER: &str = "server";

impl BoxRuntime {
    /// Returns an image as an item.
    pub(crate) async fn image_item(
        &self,
        caller: &Caller,
        item: &ItemRef,
    ) -> Result<CatalogItem, BoxError> {
        let params = ImageGetParams {
            image: item.to_string(),
        };
        item_of(self.get_image(caller, params).await?)
    }

    /// Lists the images as items, sorted by digest.
    pub(crate) async fn image_items(
        &self,
        caller: &Caller,
        params: &CatalogListParams,
    ) -> Result<CatalogListResult, BoxError> {
        let images = self.list_images(caller, ImageListParams {}).await?.items;
        let items = images
            .into_iter()
            .map(item_of)
            .collect::<Result<Vec<_>, _>>();
        let mut items = items?;
        items.retain(|item| {
            params.name.as_ref().is_none_or(|name| item.name == *name)
                && params
                    .tag
                    .as_ref()
                    .is_none_or(|tag| item.tags.contains(tag))
                && (params.state.is_empty() || params.state.contains(&item.state))
                && params.labels.is_empty()
                && params.source_box.is_none()
        });
        items.sort_by(|a, b| a.id.cmp(&b.id));
        let total = items.len() as u64;
        if let Some(after) = &params.after {
            items.retain(|item| item.id > *after);
        }
        let limit = params.limit.map_or(usize::MAX, |limit| limit as usize);
        let more = items.len() > limit.max(1);
        items.truncate(limit.max(1));
        let next = items.last().filter(|_| more);
        Ok(CatalogListResult {
            next: next.map(|item| item.id.clone()),
            items,
            total,
            damaged: Vec::new(),
        })
    }
}

fn item_of(image: ImageInfo) -> Result<CatalogItem, BoxError> {
    let short = |name: &String| {
        let name = name.strip_prefix("docker.io/").unwrap_or(name);
        Name::new(name.strip_prefix("library/").unwrap_or(name)).ok()
    };
    let mut names = image.names.iter().filter_map(short);
    let name = match names.next() {
        Some(name) => name,
        None => Name::new(&image.digest)?,
    };
    Ok(CatalogItem {
        id: ItemId::new(&image.digest)?,
        name,
        tags: names.collect(),
        owner: OWNER.to_owned(),
        labels: Labels::new(),
        state: ItemState::Ready,
        reason: None,
        created_at: image.created_at,
        updated_at: image.created_at,
        size_bytes: Some(image.disk_bytes),
        used_by: image.uses,
        content: ItemContent::Image(ImageContent {
            digest: image.digest,
            names: image.names,
            platform: image.platform,
        }),
    })
}
