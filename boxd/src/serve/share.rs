//! `port.share`: addresses that are credentials for one port of one box.

use std::sync::Arc;

use box_gateways::http::capability::{Scope, SigningKey};
use box_gateways::http::context::Context;
use box_protocol::actions::{PortShare, PortShareParams, PortShareResult};
use box_protocol::{BoxError, UnixMs};
use box_rpc::{Call, Handle, Router};
use box_runtime::BoxRuntime;

use crate::embedded::EmbeddedServer;

/// The handler that creates addresses.
#[derive(Debug)]
struct Share {
    runtime: BoxRuntime,
    key: SigningKey,
    /// The public URL of the HTTP port, if the server has one.
    url: Option<String>,
}

/// Returns all actions of the server: those of the policy layer, and `port.share`.
pub(super) fn router(embedded: &EmbeddedServer, key: SigningKey, url: Option<String>) -> Router {
    let runtime = embedded.runtime.clone();
    let share = Arc::new(Share { runtime, key, url });
    Router::builder(share)
        .on::<PortShare>()
        .and(&embedded.service.router())
        .build()
}

impl Handle<PortShare> for Share {
    async fn handle(
        &self,
        params: PortShareParams,
        call: Call<PortShare>,
    ) -> Result<PortShareResult, BoxError> {
        let PortShareParams {
            box_id,
            port,
            for_ms,
        } = params;
        let info = self.runtime.get(&call.caller(), &box_id).await?;
        let Some(url) = &self.url else {
            return Err(BoxError::unsupported(
                "this server does not listen on HTTP; set server.http, or start it with --http HOST:PORT",
            ));
        };
        let expires_at = for_ms.map(|time| UnixMs(UnixMs::now().0.saturating_add(time.get())));
        let signature = self.key.sign(&info, Scope::Port(port), expires_at);
        // A box name is unique only per owner; this id is unique on the server.
        let path = Context::box_path(&info);
        tracing::info!(
            target: "audit",
            caller = &*call.caller().name(),
            box_id = box_id.as_str(),
            port,
            expires_at = expires_at.map(|time| time.0),
            "port shared"
        );
        Ok(PortShareResult {
            url: format!("{url}{path}~{signature}/port/{port}/"),
            expires_at,
        })
    }
}
