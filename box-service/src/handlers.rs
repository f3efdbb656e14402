//! Handlers of the contract: apply policy to some actions, forward the rest.

use std::marker::PhantomData;
use std::sync::Arc;

#[allow(clippy::wildcard_imports, reason = "the whole contract is served here")]
use box_protocol::actions::*;
use box_protocol::{BoxError, BoxInfo};
use box_rpc::{Action, Call, Empty, Handle, Never, Router, contract};
use serde_json::value::RawValue;

use crate::audit::Origin;
use crate::run::Run;
use crate::service::BoxService;

/// An action without policy, forwarded as unparsed JSON.
/// The runtime validates it.
struct Forwarded<A>(PhantomData<A>);

/// A streaming action without policy, forwarded as unparsed JSON.
struct ForwardedStream<A>(PhantomData<A>);

type RawJson = Box<RawValue>;

impl<A: Action> Action for Forwarded<A> {
    const NAME: &'static str = A::NAME;
    type Params = RawJson;
    type Result = RawJson;
    type Chunk = Never;
}

impl<A: Action> Action for ForwardedStream<A> {
    const NAME: &'static str = A::NAME;
    type Params = RawJson;
    type Result = RawJson;
    type Chunk = RawJson;
}

/// Fails to compile for an action with chunks, which [`Forwarded`] would lose.
const fn assert_no_chunks<A: Action<Chunk = Never>>() {}

macro_rules! serve {
    (decided: $($decided:ty),+; run: $($run:ty),+; forwarded: $($forwarded:ty),+; streamed: $($streamed:ty),+;) => {
        contract! {
            /// Actions that a [`BoxService`] serves.
            /// This is the contract without `port.share`, which needs an HTTP port.
            pub(crate) ServiceActions: $($decided),+, $(Run<$run>),+, $(Forwarded<$forwarded>),+, $(ForwardedStream<$streamed>),+
        }
        const _: () = { $(assert_no_chunks::<$forwarded>();)+ };
    };
}

serve! {
    decided: BoxCreate, BoxUpdate, BoxApply, SystemStatus, CatalogPut, CatalogUpdate;
    run: BoxExec, CommandStart, ShellRun;
    forwarded:
        SystemHealth, SystemConfigure, SystemShutdown,
        BoxGet, BoxList, BoxTransition, BoxDelete, BoxSnapshot, BoxFork, BoxCheckpoint,
        BoxRollback, BoxDiff, BoxDiscard,
        CommandGet, CommandList, CommandInput, CommandKill,
        ShellCreate, ShellList, ShellDelete,
        FileWrite, FileStat, FileList, FileFind, FileGrep, FileReplace, FileMove, FileRemove,
        FileMkdir, FileAttributes, FileUnpack,
        PortSend,
        CatalogGet, CatalogList, CatalogDelete,
        ImageImport, ImageList, ImageGet, ImageRemove, ImagePrune, ImageLogin, ImageLogout;
    streamed:
        BoxStats, BoxEvents, CommandAttach, FileRead, FileWatch, FilePack, PortOpen, ImagePull, ImageExport,
        SnapshotExport;
}

impl<A: Action> Handle<Forwarded<A>> for BoxService {
    async fn handle(&self, params: RawJson, call: Call<Forwarded<A>>) -> Result<RawJson, BoxError> {
        self.forward_in_order(params, call).await
    }
}

impl<A: Action> Handle<ForwardedStream<A>> for BoxService {
    async fn handle(
        &self,
        params: RawJson,
        call: Call<ForwardedStream<A>>,
    ) -> Result<RawJson, BoxError> {
        self.forward_in_order(params, call).await
    }
}

impl BoxService {
    /// Forwards a call after the earlier calls of its caller.
    async fn forward_in_order<A>(
        &self,
        params: A::Params,
        mut call: Call<A>,
    ) -> Result<A::Result, BoxError>
    where
        A: Action,
    {
        let caller = call.caller();
        let _call = self.begin_call(&caller)?;
        let turn = self.0.turns.take([caller.clone()]);
        let client = self.client_for(&caller).await?;
        turn.wait().await;
        client.forward(&params, &mut call, Some(turn)).await
    }

    /// Returns a router that serves the contract.
    /// It applies policy to boxes, commands, runs and items, and adds the service's data to `system.status`.
    /// It forwards all other actions to the runtime.
    pub fn router(&self) -> Router {
        ServiceActions::router(Arc::new(self.clone())).build()
    }
}

pub(crate) fn origin<A: Action>(call: &Call<A>) -> Origin {
    Origin::of(&call.caller())
}

impl Handle<BoxCreate> for BoxService {
    async fn handle(
        &self,
        params: BoxCreateParams,
        call: Call<BoxCreate>,
    ) -> Result<BoxCreateResult, BoxError> {
        let origin = origin(&call);
        let _call = self.begin_call(&origin.caller)?;
        self.create_with_policy(params, &origin, Some(call)).await
    }
}

impl Handle<BoxUpdate> for BoxService {
    async fn handle(
        &self,
        params: BoxUpdateParams,
        call: Call<BoxUpdate>,
    ) -> Result<BoxInfo, BoxError> {
        let origin = origin(&call);
        let _call = self.begin_call(&origin.caller)?;
        self.update_with_policy(params, &origin, call).await
    }
}

impl Handle<BoxApply> for BoxService {
    async fn handle(
        &self,
        params: BoxApplyParams,
        call: Call<BoxApply>,
    ) -> Result<BoxApplyResult, BoxError> {
        let origin = origin(&call);
        let _call = self.begin_call(&origin.caller)?;
        self.apply_with_policy(params, &origin, call).await
    }
}

impl Handle<SystemStatus> for BoxService {
    async fn handle(
        &self,
        _: Empty,
        call: Call<SystemStatus>,
    ) -> Result<SystemStatusResult, BoxError> {
        Ok(self.status_for(&call.caller()).await.runtime)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn all_actions_but_port_share_are_served() {
        let names = ServiceActions::NAMES.iter().chain([&PortShare::NAME]);
        let names: BTreeSet<_> = names.collect();
        assert_eq!(names, ALL_ACTIONS.iter().collect());
    }
}
