//! Places of a listener: its connection limit, and eviction when it is full.
//!
//! A connection with an unidentified peer makes room for the next one, the oldest first. Many silent connections
//! therefore cannot keep out a peer that identifies itself quickly enough. It has time until as many further
//! connections arrive as the listener has places.

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

/// Places of one listener. Cheap to clone.
#[derive(Clone)]
pub struct Places(Arc<Inner>);

struct Inner {
    limit: usize,
    taken: watch::Sender<usize>,
    /// Places of unidentified peers, oldest first.
    unknown: Mutex<Unknown>,
}

#[derive(Default)]
struct Unknown {
    next: u64,
    seats: BTreeMap<u64, Arc<Seat>>,
}

/// State that a place and the listener share.
#[derive(Debug, Default)]
struct Seat {
    lost: AtomicBool,
    waker: AtomicWaker,
}

/// The place of one connection. Dropping the last clone frees it.
/// The default belongs to no listener.
#[derive(Debug, Clone, Default)]
pub struct Place(Option<Arc<Held>>);

#[derive(Debug)]
struct Held {
    places: Places,
    number: u64,
    seat: Arc<Seat>,
}

impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Places")
            .field("limit", &self.0.limit)
            .field("taken", &self.taken())
            .finish_non_exhaustive()
    }
}

impl Places {
    /// Creates this many places.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Inner {
            limit,
            taken: watch::Sender::new(0),
            unknown: Mutex::default(),
        }))
    }

    fn unknown(&self) -> MutexGuard<'_, Unknown> {
        // The state is consistent whenever the lock is released.
        self.0
            .unknown
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of places.
    pub fn limit(&self) -> usize {
        self.0.limit
    }

    /// Returns the number of taken places.
    pub fn taken(&self) -> usize {
        *self.0.taken.borrow()
    }

    /// Takes a place for a new connection with an unidentified peer.
    /// Also returns whether another connection had to make room. `None` if all other peers are identified.
    pub fn take(&self) -> Option<(Place, bool)> {
        let made_room = self.taken() >= self.0.limit;
        if made_room && !self.make_room() {
            return None;
        }
        let seat = Arc::new(Seat::default());
        let mut unknown = self.unknown();
        unknown.next += 1;
        let number = unknown.next;
        unknown.seats.insert(number, Arc::clone(&seat));
        drop(unknown);
        self.0.taken.send_modify(|taken| *taken += 1);
        let held = Held {
            places: self.clone(),
            number,
            seat,
        };
        Some((Place(Some(Arc::new(held))), made_room))
    }

    /// Evicts the oldest connection with an unidentified peer, if any.
    /// Returns whether one existed.
    pub fn make_room(&self) -> bool {
        let mut unknown = self.unknown();
        let Some((_, seat)) = unknown.seats.pop_first() else {
            return false;
        };
        // Under the lock, or a connection that ends at this moment would be subtracted twice.
        seat.lost.store(true, Ordering::Release);
        drop(unknown);
        self.0.taken.send_modify(|taken| *taken -= 1);
        seat.waker.wake();
        true
    }

    /// Waits until no place is taken.
    pub async fn all_free(&self) {
        // `self` owns the sender, so it cannot be gone.
        let _ = self.0.taken.subscribe().wait_for(|taken| *taken == 0).await;
    }
}

impl Place {
    /// Keeps the place of a connection with an identified peer.
    /// Returns `false` if another connection has taken the place: this one is over.
    #[must_use]
    pub fn keep(&self) -> bool {
        let Some(held) = &self.0 else {
            return true;
        };
        // Uses the lock that also guards eviction.
        let mut unknown = held.places.unknown();
        unknown.seats.remove(&held.number);
        !held.seat.lost.load(Ordering::Acquire)
    }

    /// Ready once another connection has taken the place. One task can wait for it.
    pub fn poll_lost(&self, cx: &Context<'_>) -> Poll<()> {
        let Some(held) = &self.0 else {
            return Poll::Pending;
        };
        held.seat.waker.register(cx.waker());
        if held.seat.lost.load(Ordering::Acquire) {
            return Poll::Ready(());
        }
        Poll::Pending
    }

    /// Waits until another connection has taken the place. One task can wait for it.
    pub async fn lost(&self) {
        poll_fn(|cx| self.poll_lost(cx)).await;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.places.unknown().seats.remove(&self.number);
        if !self.seat.lost.load(Ordering::Acquire) {
            self.places.0.taken.send_modify(|taken| *taken -= 1);
        }
    }
}

/// First pause of accepting without descriptors or memory; doubles each time.
const FIRST_REST: Duration = Duration::from_millis(20);

/// Maximum pause.
const LONGEST_REST: Duration = Duration::from_millis(640);

/// Minimum interval between log lines about failed accepts.
const SAID_EVERY: Duration = Duration::from_secs(30);

