//! Images without the feature `native`: a runtime has none.

use box_protocol::actions::{
    CatalogListParams, CatalogListResult, ImageExport, ImageExportParams, ImageExportResult,
    ImageGet, ImageGetParams, ImageImport, ImageImportParams, ImageImportResult, ImageInfo,
    ImageList, ImageListParams, ImageListResult, ImageLogin, ImageLoginParams, ImageLogout,
    ImageLogoutParams, ImagePrune, ImagePruneParams, ImagePruneResult, ImagePull, ImagePullParams,
    ImageRemove, ImageRemoveParams, ImageRemoveResult,
};
use box_protocol::catalog::CatalogItem;
use box_protocol::{BoxError, BoxSpec, ItemRef};
use box_rpc::{Call, Caller, Empty, Handle};
use uuid::Uuid;

use crate::backend::ImageRoot;
use crate::box_actor::entry::ImageDefaults;
use crate::config::RuntimeConfig;
use crate::runtime::BoxRuntime;

#[derive(Clone)]
pub(crate) struct Images;

pub(crate) struct ResolvedImage {
    pub(crate) root: ImageRoot,
    pub(crate) defaults: ImageDefaults,
    pub(crate) lease: Option<box_rpc::Never>,
}

pub(crate) struct HeldImage {
    pub(crate) root: ImageRoot,
}

#[allow(
    clippy::unused_self,
    clippy::unused_async,
    reason = "the functions of the feature `native`"
)]
impl Images {
    pub(crate) fn new(_: &RuntimeConfig) -> Self {
        Self
    }

    pub(crate) fn clean_up(&self) {}

    pub(crate) fn hold(&self, _: Uuid, _: Option<box_rpc::Never>) {}

    pub(crate) fn release(&self, _: Uuid) {}

    pub(crate) async fn export_changes(
        &self,
        _: Option<String>,
        _: Option<std::path::PathBuf>,
        _: tokio::sync::mpsc::Sender<box_protocol::actions::FileChunk>,
    ) -> Result<(Option<String>, u64), BoxError> {
        Err(BoxError::unsupported(
            "snapshot: this runtime writes no archives",
        ))
    }

    pub(crate) async fn resolve(
        &self,
        _: &BoxSpec,
        _: bool,
    ) -> Result<Option<ResolvedImage>, BoxError> {
        Ok(None)
    }

    pub(crate) async fn hold_root(
        &self,
        _: &BoxSpec,
        _: Option<&str>,
    ) -> Result<Option<HeldImage>, BoxError> {
        Ok(None)
    }
}

#[allow(clippy::unused_async, reason = "the functions of the feature `native`")]
impl BoxRuntime {
    pub(crate) async fn pull_image(
        &self,
        _: &Caller,
        _: ImagePullParams,
        _: Option<box_rpc::Never>,
    ) -> Result<ImageInfo, BoxError> {
        Err(BoxError::unsupported(
            "image: this runtime has no store of images",
        ))
    }

    pub(crate) async fn image_item(
        &self,
        _: &Caller,
        _: &ItemRef,
    ) -> Result<CatalogItem, BoxError> {
        Err(BoxError::unsupported(
            "image: this runtime has no store of images",
        ))
    }

    pub(crate) async fn image_items(
        &self,
        _: &Caller,
        _: &CatalogListParams,
    ) -> Result<CatalogListResult, BoxError> {
        Err(BoxError::unsupported(
            "image: this runtime has no store of images",
        ))
    }
}

macro_rules! unsupported {
    ($($action:ty: $params:ty => $result:ty;)*) => {$(
        impl Handle<$action> for BoxRuntime {
            async fn handle(&self, _: $params, _: Call<$action>) -> Result<$result, BoxError> {
                Err(BoxError::unsupported("image: this runtime has no store of images"))
            }
        }
    )*};
}

unsupported! {
    ImagePull: ImagePullParams => ImageInfo;
    ImageImport: ImageImportParams => ImageImportResult;
    ImageExport: ImageExportParams => ImageExportResult;
    ImageList: ImageListParams => ImageListResult;
    ImageGet: ImageGetParams => ImageInfo;
    ImageRemove: ImageRemoveParams => ImageRemoveResult;
    ImagePrune: ImagePruneParams => ImagePruneResult;
    ImageLogin: ImageLoginParams => Empty;
    ImageLogout: ImageLogoutParams => Empty;
}
