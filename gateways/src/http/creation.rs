//! The creation of a box that may take longer than the request for it.

use std::time::Duration;

use box_protocol::{BoxError, BoxId, BoxInfo, GatewayName, SpecDraft};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::context::Context;

/// A box that is being created for a client that does not know of it yet.
///
/// If its start fails after the client has learned of it, the box stays with the state `failed` and the reason. Dropping
/// the creation before that deletes the box.
pub(crate) struct Creation {
    context: Context,
    id: BoxId,
    /// The running creation.
    task: Option<JoinHandle<Result<BoxInfo, BoxError>>>,
    is_answered: bool,
}

impl Creation {
    /// Starts to create a new box. No other box may have the id of the spec.
    pub(crate) fn start(
        context: Context,
        gateway: GatewayName,
        id: BoxId,
        mut spec: SpecDraft,
    ) -> Self {
        spec.box_id = Some(id.to_string());
        let creator = context.clone();
        let task = async move {
            let created = creator.create_and_keep_failed(&gateway, spec).await;
            created.map(|created| created.info)
        };
        Self {
            context,
            id,
            task: Some(tokio::spawn(task)),
            is_answered: false,
        }
    }

    /// Waits until the box is ready.
    pub(crate) async fn ready(&mut self) -> Result<BoxInfo, BoxError> {
        let ended = || BoxError::cancelled("the creation was stopped");
        let task = self.task.as_mut().ok_or_else(ended)?;
        let created = task.await;
        self.task = None;
        let created = created.map_err(|_| ended())?;
        if created.is_err() {
            // The client gets the error, so it does not need the box.
            let _ = self.context.delete(&self.id).await;
        }
        created
    }

    /// Waits until the box is ready, or, at intervals of `patience`, until it exists.
    pub(crate) async fn ready_or_visible(
        &mut self,
        patience: Duration,
    ) -> Result<BoxInfo, BoxError> {
        loop {
            if let Ok(created) = timeout(patience, self.ready()).await {
                return created;
            }
            if let Ok(info) = self.context.get(&self.id).await {
                return Ok(info);
            }
        }
    }

    /// Leaves the box to the client, which a response tells of it.
    pub(crate) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for Creation {
    fn drop(&mut self) {
        if self.is_answered {
            return;
        }
        let (context, id) = (self.context.clone(), self.id.clone());
        let task = self.task.take();
        tokio::spawn(async move {
            let deleted = context.delete(&id).await;
            // The creation may not have made the box yet.
            if let (Err(_), Some(task)) = (deleted, task) {
                let _ = task.await;
                let _ = context.delete(&id).await;
            }
        });
    }
}
