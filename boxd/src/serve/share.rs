//! `port.share`: addresses of the HTTP port that are credentials for one port of one box.

use std::sync::Arc;

use box_protocol::actions::{PortShare, PortShareParams, PortShareResult};
use box_protocol::{BoxError, UnixMs};
use box_rpc::{Call, Handle, Router};
use box_runtime::BoxRuntime;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::http::caps::{Key, Scope};
use crate::local::Boxes;

/// What is written as it is in the segment of a path.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');

/// Hands addresses out.
#[derive(Debug)]
struct Share {
    runtime: BoxRuntime,
    key: Key,
    /// How the HTTP port is called, if there is one.
    url: Option<String>,
}

/// Everything that is served: the contract as the policy layer serves it, and addresses.
pub(super) fn router(boxes: &Boxes, key: Key, url: Option<String>) -> Router {
    let runtime = boxes.runtime.clone();
    let share = Arc::new(Share { runtime, key, url });
    Router::builder(share)
        .on::<PortShare>()
        .and(&boxes.service.router())
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
                "this server has no HTTP port (server.http, boxd serve --http HOST:PORT)",
            ));
        };
        let expires_at = for_ms.map(|time| UnixMs(UnixMs::now().0.saturating_add(time.get())));
        let cap = self.key.grant(&info, Scope::Port(port), expires_at);
        // Names are their owners'. This id is the box's own, whoever has the address.
        let id = utf8_percent_encode(&info.backend_id, SEGMENT);
        tracing::info!(
            target: "audit",
            caller = &*call.caller().name(),
            box_id = box_id.as_str(),
            port,
            expires_at = expires_at.map(|time| time.0),
            "an address was handed out"
        );
        Ok(PortShareResult {
            url: format!("{url}/boxes/{id}~{cap}/port/{port}/"),
            expires_at,
        })
    }
}
