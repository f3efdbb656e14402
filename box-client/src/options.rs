//! How a client connects.

use std::time::Duration;

use box_rpc::HelloParams;
use box_transports::ConnectOptions;
use box_transports::link::LinkOptions;

/// How a [`BoxClient`](crate::BoxClient) connects. The default suits a server on the same machine.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClientOptions {
    /// How each connection is made: time, TLS, headers.
    pub connect: ConnectOptions,
    /// How the link comes back, and what it says first.
    pub link: LinkOptions,
    /// How long the first connection is tried for, with a pause that grows between attempts. Zero is
    /// one attempt, so that a server that is not there is told at once.
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
            link: LinkOptions {
                hello: Some(hello),
                ..LinkOptions::default()
            },
            first_connection: Duration::ZERO,
        }
    }
}

impl ClientOptions {
    /// Says hello with this token, as servers on a network ask for.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.link.hello.get_or_insert_default().token = Some(token.into());
        self
    }

    /// Tries for so long before giving up the first connection.
    pub fn first_connection(mut self, within: Duration) -> Self {
        self.first_connection = within;
        self
    }
}
