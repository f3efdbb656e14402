//! In-process transport: two joined bounded queues of strings.
//!
//! A batch costs one lock on either side: [`SendHalf::send_all`] hands over the whole batch, and a receiver takes all
//! waiting messages at once.
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

use crate::connection_limit::ConnectionPermit;

/// Capacity in messages of each direction of a named queue.
const NAMED_CAPACITY: usize = 1024;

/// Maximum number of connections to a named queue that wait for `accept`.
const BACKLOG: usize = 128;

/// One end of a joined pair.
#[derive(Debug)]
pub struct Queue {
    send: QueueSend,
    receive: QueueReceive,
}

/// Creates two joined ends: each receives the messages the other sends.
///
/// Each direction holds `capacity` messages (at least one), and its receiver buffers as many again. The sender waits
/// when both are full.
///
/// Dropping an end, or its sending half, ends the other with `None`.
pub fn pair(capacity: usize) -> (Queue, Queue) {
    let there = Arc::new(Channel::new(capacity));
    let back = Arc::new(Channel::new(capacity));
    (
        Queue::joined(Arc::clone(&there), Arc::clone(&back)),
        Queue::joined(back, there),
    )
}

impl Queue {
    fn joined(outgoing: Arc<Channel>, incoming: Arc<Channel>) -> Self {
        Self {
            send: QueueSend {
                channel: outgoing,
                one: VecDeque::new(),
                permit: ConnectionPermit::default(),
            },
            receive: QueueReceive {
                channel: incoming,
                taken: VecDeque::new(),
                permit: ConnectionPermit::default(),
            },
        }
    }

    /// Adds a permit of a listener.
    pub(crate) fn with_permit(mut self, permit: &ConnectionPermit) -> Self {
        self.send.permit = permit.clone();
        self.receive.permit = permit.clone();
        self
    }
}

impl Connection for Queue {
    fn split(self: Box<Self>) -> (Box<dyn SendHalf>, Box<dyn ReceiveHalf>) {
        (Box::new(self.send), Box::new(self.receive))
    }
}

/// One direction of a pair.
#[derive(Debug)]
struct Channel {
    capacity: usize,
    state: Mutex<ChannelState>,
}

/// Messages of a channel, and the tasks that wait for a change.
#[derive(Debug, Default)]
struct ChannelState {
    /// Messages sent and not yet taken.
    messages: VecDeque<String>,
    /// Whether the sender has ended.
    sender_closed: bool,
    /// Whether the receiver is gone.
    receiver_closed: bool,
    /// Sender that waits for capacity.
    sender: Option<Waker>,
    /// Receiver that waits for a message.
    receiver: Option<Waker>,
}

impl Channel {
    fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            state: Mutex::default(),
        }
    }

    /// Locks the state.
    /// No user code runs under the lock, so a poisoned lock still holds a consistent state.
    fn state(&self) -> MutexGuard<'_, ChannelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves messages in until `batch` is empty; waits while the channel is full.
    fn poll_send(
        &self,
        cx: &mut Context<'_>,
        batch: &mut VecDeque<String>,
    ) -> Poll<Result<(), ConnectionError>> {
        let mut state = self.state();
        if state.receiver_closed || state.sender_closed {
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
            register_waker(&mut state.sender, cx);
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

    /// Swaps an empty `taken` with all waiting messages; `false` at the end.
    fn poll_receive(&self, cx: &mut Context<'_>, taken: &mut VecDeque<String>) -> Poll<bool> {
        let mut state = self.state();
        if state.messages.is_empty() {
            if state.sender_closed {
                return Poll::Ready(false);
            }
            register_waker(&mut state.receiver, cx);
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

    /// Ends the sending side: the receiver gets the waiting messages, then `None`.
    fn close_sender(&self) {
        let mut state = self.state();
        state.sender_closed = true;
        let receiver = state.receiver.take();
        drop(state);
        if let Some(receiver) = receiver {
            receiver.wake();
        }
    }

    /// Ends the receiving side: drops waiting messages and wakes the sender.
    fn close_receiver(&self) {
        let mut state = self.state();
        state.receiver_closed = true;
        let unread = std::mem::take(&mut state.messages);
        let sender = state.sender.take();
        drop(state);
        drop(unread);
        if let Some(sender) = sender {
            sender.wake();
        }
    }
}

/// Stores the waker of the waiting task; clones it only if the task changed.
fn register_waker(slot: &mut Option<Waker>, cx: &Context<'_>) {
    match slot {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *slot = Some(cx.waker().clone()),
    }
}

/// Sending half.
#[derive(Debug)]
struct QueueSend {
    channel: Arc<Channel>,
    /// Buffer that lets a single message use the same path as a batch.
    one: VecDeque<String>,
    #[allow(dead_code, reason = "held, not read")]
    permit: ConnectionPermit,
}

impl QueueSend {
    /// Puts all of `batch` into the channel.
    /// If the future is dropped early, the remaining messages stay in `batch`.
    async fn put(&self, batch: &mut VecDeque<String>) -> Result<(), ConnectionError> {
        if batch.is_empty() {
            return Ok(());
        }
        poll_fn(|cx| {
            let budget = ready!(coop::poll_proceed(cx));
            let result = ready!(self.channel.poll_send(cx, batch));
            budget.made_progress();
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
        self.channel.close_sender();
        Ok(())
    }

    async fn probe(&mut self) -> Result<(), ConnectionError> {
        if self.channel.state().receiver_closed {
            return Err(ConnectionError::Closed);
        }
        Ok(())
    }
}

impl Drop for QueueSend {
    fn drop(&mut self) {
        self.channel.close_sender();
    }
}

/// Receiving half.
#[derive(Debug)]
struct QueueReceive {
    channel: Arc<Channel>,
    /// Messages taken from the channel and not yet returned.
    taken: VecDeque<String>,
    #[allow(dead_code, reason = "held, not read")]
    permit: ConnectionPermit,
}

#[async_trait]
impl ReceiveHalf for QueueReceive {
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError> {
        let Self { channel, taken, .. } = self;
        if taken.is_empty() {
            let more = poll_fn(|cx| {
                let budget = ready!(coop::poll_proceed(cx));
                let more = ready!(channel.poll_receive(cx, taken));
                budget.made_progress();
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
        // Returns only messages already taken: a sender that never pauses must not starve other tasks.
        self.taken.pop_front()
    }
}

impl Drop for QueueReceive {
    fn drop(&mut self) {
        self.channel.close_receiver();
    }
}

/// Names of the listeners in this process.
static NAMES: Mutex<BTreeMap<String, mpsc::Sender<Queue>>> = Mutex::new(BTreeMap::new());

/// Accepts connections to a name until it is dropped.
#[derive(Debug)]
pub(crate) struct QueueListener {
    name: String,
    incoming: mpsc::Receiver<Queue>,
}

impl QueueListener {
    /// Registers the name; `None` if another listener has it.
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

    /// Returns the next connection. Cancel safe.
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

/// Connects to the listener at `queue:name` in this process.
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
