//! Snapshots of images: they have no files of their own.

use std::time::Duration;

use box_catalog::NewItem;
use box_protocol::actions::ImagePullParams;
use box_protocol::catalog::{CatalogItem, ItemContent, ItemState};
use box_protocol::{BoxError, HOST_IMAGE, PullPolicy};
use box_rpc::Caller;

use super::Captured;
use crate::runtime::BoxRuntime;

impl BoxRuntime {
    /// Makes a snapshot of an image, and pulls the image if it is missing.
    ///
    /// The item exists from the start, so that callers can follow its state. After a failure it says why.
    pub(crate) async fn put_image_snapshot(
        &self,
        caller: &Caller,
        image: String,
        mut new: NewItem,
    ) -> Result<CatalogItem, BoxError> {
        new.state = ItemState::Building;
        if let ItemContent::Snapshot(content) = &mut new.content {
            content.keep_failed = true;
        }
        let tags = new.tags.clone();
        let item = self.on_store(move |store| store.insert(new)).await?;
        let made = match self.image_digest(caller, image).await {
            Ok(image) => {
                let captured = Captured {
                    layers: Vec::new(),
                    image,
                    paused: Duration::ZERO,
                };
                self.complete_snapshot(item.id.clone(), tags, captured)
                    .await
            }
            Err(error) => Err(error),
        };
        match made {
            Ok(ready) => Ok(ready),
            Err(error) => {
                self.end_snapshot(item, &error).await?;
                Err(error)
            }
        }
    }

    /// Returns the digest of an image; `None` for the system directories of the machine.
    async fn image_digest(
        &self,
        caller: &Caller,
        image: String,
    ) -> Result<Option<String>, BoxError> {
        if image == HOST_IMAGE {
            return Ok(None);
        }
        let params = ImagePullParams {
            reference: image,
            policy: Some(PullPolicy::Missing),
        };
        let pulled = self.pull_image(caller, params, None).await?;
        Ok(Some(pulled.digest))
    }
}
