//! Connection options of a client.

use std::time::Duration;

use box_rpc::HelloParams;
use box_transports::ConnectOptions;
use box_transports::reconnecting::ReconnectOptions;

/// Connection options of a [`BoxClient`](crate::BoxClient).
///
/// The defaults suit a server on the same machine.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClientOptions {
    /// Options of each connection: timeout, TLS, headers.
    pub connect: ConnectOptions,
    /// Options of the reconnection and of the `hello` call.
    pub reconnect: ReconnectOptions,
    /// How long to retry the first connection, with growing delays; one attempt if zero.
    pub first_connection: Duration,
}

impl Default for ClientOptions {
    fn default() -> Self {
        let hello = HelloParams {
            client: concat!("box-client/", env!("CARGO_PKG_VERSION")).to_owned(),
            ..HelloParams::default()
        };
        Self {
            connect: ConnectOptions::default(),
            reconnect: ReconnectOptions {
                hello: Some(hello),
                ..ReconnectOptions::default()
            },
            first_connection: Duration::ZERO,
        }
    }
}

impl ClientOptions {
    /// Sets the token for the `hello` call, which a server on a network requires.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.reconnect.hello.get_or_insert_default().token = Some(token.into());
        self
    }

    /// Sets how long to retry the first connection.
    pub fn first_connection(mut self, within: Duration) -> Self {
        self.first_connection = within;
        self
    }
}
