//! The handwritten multiplexer with both ends in one process, joined by queues.

use std::sync::{Arc, Mutex};

use anyhow::{Context, Result};
use tokio::sync::mpsc;

use super::{
    MAX_IN_FLIGHT,
    mux::{self, Waiting, lock},
};
use crate::{contestant, payload::Payload};

/// Starts both ends; they stop when the last client is dropped.
#[allow(
    clippy::unused_async,
    reason = "connecting is asynchronous for the others"
)]
pub(crate) async fn connect() -> Result<Client> {
    let (requests, mut incoming) = mpsc::channel::<Vec<u8>>(MAX_IN_FLIGHT);
    let (answers, mut outcome) = mpsc::channel::<Vec<u8>>(MAX_IN_FLIGHT);
    let waiting = Arc::new(Mutex::new(Waiting::new()));
    tokio::spawn(async move {
        while let Some(request) = incoming.recv().await {
            let mut answer = Vec::with_capacity(request.len());
            mux::answer(&request, &mut answer)?;
            answers.send(answer).await?;
        }
        anyhow::Ok(())
    });
    let callers = Arc::clone(&waiting);
    tokio::spawn(async move {
        while let Some(answer) = outcome.recv().await {
            lock(&callers).complete(&answer)?;
        }
        lock(&callers).close();
        anyhow::Ok(())
    });
    Ok(Client { waiting, requests })
}

/// The calling end.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    waiting: Arc<Mutex<Waiting>>,
    requests: mpsc::Sender<Vec<u8>>,
}

impl contestant::Client for Client {
    async fn echo(&self, payload: Payload) -> Result<Payload> {
        let (id, answer) = lock(&self.waiting).register()?;
        let mut request = Vec::with_capacity(256);
        mux::write_request(&mut request, id, &payload)?;
        self.requests.send(request).await?;
        answer.await.context("the connection is over")
    }
}
