//! The box of requests without a box in their path.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use box_protocol::actions::IfExists;
use box_protocol::{BoxError, BoxId, Code};

use super::{GATEWAY, envelope::Failure, spec};
use crate::http::context::{Context, InBox};

/// Adds the default box of the caller to a request. The first request creates it.
pub(super) async fn choose(context: Context, mut request: Request, next: Next) -> Response {
    match default_box(&context).await {
        Ok(id) => {
            request.extensions_mut().insert(InBox(id));
            next.run(request).await
        }
        Err(error) => Failure::from(error).into_response(),
    }
}

async fn default_box(context: &Context) -> Result<BoxId, BoxError> {
    let id = spec::default_id()?;
    match context.get(&id).await {
        Err(error) if error.code() == Code::NotFound => {
            // A concurrent first request finds this box.
            let spec = spec::of(&id);
            context.create(&GATEWAY, spec, IfExists::Reuse).await?;
            Ok(id)
        }
        Ok(info) if info.gateway != GATEWAY => {
            let message = format!("box {id}: not of AIO; delete it, or name a box in the path");
            Err(BoxError::conflict(message))
        }
        found => found.map(|_| id),
    }
}
