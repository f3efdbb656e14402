//! Reports about a pull, on their way to its caller.
//!
//! A pull must not wait for its caller. A newer report about a layer replaces an older one that
//! was not sent, so the queue has at most three reports for each layer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_image::{Event, Phase, Progress};
use box_protocol::actions::{ImageLayer, LayerPhase, PullProgress};
use tokio::sync::{Notify, mpsc};

#[derive(Default)]
struct Queue {
    reports: Mutex<VecDeque<PullProgress>>,
    changed: Notify,
}

/// The reports of one pull.
pub(super) struct Reports(Arc<Queue>);

/// Returns a receiver of events and the reports made from them.
pub(super) fn channel() -> (Progress, Reports) {
    let queue = Arc::new(Queue::default());
    let reports = Reports(Arc::clone(&queue));
    let progress = Progress::new(move |event| {
        if let Some(report) = converted(event) {
            queue.push(report);
        }
    });
    (progress, reports)
}

impl Queue {
    fn push(&self, report: PullProgress) {
        let mut reports = self.lock();
        let older = reports.iter_mut().find(|older| is_replaced(older, &report));
        match older {
            Some(older) => *older = report,
            None => reports.push_back(report),
        }
        drop(reports);
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<PullProgress>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the reports that wait; returns whether the caller takes more.
    async fn send_all(&self, to: &mpsc::Sender<PullProgress>) -> bool {
        loop {
            let Some(report) = self.lock().pop_front() else {
                return true;
            };
            if to.send(report).await.is_err() {
                return false;
            }
        }
    }
}

impl Reports {
    /// Runs a pull to its end and sends its reports.
    pub(super) async fn during<T>(
        self,
        to: &mpsc::Sender<PullProgress>,
        pull: impl Future<Output = T>,
    ) -> T {
        let forward = async {
            while self.0.send_all(to).await {
                self.0.changed.notified().await;
            }
            std::future::pending::<()>().await;
        };
        let result = tokio::select! {
            result = pull => result,
            () = forward => return std::future::pending().await,
        };
        self.0.send_all(to).await;
        result
    }
}

fn is_replaced(older: &PullProgress, newer: &PullProgress) -> bool {
    match (older, newer) {
        (
            PullProgress::Layer { digest, phase, .. },
            PullProgress::Layer {
                digest: of_newer,
                phase: newer_phase,
                ..
            },
        ) => digest == of_newer && phase == newer_phase,
        (PullProgress::Retry { .. }, PullProgress::Retry { .. }) => true,
        _ => false,
    }
}

fn converted(event: Event) -> Option<PullProgress> {
    Some(match event {
        Event::Resolved { digest, layers } => PullProgress::Resolved {
            digest: digest.to_string(),
            layers: layers.into_iter().map(layer).collect(),
        },
        Event::Layer {
            digest,
            phase,
            done,
            total,
        } => PullProgress::Layer {
            digest: digest.to_string(),
            phase: match phase {
                Phase::Download => LayerPhase::Download,
                Phase::Unpack => LayerPhase::Unpack,
                Phase::Done => LayerPhase::Done,
            },
            done,
            total,
        },
        Event::Retry { reason, wait_ms } => PullProgress::Retry { reason, wait_ms },
        Event::Saving => PullProgress::Saving {},
        _ => return None,
    })
}

pub(super) fn layer((digest, size): (box_image::Digest, u64)) -> ImageLayer {
    ImageLayer {
        digest: digest.to_string(),
        size,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_slow_caller_gets_the_newest_report_of_each_layer() {
        let report = |digest: &str, phase, done| PullProgress::Layer {
            digest: digest.to_owned(),
            phase,
            done,
            total: 9,
        };
        let queue = Arc::new(Queue::default());
        let (to, mut from) = mpsc::channel(8);
        let pull = async {
            for done in 0..9 {
                queue.push(report("a", LayerPhase::Download, done));
                queue.push(report("b", LayerPhase::Download, done));
                queue.push(report("a", LayerPhase::Unpack, done));
            }
            7
        };
        let reports = Reports(Arc::clone(&queue));
        assert_eq!(reports.during(&to, pull).await, 7);
        drop(to);
        let mut got = Vec::new();
        while let Some(report) = from.recv().await {
            got.push(report);
        }
        let expected = [
            report("a", LayerPhase::Download, 8),
            report("b", LayerPhase::Download, 8),
            report("a", LayerPhase::Unpack, 8),
        ];
        assert_eq!(got, expected);
    }
}
