//! Maps the actions of the contract to the methods of the handle.

use std::future::Future;
use std::sync::Arc;

use box_protocol::actions::{
    BackendInfo, BoxApply, BoxCheckpoint, BoxCreate, BoxCreateParams, BoxCreateResult, BoxDelete,
    BoxDeleteParams, BoxDeleteResult, BoxDiff, BoxDiscard, BoxEvents, BoxExec, BoxExecParams,
    BoxFork, BoxGet, BoxGetParams, BoxGetResult, BoxList, BoxListParams, BoxListResult,
    BoxRollback, BoxSnapshot, BoxStats, BoxTransition, BoxTransitionParams, BoxTransitionResult,
    BoxUpdate, BoxUpdateParams, CatalogDelete, CatalogDeleteParams, CatalogDeleteResult,
    CatalogGet, CatalogGetParams, CatalogList, CatalogListParams, CatalogListResult, CatalogPut,
    CatalogPutParams, CatalogUpdate, CatalogUpdateParams, CommandAttach, CommandGet, CommandInput,
    CommandKill, CommandList, CommandStart, FileAttributes, FileFind, FileGrep, FileList,
    FileMkdir, FileMove, FilePack, FileRead, FileRemove, FileReplace, FileStat, FileUnpack,
    FileWatch, FileWrite, ImageExport, ImageGet, ImageImport, ImageList, ImageLogin, ImageLogout,
    ImagePrune, ImagePull, ImageRemove, PortOpen, PortSend, ShellCreate, ShellDelete, ShellList,
    ShellRun, SnapshotExport, SystemConfigure, SystemConfigureParams, SystemConfigureResult,
    SystemHealth, SystemShutdown, SystemShutdownParams, SystemShutdownResult, SystemStatus,
    SystemStatusResult,
};
use box_protocol::catalog::CatalogItem;
use box_protocol::{BoxError, BoxExecutionResult, BoxInfo, Invalid};
use box_rpc::{Action, Call, Empty, Handle, Router, contract};
use futures::future::Either;
use tokio::sync::mpsc;

use crate::runtime::BoxRuntime;

/// Capacity of the channel between a box and the connection that reads its chunks.
const CHUNK_CAPACITY: usize = 4;

contract! {
    /// The actions of the contract that a runtime serves.
    pub RuntimeActions:
        SystemHealth, SystemStatus, SystemConfigure, SystemShutdown,
        BoxCreate, BoxGet, BoxList, BoxUpdate, BoxDelete, BoxExec, BoxStats, BoxTransition, BoxEvents,
        BoxDiff, BoxApply, BoxDiscard,
        BoxSnapshot, BoxFork, BoxCheckpoint, BoxRollback, SnapshotExport,
        FileRead, FileWrite, FileStat, FileList, FileFind, FileGrep, FileReplace, FileMove, FileRemove, FileMkdir,
        FileAttributes, FileWatch, FilePack, FileUnpack,
        CommandStart, CommandAttach, CommandGet, CommandList, CommandInput, CommandKill,
        ShellCreate, ShellRun, ShellList, ShellDelete,
        PortOpen, PortSend,
        CatalogPut, CatalogGet, CatalogList, CatalogUpdate, CatalogDelete,
        ImagePull, ImageImport, ImageExport, ImageList, ImageGet, ImageRemove, ImagePrune, ImageLogin, ImageLogout,
}

impl BoxRuntime {
    /// Returns a router that serves the contract.
    pub fn router(&self) -> Router {
        RuntimeActions::router(Arc::new(self.clone())).build()
    }
}

impl Handle<SystemHealth> for BoxRuntime {
    async fn handle(&self, _: Empty, _: Call<SystemHealth>) -> Result<BackendInfo, BoxError> {
        Ok(self.health().await)
    }
}

impl Handle<BoxGet> for BoxRuntime {
    async fn handle(
        &self,
        params: BoxGetParams,
        call: Call<BoxGet>,
    ) -> Result<BoxGetResult, BoxError> {
        let caller = call.caller();
        let info = match (&params.box_id, params.name) {
            (Some(id), None) => self.get(&caller, id).await?,
            (None, Some(name)) => {
                let gateway = params.gateway.unwrap_or_default();
                self.get_named(&caller, gateway, name).await?
            }
            _ => return Err(Invalid::new("box_id", "give either box_id or name").into()),
        };
        let guest = if params.guest {
            Some(self.guest(&caller, &info.box_id).await?)
        } else {
            None
        };
        Ok(BoxGetResult { info, guest })
    }
}

