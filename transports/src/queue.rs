//! A joined pair inside one process: two bounded queues of strings.
//!
//! A batch costs one lock on either side: [`SendHalf::send_all`] hands over the whole batch, and a
//! receiver takes everything that waits and then works from its own memory.
//!
//! ```
//! use box_rpc::Connection;
//! use box_transports::queue;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), box_rpc::ConnectionError> {
//! let (near, far) = queue::pair(64);
//! let (mut send, _) = Box::new(near).split();
//! let (_, mut receive) = Box::new(far).split();
//! send.send("{}".to_owned()).await?;
//! assert_eq!(receive.receive().await?.as_deref(), Some("{}"));
//! # Ok(())
//! # }
//! ```

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, VecDeque},
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
};

use async_trait::async_trait;
use box_rpc::{Connection, ConnectionError, ReceiveHalf, SendHalf};
use tokio::{sync::mpsc, task::coop};

use crate::places::Place;

/// Messages each direction of a named queue holds before its sender waits.
const NAMED_CAPACITY: usize = 1024;

/// New connections to a named queue that may wait to be accepted.
const BACKLOG: usize = 128;

/// One end of a joined pair.
#[derive(Debug)]
pub struct Queue {
    send: QueueSend,
    receive: QueueReceive,
}

/// Two joined ends: what one sends the other receives. Each direction holds `capacity` messages
/// (at least one), and as many again in the hands of its receiver; beyond, the sender waits.
///
/// Dropping an end, or its sending half, ends the other with `None`.
pub fn pair(capacity: usize) -> (Queue, Queue) {
    let there = Arc::new(Lane::new(capacity));
    let back = Arc::new(Lane::new(capacity));
    (
        Queue::joined(Arc::clone(&there), Arc::clone(&back)),
        Queue::joined(back, there),
    )
}

impl Queue {
    fn joined(outgoing: Arc<Lane>, incoming: Arc<Lane>) -> Self {
        Self {
            send: QueueSend {
                lane: outgoing,
                one: VecDeque::new(),
                place: Place::default(),
            },
            receive: QueueReceive {
                lane: incoming,
                taken: VecDeque::new(),
                place: Place::default(),
            },
        }
    }

    /// The same end, holding a place among a listener's connections.
    pub(crate) fn in_place(mut self, place: &Place) -> Self {
        self.send.place = place.clone();
        self.receive.place = place.clone();
        self
    }
}

impl Connection for Queue {
    fn split(self: Box<Self>) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
        (Box::new(self.send), Box::new(self.receive))
    }
}

/// One direction.
#[derive(Debug)]
struct Lane {
    capacity: usize,
    state: Mutex<LaneState>,
}

/// What a lane holds, and who waits for it to change.
#[derive(Debug, Default)]
struct LaneState {
    /// Sent and not yet taken.
    messages: VecDeque<String>,
    /// Nothing more will be sent.
    ended: bool,
    /// Nobody receives any more.
    abandoned: bool,
    /// Waits for room.
    sender: Option<Waker>,
    /// Waits for a message.
    receiver: Option<Waker>,
}

impl Lane {
    fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            state: Mutex::default(),
        }
    }

    /// No user code runs under the lock, so a poisoned one still holds a sound state.
    fn state(&self) -> MutexGuard<'_, LaneState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves messages in until `batch` is empty; waits while the lane is full.
    fn poll_put(
        &self,
        cx: &mut Context<'_>,
        batch: &mut VecDeque<String>,
    ) -> Poll<Result<(), ConnectionError>> {
        let mut state = self.state();
        if state.abandoned || state.ended {
            return Poll::Ready(Err(ConnectionError::Closed));
        }
        let room = self.capacity.saturating_sub(state.messages.len());
        if state.messages.is_empty() && batch.len() <= room {
            std::mem::swap(&mut state.messages, batch);
        } else {
            let fitting = room.min(batch.len());
            state.messages.extend(batch.drain(..fitting));
        }
        let waiting = if batch.is_empty() {
            None
        } else {
            remember(&mut state.sender, cx);
            Some(Poll::Pending)
        };
        let receiver = if state.messages.is_empty() {
            None
        } else {
            state.receiver.take()
        };
        drop(state);
        if let Some(receiver) = receiver {
            receiver.wake();
        }
        waiting.unwrap_or(Poll::Ready(Ok(())))
    }

    /// Exchanges an empty `taken` for everything that waits; `false` when nothing more will come.
    fn poll_take(&self, cx: &mut Context<'_>, taken: &mut VecDeque<String>) -> Poll<bool> {
        let mut state = self.state();
        if state.messages.is_empty() {
            if state.ended {
                return Poll::Ready(false);
            }
            remember(&mut state.receiver, cx);
            return Poll::Pending;
        }
        std::mem::swap(&mut state.messages, taken);
        let sender = state.sender.take();
        drop(state);
        if let Some(sender) = sender {
            sender.wake();
        }
        Poll::Ready(true)
    }

    /// Nothing more will be sent: the receiver gets what waits, and then `None`.
    fn end(&self) {
        let mut state = self.state();
        state.ended = true;
        let receiver = state.receiver.take();
        drop(state);
        if let Some(receiver) = receiver {
            receiver.wake();
        }
    }

    /// Nobody receives any more: what waits is dropped, and whoever sends is told.
    fn abandon(&self) {
        let mut state = self.state();
        state.abandoned = true;
        let unread = std::mem::take(&mut state.messages);
        let sender = state.sender.take();
        drop(state);
        drop(unread);
        if let Some(sender) = sender {
            sender.wake();
        }
    }
}

