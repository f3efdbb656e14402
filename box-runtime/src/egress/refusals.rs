//! Recently refused destinations of a box, for diagnosis.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use box_protocol::UnixMs;
use box_protocol::actions::RefusedConnection;

use super::policy::Refusal;

/// Limit of remembered destinations. The oldest is dropped first.
const REMEMBERED: usize = 64;

/// Most recently refused destinations, without duplicates.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<VecDeque<RefusedConnection>>);

impl Refusals {
    /// Locks the list.
    ///
    /// Every change is one removal and one push, so a poisoned lock still holds a valid list.
    fn all(&self) -> MutexGuard<'_, VecDeque<RefusedConnection>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a refused destination, if a policy or a limit caused the refusal.
    pub(super) fn record(&self, to: impl FnOnce() -> String, why: Refusal) {
        if !why.is_decided() {
            return;
        }
        let (to, why) = (to(), why.as_str());
        let mut all = self.all();
        let before = all
            .iter()
            .position(|refused| refused.to == to && refused.why == why);
        let count = before
            .and_then(|at| all.remove(at))
            .map_or(0, |old| old.count);
        if all.len() == REMEMBERED {
            all.pop_front();
        }
        all.push_back(RefusedConnection {
            to,
            why: why.to_owned(),
            count: count + 1,
            at: UnixMs::now(),
        });
    }

    /// Returns all refusals, the most recent last.
    pub(super) fn list(&self) -> Vec<RefusedConnection> {
        self.all().iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_are_listed_once_and_the_oldest_dropped() {
        let refusals = Refusals::default();
        for number in 0..100 {
            refusals.record(|| format!("h{number}:443"), Refusal::Unlisted);
        }
        refusals.record(|| "h50:443".to_owned(), Refusal::Unlisted);
        refusals.record(|| "h50:443".to_owned(), Refusal::Denied);
        refusals.record(|| "far:443".to_owned(), Refusal::Unreachable);
        let all = refusals.list();
        assert_eq!(all.len(), REMEMBERED);
        let seen = |to: &str| all.iter().filter(|refused| refused.to == to).count();
        assert_eq!(
            (seen("h36:443"), seen("h99:443"), seen("h50:443")),
            (0, 1, 2)
        );
        assert_eq!(seen("far:443"), 0, "no policy decided that");
        let last: Vec<_> = all.iter().rev().take(2).collect();
        assert_eq!((last[0].why.as_str(), last[0].count), ("denied", 1));
        assert_eq!((last[1].why.as_str(), last[1].count), ("unlisted", 2));
    }
}
