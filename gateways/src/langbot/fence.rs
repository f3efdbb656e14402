//! The fence serves only the newest placement of a workspace.
//!
//! A call of a newer placement ends the calls, relays and boxes of older placements.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use box_protocol::BoxError;
use tokio::sync::watch;

use super::context::Placement;
use super::errors::{permission, stale};

/// The newest placement of each workspace.
#[derive(Debug, Default)]
pub(super) struct Fence(Mutex<HashMap<String, Arc<Workspace>>>);

#[derive(Debug)]
struct Workspace {
    newest: watch::Sender<u64>,
    /// All boxes of generations older than this are deleted.
    cleared: AtomicU64,
    clearing: tokio::sync::Mutex<()>,
}

/// A call's lease on the newest placement.
#[derive(Debug, Clone)]
pub(super) struct Lease {
    workspace: Arc<Workspace>,
    generation: u64,
}

impl Fence {
    /// Returns whether a call of this workspace has been seen.
    pub(super) fn knows(&self, workspace: &str) -> bool {
        self.lock().contains_key(workspace)
    }

    /// Records a placement, which becomes the newest unless a newer one is known.
    ///
    /// For an unknown workspace, `floor` is the newest generation that has boxes. `limit` limits the number of
    /// workspaces.
    pub(super) fn observe(
        &self,
        placement: &Placement,
        floor: u64,
        limit: usize,
    ) -> Result<Lease, BoxError> {
        let workspace = {
            let mut all = self.lock();
            match all.get(&placement.workspace) {
                Some(workspace) => Arc::clone(workspace),
                None if all.len() >= limit => {
                    return Err(permission(
                        "Box generation fence capacity reached; refusing an unbounded Workspace allocation",
                    ));
                }
                None => {
                    let workspace = Arc::new(Workspace {
                        newest: watch::Sender::new(floor),
                        cleared: AtomicU64::new(0),
                        clearing: tokio::sync::Mutex::new(()),
                    });
                    all.insert(placement.workspace.clone(), Arc::clone(&workspace));
                    workspace
                }
            }
        };
        let mut accepted = true;
        workspace.newest.send_if_modified(|newest| {
            accepted = placement.generation >= *newest;
            let is_newer = placement.generation > *newest;
            *newest = placement.generation.max(*newest);
            is_newer
        });
        if !accepted {
            return Err(stale());
        }
        Ok(Lease {
            workspace,
            generation: placement.generation,
        })
    }

    /// Returns a lease if the placement is already the newest.
    pub(super) fn current(&self, placement: &Placement) -> Option<Lease> {
        let workspace = self.lock().get(&placement.workspace).cloned()?;
        let lease = Lease {
            workspace,
            generation: placement.generation,
        };
        lease.is_current().then_some(lease)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Arc<Workspace>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    pub(super) fn is_current(&self) -> bool {
        *self.workspace.newest.borrow() == self.generation
    }

    /// Returns once a newer placement is recorded.
    pub(super) async fn stale(&self) {
        let mut newest = self.workspace.newest.subscribe();
        // This workspace owns the sender, so the channel cannot be closed.
        let _ = newest.wait_for(|newest| *newest != self.generation).await;
    }

    /// Returns whether all older placements are cleared.
    pub(super) fn is_cleared(&self) -> bool {
        self.workspace.cleared.load(Ordering::Acquire) >= self.generation
    }

    /// Runs the clearing for this generation once; concurrent callers wait for it.
    pub(super) async fn cleared_by<F: Future<Output = ()>>(&self, clear: impl FnOnce() -> F) {
        if self.is_cleared() {
            return;
        }
        let _turn = self.workspace.clearing.lock().await;
        if !self.is_cleared() {
            clear().await;
            self.workspace
                .cleared
                .store(self.generation, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(generation: u64) -> Placement {
        Placement::new("i", "w", generation)
    }

    #[tokio::test]
    async fn a_newer_placement_makes_the_older_stale() {
        let fence = Fence::default();
        let old = fence.observe(&at(3), 0, 10).unwrap();
        assert!(old.is_current());
        let again = fence.observe(&at(3), 0, 10).unwrap();
        let new = fence.observe(&at(4), 0, 10).unwrap();
        old.stale().await;
        again.stale().await;
        assert!(new.is_current() && !old.is_current());
        let refused = fence.observe(&at(3), 0, 10).unwrap_err();
        assert_eq!(refused.message(), "Stale Box placement generation");
        assert!(fence.current(&at(4)).is_some() && fence.current(&at(3)).is_none());
    }

    #[tokio::test]
    async fn existing_boxes_set_the_minimum_generation() {
        let fence = Fence::default();
        assert!(!fence.knows("w"));
        assert!(fence.observe(&at(2), 5, 10).is_err());
        assert!(fence.knows("w"));
        assert!(fence.observe(&at(5), 0, 10).is_ok());
    }

    #[test]
    fn workspaces_are_bounded() {
        let fence = Fence::default();
        fence.observe(&at(1), 0, 1).unwrap();
        let full = fence
            .observe(&Placement::new("i", "other", 1), 0, 1)
            .unwrap_err();
        assert!(
            full.message()
                .starts_with("Box generation fence capacity reached")
        );
        assert!(fence.observe(&at(2), 0, 1).is_ok());
    }

    #[tokio::test]
    async fn older_placements_are_cleared_once() {
        let fence = Fence::default();
        let lease = fence.observe(&at(1), 0, 1).unwrap();
        let times = AtomicU64::new(0);
        let count = || async {
            times.fetch_add(1, Ordering::Relaxed);
        };
        lease.cleared_by(count).await;
        lease.cleared_by(count).await;
        assert_eq!(times.load(Ordering::Relaxed), 1);
    }
}
