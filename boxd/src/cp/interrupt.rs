//! Ctrl-C during a copy: reads fail, and the copy is undone as after any other failure.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use anyhow::{Result, anyhow};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::signals::{CONFIRM_TIMEOUT, Signals};

/// The signal that stops a copy.
#[derive(Debug, Clone)]
pub(crate) struct Interrupt(watch::Receiver<Option<i32>>);

impl Interrupt {
    /// Runs work until a signal. After the signal, waits for the cleanup and exits as if by the signal.
    pub(crate) async fn run_until_signal<T>(
        work: impl AsyncFnOnce(Self) -> Result<T>,
    ) -> Result<T> {
        let (sender, interrupted) = watch::channel(None);
        let mut work = std::pin::pin!(work(Self(interrupted)));
        let mut signals = Signals::listen()?;
        let number = tokio::select! {
            done = &mut work => return done,
            (number, _) = signals.next() => number,
        };
        sender.send_replace(Some(number));
        let finished = tokio::select! {
            done = timeout(CONFIRM_TIMEOUT, work) => done.ok(),
            _ = signals.next() => None,
        };
        // The work may finish at the same moment.
        if let Some(Ok(done)) = finished {
            return Ok(done);
        }
        std::process::exit(128 + number)
    }

    /// Wraps a reader so that it fails after the signal.
    pub(crate) fn guard<R: AsyncRead + Unpin>(&self, reader: R) -> InterruptibleReader<R> {
        let mut interrupted = self.0.clone();
        let interrupted = async move {
            if interrupted.wait_for(Option::is_some).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        InterruptibleReader {
            reader,
            interrupted: Box::pin(interrupted),
        }
    }
}

/// A reader that fails after the signal.
pub(crate) struct InterruptibleReader<R> {
    reader: R,
    interrupted: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl<R: AsyncRead + Unpin> AsyncRead for InterruptibleReader<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.interrupted.as_mut().poll(cx).is_ready() {
            // A finished future must not be polled again.
            self.interrupted = Box::pin(std::future::ready(()));
            return Poll::Ready(Err(io::Error::other(anyhow!("interrupted"))));
        }
        Pin::new(&mut self.reader).poll_read(cx, into)
    }
}
