//! Client of a runtime, over a connection of a [`Connector`](crate::Connector).

use std::sync::Arc;
use std::time::Duration;

use box_protocol::BoxError;
use box_rpc::{Action, Call, Caller, Peer, Turn};
use box_transports::reconnecting::{Reconnecting, Remote};
use futures::StreamExt as _;
use serde_json::value::RawValue;

/// A client of a runtime. Cheap to clone.
/// Only the owner of the connection ends it, even while clones exist.
#[derive(Debug, Clone)]
pub struct RuntimeClient(Remote);

/// Uses one connection: in process, or over any transport.
impl From<Peer> for RuntimeClient {
    fn from(peer: Peer) -> Self {
        Self(Remote::Peer(peer))
    }
}

/// Uses a connection that reconnects until its owner [closes](Reconnecting::close) it.
impl From<&Arc<Reconnecting>> for RuntimeClient {
    fn from(connection: &Arc<Reconnecting>) -> Self {
        Self(Remote::Reconnecting(Arc::clone(connection)))
    }
}

impl RuntimeClient {
    /// Returns the peer of the current connection, if connected.
    pub fn peer(&self) -> Result<Peer, BoxError> {
        Ok(self.0.peer()?)
    }

    /// Returns whether the connection has ended, so that no later call can succeed.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Calls the runtime.
    pub async fn call<A: Action>(&self, params: &A::Params) -> Result<A::Result, BoxError> {
        Ok(self.peer()?.call::<A>(params).await?)
    }

    /// Calls the runtime with a timeout.
    pub async fn call_within<A: Action>(
        &self,
        params: &A::Params,
        within: Duration,
    ) -> Result<A::Result, BoxError> {
        let peer = self.peer()?;
        Ok(peer.request::<A>(params).deadline(within).call().await?)
    }

    /// Forwards a call with its deadline and context, and its chunks as they come.
    ///
    /// It drops the request key, because this side has stored it. The runtime would treat the keys of different
    /// callers as those of one. The turn ends once the call is sent.
    pub(crate) async fn forward<A: Action>(
        &self,
        params: &A::Params,
        call: &mut Call<A>,
        turn: Option<Turn<Caller>>,
    ) -> Result<A::Result, BoxError> {
        let peer = self.peer()?;
        let mut request = peer.request::<A>(params);
        if let Some(left) = call.time_left() {
            request = request.deadline(left);
        }
        if let Some(context) = call.context::<Box<RawValue>>() {
            request = request.context(&context?);
        }
        let Some(sink) = call.chunks() else {
            let sent = request.send().await?;
            drop(turn);
            return Ok(sent.result().await?);
        };
        let mut chunks = request.stream().await?;
        drop(turn);
        while let Some(chunk) = chunks.next().await {
            sink.send(&chunk?).await?;
        }
        Ok(chunks.finish().await?)
    }
}
