//! jsonrpsee over WebSocket.

use std::sync::Arc;

use anyhow::Result;
use jsonrpsee_core::{client::ClientT, traits::ToRpcParams};
use jsonrpsee_server::{RpcModule, Server, ServerConfig};
use jsonrpsee_ws_client::{WsClient, WsClientBuilder};
use serde_json::value::{RawValue, to_raw_value};

use super::{MAX_IN_FLIGHT, MAX_MESSAGE};
use crate::{contestant, payload::Payload, process};

pub(crate) async fn serve() -> Result<()> {
    let config = ServerConfig::builder()
        .max_request_body_size(MAX_MESSAGE)
        .max_response_body_size(MAX_MESSAGE)
        .max_connections(100_000)
        .set_message_buffer_capacity(4096)
        .build();
    let server = Server::builder()
        .set_config(config)
        .build("127.0.0.1:0")
        .await?;
    let mut module = RpcModule::new(());
    // A synchronous method runs without a task, which is jsonrpsee's fastest kind.
    module.register_method("echo", |params, (), _| params.parse::<Payload>())?;
    process::announce(server.local_addr()?)?;
    server.start(module).stopped().await;
    Ok(())
}

pub(crate) async fn connect(address: &str) -> Result<Client> {
    let client = WsClientBuilder::new()
        .max_request_size(MAX_MESSAGE)
        .max_response_size(MAX_MESSAGE)
        .max_concurrent_requests(MAX_IN_FLIGHT)
        .build(format!("ws://{address}"))
        .await?;
    Ok(Client(Arc::new(client)))
}

/// The calling end.
#[derive(Clone, Debug)]
pub(crate) struct Client(Arc<WsClient>);

impl contestant::Client for Client {
    async fn echo(&self, payload: Payload) -> Result<Payload> {
        Ok(self.0.request("echo", payload).await?)
    }
}

impl ToRpcParams for Payload {
    fn to_rpc_params(self) -> serde_json::Result<Option<Box<RawValue>>> {
        to_raw_value(&self).map(Some)
    }
}
