//! The way to a server: one connection, or one that comes back.

use std::sync::Arc;

use box_rpc::{Action, CallError, Peer};
use box_transports::link::Link;

use crate::error::ClientError;

#[derive(Debug, Clone)]
pub(crate) enum Way {
    Peer(Peer),
    Link(Arc<Link>),
}

impl Way {
    /// The server, if there is a connection now.
    pub(crate) fn peer(&self) -> Result<Peer, CallError> {
        match self {
            Self::Peer(peer) => Ok(peer.clone()),
            Self::Link(link) => link.peer(),
        }
    }

    /// The server, by the connection there is or by one attempt to make one.
    pub(crate) async fn try_now(&self) -> Result<Peer, CallError> {
        match self {
            Self::Link(link) => link.try_now().await,
            Self::Peer(peer) if peer.is_closed() => Err(CallError::NotSent(
                "the connection is closed, and nobody makes another".to_owned(),
            )),
            Self::Peer(peer) => Ok(peer.clone()),
        }
    }

    pub(crate) async fn call<A: Action>(
        &self,
        params: &A::Params,
    ) -> Result<A::Result, ClientError> {
        Ok(self.peer()?.call::<A>(params).await?)
    }
}
