//! Bodies of streams. One breaks off if its box ends: clients then ask for the health of the box.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures::{StreamExt as _, future, stream};

use crate::http::stream::{Step, StreamedCall};

/// The last bytes of a body that breaks off.
#[derive(Debug)]
pub(super) struct Broken(pub(super) Bytes);

/// Returns the body of a call; `frame` writes each step, or nothing.
pub(super) fn breakable<C: Send + 'static, R: Send + 'static>(
    call: StreamedCall<C, R>,
    keepalive: Duration,
    mut frame: impl FnMut(Step<C, R>) -> Result<Bytes, Broken> + Send + 'static,
) -> Body {
    let is_broken = Arc::new(AtomicBool::new(false));
    let breaks = Arc::clone(&is_broken);
    let body = call.into_body(Some(keepalive), move |step| {
        frame(step).unwrap_or_else(|Broken(last)| {
            breaks.store(true, Ordering::Relaxed);
            last
        })
    });
    let end = stream::once(async move {
        if !is_broken.load(Ordering::Relaxed) {
            return None;
        }
        // hyper discards what it has not sent yet when a body fails, and sends before it polls again.
        tokio::task::yield_now().await;
        let ended = io::Error::other("the sandbox ended");
        Some(Err(axum::Error::new(ended)))
    });
    let pieces = body.into_data_stream();
    Body::from_stream(pieces.chain(end.filter_map(future::ready)))
}

#[cfg(test)]
mod tests {
    use box_protocol::BoxError;

    use super::*;

    async fn read(breaks: bool) -> (Vec<u8>, bool) {
        let call = StreamedCall::<u32, u32>::new(|_| async { Err(BoxError::conflict("no")) });
        let body = breakable(call, Duration::from_mins(1), move |_| {
            let last = Bytes::from_static(b"last");
            if breaks { Err(Broken(last)) } else { Ok(last) }
        });
        let mut pieces = body.into_data_stream();
        let mut read = Vec::new();
        while let Some(piece) = pieces.next().await {
            match piece {
                Ok(piece) => read.extend(piece),
                Err(_) => return (read, true),
            }
        }
        (read, false)
    }

    #[tokio::test]
    async fn a_body_breaks_off_after_its_last_bytes() {
        assert_eq!(read(true).await, (b"last".to_vec(), true));
        assert_eq!(read(false).await, (b"last".to_vec(), false));
    }
}
