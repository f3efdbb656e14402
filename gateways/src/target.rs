//! Where the boxes of a client are: in this process, or on a server that this process is a client of.

use box_client::{BoxClient, ClientError};
use box_protocol::actions::{
    BoxCheckpoint, BoxCheckpointParams, BoxCreate, BoxCreateParams, BoxCreateResult, BoxDelete,
    BoxDeleteParams, BoxDeleteResult, BoxFork, BoxForkParams, BoxForkResult, BoxGet, BoxGetParams,
    BoxList, BoxListParams, BoxListResult, BoxRollback, BoxRollbackParams, CommandAttach,
    CommandAttachParams, CommandAttachResult, CommandChunk, CommandGet, CommandInput,
    CommandInputParams, CommandInputResult, CommandKey, CommandKill, CommandKillParams,
    CommandKillResult, CommandStart, CommandStartParams, CommandStartResult, IfExists, PortShare,
    PortShareParams, ShellCreate, ShellCreateParams, ShellCreateResult, ShellRun, ShellRunParams,
};
use box_protocol::{
    BoxError, BoxId, BoxInfo, Checkpoint, Code, CommandInfo, GatewayName, Invalid, SpecDraft,
};
use box_rpc::{Action, Caller};
use box_runtime::{BoxRuntime, DataPlane};
use box_service::BoxService;
use futures::StreamExt as _;
use tokio::sync::mpsc;

use crate::http::body::Params;
use crate::http::context::Context;

/// The box of calls that name none.
#[derive(Debug, Clone)]
pub(crate) struct DefaultBox {
    /// The id.
    pub(crate) id: BoxId,
    /// The spec of a box that the first call creates; `None` if the box must exist.
    pub(crate) spec: Option<Box<SpecDraft>>,
}

impl DefaultBox {
    /// Returns the box that the query of a request names, or the one of its token, with a prefix in its id.
    pub(crate) fn of_request(
        context: &Context,
        params: &Params,
        prefix: &str,
    ) -> Result<Self, Invalid> {
        let named = params.get("box").map(str::to_owned);
        // The names of tokens may have characters that the ids of boxes have not.
        let own = || format!("{prefix}-{}", context.caller.name().replace('/', "-"));
        Ok(Self {
            id: BoxId::new(named.unwrap_or_else(own))?,
            spec: Some(Box::new(SpecDraft::default())),
        })
    }

    /// Creates the box if it does not exist, and returns the result of the creation.
    pub(crate) async fn open(&self, target: &Target) -> Result<Option<BoxCreateResult>, BoxError> {
        let Some(spec) = &self.spec else {
            return Ok(None);
        };
        match target.get(&self.id).await {
            Err(error) if error.code() == Code::NotFound => {
                let mut spec = SpecDraft::clone(spec);
                spec.box_id = Some(self.id.as_str().to_owned());
                target.create(spec, IfExists::Reuse).await.map(Some)
            }
            found => found.map(|_| None),
        }
    }
}

/// Where boxes are.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    /// In this process, behind the policy.
    InProcess(InProcess),
    /// On a server, whose policy decides about every call.
    Server(BoxClient),
}

/// The boxes of this process, as a caller sees them.
#[derive(Debug, Clone)]
pub(crate) struct InProcess {
    pub(crate) policy: BoxService,
    pub(crate) runtime: BoxRuntime,
    pub(crate) caller: Caller,
    /// The gateway whose policy applies.
    pub(crate) gateway: GatewayName,
}

impl InProcess {
    /// Starts a command, if the policy allows it.
    pub(crate) async fn start_command(
        &self,
        mut params: CommandStartParams,
        chunks: Option<mpsc::Sender<CommandChunk>>,
    ) -> Result<CommandStartResult, BoxError> {
        let of = self.runtime.get(&self.caller, &params.box_id).await.ok();
        let through = (&self.caller, &self.gateway);
        let deciding = self
            .policy
            .decide_command(&mut params, of.as_ref(), through);
        let adjusted = deciding.await?;
        let starting = self.runtime.start_command(&self.caller, params, chunks);
        let mut started = starting.await?;
        started.adjusted.extend(adjusted);
        Ok(started)
    }

    /// Runs a text in a shell, if the policy allows it.
    pub(crate) async fn run_in_shell(
        &self,
        mut params: ShellRunParams,
        chunks: Option<mpsc::Sender<CommandChunk>>,
    ) -> Result<CommandStartResult, BoxError> {
        let of = self.runtime.get(&self.caller, &params.box_id).await.ok();
        let through = (&self.caller, &self.gateway);
        let deciding = self.policy.decide_run(&mut params, of.as_ref(), through);
        let adjusted = deciding.await?;
        let running = self.runtime.run_in_shell(&self.caller, params, chunks);
        let mut ran = running.await?;
        ran.adjusted.extend(adjusted);
        Ok(ran)
    }
}

/// Methods that are one call each, by the name of the method of the runtime.
macro_rules! calls {
    ($($name:ident: $action:ty, $params:ty => $result:ty;)*) => {
        impl Target {
            $(pub(crate) async fn $name(&self, params: $params) -> Result<$result, BoxError> {
                match self {
                    Self::InProcess(InProcess { runtime, caller, .. }) => runtime.$name(caller, params).await,
                    Self::Server(client) => call::<$action>(client, &params).await,
                }
            })*
        }
    };
}

calls! {
    delete: BoxDelete, BoxDeleteParams => BoxDeleteResult;
    fork: BoxFork, BoxForkParams => BoxForkResult;
    checkpoint: BoxCheckpoint, BoxCheckpointParams => Checkpoint;
    rollback: BoxRollback, BoxRollbackParams => BoxInfo;
    create_shell: ShellCreate, ShellCreateParams => ShellCreateResult;
    get_command: CommandGet, CommandKey => CommandInfo;
    input_command: CommandInput, CommandInputParams => CommandInputResult;
    kill_command: CommandKill, CommandKillParams => CommandKillResult;
}