/// Backoff of a listener that cannot accept connections.
/// It logs at intervals and retries after increasing pauses.
#[derive(Debug, Default)]
pub struct Rests {
    /// Last pause, unless a connection has arrived since.
    last: Option<Duration>,
    /// Time of the last log line.
    said: Option<Instant>,
    /// Whether the log must still report the end of the problem.
    lasts: bool,
    /// Whether an eviction freed the descriptor of the next connection.
    /// That connection does not end the problem.
    made_room: bool,
}

impl Rests {
    /// Pauses. If descriptors ran out, evicts a connection with an unidentified peer.
    pub async fn rest(&mut self, error: &io::Error, places: &Places) {
        let rest = self
            .last
            .map_or(FIRST_REST, |last| (last * 2).min(LONGEST_REST));
        self.last = Some(rest);
        if self.said.is_none_or(|said| said.elapsed() >= SAID_EVERY) {
            tracing::warn!(reason = %unaccepted(error), "no connection is accepted for now");
            self.said = Some(Instant::now());
            self.lasts = true;
        }
        self.made_room = matches!(
            Errno::from_io_error(error),
            Some(Errno::MFILE | Errno::NFILE)
        ) && places.make_room();
        tokio::time::sleep(rest).await;
    }

    /// Records that a connection was accepted.
    pub fn over(&mut self) {
        self.last = None;
        if !std::mem::take(&mut self.made_room) && std::mem::take(&mut self.lasts) {
            tracing::info!("connections are accepted again");
        }
    }
}

/// Returns the reason for a failed accept, for the operator.
fn unaccepted(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => "this process has no file descriptor left (EMFILE); raise its limit \
                               (ulimit -n, LimitNOFILE) or lower server.max_connections"
            .to_owned(),
        Some(Errno::NFILE) => {
            "this machine has no file descriptor left (ENFILE); raise fs.file-max".to_owned()
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn is_lost(place: &Place) -> bool {
        place.lost().now_or_never().is_some()
    }

    #[test]
    fn the_oldest_whose_peer_is_not_known_makes_room() {
        let places = Places::new(3);
        let [known, old, young] = [(); 3].map(|()| {
            let (place, made_room) = places.take().unwrap();
            assert!(!made_room);
            place
        });
        assert!(known.keep());
        let (next, made_room) = places.take().unwrap();
        assert!(made_room && is_lost(&old));
        assert!(!is_lost(&known) && !is_lost(&young) && !is_lost(&next));
        assert_eq!(places.taken(), 3);
        drop(old);
        assert_eq!(places.taken(), 3, "it was counted out when it made room");
        assert!(young.keep() && next.keep());
        assert!(known.keep(), "a peer may say again who it is");
        assert!(places.take().is_none(), "all peers are known");
        drop((known, young, next));
        assert_eq!(places.taken(), 0);
        assert!(places.unknown().seats.is_empty());
    }

    #[test]
    fn a_connection_that_made_room_cannot_keep_its_place() {
        let places = Places::new(1);
        let (evicted, _) = places.take().unwrap();
        let (next, made_room) = places.take().unwrap();
        assert!(made_room);
        assert!(!evicted.keep(), "its peer spoke too late");
        assert!(next.keep());
        assert_eq!(places.taken(), 1);
        drop(evicted);
        assert_eq!(places.taken(), 1, "it was counted out when it made room");
        assert!(places.take().is_none(), "the one place is kept");
    }

    #[tokio::test(start_paused = true)]
    async fn rests_grow_and_missing_descriptors_are_taken_from_those_who_say_nothing() {
        let places = Places::new(9);
        let (silent, _) = places.take().unwrap();
        let mut rests = Rests::default();
        let starved = io::Error::from_raw_os_error(Errno::MFILE.raw_os_error());
        assert!(
            unaccepted(&starved).contains("EMFILE"),
            "{}",
            unaccepted(&starved)
        );
        let begun = tokio::time::Instant::now();
        rests.rest(&starved, &places).await;
        assert_eq!(begun.elapsed(), FIRST_REST);
        assert!(is_lost(&silent));
        // The descriptor of an evicted connection does not end the problem, so the log does not report it again.
        rests.over();
        assert!(rests.lasts && rests.last.is_none());
        rests.rest(&starved, &places).await;
        assert_eq!(rests.said, Some(begun));
        rests.over();
        assert!(!rests.lasts);
        for _ in 0..20 {
            rests.rest(&starved, &places).await;
        }
        assert_eq!(rests.last, Some(LONGEST_REST));
        assert_eq!(rests.said, Some(begun));
        tokio::time::advance(SAID_EVERY).await;
        rests.rest(&starved, &places).await;
        assert!(rests.said > Some(begun), "it is said again while it lasts");
        rests.over();
        assert_eq!(rests.last, None);
    }

    #[tokio::test]
    async fn a_connection_learns_of_its_loss_and_the_listener_of_the_last_end() {
        let places = Places::new(1);
        let (first, _) = places.take().unwrap();
        let waiting = tokio::spawn(async move { first.lost().await });
        tokio::task::yield_now().await;
        let (second, _) = places.take().unwrap();
        waiting.await.unwrap();
        let all_free = tokio::spawn({
            let places = places.clone();
            async move { places.all_free().await }
        });
        drop(second);
        all_free.await.unwrap();
    }
}
