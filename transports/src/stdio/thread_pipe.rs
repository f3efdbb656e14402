//! Standard streams that cannot be polled (terminal, regular file): a thread each.
//!
//! The threads do not belong to the async runtime. A read of a terminal cannot be interrupted, and must not delay the
//! end of the program.

use std::{
    fs::File,
    io::{self, Read, Write},
    pin::Pin,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum bytes buffered between the thread and the task.
const CAPACITY: usize = 64 * 1024;

/// Buffer between a blocking thread and an async task.
#[derive(Debug, Default)]
struct Pipe {
    state: Mutex<State>,
    /// Wakes the thread.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    /// Whether the thread is writing the bytes it took.
    busy: bool,
    /// Whether no more bytes come in, or the reader is gone.
    ended: bool,
    failed: Option<io::ErrorKind>,
    task: Option<Waker>,
}

impl Pipe {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks the thread until `ready` holds.
    fn wait_until(&self, ready: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        self.changed
            .wait_while(self.state(), |state| !ready(state))
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state from the thread and wakes the task.
    fn update_and_wake_task(mut state: MutexGuard<'_, State>, change: impl FnOnce(&mut State)) {
        change(&mut state);
        let task = state.task.take();
        drop(state);
        if let Some(task) = task {
            task.wake();
        }
    }

    /// Changes the state from the task and wakes the thread.
    fn update_and_wake_thread(
        &self,
        mut state: MutexGuard<'_, State>,
        change: impl FnOnce(&mut State),
    ) {
        change(&mut state);
        drop(state);
        self.changed.notify_one();
    }

    fn end(&self) {
        self.update_and_wake_thread(self.state(), |state| state.ended = true);
    }
}

fn wait<T>(state: &mut State, cx: &Context<'_>) -> Poll<T> {
    state.task = Some(cx.waker().clone());
    Poll::Pending
}

/// Reads in a thread.
#[derive(Debug)]
pub(super) struct ThreadReader(Arc<Pipe>);

impl ThreadReader {
    /// Starts the thread.
    pub(super) fn start(mut file: File) -> io::Result<Self> {
        let pipe = Arc::new(Pipe::default());
        let end = Arc::clone(&pipe);
        std::thread::Builder::new()
            .name("stdio-read".to_owned())
            .spawn(move || {
                let mut chunk = vec![0; 8 * 1024];
                loop {
                    let read = file.read(&mut chunk);
                    let state = end.wait_until(|state| state.bytes.len() < CAPACITY || state.ended);
                    match read {
                        _ if state.ended => return,
                        Ok(0) => {
                            return Pipe::update_and_wake_task(state, |state| state.ended = true);
                        }
                        Ok(count) => Pipe::update_and_wake_task(state, |state| {
                            state.bytes.extend_from_slice(&chunk[..count]);
                        }),
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) => {
                            return Pipe::update_and_wake_task(state, |state| {
                                state.failed = Some(error.kind());
                            });
                        }
                    }
                }
            })?;
        Ok(Self(pipe))
    }
}

impl AsyncRead for ThreadReader {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.0.state();
        if state.bytes.is_empty() {
            return match state.failed {
                Some(kind) => Poll::Ready(Err(kind.into())),
                None if state.ended => Poll::Ready(Ok(())),
                None => wait(&mut state, cx),
            };
        }
        let count = into.remaining().min(state.bytes.len());
        into.put_slice(&state.bytes[..count]);
        self.0.update_and_wake_thread(state, |state| {
            state.bytes.drain(..count);
        });
        Poll::Ready(Ok(()))
    }
}

impl Drop for ThreadReader {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Writes in a thread.
#[derive(Debug)]
pub(super) struct ThreadWriter(Arc<Pipe>);

impl ThreadWriter {
    /// Starts the thread.
    pub(super) fn start(mut file: File) -> io::Result<Self> {
        let pipe = Arc::new(Pipe::default());
        let end = Arc::clone(&pipe);
        std::thread::Builder::new()
            .name("stdio-write".to_owned())
            .spawn(move || {
                loop {
                    let mut state = end.wait_until(|state| !state.bytes.is_empty() || state.ended);
                    if state.bytes.is_empty() {
                        return;
                    }
                    let bytes = std::mem::take(&mut state.bytes);
                    state.busy = true;
                    drop(state);
                    let written = file.write_all(&bytes);
                    let failed = written.err().map(|error| error.kind());
                    Pipe::update_and_wake_task(end.state(), |state| {
                        state.busy = false;
                        state.failed = failed;
                    });
                    if failed.is_some() {
                        return;
                    }
                }
            })?;
        Ok(Self(pipe))
    }
}

impl AsyncWrite for ThreadWriter {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.0.state();
        if let Some(kind) = state.failed {
            return Poll::Ready(Err(kind.into()));
        }
        let room = CAPACITY.saturating_sub(state.bytes.len());
        if room == 0 {
            return wait(&mut state, cx);
        }
        let count = room.min(bytes.len());
        self.0.update_and_wake_thread(state, |state| {
            state.bytes.extend_from_slice(&bytes[..count]);
        });
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.0.state();
        match state.failed {
            Some(kind) => Poll::Ready(Err(kind.into())),
            None if state.bytes.is_empty() && !state.busy => Poll::Ready(Ok(())),
            None => wait(&mut state, cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(cx)
    }
}

impl Drop for ThreadWriter {
    fn drop(&mut self) {
        self.0.end();
    }
}
