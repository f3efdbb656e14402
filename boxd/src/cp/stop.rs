//! Ctrl-C during a copy: reads fail, and the copy is undone as after any other failure.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use anyhow::{Result, anyhow};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::signals::{ANSWER, Signals};

/// The signal that stops a copy.
#[derive(Debug, Clone)]
pub(super) struct Stop(watch::Receiver<Option<i32>>);

impl Stop {
    /// Runs work until a signal. After the signal, waits for the cleanup and exits as if by the signal.
    pub(super) async fn unless<W: Future<Output = Result<()>>>(
        work: impl FnOnce(Self) -> W,
    ) -> Result<()> {
        let (tell, told) = watch::channel(None);
        let mut work = std::pin::pin!(work(Self(told)));
        let mut signals = Signals::listen()?;
        let number = tokio::select! {
            done = &mut work => return done,
            (number, _) = signals.next() => number,
        };
        tell.send_replace(Some(number));
        let given_up = async {
            tokio::select! {
                done = timeout(ANSWER, work) => done.is_ok_and(|done| done.is_ok()),
                _ = signals.next() => false,
            }
        };
        // The work may finish at the same moment.
        if given_up.await {
            return Ok(());
        }
        std::process::exit(128 + number)
    }

    /// Wraps a reader so that it fails after the signal.
    pub(super) fn cut<R: AsyncRead + Unpin>(&self, reader: R) -> Cut<R> {
        let mut told = self.0.clone();
        let told = async move {
            if told.wait_for(Option::is_some).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        Cut {
            reader,
            told: Box::pin(told),
        }
    }
}

/// A reader that fails after the signal.
pub(super) struct Cut<R> {
    reader: R,
    told: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl<R: AsyncRead + Unpin> AsyncRead for Cut<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.told.as_mut().poll(cx).is_ready() {
            // A finished future must not be polled again.
            self.told = Box::pin(std::future::ready(()));
            return Poll::Ready(Err(io::Error::other(anyhow!("interrupted"))));
        }
        Pin::new(&mut self.reader).poll_read(cx, into)
    }
}
