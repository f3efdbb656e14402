//! A box, and everything in it.

use std::num::{NonZeroU16, NonZeroU64};
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{
    AttachOptions, BoxDelete, BoxDeleteParams, BoxEvent, BoxEvents, BoxEventsParams, BoxGet,
    BoxGetParams, BoxGetResult, BoxStats, BoxStatsParams, BoxStatsResult, BoxTransition,
    BoxTransitionParams, BoxUpdate, BoxUpdateParams, CommandList, CommandListParams, EarlierBox,
    PortShare, PortShareParams, PortShareResult, TargetState, Until, View,
};
use box_protocol::{
    Adjusted, BoxSessionInfo, CommandId, CommandInfo, LifetimeChange, Network, NetworkPolicy,
    Program, SessionId,
};
use futures::{Stream, StreamExt as _};

use crate::chunk::Offsets;
use crate::client::BoxClient;
use crate::command::{CommandBuilder, CommandHandle, DEFAULT_KEPT_BYTES, Key, Shared};
use crate::error::ClientError;
use crate::files::Files;
use crate::port::PortStream;
use crate::shell::ShellBuilder;

/// A box. Cheap to clone. Dropping it deletes nothing, unless it is [`ephemeral`](Self::ephemeral).
#[derive(Debug, Clone)]
pub struct BoxHandle {
    client: BoxClient,
    id: SessionId,
    existed: bool,
    network: Network,
    earlier: Option<EarlierBox>,
    adjusted: Vec<Adjusted>,
    ephemeral: Option<Arc<Ephemeral>>,
}

impl BoxHandle {
    pub(crate) fn new(client: BoxClient, info: BoxSessionInfo, existed: bool) -> Self {
        Self {
            client,
            id: info.session_id,
            existed,
            network: info.network,
            earlier: None,
            adjusted: Vec::new(),
            ephemeral: None,
        }
    }

    pub(crate) fn after(mut self, earlier: Option<EarlierBox>) -> Self {
        self.earlier = earlier;
        self
    }

    pub(crate) fn with_adjusted(mut self, adjusted: Vec<Adjusted>) -> Self {
        self.adjusted = adjusted;
        self
    }

    /// The box's id.
    pub fn id(&self) -> &SessionId {
        &self.id
    }

    /// It was there before this handle asked for it.
    pub fn existed(&self) -> bool {
        self.existed
    }

    /// Whether it has a network.
    pub fn network(&self) -> Network {
        self.network
    }

    /// How the box of this id ended that was there before, if this one is new and that one was not deleted on request.
    pub fn earlier(&self) -> Option<&EarlierBox> {
        self.earlier.as_ref()
    }

    /// What the server's profile changed of the request that made this handle.
    pub fn adjusted(&self) -> &[Adjusted] {
        &self.adjusted
    }

    /// Deletes the box when the last clone of the handle returned here is dropped, without waiting for
    /// that. Whoever needs to know that it is gone calls [`delete`](Self::delete).
    pub fn ephemeral(mut self) -> Self {
        let (client, id) = (self.client.clone(), self.id.clone());
        self.ephemeral = Some(Arc::new(Ephemeral { client, id }));
        self
    }

    /// What is known of it.
    pub async fn info(&self) -> Result<BoxSessionInfo, ClientError> {
        Ok(self.get(false).await?.info)
    }

    /// What is known of it and of its inside: system, user, ports somebody listens on, interpreters.
    pub async fn inside(&self) -> Result<BoxGetResult, ClientError> {
        self.get(true).await
    }

    async fn get(&self, guest: bool) -> Result<BoxGetResult, ClientError> {
        let session_id = self.id.clone();
        let params = BoxGetParams { session_id, guest };
        self.client.call::<BoxGet>(&params).await
    }

    /// Runs a text of the box's shell: awaited, it gives the [`Output`](crate::Output).
    pub fn run(&self, text: impl Into<String>) -> CommandBuilder {
        self.command(text)
    }

    /// A text for the box's shell, to be [started](CommandBuilder::start).
    pub fn command(&self, text: impl Into<String>) -> CommandBuilder {
        let server = self.client.server.clone();
        CommandBuilder::new(server, self.id.clone(), Program::text(text))
    }

    /// A program and its arguments, to be run as they are.
    pub fn program<T: Into<String>>(&self, argv: impl IntoIterator<Item = T>) -> CommandBuilder {
        let server = self.client.server.clone();
        CommandBuilder::new(server, self.id.clone(), Program::argv(argv))
    }

    /// Reads a command that is there, from these offsets on. `not_found` if its record is gone.
    pub async fn attach(
        &self,
        id: impl AsRef<str>,
        from: Offsets,
    ) -> Result<CommandHandle, ClientError> {
        let shared = self.read(id, from, View::default(), DEFAULT_KEPT_BYTES)?;
        CommandHandle::attach(shared).await
    }

    /// As [`attach`](Self::attach), in any view, keeping nothing for [`result`](CommandHandle::result), and asking nothing
    /// beforehand: what is wrong is told by the stream.
    pub fn follow(
        &self,
        id: impl AsRef<str>,
        from: Offsets,
        view: View,
    ) -> Result<CommandHandle, ClientError> {
        Ok(CommandHandle::follow(self.read(id, from, view, 0)?))
    }

    fn read(
        &self,
        id: impl AsRef<str>,
        from: Offsets,
        view: View,
        kept_bytes: usize,
    ) -> Result<Arc<Shared>, ClientError> {
        let until = Until::default();
        let key = Key {
            session_id: self.id.clone(),
            command_id: CommandId::new(id)?,
            attach: AttachOptions { view, until },
        };
        let server = self.client.server.clone();
        Ok(Shared::new(server, key, from, kept_bytes))
    }