impl Handle<BoxList> for BoxRuntime {
    async fn handle(
        &self,
        params: BoxListParams,
        call: Call<BoxList>,
    ) -> Result<BoxListResult, BoxError> {
        self.list(&call.caller(), &params).await
    }
}

impl Handle<SystemStatus> for BoxRuntime {
    async fn handle(
        &self,
        _: Empty,
        call: Call<SystemStatus>,
    ) -> Result<SystemStatusResult, BoxError> {
        self.status(&call.caller()).await
    }
}

/// Implements actions that pass their parameters to a method unchanged.
macro_rules! plain {
    ($($action:ty: $method:ident($params:ty) -> $result:ty;)*) => {$(
        impl Handle<$action> for BoxRuntime {
            async fn handle(&self, params: $params, call: Call<$action>) -> Result<$result, BoxError> {
                self.$method(&call.caller(), params).await
            }
        }
    )*};
}
pub(crate) use plain;

/// Implements actions that send chunks if the caller wants them.
macro_rules! streaming {
    ($($action:ty: $method:ident($params:ty) -> $result:ty;)*) => {$(
        impl Handle<$action> for BoxRuntime {
            async fn handle(&self, params: $params, call: Call<$action>) -> Result<$result, BoxError> {
                let caller = call.caller();
                crate::handlers::streamed(call, |chunks| self.$method(&caller, params, chunks)).await
            }
        }
    )*};
}
pub(crate) use streaming;

plain! {
    SystemConfigure: configure(SystemConfigureParams) -> SystemConfigureResult;
    SystemShutdown: shutdown(SystemShutdownParams) -> SystemShutdownResult;
    BoxCreate: create(BoxCreateParams) -> BoxCreateResult;
    BoxUpdate: update(BoxUpdateParams) -> BoxInfo;
    BoxTransition: transition(BoxTransitionParams) -> BoxTransitionResult;
    BoxDelete: delete(BoxDeleteParams) -> BoxDeleteResult;
    CatalogPut: put_item(CatalogPutParams) -> CatalogItem;
    CatalogGet: item(CatalogGetParams) -> CatalogItem;
    CatalogList: list_items(CatalogListParams) -> CatalogListResult;
    CatalogUpdate: update_item(CatalogUpdateParams) -> CatalogItem;
    CatalogDelete: delete_item(CatalogDeleteParams) -> CatalogDeleteResult;
}

impl Handle<BoxExec> for BoxRuntime {
    /// Consumes the parameters before the first await, so the future holds none.
    fn handle(
        &self,
        params: BoxExecParams,
        mut call: Call<BoxExec>,
    ) -> impl Future<Output = Result<BoxExecutionResult, BoxError>> + Send {
        let caller = call.caller();
        let streams = params.attach.is_some() && call.chunks().is_some();
        if streams {
            let exec = move |chunks| self.exec_streamed(&caller, params, chunks);
            Either::Left(Box::pin(forwarded(call, exec)))
        } else {
            Either::Right(self.exec(&caller, params))
        }
    }
}

/// Runs work that may send chunks, and forwards them if the caller wants them.
pub(crate) async fn streamed<A: Action, W>(
    mut call: Call<A>,
    work: impl FnOnce(Option<mpsc::Sender<A::Chunk>>) -> W,
) -> Result<A::Result, BoxError>
where
    W: Future<Output = Result<A::Result, BoxError>>,
{
    if call.chunks().is_none() {
        return work(None).await;
    }
    forwarded(call, |chunks| work(Some(chunks))).await
}

/// Runs work and forwards its chunks until the work drops the sender.
pub(crate) fn forwarded<A: Action, W>(
    mut call: Call<A>,
    work: impl FnOnce(mpsc::Sender<A::Chunk>) -> W,
) -> impl Future<Output = Result<A::Result, BoxError>>
where
    W: Future<Output = Result<A::Result, BoxError>>,
{
    let (sender, mut chunks) = mpsc::channel(CHUNK_CAPACITY);
    let running = work(sender);
    // The block owns the receiver and drops it at its end, so the box does not wait for it.
    let forward = async move {
        while let (Some(chunk), Some(sink)) = (chunks.recv().await, call.chunks()) {
            sink.send(&chunk).await?;
        }
        Ok(())
    };
    async move {
        let (result, forwarded) = tokio::join!(running, forward);
        forwarded.and(result)
    }
}
