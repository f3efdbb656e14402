//! Connections that another part of the program makes, for example through a proxy.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use tokio::net::TcpStream;

type Dialing = Pin<Box<dyn Future<Output = io::Result<Option<TcpStream>>> + Send>>;

/// Makes connections to a host and a port.
///
/// The result `None` means that the client connects directly.
#[derive(Clone)]
pub struct Dialer(Arc<dyn Fn(String, u16) -> Dialing + Send + Sync>);

impl Dialer {
    /// Creates a dialer from a function.
    pub fn new<F>(dial: impl Fn(String, u16) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = io::Result<Option<TcpStream>>> + Send + 'static,
    {
        Self(Arc::new(move |host, port| Box::pin(dial(host, port))))
    }

    pub(super) async fn dial(&self, host: &str, port: u16) -> io::Result<Option<TcpStream>> {
        (self.0)(host.to_owned(), port).await
    }
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Dialer")
    }
}
