//! Freezing and thawing of a box, which a pause and a snapshot may want at the same time.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use box_protocol::BoxError;

use super::error::freeze_error;
use super::live_box::LiveBox;

/// Time limit of a freeze. A process finishes its current disk read first.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a box is frozen.
#[derive(Debug, Default)]
pub(super) struct FreezeReasons {
    is_paused: bool,
    snapshots: usize,
}

impl FreezeReasons {
    fn any(&self) -> bool {
        self.is_paused || self.snapshots > 0
    }
}

/// A box that stays frozen until this is dropped.
#[derive(Debug)]
pub(super) struct Frozen(Arc<LiveBox>);

impl Drop for Frozen {
    fn drop(&mut self) {
        // Thawing fails only for a box that is gone.
        let _ = self.0.freeze_for(|reasons| reasons.snapshots -= 1);
    }
}

impl LiveBox {
    /// Pauses or resumes the box.
    pub(super) async fn pause(&self, is_paused: bool) -> Result<(), BoxError> {
        self.freeze_for(|reasons| reasons.is_paused = is_paused)?;
        if !is_paused {
            return Ok(());
        }
        let frozen = self.wait_frozen().await;
        frozen.inspect_err(|_| {
            let _ = self.freeze_for(|reasons| reasons.is_paused = false);
        })
    }

    /// Freezes the box until the result is dropped.
    pub(super) async fn hold(self: &Arc<Self>) -> Result<Frozen, BoxError> {
        self.freeze_for(|reasons| reasons.snapshots += 1)?;
        let frozen = Frozen(Arc::clone(self));
        self.wait_frozen().await?;
        Ok(frozen)
    }

    /// Changes the reasons, and freezes or thaws the box if that changes its state.
    fn freeze_for(&self, change: impl Fn(&mut FreezeReasons)) -> Result<(), BoxError> {
        let mut reasons = self
            .freeze_reasons
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut changed = FreezeReasons { ..*reasons };
        change(&mut changed);
        let done = if changed.any() {
            self.sandbox.freeze()
        } else {
            self.sandbox.thaw()
        };
        if done.is_ok() || !changed.any() {
            *reasons = changed;
        }
        done.map_err(freeze_error)
    }

    async fn wait_frozen(&self) -> Result<(), BoxError> {
        let started = Instant::now();
        while !self.sandbox.is_frozen() {
            if started.elapsed() > FREEZE_TIMEOUT {
                let seconds = FREEZE_TIMEOUT.as_secs();
                let message =
                    format!("the box did not freeze within {seconds} s and keeps running");
                return Err(BoxError::unavailable(message));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }
}
