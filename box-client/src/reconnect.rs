//! When to resume reading a command after its connection was lost.
//!
//! A pure state machine: events in, decisions out, without a clock or a connection.
//!
//! | event | decision |
//! |---|---|
//! | connection loss | resume after 0.5 s, 1 s, 2 s, 4 s, 8 s: the delay doubles with each loss, up to 8 s |
//! | connection loss that the server announced as a restart | resume at once; it counts as a loss |
//! | output, or the `started` chunk | reset the number of losses |
//! | sixth consecutive loss | give up |
//! | loss after a kill | give up |

use std::time::Duration;

use box_transports::reconnecting::backoff_delay;

/// Number of consecutive losses after which a command is still resumed.
pub const MAX_RECONNECTS: u32 = 5;

/// Delay after the first loss; it doubles with each further one.
pub const FIRST_DELAY: Duration = Duration::from_millis(500);

/// Maximum delay.
pub const MAX_DELAY: Duration = Duration::from_secs(8);

/// How the connection was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// The server announced a restart.
    Restart,
    /// The connection broke or could not be established.
    Broken,
}

/// The reaction to a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Resume after this delay.
    After(Duration),
    /// Too many consecutive losses.
    GiveUp {
        /// Number of consecutive losses.
        losses: u32,
    },
    /// The client has killed the command.
    Killed,
}

/// The reconnection state of one command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reconnect {
    losses: u32,
    killed: bool,
}

impl Reconnect {
    /// Records output or the `started` chunk, which resets the number of losses.
    pub fn on_progress(&mut self) {
        self.losses = 0;
    }

    /// Records that the client has killed the command.
    pub fn on_kill(&mut self) {
        self.killed = true;
    }

    /// Records a lost connection or a failed attempt to resume.
    pub fn on_loss(&mut self, loss: Loss) -> Decision {
        if self.killed {
            return Decision::Killed;
        }
        self.losses = self.losses.saturating_add(1);
        let losses = self.losses;
        if losses > MAX_RECONNECTS {
            return Decision::GiveUp { losses };
        }
        Decision::After(match loss {
            Loss::Restart => Duration::ZERO,
            Loss::Broken => backoff_delay(FIRST_DELAY, MAX_DELAY, losses - 1),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::{Instant, sleep};

    /// Returns the times of the attempts in milliseconds, and the last decision.
    async fn attempts(mut policy: Reconnect, losses: &[Loss]) -> (Vec<u128>, Decision) {
        let start = Instant::now();
        let mut times = Vec::new();
        for loss in losses {
            match policy.on_loss(*loss) {
                Decision::After(delay) => sleep(delay).await,
                last => return (times, last),
            }
            times.push(start.elapsed().as_millis());
        }
        (times, Decision::After(Duration::ZERO))
    }

    #[tokio::test(start_paused = true)]
    async fn five_attempts_with_growing_delays_then_give_up() {
        let (times, last) = attempts(Reconnect::default(), &[Loss::Broken; 9]).await;
        assert_eq!(times, [500, 1500, 3500, 7500, 15500]);
        assert_eq!(last, Decision::GiveUp { losses: 6 });
    }

    #[tokio::test(start_paused = true)]
    async fn an_announced_restart_resumes_at_once_and_counts() {
        let losses = [Loss::Restart, Loss::Broken, Loss::Restart, Loss::Broken];
        let (times, _) = attempts(Reconnect::default(), &losses).await;
        assert_eq!(times, [0, 1000, 1000, 5000]);
        let (times, last) = attempts(Reconnect::default(), &[Loss::Restart; 9]).await;
        assert_eq!(times, [0; 5]);
        assert_eq!(last, Decision::GiveUp { losses: 6 });
    }

    #[test]
    fn output_resets_the_losses() {
        let mut policy = Reconnect::default();
        for _ in 0..100 {
            for _ in 0..MAX_RECONNECTS {
                assert!(matches!(policy.on_loss(Loss::Broken), Decision::After(_)));
            }
            policy.on_progress();
            assert_eq!(policy, Reconnect::default());
        }
    }

    #[test]
    fn no_delay_exceeds_the_maximum() {
        let mut policy = Reconnect {
            losses: 3,
            killed: false,
        };
        assert_eq!(
            policy.on_loss(Loss::Broken),
            Decision::After(Duration::from_secs(4))
        );
        assert_eq!(policy.on_loss(Loss::Broken), Decision::After(MAX_DELAY));
    }

    #[test]
    fn a_killed_command_is_not_resumed() {
        let mut policy = Reconnect::default();
        policy.on_loss(Loss::Broken);
        policy.on_kill();
        policy.on_progress();
        assert_eq!(policy.on_loss(Loss::Restart), Decision::Killed);
        assert_eq!(policy.on_loss(Loss::Broken), Decision::Killed);
    }
}
