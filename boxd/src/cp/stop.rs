//! Ctrl-C while something is copied: reading fails, and what was begun is given up the way it is after any other failure.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use anyhow::{Result, anyhow};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::signals::{ANSWER, Signals};

/// Told to stop, by this signal.
#[derive(Debug, Clone)]
pub(super) struct Stop(watch::Receiver<Option<i32>>);

impl Stop {
    /// Does work that may be told to stop. Ends this process as the signal would have, once what the work had begun is given up.
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
        // What was finished at the same moment is finished.
        if given_up.await {
            return Ok(());
        }
        std::process::exit(128 + number)
    }

    /// The same bytes, until it is told.
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

/// A reader that fails once it is told to stop.
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
            // A future that is ready is not asked again.
            self.told = Box::pin(std::future::ready(()));
            return Poll::Ready(Err(io::Error::other(anyhow!("interrupted"))));
        }
        Pin::new(&mut self.reader).poll_read(cx, into)
    }
}
