//! Connection limit of a listener, and eviction when it is full.
//!
//! A connection with an unidentified peer is evicted for the next one, the oldest first. Many silent connections
//! therefore cannot keep out a peer that identifies itself quickly enough. It has time until as many further
//! connections arrive as the limit allows.

use std::collections::BTreeMap;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::task::AtomicWaker;
use rustix::io::Errno;
use tokio::sync::watch;
use tokio::time::Instant;

/// Connection limit of one listener. Cheap to clone.
#[derive(Clone)]
pub struct ConnectionLimit(Arc<Inner>);

struct Inner {
    limit: usize,
    in_use: watch::Sender<usize>,
    /// Permits of unidentified peers, oldest first.
    unidentified: Mutex<Unidentified>,
}

#[derive(Default)]
struct Unidentified {
    next: u64,
    slots: BTreeMap<u64, Arc<Slot>>,
}

/// State that a permit and the listener share.
#[derive(Debug, Default)]
struct Slot {
    evicted: AtomicBool,
    waker: AtomicWaker,
}

/// Permit of one connection. Dropping the last clone releases it.
/// The default belongs to no listener.
#[derive(Debug, Clone, Default)]
pub struct ConnectionPermit(Option<Arc<PermitState>>);

#[derive(Debug)]
struct PermitState {
    limit: ConnectionLimit,
    number: u64,
    slot: Arc<Slot>,
}

impl fmt::Debug for ConnectionLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionLimit")
            .field("limit", &self.0.limit)
            .field("in_use", &self.in_use())
            .finish_non_exhaustive()
    }
}

impl ConnectionLimit {
    /// Creates a limit of this many connections.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Inner {
            limit,
            in_use: watch::Sender::new(0),
            unidentified: Mutex::default(),
        }))
    }

    fn unidentified(&self) -> MutexGuard<'_, Unidentified> {
        // The state is consistent whenever the lock is released.
        self.0
            .unidentified
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the maximum number of connections.
    pub fn limit(&self) -> usize {
        self.0.limit
    }

    /// Returns the number of permits in use.
    pub fn in_use(&self) -> usize {
        *self.0.in_use.borrow()
    }

    /// Acquires a permit for a new connection with an unidentified peer.
    /// Also returns whether another connection was evicted for it. `None` if all other peers are identified.
    pub fn acquire(&self) -> Option<(ConnectionPermit, bool)> {
        let evicted = self.in_use() >= self.0.limit;
        if evicted && !self.evict_oldest() {
            return None;
        }
        let slot = Arc::new(Slot::default());
        let mut unidentified = self.unidentified();
        unidentified.next += 1;
        let number = unidentified.next;
        unidentified.slots.insert(number, Arc::clone(&slot));
        drop(unidentified);
        self.0.in_use.send_modify(|count| *count += 1);
        let state = PermitState {
            limit: self.clone(),
            number,
            slot,
        };
        Some((ConnectionPermit(Some(Arc::new(state))), evicted))
    }

    /// Evicts the oldest connection with an unidentified peer, if any.
    /// Returns whether one existed.
    pub fn evict_oldest(&self) -> bool {
        let mut unidentified = self.unidentified();
        let Some((_, slot)) = unidentified.slots.pop_first() else {
            return false;
        };
        // Under the lock, or a connection that ends at this moment would be subtracted twice.
        slot.evicted.store(true, Ordering::Release);
        drop(unidentified);
        self.0.in_use.send_modify(|count| *count -= 1);
        slot.waker.wake();
        true
    }

    /// Waits until no permit is in use.
    pub async fn all_released(&self) {
        // `self` owns the sender, so it cannot be gone.
        let _ = self
            .0
            .in_use
            .subscribe()
            .wait_for(|count| *count == 0)
            .await;
    }
}

impl ConnectionPermit {
    /// Makes the permit permanent, for a connection with an identified peer.
    /// Returns `false` if the listener has evicted the connection.
    #[must_use]
    pub fn confirm(&self) -> bool {
        let Some(state) = &self.0 else {
            return true;
        };
        // Uses the lock that also guards eviction.
        let mut unidentified = state.limit.unidentified();
        unidentified.slots.remove(&state.number);
        !state.slot.evicted.load(Ordering::Acquire)
    }

    /// Ready once the listener has evicted the connection. One task can wait for it.
    pub fn poll_evicted(&self, cx: &Context<'_>) -> Poll<()> {
        let Some(state) = &self.0 else {
            return Poll::Pending;
        };
        state.slot.waker.register(cx.waker());
        if state.slot.evicted.load(Ordering::Acquire) {
            return Poll::Ready(());
        }
        Poll::Pending
    }

    /// Waits until the listener has evicted the connection. One task can wait for it.
    pub async fn evicted(&self) {
        poll_fn(|cx| self.poll_evicted(cx)).await;
    }
}

impl Drop for PermitState {
    fn drop(&mut self) {
        self.limit.unidentified().slots.remove(&self.number);
        if !self.slot.evicted.load(Ordering::Acquire) {
            self.limit.0.in_use.send_modify(|count| *count -= 1);
        }
    }
}

/// First pause of accepting without descriptors or memory; doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// Maximum pause.
const MAX_PAUSE: Duration = Duration::from_millis(640);

