//! Standard input and output as a transport. A message that cannot be written ends the input.

use std::io;
use std::sync::Arc;

use rmcp::RoleServer;
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rmcp::transport::async_rw::AsyncRwTransport;
use tokio::io::{Stdin, Stdout};
use tokio::sync::Notify;

/// The pipes of the parent process.
///
/// The server ends with its input. A client that closes only the output would leave it, with its boxes.
pub(super) struct Stdio {
    pipes: AsyncRwTransport<RoleServer, Stdin, Stdout>,
    failed: Arc<Notify>,
}

impl Stdio {
    pub(super) fn new() -> Self {
        let (input, output) = rmcp::transport::stdio();
        Self {
            pipes: AsyncRwTransport::new(input, output),
            failed: Arc::default(),
        }
    }
}

impl Transport<RoleServer> for Stdio {
    type Error = io::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleServer>,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let (sent, failed) = (self.pipes.send(message), Arc::clone(&self.failed));
        async move {
            let sent = sent.await;
            if sent.is_err() {
                failed.notify_one();
            }
            sent
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        tokio::select! {
            message = self.pipes.receive() => message,
            () = self.failed.notified() => None,
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.pipes.close().await
    }
}
