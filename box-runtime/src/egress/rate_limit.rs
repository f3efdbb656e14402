//! Rate limiter that delays callers.

use std::time::Duration;

use tokio::time::Instant;

/// Burst size, as a duration at the configured rate.
const BURST: Duration = Duration::from_secs(1);

/// Rate limit enforced by waiting.
#[derive(Debug)]
pub(crate) struct RateLimit {
    every: Option<Duration>,
    next: Instant,
}

impl RateLimit {
    /// Creates a limiter with this rate per second; 0 is unlimited.
    pub(crate) fn new(per_sec: u32) -> Self {
        let every = Duration::from_secs(1).checked_div(per_sec);
        Self {
            every,
            next: Instant::now(),
        }
    }

    /// Waits until the next event is permitted.
    pub(crate) async fn wait(&mut self) {
        let Some(every) = self.every else {
            return;
        };
        let now = Instant::now();
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        self.next = self.next.max(earliest) + every;
        if self.next > now {
            tokio::time::sleep_until(self.next).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn events_beyond_the_rate_wait() {
        tokio::time::advance(Duration::from_secs(10)).await;
        let mut rate_limit = RateLimit::new(10);
        tokio::time::advance(Duration::from_secs(10)).await;
        let started = Instant::now();
        for _ in 0..10 {
            rate_limit.wait().await;
        }
        assert_eq!(
            started.elapsed(),
            Duration::ZERO,
            "a second's worth at once"
        );
        for _ in 0..20 {
            rate_limit.wait().await;
        }
        let took = started.elapsed();
        assert!(
            (Duration::from_millis(1900)..Duration::from_millis(2200)).contains(&took),
            "{took:?}"
        );
        let mut free = RateLimit::new(0);
        free.wait().await;
    }
}
