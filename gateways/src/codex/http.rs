//! Clients over websockets: one message of the protocol is one text message.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use axum::routing::any;
use tokio::sync::mpsc;

use super::connection::Connection;
use super::session::{Place, Sessions};
use super::{GATEWAY, MAX_MESSAGE_BYTES};
use crate::http::body::Params;
use crate::http::context::{Context, InBox};
use crate::http::refusal::Refusal;
use crate::http::routes::{Routes, default_and_one_box};
use crate::http::socket::{Incoming, Socket, SocketSender, Upgrade};
use crate::target::{DefaultBox, Target};

/// Returns all routes.
pub fn routes() -> Vec<Routes> {
    let sessions = Arc::<Sessions>::default();
    default_and_one_box(
        ("codex", any(default_box)),
        ("codex_box", any(one_box)),
        sessions,
    )
}

/// Serves a client whose box is in the query, or is that of its token.
async fn default_box(
    State(sessions): State<Arc<Sessions>>,
    context: Context,
    params: Params,
    upgrade: Upgrade,
) -> Result<Response, Refusal> {
    let default = DefaultBox::of_request(&context, &params, "codex")?;
    Ok(serve(sessions, context, default, upgrade))
}

/// Serves a client for the box in the path.
async fn one_box(
    State(sessions): State<Arc<Sessions>>,
    context: Context,
    InBox(id): InBox,
    upgrade: Upgrade,
) -> Response {
    serve(sessions, context, DefaultBox { id, spec: None }, upgrade)
}

fn serve(
    sessions: Arc<Sessions>,
    context: Context,
    default: DefaultBox,
    upgrade: Upgrade,
) -> Response {
    let place = Place {
        target: Target::InProcess(context.in_process(&GATEWAY)),
        default,
        owner: context.caller.name().to_string(),
    };
    let upgrade = upgrade.max_message_bytes(MAX_MESSAGE_BYTES);
    upgrade.serve(context, async move |socket| {
        converse(socket, sessions, place).await;
    })
}

async fn converse(socket: Socket, sessions: Arc<Sessions>, place: Place) {
    let (sender, mut receiver) = socket.split();
    let (mut connection, messages) = Connection::new(sessions, place);
    let receive = async {
        loop {
            match receiver.receive().await {
                Incoming::Text(text) => connection.receive(&text).await,
                Incoming::Binary(bytes) => {
                    connection.receive(&String::from_utf8_lossy(&bytes)).await;
                }
                Incoming::Left => return None,
                Incoming::Stopping(status) => return Some(status),
            }
        }
    };
    let stopping = tokio::select! {
        stopping = receive => stopping,
        () = send(sender, messages) => None,
    };
    if let Some(status) = stopping {
        receiver.close(status, "the server is stopping").await;
    }
}

/// Sends messages until the client has left.
async fn send(sender: SocketSender, mut messages: mpsc::Receiver<String>) {
    while let Some(message) = messages.recv().await {
        if !sender.send_text(message).await {
            return;
        }
    }
}
