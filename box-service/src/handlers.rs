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

/// An action without policy, forwarded with unparsed data.
/// The runtime checks the data where it uses them.
struct Unread<A>(PhantomData<A>);

/// A streaming action without policy, forwarded with unparsed data.
struct UnreadStream<A>(PhantomData<A>);

type Text = Box<RawValue>;

impl<A: Action> Action for Unread<A> {
    const NAME: &'static str = A::NAME;
    type Params = Text;
    type Result = Text;
    type Chunk = Never;
}

impl<A: Action> Action for UnreadStream<A> {
    const NAME: &'static str = A::NAME;
    type Params = Text;
    type Result = Text;
    type Chunk = Text;
}

/// Checks that an action has no chunks: only such a one is forwarded without them.
const fn streams_nothing<A: Action<Chunk = Never>>() {}

macro_rules! serve {
    (decided: $($decided:ty),+; run: $($run:ty),+; forwarded: $($forwarded:ty),+; streamed: $($streamed:ty),+;) => {
        contract! {
            /// Actions that a [`BoxService`] serves.
            /// This is the contract without `port.share`, which needs an HTTP port.
            pub(crate) Served: $($decided),+, $(Run<$run>),+, $(Unread<$forwarded>),+, $(UnreadStream<$streamed>),+
        }
        const _: () = { $(streams_nothing::<$forwarded>();)+ };
    };
}

serve! {
    decided: BoxCreate, BoxUpdate, SystemStatus;
    run: BoxExec, CommandStart, ShellRun;
    forwarded:
        SystemHealth, SystemConfigure, SystemShutdown,
        BoxGet, BoxList, BoxTransition, BoxDelete,
        CommandGet, CommandList, CommandInput, CommandKill,
        ShellCreate, ShellList, ShellDelete,
        FileWrite, FileStat, FileList, FileFind, FileGrep, FileReplace, FileMove, FileRemove,
        FileMkdir, FileAttributes, FileUnpack,
        PortSend;
    streamed:
        BoxStats, BoxEvents, CommandAttach, FileRead, FileWatch, FilePack, PortOpen;
}

impl<A: Action> Handle<Unread<A>> for BoxService {
    async fn handle(&self, params: Text, call: Call<Unread<A>>) -> Result<Text, BoxError> {
        self.pass_on(params, call).await
    }
}

impl<A: Action> Handle<UnreadStream<A>> for BoxService {
    async fn handle(&self, params: Text, call: Call<UnreadStream<A>>) -> Result<Text, BoxError> {
        self.pass_on(params, call).await
    }
}

impl BoxService {
    /// Forwards a call after the earlier calls of its caller.
    async fn pass_on<A>(&self, params: A::Params, mut call: Call<A>) -> Result<A::Result, BoxError>
    where
        A: Action,
    {
        let caller = call.caller();
        let turn = self.0.turns.take([caller.clone()]);
        let client = self.client_for(&caller).await?;
        turn.comes().await;
        client.forward(&params, &mut call, Some(turn)).await
    }

    /// Returns a router that serves the contract.
    /// It applies policy to `box.create`, `box.exec` and `box.update`, and adds the service's data to `system.status`.
    /// It forwards all other actions to the runtime.
    pub fn router(&self) -> Router {
        Served::router(Arc::new(self.clone())).build()
    }
}

pub(crate) fn origin<A: Action>(call: &Call<A>) -> Origin {
    Origin {
        query_id: None,
        caller: call.caller(),
    }
}

impl Handle<BoxCreate> for BoxService {
    async fn handle(
        &self,
        params: BoxCreateParams,
        call: Call<BoxCreate>,
    ) -> Result<BoxCreateResult, BoxError> {
        let origin = origin(&call);
        self.decided_create(params, &origin, Some(call)).await
    }
}

impl Handle<BoxUpdate> for BoxService {
    async fn handle(
        &self,
        params: BoxUpdateParams,
        call: Call<BoxUpdate>,
    ) -> Result<BoxInfo, BoxError> {
        let origin = origin(&call);
        self.decided_update(params, &origin, call).await
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
    fn the_contract_is_served() {
        let served = Served::NAMES.iter().chain([&PortShare::NAME]);
        let served: BTreeSet<_> = served.collect();
        assert_eq!(served, ALL_ACTIONS.iter().collect());
    }
}
