//! The list of contestants.

use std::future::Future;

use anyhow::{Context, Result};

use crate::{
    driver::{self, Load},
    ours::{self, Carrier},
    payload::Payload,
    peers,
    rounds::Numbers,
};

/// The client end of a connection, shared by all tasks that call over it.
pub(crate) trait Client: Clone + Send + Sync + 'static {
    /// Sends the payload, and returns the parsed answer.
    fn echo(&self, payload: Payload) -> impl Future<Output = Result<Payload>> + Send;
}

/// An operation with a client of any type.
pub(crate) trait Use {
    /// The result of the operation.
    type Output;

    /// Runs the operation; each call of `connect` opens another connection.
    async fn run<C, F>(self, connect: impl Fn() -> F) -> Result<Self::Output>
    where
        C: Client,
        F: Future<Output = Result<C>>;
}

/// An engine and its transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contestant {
    /// The minimal RPC: ids, a map of waiting calls, batched writes.
    MuxTcp,
    /// The minimal RPC with both ends on one thread of this process.
    MuxQueue,
    /// jsonrpsee over WebSocket.
    Jsonrpsee,
    /// tarpc over TCP, with JSON messages.
    Tarpc,
    /// Box.
    Ours(Carrier),
}

impl Contestant {
    /// Returns all contestants in the order of the table.
    ///
    /// Compared contestants run one after the other, so that the machine is in the same state.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        [
            Self::MuxTcp,
            Self::Ours(Carrier::Tcp),
            Self::Tarpc,
            Self::Jsonrpsee,
            Self::Ours(Carrier::WebSocket),
            Self::Ours(Carrier::Unix),
            Self::Ours(Carrier::Queue),
            Self::MuxQueue,
        ]
        .into_iter()
    }

    pub(crate) fn named(name: &str) -> Result<Self> {
        Self::all()
            .find(|contestant| contestant.name() == name)
            .with_context(|| format!("no contestant `{name}`; see `box-bench list`"))
    }

    /// Returns the name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::MuxTcp => "mux-tcp",
            Self::MuxQueue => "mux-queue",
            Self::Jsonrpsee => "jsonrpsee",
            Self::Tarpc => "tarpc",
            Self::Ours(carrier) => carrier.name(),
        }
    }

    /// Returns the name in the table.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::MuxTcp => "hand-written mux, tcp",
            Self::MuxQueue => "hand-written mux, in-process queue",
            Self::Jsonrpsee => "jsonrpsee 0.26, ws",
            Self::Tarpc => "tarpc 0.38, tcp + JSON",
            Self::Ours(carrier) => carrier.title(),
        }
    }

    /// Returns whether both ends share one thread of this process, without a server.
    pub(crate) fn is_in_process(self) -> bool {
        match self {
            Self::MuxQueue => true,
            Self::MuxTcp | Self::Jsonrpsee | Self::Tarpc => false,
            Self::Ours(carrier) => carrier.is_in_process(),
        }
    }

    /// Listens, calls [`crate::process::announce`], and serves until the process ends.
    pub(crate) async fn serve(self) -> Result<()> {
        match self {
            Self::MuxTcp => peers::mux_tcp::serve().await,
            Self::MuxQueue => anyhow::bail!("{} has no server", self.name()),
            Self::Jsonrpsee => peers::jsonrpsee::serve().await,
            Self::Tarpc => peers::tarpc::serve().await,
            Self::Ours(carrier) => ours::serve(carrier).await,
        }
    }

    /// Runs `action` with connections to the server at `address`.
    pub(crate) async fn with<U: Use>(self, address: &str, action: U) -> Result<U::Output> {
        match self {
            Self::MuxTcp => action.run(|| peers::mux_tcp::connect(address)).await,
            Self::MuxQueue => action.run(peers::mux_queue::connect).await,
            Self::Jsonrpsee => action.run(|| peers::jsonrpsee::connect(address)).await,
            Self::Tarpc => action.run(|| peers::tarpc::connect(address)).await,
            Self::Ours(carrier) => action.run(|| ours::connect(carrier, address)).await,
        }
    }

    /// Runs one round of every load.
    pub(crate) async fn measure(self, address: &str, load: Load) -> Result<Numbers> {
        self.with(address, driver::Measure(load)).await
    }
}