/// Methods that start a command, with chunks before the result.
macro_rules! streams {
    ($($name:ident: $action:ty, $params:ty => $result:ty;)*) => {
        impl Target {
            $(pub(crate) async fn $name(
                &self,
                params: $params,
                chunks: mpsc::Sender<CommandChunk>,
            ) -> Result<$result, BoxError> {
                match self {
                    Self::InProcess(process) => process.$name(params, chunks.into()).await,
                    Self::Server(client) => stream::<$action>(client, &params, chunks).await,
                }
            })*
        }
    };
}

streams! {
    start_command: CommandStart, CommandStartParams => CommandStartResult;
    run_in_shell: ShellRun, ShellRunParams => CommandStartResult;
}

impl Target {
    /// Reads the output of a command.
    pub(crate) async fn attach_command(
        &self,
        params: CommandAttachParams,
        chunks: mpsc::Sender<CommandChunk>,
    ) -> Result<CommandAttachResult, BoxError> {
        match self {
            Self::InProcess(InProcess {
                runtime, caller, ..
            }) => runtime.attach_command(caller, params, chunks).await,
            Self::Server(client) => stream::<CommandAttach>(client, &params, chunks).await,
        }
    }

    /// Returns the state and settings of a box.
    pub(crate) async fn get(&self, id: &BoxId) -> Result<BoxInfo, BoxError> {
        match self {
            Self::InProcess(InProcess {
                runtime, caller, ..
            }) => runtime.get(caller, id).await,
            Self::Server(client) => {
                let params = BoxGetParams::new(id.clone());
                Ok(call::<BoxGet>(client, &params).await?.info)
            }
        }
    }

    /// Lists boxes.
    pub(crate) async fn list(&self, params: &BoxListParams) -> Result<BoxListResult, BoxError> {
        match self {
            Self::InProcess(InProcess {
                runtime, caller, ..
            }) => runtime.list(caller, params).await,
            Self::Server(client) => call::<BoxList>(client, params).await,
        }
    }

    /// Creates a box with a spec that the policy allows.
    pub(crate) async fn create(
        &self,
        mut spec: SpecDraft,
        if_exists: IfExists,
    ) -> Result<BoxCreateResult, BoxError> {
        match self {
            Self::InProcess(InProcess {
                policy,
                runtime,
                caller,
                gateway,
            }) => {
                spec.gateway = Some(gateway.clone());
                let decided = policy
                    .decide_spec_and_changes(spec, caller, gateway)
                    .await?;
                let (spec, adjusted) = decided;
                let params = BoxCreateParams {
                    spec,
                    if_exists,
                    template_applied: true,
                    keep_failed: false,
                };
                let created = runtime.create(caller, params).await?;
                Ok(BoxCreateResult {
                    adjusted,
                    ..created
                })
            }
            Self::Server(client) => {
                let params = BoxCreateParams {
                    if_exists,
                    ..BoxCreateParams::new(spec)
                };
                call::<BoxCreate>(client, &params).await
            }
        }
    }

    /// Calls an action about files.
    pub(crate) async fn forward<A: DataPlane>(
        &self,
        params: &A::Params,
    ) -> Result<A::Result, BoxError> {
        match self {
            Self::InProcess(InProcess {
                runtime, caller, ..
            }) => runtime.forward::<A>(caller, params).await,
            Self::Server(client) => call::<A>(client, params).await,
        }
    }

    /// Calls an action about files with chunks before its result.
    pub(crate) async fn forward_streamed<A: DataPlane>(
        &self,
        params: &A::Params,
        chunks: mpsc::Sender<A::Chunk>,
    ) -> Result<A::Result, BoxError> {
        match self {
            Self::InProcess(InProcess {
                runtime, caller, ..
            }) => runtime.forward_streamed::<A>(caller, params, chunks).await,
            Self::Server(client) => stream::<A>(client, params, chunks).await,
        }
    }

    /// Returns an address of a port from a server; `None` if the boxes are in this process.
    pub(crate) async fn shared_by_server(
        &self,
        params: &PortShareParams,
    ) -> Option<Result<String, BoxError>> {
        let Self::Server(client) = self else {
            return None;
        };
        let shared = call::<PortShare>(client, params).await;
        Some(shared.map(|shared| shared.url))
    }
}

/// Calls an action of a server.
async fn call<A: Action>(client: &BoxClient, params: &A::Params) -> Result<A::Result, BoxError> {
    client.call::<A>(params).await.map_err(error)
}

/// Calls an action of a server with chunks before its result. Dropping the future cancels the call.
async fn stream<A: Action>(
    client: &BoxClient,
    params: &A::Params,
    to: mpsc::Sender<A::Chunk>,
) -> Result<A::Result, BoxError> {
    let peer = client.peer().map_err(error)?;
    let failed = |failure| error(ClientError::from(failure));
    let mut chunks = peer.stream::<A>(params).await.map_err(failed)?;
    while let Some(chunk) = chunks.next().await {
        if to.send(chunk.map_err(failed)?).await.is_err() {
            return Err(BoxError::cancelled("the reader has disconnected"));
        }
    }
    drop(to);
    chunks.finish().await.map_err(failed)
}

/// Returns the server's error, or that of the connection to it.
fn error(error: ClientError) -> BoxError {
    match error {
        ClientError::Refused(error) => error,
        other => BoxError::new(other.code(), format!("server: {other}")),
    }
}