/// Minimum interval between log lines about failed accepts.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// Backoff of a listener that cannot accept connections.
/// It logs at intervals and retries after increasing pauses.
#[derive(Debug, Default)]
pub struct AcceptBackoff {
    /// Last pause, unless a connection has arrived since.
    last: Option<Duration>,
    /// Time of the last log line.
    logged: Option<Instant>,
    /// Whether the log must still report the end of the problem.
    is_reported: bool,
    /// Whether an eviction freed the descriptor of the next connection.
    /// That connection does not end the problem.
    evicted: bool,
}

impl AcceptBackoff {
    /// Pauses. If descriptors ran out, evicts a connection with an unidentified peer.
    pub async fn pause(&mut self, error: &io::Error, limit: &ConnectionLimit) {
        let pause = self
            .last
            .map_or(FIRST_PAUSE, |last| (last * 2).min(MAX_PAUSE));
        self.last = Some(pause);
        if self
            .logged
            .is_none_or(|logged| logged.elapsed() >= LOG_INTERVAL)
        {
            tracing::warn!(reason = %accept_failure(error), "accepting connections failed; retrying");
            self.logged = Some(Instant::now());
            self.is_reported = true;
        }
        self.evicted = matches!(
            Errno::from_io_error(error),
            Some(Errno::MFILE | Errno::NFILE)
        ) && limit.evict_oldest();
        tokio::time::sleep(pause).await;
    }

    /// Records that a connection was accepted.
    pub fn reset(&mut self) {
        self.last = None;
        if !std::mem::take(&mut self.evicted) && std::mem::take(&mut self.is_reported) {
            tracing::info!("accepting connections again");
        }
    }
}

/// Returns the reason for a failed accept, for the operator.
fn accept_failure(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => "the process has no file descriptor left (EMFILE); raise its limit \
                               (ulimit -n, LimitNOFILE) or lower server.max_connections"
            .to_owned(),
        Some(Errno::NFILE) => {
            "the machine has no file descriptor left (ENFILE); raise fs.file-max".to_owned()
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn is_evicted(permit: &ConnectionPermit) -> bool {
        permit.evicted().now_or_never().is_some()
    }

    #[test]
    fn the_oldest_unidentified_connection_is_evicted() {
        let limit = ConnectionLimit::new(3);
        let [known, old, young] = [(); 3].map(|()| {
            let (permit, evicted) = limit.acquire().unwrap();
            assert!(!evicted);
            permit
        });
        assert!(known.confirm());
        let (next, evicted) = limit.acquire().unwrap();
        assert!(evicted && is_evicted(&old));
        assert!(!is_evicted(&known) && !is_evicted(&young) && !is_evicted(&next));
        assert_eq!(limit.in_use(), 3);
        drop(old);
        assert_eq!(limit.in_use(), 3, "the eviction released its permit");
        assert!(young.confirm() && next.confirm());
        assert!(known.confirm(), "a permit can be confirmed again");
        assert!(limit.acquire().is_none(), "all peers are identified");
        drop((known, young, next));
        assert_eq!(limit.in_use(), 0);
        assert!(limit.unidentified().slots.is_empty());
    }

    #[test]
    fn an_evicted_connection_cannot_confirm_its_permit() {
        let limit = ConnectionLimit::new(1);
        let (old, _) = limit.acquire().unwrap();
        let (next, evicted) = limit.acquire().unwrap();
        assert!(evicted);
        assert!(!old.confirm(), "its peer identified itself too late");
        assert!(next.confirm());
        assert_eq!(limit.in_use(), 1);
        drop(old);
        assert_eq!(limit.in_use(), 1, "the eviction released its permit");
        assert!(limit.acquire().is_none(), "the only permit is confirmed");
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_and_a_lack_of_descriptors_evicts_a_silent_connection() {
        let limit = ConnectionLimit::new(9);
        let (silent, _) = limit.acquire().unwrap();
        let mut backoff = AcceptBackoff::default();
        let no_descriptors = io::Error::from_raw_os_error(Errno::MFILE.raw_os_error());
        assert!(
            accept_failure(&no_descriptors).contains("EMFILE"),
            "{}",
            accept_failure(&no_descriptors)
        );
        let start = tokio::time::Instant::now();
        backoff.pause(&no_descriptors, &limit).await;
        assert_eq!(start.elapsed(), FIRST_PAUSE);
        assert!(is_evicted(&silent));
        // The descriptor of an evicted connection does not end the problem, so the log does not report it again.
        backoff.reset();
        assert!(backoff.is_reported && backoff.last.is_none());
        backoff.pause(&no_descriptors, &limit).await;
        assert_eq!(backoff.logged, Some(start));
        backoff.reset();
        assert!(!backoff.is_reported);
        for _ in 0..20 {
            backoff.pause(&no_descriptors, &limit).await;
        }
        assert_eq!(backoff.last, Some(MAX_PAUSE));
        assert_eq!(backoff.logged, Some(start));
        tokio::time::advance(LOG_INTERVAL).await;
        backoff.pause(&no_descriptors, &limit).await;
        assert!(
            backoff.logged > Some(start),
            "the problem is logged again while it lasts"
        );
        backoff.reset();
        assert_eq!(backoff.last, None);
    }

    #[tokio::test]
    async fn eviction_and_the_last_release_wake_their_waiters() {
        let limit = ConnectionLimit::new(1);
        let (first, _) = limit.acquire().unwrap();
        let waiting = tokio::spawn(async move { first.evicted().await });
        tokio::task::yield_now().await;
        let (second, _) = limit.acquire().unwrap();
        waiting.await.unwrap();
        let all_released = tokio::spawn({
            let limit = limit.clone();
            async move { limit.all_released().await }
        });
        drop(second);
        all_released.await.unwrap();
    }
}
