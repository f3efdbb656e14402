//! Boxes that a call starts.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use box_protocol::actions::TargetState;
use box_protocol::{Access, BoxError, BoxId};

use super::envelope::Failure;
use crate::http::context::{Context, InBox};

/// Starts the box of a request if it is paused or stopped, because some calls of the runtime do not.
pub(super) async fn wake(
    context: Context,
    InBox(id): InBox,
    request: Request,
    next: Next,
) -> Response {
    match started(&context, &id).await {
        Ok(()) => next.run(request).await,
        Err(error) => Failure::from(error).into_response(),
    }
}

async fn started(context: &Context, id: &BoxId) -> Result<(), BoxError> {
    let info = context.get(id).await?;
    let wakes = info.lifetime.is_some_and(|lifetime| lifetime.wake);
    if info.state.access(wakes) == Access::WakeFirst {
        context.transition(id, TargetState::Running).await?;
    }
    Ok(())
}
