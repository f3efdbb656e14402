//! `box.stats`: what a box uses, told once or again and again.

use std::time::Duration;

use box_protocol::BoxError;
use box_protocol::actions::{BoxStats, BoxStatsParams, BoxStatsResult};
use box_rpc::{Call, Handle};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use crate::caller::Caller;
use crate::card::Card;
use crate::handlers::streamed;
use crate::runtime::BoxRuntime;

/// Figures are told no more often than this.
const OFTEN: Duration = Duration::from_millis(20);

impl BoxRuntime {
    /// What a box uses now. With a place for chunks and `every_ms` it goes on until it is dropped, or the box does not run any
    /// more. Neither counts as use.
    pub async fn stats(
        &self,
        caller: &Caller,
        params: BoxStatsParams,
        chunks: Option<mpsc::Sender<BoxStatsResult>>,
    ) -> Result<BoxStatsResult, BoxError> {
        let card = self.card(caller, &params.session_id).await?;
        let every = params.every_ms.map(Duration::from_millis);
        let Some((every, chunks)) = every.zip(chunks) else {
            return figures(&card).await;
        };
        let mut interval = tokio::time::interval(every.max(OFTEN));
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            let now = figures(&card).await?;
            if chunks.send(now).await.is_err() {
                return Err(BoxError::cancelled("nobody takes the figures"));
            }
        }
    }
}

async fn figures(card: &Card) -> Result<BoxStatsResult, BoxError> {
    let place = card.place().await?;
    let (received, sent) = card.door.traffic();
    let used = place.backend.usage(place.id)?;
    // Over its ports, and by itself.
    Ok(BoxStatsResult {
        network_received_bytes: Some(received + used.network_received_bytes.unwrap_or(0)),
        network_sent_bytes: Some(sent + used.network_sent_bytes.unwrap_or(0)),
        ..used
    })
}

impl Handle<BoxStats> for BoxRuntime {
    async fn handle(
        &self,
        params: BoxStatsParams,
        call: Call<BoxStats>,
    ) -> Result<BoxStatsResult, BoxError> {
        let caller = Caller::of(&call);
        streamed(call, |chunks| self.stats(&caller, params, chunks)).await
    }
}
