//! A box and the operations on it.

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
    Adjusted, BoxId, BoxInfo, CommandId, CommandInfo, LifetimeChange, Network, NetworkPolicy,
    Program,
};
use futures::{Stream, StreamExt as _};

use crate::chunk::Offsets;
use crate::client::BoxClient;
use crate::command::{CommandBuilder, CommandHandle, DEFAULT_CAPTURE_LIMIT, Key, Shared};
use crate::error::ClientError;
use crate::files::Files;
use crate::port::PortStream;
use crate::shell::ShellBuilder;

/// A box. Dropping the handle does not delete the box, unless it is [`ephemeral`](Self::ephemeral).
#[derive(Debug, Clone)]
pub struct BoxHandle {
    client: BoxClient,
    id: BoxId,
    existed: bool,
    network: Network,
    earlier: Option<EarlierBox>,
    adjusted: Vec<Adjusted>,
    ephemeral: Option<Arc<Ephemeral>>,
}

impl BoxHandle {
    /// Returns the client of the server.
    pub fn client(&self) -> &BoxClient {
        &self.client
    }

    pub(crate) fn new(client: BoxClient, info: BoxInfo, existed: bool) -> Self {
        Self {
            client,
            id: info.box_id,
            existed,
            network: info.network,
            earlier: None,
            adjusted: Vec::new(),
            ephemeral: None,
        }
    }

    pub(crate) fn with_earlier(mut self, earlier: Option<EarlierBox>) -> Self {
        self.earlier = earlier;
        self
    }

    pub(crate) fn with_adjusted(mut self, adjusted: Vec<Adjusted>) -> Self {
        self.adjusted = adjusted;
        self
    }

    /// Returns the id of the box.
    pub fn id(&self) -> &BoxId {
        &self.id
    }

    /// Whether the box existed before this handle requested it.
    pub fn existed(&self) -> bool {
        self.existed
    }

    /// Returns whether the box has a network.
    pub fn network(&self) -> Network {
        self.network
    }

    /// Returns how the previous box with this id ended.
    ///
    /// `None` if this box is not new, or if its owner deleted the previous one.
    pub fn earlier(&self) -> Option<&EarlierBox> {
        self.earlier.as_ref()
    }

    /// Returns the fields of the request that the profile of the server changed.
    pub fn adjusted(&self) -> &[Adjusted] {
        &self.adjusted
    }

    /// Deletes the box when the last clone of the returned handle is dropped.
    ///
    /// The drop does not wait for the deletion; [`delete`](Self::delete) does.
    pub fn ephemeral(mut self) -> Self {
        let (client, id) = (self.client.clone(), self.id.clone());
        self.ephemeral = Some(Arc::new(Ephemeral { client, id }));
        self
    }

    /// Returns the record of the box.
    pub async fn info(&self) -> Result<BoxInfo, ClientError> {
        Ok(self.get(false).await?.info)
    }

    /// Returns the record of the box with information from inside: system, user, listening ports,
    /// interpreters.
    pub async fn inspect(&self) -> Result<BoxGetResult, ClientError> {
        self.get(true).await
    }

    async fn get(&self, guest: bool) -> Result<BoxGetResult, ClientError> {
        let box_id = self.id.clone();
        let params = BoxGetParams {
            guest,
            ..BoxGetParams::new(box_id)
        };
        self.client.call::<BoxGet>(&params).await
    }

    /// Runs a text in the shell of the box. Awaiting the builder returns the
    /// [`Output`](crate::Output).
    pub fn run(&self, text: impl Into<String>) -> CommandBuilder {
        self.command(text)
    }

    /// A text for the shell of the box, to be [started](CommandBuilder::start).
    pub fn command(&self, text: impl Into<String>) -> CommandBuilder {
        let server = self.client.server.clone();
        CommandBuilder::new(server, self.id.clone(), Program::text(text))
    }

    /// A program with its arguments, which runs without a shell.
    pub fn program<T: Into<String>>(&self, argv: impl IntoIterator<Item = T>) -> CommandBuilder {
        let server = self.client.server.clone();
        CommandBuilder::new(server, self.id.clone(), Program::argv(argv))
    }

    /// Attaches to an existing command at these offsets; `not_found` if its record is gone.
    pub async fn attach(
        &self,
        id: impl AsRef<str>,
        from: Offsets,
    ) -> Result<CommandHandle, ClientError> {
        let shared = self.read(id, from, View::default(), DEFAULT_CAPTURE_LIMIT)?;
        CommandHandle::attach(shared).await
    }

