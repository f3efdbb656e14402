//! When a command that lost its connection is read on. A pure state machine: events in, decisions out,
//! no clock and no connection.
//!
//! | event | decision |
//! |---|---|
//! | a loss | read on after 0.5 s, 1 s, 2 s, 4 s, 8 s: twice as long after each further one, at most 8 s |
//! | a loss that the server announced, to be back at once | read on at once; it counts as a loss all the same |
//! | output, or the word that the command has started | the losses so far are forgotten |
//! | the sixth loss in succession | give up |
//! | any loss after a kill | give up: nobody wants the rest |

use std::time::Duration;

use box_transports::link::doubled;

/// Losses in succession after which reading goes on.
pub const MAX_RECONNECTS: u32 = 5;

/// The pause after the first loss; each further one doubles it.
pub const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// The longest pause.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// How a connection was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// The server said that it goes and will be back at once.
    Restart,
    /// It broke, or could not be made.
    Broken,
}

/// What to do about a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Read on after this pause.
    After(Duration),
    /// It was lost too often in succession.
    GiveUp {
        /// How often.
        losses: u32,
    },
    /// It was killed.
    Killed,
}

/// When a command that lost its connection is read on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reconnect {
    losses: u32,
    killed: bool,
}

impl Reconnect {
    /// Output has come, or the word that the command has started: the losses so far are forgotten.
    pub fn progress(&mut self) {
        self.losses = 0;
    }

    /// The command was killed: whatever is lost from now on stays lost.
    pub fn kill(&mut self) {
        self.killed = true;
    }

    /// The connection was lost, or an attempt to read on failed.
    pub fn lost(&mut self, loss: Loss) -> Decision {
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
            Loss::Broken => doubled(FIRST_PAUSE, LONGEST_PAUSE, losses - 1),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::{Instant, sleep};

    /// Loses until it gives up, and tells after how many milliseconds each attempt was made.
    async fn attempts(mut policy: Reconnect, losses: &[Loss]) -> (Vec<u128>, Decision) {
        let begun = Instant::now();
        let mut made = Vec::new();
        for loss in losses {
            match policy.lost(*loss) {
                Decision::After(pause) => sleep(pause).await,
                over => return (made, over),
            }
            made.push(begun.elapsed().as_millis());
        }
        (made, Decision::After(Duration::ZERO))
    }

    #[tokio::test(start_paused = true)]
    async fn five_attempts_ever_later_and_the_sixth_loss_is_the_last() {
        let (made, over) = attempts(Reconnect::default(), &[Loss::Broken; 9]).await;
        assert_eq!(made, [500, 1500, 3500, 7500, 15500]);
        assert_eq!(over, Decision::GiveUp { losses: 6 });
    }

    #[tokio::test(start_paused = true)]
    async fn an_announced_restart_is_followed_at_once_and_counts() {
        let losses = [Loss::Restart, Loss::Broken, Loss::Restart, Loss::Broken];
        let (made, _) = attempts(Reconnect::default(), &losses).await;
        assert_eq!(made, [0, 1000, 1000, 5000]);
        let (made, over) = attempts(Reconnect::default(), &[Loss::Restart; 9]).await;
        assert_eq!(made, [0; 5]);
        assert_eq!(over, Decision::GiveUp { losses: 6 });
    }

    #[test]
    fn output_starts_over() {
        let mut policy = Reconnect::default();
        for _ in 0..100 {
            for _ in 0..MAX_RECONNECTS {
                assert!(matches!(policy.lost(Loss::Broken), Decision::After(_)));
            }
            policy.progress();
            assert_eq!(policy, Reconnect::default());
        }
    }

    #[test]
    fn no_pause_is_longer_than_the_longest() {
        let mut policy = Reconnect {
            losses: 3,
            killed: false,
        };
        assert_eq!(
            policy.lost(Loss::Broken),
            Decision::After(Duration::from_secs(4))
        );
        assert_eq!(policy.lost(Loss::Broken), Decision::After(LONGEST_PAUSE));
    }

    #[test]
    fn nothing_is_read_on_after_a_kill() {
        let mut policy = Reconnect::default();
        policy.lost(Loss::Broken);
        policy.kill();
        policy.progress();
        assert_eq!(policy.lost(Loss::Restart), Decision::Killed);
        assert_eq!(policy.lost(Loss::Broken), Decision::Killed);
    }
}
