//! The client: its connection to a server, and calls to the server as a whole.

use std::sync::Arc;

use box_protocol::actions::{
    BackendInfo, BoxCreate, BoxCreateParams, BoxExec, BoxExecParams, BoxGet, BoxGetParams, BoxList,
    BoxListParams, BoxListResult, IfExists, SystemHealth, SystemStatus, SystemStatusResult,
};
use box_protocol::{BoxId, Invalid, SpecDraft};
use box_rpc::{Action, Empty, Peer};
use box_transports::Endpoint;
use box_transports::reconnecting::{Reconnecting, Remote};

use crate::chunk::Output;
use crate::error::ClientError;
use crate::handle::BoxHandle;
use crate::images::Images;
use crate::options::ClientOptions;

/// A client of a runtime, or of a service in front of one: both implement the same contract.
///
/// Clones share the connection. It closes with the last clone and the last handle.
#[derive(Debug, Clone)]
pub struct BoxClient {
    pub(crate) server: Remote,
}

impl BoxClient {
    /// Connects to an endpoint, and reconnects when the connection is lost.
    ///
    /// Calls fail with `unavailable` while the connection is down; commands that are being read
    /// resume.
    pub async fn connect(endpoint: Endpoint, options: ClientOptions) -> Result<Self, ClientError> {
        let connection = Reconnecting::to(endpoint, options.connect, options.reconnect);
        if connection.try_now().await.is_err()
            && let Err(error) = connection.connected_within(options.first_connection).await
        {
            return Err(connection
                .disconnect_reason()
                .map_or(error.into(), |why| (&*why).into()));
        }
        Ok(Self::from_reconnecting(Arc::new(connection)))
    }

    /// Uses an existing connection, which reconnects.
    pub fn from_reconnecting(connection: Arc<Reconnecting>) -> Self {
        let server = Remote::Reconnecting(connection);
        Self { server }
    }

    /// Uses one connection that the caller owns. The client does not reconnect it.
    pub fn from_peer(peer: Peer) -> Self {
        let server = Remote::Peer(peer);
        Self { server }
    }

    /// Creates a box; `conflict` if a box with its id exists.
    pub async fn create(&self, spec: SpecDraft) -> Result<BoxHandle, ClientError> {
        self.create_box(spec, IfExists::Fail).await
    }

    /// Creates a box, or opens the existing one with its id; `conflict` if its spec differs.
    pub async fn get_or_create(&self, spec: SpecDraft) -> Result<BoxHandle, ClientError> {
        self.create_box(spec, IfExists::Reuse).await
    }

    async fn create_box(
        &self,
        spec: SpecDraft,
        if_exists: IfExists,
    ) -> Result<BoxHandle, ClientError> {
        // The client validates a copy and sends the draft, because the service adds the defaults.
        spec.clone().build()?;
        let params = BoxCreateParams {
            if_exists,
            ..BoxCreateParams::new(spec)
        };
        let created = self.call::<BoxCreate>(&params).await?;
        let handle = BoxHandle::new(self.clone(), created.info, created.existed);
        Ok(handle
            .with_earlier(created.earlier)
            .with_adjusted(created.adjusted))
    }

    /// Opens a box; `not_found` if it does not exist or belongs to another caller.
    pub async fn open(&self, id: impl AsRef<str>) -> Result<BoxHandle, ClientError> {
        let params = BoxGetParams::new(BoxId::new(id)?);
        let found = self.call::<BoxGet>(&params).await?;
        Ok(BoxHandle::new(self.clone(), found.info, true))
    }

    /// Lists the boxes that match a filter.
    pub async fn list(&self, filter: BoxListParams) -> Result<BoxListResult, ClientError> {
        self.call::<BoxList>(&filter).await
    }

    /// Runs `spec.cmd` in a box, which is created if it does not exist.
    ///
    /// The runtime runs the execs of one box one at a time. A timeout is a result. The client
    /// refuses a blank command before it sends the call.
    pub async fn exec(&self, spec: SpecDraft) -> Result<Output, ClientError> {
        if spec.cmd.as_deref().is_none_or(|cmd| cmd.trim().is_empty()) {
            return Err(Invalid::new("cmd", "must not be empty").into());
        }
        spec.clone().build()?;
        let ran = self.call::<BoxExec>(&BoxExecParams::new(spec)).await?;
        Ok(ran.into())
    }

    /// Returns the images of the server.
    pub fn images(&self) -> Images {
        Images::new(self.server.clone())
    }

    /// Returns the backend in use and its deficiencies.
    pub async fn health(&self) -> Result<BackendInfo, ClientError> {
        self.call::<SystemHealth>(&Empty {}).await
    }

    /// Returns health, counts, limits, profile and recent errors.
    pub async fn status(&self) -> Result<SystemStatusResult, ClientError> {
        self.call::<SystemStatus>(&Empty {}).await
    }

    /// Calls any action of the contract.
    pub async fn call<A: Action>(&self, params: &A::Params) -> Result<A::Result, ClientError> {
        Ok(self.server.call::<A>(params).await?)
    }

    /// Returns the current connection, for actions without a method; an error if it is down.
    pub fn peer(&self) -> Result<Peer, ClientError> {
        Ok(self.server.peer()?)
    }
}