    /// Attaches as [`attach`](Self::attach) does, but with any view and without a first call.
    ///
    /// The handle keeps no output for [`result`](CommandHandle::result), and the stream reports
    /// errors.
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
        capture_limit: usize,
    ) -> Result<Arc<Shared>, ClientError> {
        let until = Until::default();
        let key = Key {
            box_id: self.id.clone(),
            command_id: CommandId::new(id)?,
            attach: AttachOptions { view, until },
        };
        let server = self.client.server.clone();
        Ok(Shared::new(server, key, from, capture_limit))
    }

    /// Lists the commands of the box, oldest first.
    pub async fn commands(&self) -> Result<Vec<CommandInfo>, ClientError> {
        let params = CommandListParams::new(self.id.clone());
        Ok(self.client.call::<CommandList>(&params).await?.items)
    }

    /// A shell, to be [opened](ShellBuilder::open).
    pub fn shell(&self, id: impl AsRef<str>) -> ShellBuilder {
        ShellBuilder::new(self.client.server.clone(), self.id.clone(), id.as_ref())
    }

    /// Returns the files of the box.
    pub fn files(&self) -> Files {
        Files::new(self.client.server.clone(), self.id.clone())
    }

    /// Connects to a port inside the box; `unavailable` if it has no listener.
    pub async fn connect_port(&self, port: NonZeroU16) -> Result<PortStream, ClientError> {
        PortStream::open(self.client.peer()?, self.id.clone(), port).await
    }

    /// Creates a URL that gives access to a port over HTTP without a token.
    ///
    /// The URL is valid for `lasting`, or for the life of the box. `unsupported` if the server has
    /// no HTTP listener.
    pub async fn share_port(
        &self,
        port: NonZeroU16,
        lasting: Option<Duration>,
    ) -> Result<PortShareResult, ClientError> {
        let millis = lasting.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        let params = PortShareParams {
            box_id: self.id.clone(),
            port,
            // The contract requires at least one millisecond.
            for_ms: millis.map(|millis| NonZeroU64::new(millis).unwrap_or(NonZeroU64::MIN)),
        };
        self.client.call::<PortShare>(&params).await
    }

    /// Returns the resource usage of the box.
    pub async fn stats(&self) -> Result<BoxStatsResult, ClientError> {
        let params = BoxStatsParams {
            box_id: self.id.clone(),
            every_ms: None,
        };
        self.client.call::<BoxStats>(&params).await
    }

    /// Streams the events of the box after this event number; with `follow`, also future ones.
    pub async fn events(
        &self,
        after: Option<u64>,
        follow: bool,
    ) -> Result<impl Stream<Item = Result<BoxEvent, ClientError>> + Send + use<>, ClientError> {
        let params = BoxEventsParams {
            box_id: Some(self.id.clone()),
            after,
            follow,
        };
        let events = self.client.peer()?.stream::<BoxEvents>(&params).await?;
        Ok(events.map(|event| event.map_err(ClientError::from)))
    }

    /// Pauses all processes of the box; [`resume`](Self::resume) continues them.
    pub async fn pause(&self) -> Result<BoxInfo, ClientError> {
        self.transition(TargetState::Paused).await
    }

    /// Resumes a box after [`pause`](Self::pause).
    pub async fn resume(&self) -> Result<BoxInfo, ClientError> {
        self.transition(TargetState::Running).await
    }

    /// Ends all processes of the box and keeps its files.
    pub async fn stop(&self) -> Result<BoxInfo, ClientError> {
        self.transition(TargetState::Stopped).await
    }

    /// Starts a stopped box.
    pub async fn start(&self) -> Result<BoxInfo, ClientError> {
        self.transition(TargetState::Running).await
    }

    async fn transition(&self, to: TargetState) -> Result<BoxInfo, ClientError> {
        let box_id = self.id.clone();
        let params = BoxTransitionParams { box_id, to };
        Ok(self.client.call::<BoxTransition>(&params).await?.info)
    }

    /// Changes the lifetime of the box.
    ///
    /// Absent members stay unchanged; a [`Lifetime`](box_protocol::Lifetime) replaces all of them.
    pub async fn update_lifetime(
        &self,
        lifetime: impl Into<LifetimeChange>,
    ) -> Result<BoxInfo, ClientError> {
        let params = BoxUpdateParams {
            lifetime: Some(lifetime.into()),
            ..BoxUpdateParams::of(self.id.clone())
        };
        self.client.call::<BoxUpdate>(&params).await
    }

    /// Replaces the network policy. The runtime closes open connections that it forbids.
    pub async fn set_network_policy(&self, policy: NetworkPolicy) -> Result<BoxInfo, ClientError> {
        let params = BoxUpdateParams {
            network_policy: Some(policy),
            ..BoxUpdateParams::of(self.id.clone())
        };
        self.client.call::<BoxUpdate>(&params).await
    }

    /// Deletes the box and returns when it is gone.
    pub async fn delete(&self) -> Result<(), ClientError> {
        delete(&self.client, &self.id).await
    }
}

async fn delete(client: &BoxClient, id: &BoxId) -> Result<(), ClientError> {
    let params = BoxDeleteParams {
        box_id: id.clone(),
        force: true,
    };
    client.call::<BoxDelete>(&params).await.map(drop)
}

/// Deletes its box when it is dropped.
#[derive(Debug)]
struct Ephemeral {
    client: BoxClient,
    id: BoxId,
}

impl Drop for Ephemeral {
    fn drop(&mut self) {
        let (client, id) = (self.client.clone(), self.id.clone());
        let deleting = async move {
            match delete(&client, &id).await {
                Err(error) if !error.is_not_found() => {
                    tracing::warn!(%id, %error, "could not delete an ephemeral box");
                }
                _ => {}
            }
        };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(deleting);
        } else {
            tracing::warn!(id = %self.id, "could not delete an ephemeral box: no async runtime");
        }
    }
}
