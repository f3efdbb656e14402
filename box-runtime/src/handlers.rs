//! The contract over the handle's methods: translation only.

use std::future::Future;
use std::sync::Arc;

use box_protocol::actions::{
    BackendInfo, BoxCreate, BoxCreateParams, BoxCreateResult, BoxDelete, BoxDeleteParams,
    BoxDeleteResult, BoxEvents, BoxExec, BoxExecParams, BoxGet, BoxGetParams, BoxGetResult,
    BoxList, BoxListParams, BoxListResult, BoxStats, BoxTransition, BoxTransitionParams,
    BoxTransitionResult, BoxUpdate, BoxUpdateParams, CommandAttach, CommandGet, CommandInput,
    CommandKill, CommandList, CommandStart, FileAttributes, FileFind, FileGrep, FileList,
    FileMkdir, FileMove, FilePack, FileRead, FileRemove, FileReplace, FileStat, FileUnpack,
    FileWatch, FileWrite, PortOpen, PortSend, ShellCreate, ShellDelete, ShellList, ShellRun,
    SystemConfigure, SystemConfigureParams, SystemConfigureResult, SystemHealth, SystemShutdown,
    SystemShutdownParams, SystemShutdownResult, SystemStatus, SystemStatusResult,
};
use box_protocol::{BoxError, BoxExecutionResult, BoxInfo};
use box_rpc::{Action, Call, Empty, Handle, Router, contract};
use futures::future::Either;
use tokio::sync::mpsc;

use crate::runtime::BoxRuntime;

/// Chunks between a session and the connection that wants them.
const CHUNKS_AHEAD: usize = 4;

contract! {
    /// The actions of the contract that a runtime serves.
    pub Served:
        SystemHealth, SystemStatus, SystemConfigure, SystemShutdown,
        BoxCreate, BoxGet, BoxList, BoxUpdate, BoxDelete, BoxExec, BoxStats, BoxTransition, BoxEvents,
        FileRead, FileWrite, FileStat, FileList, FileFind, FileGrep, FileReplace, FileMove, FileRemove, FileMkdir,
        FileAttributes, FileWatch, FilePack, FileUnpack,
        CommandStart, CommandAttach, CommandGet, CommandList, CommandInput, CommandKill,
        ShellCreate, ShellRun, ShellList, ShellDelete,
        PortOpen, PortSend,
}

impl BoxRuntime {
    /// Serves the contract.
    pub fn router(&self) -> Router {
        Served::router(Arc::new(self.clone())).build()
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
        let (caller, id) = (call.caller(), &params.box_id);
        let guest = if params.guest {
            Some(self.guest(&caller, id).await?)
        } else {
            None
        };
        let info = self.get(&caller, id).await?;
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

/// Those whose method takes the parameters as they came.
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

plain! {
    SystemConfigure: configure(SystemConfigureParams) -> SystemConfigureResult;
    SystemShutdown: shutdown(SystemShutdownParams) -> SystemShutdownResult;
    BoxCreate: create(BoxCreateParams) -> BoxCreateResult;
    BoxUpdate: update(BoxUpdateParams) -> BoxInfo;
    BoxTransition: transition(BoxTransitionParams) -> BoxTransitionResult;
    BoxDelete: delete(BoxDeleteParams) -> BoxDeleteResult;
}

impl Handle<BoxExec> for BoxRuntime {
    /// The parameters become work before the first wait: the future holds neither.
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

/// Does work that has chunks for whoever takes them, and passes them on if this call does.
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

/// Does work and passes its chunks on until it ends; whoever does it lets go of the sender then.
pub(crate) fn forwarded<A: Action, W>(
    mut call: Call<A>,
    work: impl FnOnce(mpsc::Sender<A::Chunk>) -> W,
) -> impl Future<Output = Result<A::Result, BoxError>>
where
    W: Future<Output = Result<A::Result, BoxError>>,
{
    let (sender, mut chunks) = mpsc::channel(CHUNKS_AHEAD);
    let running = work(sender);
    // Moved, so that the receiver ends with the forwarding and the session need not wait for it.
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
