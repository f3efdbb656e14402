//! Boxes that outlived the process that kept them, taken over.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::AgentHealthParams;
use box_protocol::{BoxError, BoxState};
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::backend::{AdoptedBox, Backend};
use crate::card::{Card, Place, Record};
use crate::runtime::{BoxRuntime, unanswered};
use crate::session::Living;
use crate::table::Ask;

/// How long the agent of a box may take to answer whoever takes it over. After the end of a busy server all are asked at once.
pub(crate) const AGENT_PATIENCE: Duration = Duration::from_secs(30);

impl BoxRuntime {
    /// Takes over the boxes of a process that is gone, with their commands, logs and ends; to be called once, before the first
    /// call. How many there are. What cannot be taken over is ended, unless another version of this program could.
    pub async fn adopt(&self) -> Result<usize, BoxError> {
        let mut adopted = 0;
        for backend in &self.shared().config.backends {
            let readable = |record: &str| Record::read(record).is_some();
            let found = backend.adopt(readable).await?;
            let all = found.into_iter().map(async |found| {
                let id = found.id;
                let adopted = self.adopt_one(backend, found).await;
                if let Err(error) = &adopted {
                    tracing::warn!(box_id = %id, %error, "a box cannot be taken over and is ended");
                    self.end(backend, id).await;
                }
                adopted.is_ok()
            });
            let all = futures::future::join_all(all).await;
            adopted += all.into_iter().filter(|adopted| *adopted).count();
        }
        Ok(adopted)
    }

    async fn adopt_one(
        &self,
        backend: &Arc<dyn Backend>,
        found: AdoptedBox,
    ) -> Result<(), BoxError> {
        let record = Record::read(&found.record)
            .ok_or_else(|| BoxError::validation("the record of the box cannot be read"))?;
        let paused = record.paused;
        let mounts = record.mounts.clone();
        let card = Arc::new(Card::adopted(record, backend.name()));
        let way = (found.started.connection, found.started.spool);
        let (of, health) = ((backend, found.id), AgentHealthParams::default());
        let meeting = Living::meet(self.shared(), of, way, &health);
        let living = tokio::time::timeout(AGENT_PATIENCE, meeting)
            .await
            .map_err(|_| BoxError::timeout("the box's agent does not answer"))??;
        let place = Place {
            backend: Arc::clone(backend),
            id: found.id,
        };
        card.is_at(place, mounts)?;
        // It went on while its agent was met; one that cannot be paused again goes on.
        let limit = self.shared().config.probe_timeout;
        if paused && living.freeze(limit, true).await.is_ok() {
            card.live().state = BoxState::Paused;
        }
        let (reply, answer) = oneshot::channel();
        let told = Arc::clone(&card);
        let ask = Ask::Adopt {
            card,
            living: Box::new(living),
            reply,
        };
        self.send(ask).await?;
        match answer.await {
            Ok(true) => {
                self.shared().events.tell(&told, "adopted", "");
                Ok(())
            }
            Ok(false) => Err(BoxError::conflict("there is another box of this id")),
            Err(_) => Err(unanswered()),
        }
    }

    async fn end(&self, backend: &Arc<dyn Backend>, id: Uuid) {
        let stopped =
            tokio::time::timeout(self.shared().config.stop_timeout, backend.stop(id)).await;
        if !matches!(stopped, Ok(Ok(()))) {
            tracing::error!(box_id = %id, "the box was not stopped");
        }
    }
}