    /// The commands of the box, oldest first.
    pub async fn commands(&self) -> Result<Vec<CommandInfo>, ClientError> {
        let params = CommandListParams {
            session_id: self.id.clone(),
            role: None,
            running: None,
        };
        Ok(self.client.call::<CommandList>(&params).await?.items)
    }

    /// A shell, to be [opened](ShellBuilder::open).
    pub fn shell(&self, id: impl AsRef<str>) -> ShellBuilder {
        ShellBuilder::new(self.client.server.clone(), self.id.clone(), id.as_ref())
    }

    /// The files of the box.
    pub fn files(&self) -> Files {
        Files::new(self.client.server.clone(), self.id.clone())
    }

    /// Connects to a port inside the box. `unavailable` if nobody listens.
    pub async fn connect_port(&self, port: NonZeroU16) -> Result<PortStream, ClientError> {
        PortStream::open(self.client.peer()?, self.id.clone(), port).await
    }

    /// An address at which whoever has it reaches a port of the box over HTTP, without a token: for so long, or as long as the
    /// box lives. `unsupported` if the server has no HTTP port.
    pub async fn share_port(
        &self,
        port: NonZeroU16,
        lasting: Option<Duration>,
    ) -> Result<PortShareResult, ClientError> {
        let millis = lasting.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        let params = PortShareParams {
            session_id: self.id.clone(),
            port,
            // No time at all is over before it begins, and so is a millisecond.
            for_ms: millis.map(|millis| NonZeroU64::new(millis).unwrap_or(NonZeroU64::MIN)),
        };
        self.client.call::<PortShare>(&params).await
    }

    /// What the box uses.
    pub async fn stats(&self) -> Result<BoxStatsResult, ClientError> {
        let params = BoxStatsParams {
            session_id: self.id.clone(),
            every_ms: None,
        };
        self.client.call::<BoxStats>(&params).await
    }

    /// What has happened to the box after the event of this number; with `follow`, what happens from now
    /// on, too.
    pub async fn events(
        &self,
        after: Option<u64>,
        follow: bool,
    ) -> Result<impl Stream<Item = Result<BoxEvent, ClientError>> + Send + use<>, ClientError> {
        let params = BoxEventsParams {
            session_id: Some(self.id.clone()),
            after,
            follow,
        };
        let events = self.client.peer()?.stream::<BoxEvents>(&params).await?;
        Ok(events.map(|event| event.map_err(ClientError::from)))
    }

    /// Stops everything in the box where it is; [`resume`](Self::resume) goes on.
    pub async fn pause(&self) -> Result<BoxSessionInfo, ClientError> {
        self.to(TargetState::Paused).await
    }

    /// Goes on after a [`pause`](Self::pause).
    pub async fn resume(&self) -> Result<BoxSessionInfo, ClientError> {
        self.to(TargetState::Running).await
    }

    /// Ends what runs in the box, and keeps its files.
    pub async fn stop(&self) -> Result<BoxSessionInfo, ClientError> {
        self.to(TargetState::Stopped).await
    }

    /// Starts a box that was stopped.
    pub async fn start(&self) -> Result<BoxSessionInfo, ClientError> {
        self.to(TargetState::Running).await
    }

    async fn to(&self, to: TargetState) -> Result<BoxSessionInfo, ClientError> {
        let session_id = self.id.clone();
        let params = BoxTransitionParams { session_id, to };
        Ok(self.client.call::<BoxTransition>(&params).await?.info)
    }

    /// Changes the lifetime of the box: what the change does not say stays, and a whole [`Lifetime`](box_protocol::Lifetime)
    /// says everything.
    pub async fn renew(
        &self,
        lifetime: impl Into<LifetimeChange>,
    ) -> Result<BoxSessionInfo, ClientError> {
        let params = BoxUpdateParams {
            lifetime: Some(lifetime.into()),
            ..BoxUpdateParams::of(self.id.clone())
        };
        self.client.call::<BoxUpdate>(&params).await
    }

    /// Changes to whom a box with a network may connect. What it may not any more is broken off.
    pub async fn set_network_policy(
        &self,
        policy: NetworkPolicy,
    ) -> Result<BoxSessionInfo, ClientError> {
        let params = BoxUpdateParams {
            network_policy: Some(policy),
            ..BoxUpdateParams::of(self.id.clone())
        };
        self.client.call::<BoxUpdate>(&params).await
    }

    /// Deletes the box, and returns once it is gone.
    pub async fn delete(&self) -> Result<(), ClientError> {
        delete(&self.client, &self.id).await
    }
}

async fn delete(client: &BoxClient, id: &SessionId) -> Result<(), ClientError> {
    let params = BoxDeleteParams {
        session_id: id.clone(),
        force: true,
    };
    client.call::<BoxDelete>(&params).await.map(drop)
}

/// Deletes its box when it is dropped.
#[derive(Debug)]
struct Ephemeral {
    client: BoxClient,
    id: SessionId,
}

impl Drop for Ephemeral {
    fn drop(&mut self) {
        let (client, id) = (self.client.clone(), self.id.clone());
        let deleting = async move {
            match delete(&client, &id).await {
                Err(error) if !error.is_not_found() => {
                    tracing::warn!(%id, %error, "an ephemeral box was not deleted");
                }
                _ => {}
            }
        };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(deleting);
        } else {
            tracing::warn!(id = %self.id, "an ephemeral box outlives the executor");
        }
    }
}