/// Notes who waits, without a new handle where it is the same task as last time.
fn remember(slot: &mut Option<Waker>, cx: &Context<'_>) {
    match slot {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *slot = Some(cx.waker().clone()),
    }
}

/// The half that sends.
#[derive(Debug)]
struct QueueSend {
    lane: Arc<Lane>,
    /// Carries a single message through the same door as a batch.
    one: VecDeque<String>,
    #[allow(dead_code, reason = "held, not read")]
    place: Place,
}

impl QueueSend {
    /// Puts all of `batch` into the lane. What did not fit when the future is dropped stays in it.
    async fn put(&self, batch: &mut VecDeque<String>) -> Result<(), ConnectionError> {
        if batch.is_empty() {
            return Ok(());
        }
        poll_fn(|cx| {
            let turn = ready!(coop::poll_proceed(cx));
            let result = ready!(self.lane.poll_put(cx, batch));
            turn.made_progress();
            Poll::Ready(result)
        })
        .await
    }
}

#[async_trait]
impl SendHalf for QueueSend {
    async fn send(&mut self, message: String) -> Result<(), ConnectionError> {
        let mut one = std::mem::take(&mut self.one);
        one.push_back(message);
        let result = self.put(&mut one).await;
        one.clear();
        self.one = one;
        result
    }

    async fn send_all(&mut self, messages: &mut VecDeque<String>) -> Result<(), ConnectionError> {
        self.put(messages).await
    }

    async fn close(&mut self) -> Result<(), ConnectionError> {
        self.lane.end();
        Ok(())
    }

    async fn probe(&mut self) -> Result<(), ConnectionError> {
        if self.lane.state().abandoned {
            return Err(ConnectionError::Closed);
        }
        Ok(())
    }
}

impl Drop for QueueSend {
    fn drop(&mut self) {
        self.lane.end();
    }
}

/// The half that receives.
#[derive(Debug)]
struct QueueReceive {
    lane: Arc<Lane>,
    /// Taken out of the lane and not yet handed on.
    taken: VecDeque<String>,
    #[allow(dead_code, reason = "held, not read")]
    place: Place,
}

#[async_trait]
impl ReceiveHalf for QueueReceive {
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError> {
        let Self { lane, taken, .. } = self;
        if taken.is_empty() {
            let more = poll_fn(|cx| {
                let turn = ready!(coop::poll_proceed(cx));
                let more = ready!(lane.poll_take(cx, taken));
                turn.made_progress();
                Poll::Ready(more)
            })
            .await;
            if !more {
                return Ok(None);
            }
        }
        Ok(taken.pop_front())
    }

    fn receive_ready(&mut self) -> Option<String> {
        // Only what was taken already: a sender that never rests must not keep this task from others.
        self.taken.pop_front()
    }
}

impl Drop for QueueReceive {
    fn drop(&mut self) {
        self.lane.abandon();
    }
}

/// Names at which connections are taken, process-wide.
static NAMES: Mutex<BTreeMap<String, mpsc::Sender<Queue>>> = Mutex::new(BTreeMap::new());

/// Takes connections to a name until it is dropped.
#[derive(Debug)]
pub(crate) struct QueueListener {
    name: String,
    incoming: mpsc::Receiver<Queue>,
}

impl QueueListener {
    /// Takes the name; `None` if it is taken already.
    pub(crate) fn bind(name: &str) -> Option<Self> {
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        if names.contains_key(name) {
            return None;
        }
        let (sender, incoming) = mpsc::channel(BACKLOG);
        names.insert(name.to_owned(), sender);
        Some(Self {
            name: name.to_owned(),
            incoming,
        })
    }

    /// The next connection. May be dropped while it waits.
    pub(crate) async fn accept(&mut self) -> Option<Queue> {
        self.incoming.recv().await
    }
}

impl Drop for QueueListener {
    fn drop(&mut self) {
        NAMES
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.name);
    }
}

/// Connects to whoever listens at `queue:name` in this process.
pub fn connect(name: &str) -> Result<Queue, ConnectionError> {
    let listener = NAMES
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get(name)
        .cloned()
        .ok_or(std::io::ErrorKind::ConnectionRefused)
        .map_err(std::io::Error::from)?;
    let (near, far) = pair(NAMED_CAPACITY);
    listener
        .try_send(far)
        .map_err(|_| std::io::Error::from(std::io::ErrorKind::ConnectionRefused))?;
    Ok(near)
}
