//! A running connection: a reading task, a writing task and their end.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::task::coop::unconstrained;
use tokio::time::{Instant, MissedTickBehavior, timeout};

use crate::action::Router;
use crate::caller::{Auth, Caller};
use crate::codec::{Codecs, Control, ControlPolicy};
use crate::connection::{Connection, ConnectionError, ReceiveHalf, SendHalf};
use crate::engine::{Engine, StartedCall};
use crate::limits::{Limits, MAX_MISSED_HEARTBEATS};
use crate::peer::Peer;

/// Maximum messages handled before other tasks run.
const MESSAGES_PER_YIELD: usize = 512;

/// Options of a connection.
/// It has no default, because no caller suits every connection.
#[derive(Debug, Clone)]
pub struct Options {
    /// Limits of the connection.
    pub limits: Limits,
    /// Codecs; the default is JSON-RPC.
    pub codecs: Codecs,
    /// Decides about the peer's control messages, if it may not send all of them.
    pub control_policy: Option<Arc<dyn ControlPolicy>>,
    /// How the connection identifies its caller.
    pub auth: Auth,
}

impl Options {
    /// Returns the default limits, for a peer with this authentication.
    pub fn new(auth: impl Into<Auth>) -> Self {
        Self {
            limits: Limits::default(),
            codecs: Codecs::default(),
            control_policy: None,
            auth: auth.into(),
        }
    }

    /// Returns the default limits, for a peer that this side connected to.
    /// Such a peer does not call.
    pub fn client() -> Self {
        Self::new(Caller::Anonymous)
    }
}

/// Reason for the end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloseReason {
    /// The peer ended its sending side.
    EndOfInput,
    /// This side closed it.
    Closed,
    /// The peer announced its end; `restart` if it returns at once.
    Bye {
        /// Reason that the peer sent.
        reason: String,
        /// Whether to reconnect without waiting.
        restart: bool,
    },
    /// No message arrived for three heartbeats.
    HeartbeatMissed,
    /// The peer sent no message in time after connecting.
    FirstMessageTimeout,
    /// The peer sends more than it reads.
    Flooded,
    /// The peer has no valid token.
    Denied,
    /// The connection broke.
    Broken(String),
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EndOfInput => f.write_str("the peer closed the connection"),
            Self::Closed => f.write_str("the connection was closed"),
            Self::Bye { reason, .. } => write!(f, "the peer is closing: {reason}"),
            Self::HeartbeatMissed => {
                f.write_str("heartbeat: the peer sent no message for three intervals")
            }
            Self::FirstMessageTimeout => {
                f.write_str("first_message: the peer sent no message in time")
            }
            Self::Flooded => {
                f.write_str("control_queue or unread_bytes: the peer does not read its messages")
            }
            Self::Denied => f.write_str("the peer has no valid token"),
            Self::Broken(reason) => f.write_str(reason),
        }
    }
}

/// A running connection. Dropping it cuts the connection and ends all its calls.
#[derive(Debug)]
pub struct Session {
    engine: Arc<Engine>,
}

impl Session {
    /// Starts a connection: serves the peer from `router`, and can call it.
    pub fn start(connection: impl Connection, router: Router, options: Options) -> Self {
        Self::start_boxed(Box::new(connection), router, options)
    }

    /// Like [`start`](Self::start), for a boxed connection.
    pub fn start_boxed(connection: Box<dyn Connection>, router: Router, options: Options) -> Self {
        let engine = Arc::new(Engine::new(router, options));
        let (send, receive) = connection.split();
        let writer = tokio::spawn(write(Arc::clone(&engine), send));
        tokio::spawn(run(Arc::clone(&engine), receive, writer));
        Self { engine }
    }

    /// Returns the handle for calls to the other end.
    pub fn peer(&self) -> Peer {
        Peer::of(Arc::clone(&self.engine))
    }

    /// Waits for the end of the connection and returns its reason.
    pub async fn closed(&self) -> CloseReason {
        let mut closed = self.engine.closed.subscribe();
        // The engine holds the sender, and `self` holds the engine.
        match closed.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or(CloseReason::Closed),
            Err(_) => CloseReason::Closed,
        }
    }

    /// Ends the connection and all its calls at once. Dropping does the same.
    pub fn cut(&self) {
        self.engine.stop(CloseReason::Closed, Duration::ZERO);
    }

    /// Closes the connection in order.
    /// It refuses new calls, waits up to `within` for running ones, and ends the rest.
    pub async fn close(&self, within: Duration) {
        self.close_with_reason("closing", false, within).await;
    }

    /// Like [`close`](Self::close), and announces an immediate restart to the peer.
    /// Calls that do not finish in time continue without a response. This process is about to end, and the next one
    /// continues their work.
    pub async fn close_for_restart(&self, within: Duration) {
        self.close_with_reason("restarting", true, within).await;
    }

    async fn close_with_reason(&self, reason: &str, restart: bool, within: Duration) {
        let start = Instant::now();
        self.engine
            .outgoing()
            .refuse_new("the connection is closing");
        {
            let mut incoming = self.engine.incoming();
            incoming.closing = true;
            incoming.handed_over |= restart;
        }
        if self.engine.known_codec().is_some() {
            self.engine.control(&Control::Bye {
                reason: reason.into(),
                restart,
            });
        }
        let drained = async {
            wait_until_idle(&self.engine).await;
            wait_for_responses(&self.engine).await;
        };
        let _ = timeout(within, drained).await;
        self.engine.stop(
            CloseReason::Closed,
            within.saturating_sub(start.elapsed()).max(MIN_FLUSH),
        );
        self.closed().await;
    }
}

/// Minimum time to write queued messages when a connection ends.
const MIN_FLUSH: Duration = Duration::from_millis(100);

impl Drop for Session {
    fn drop(&mut self) {
        self.cut();
    }
}

/// Waits until no call of the peer runs.
async fn wait_until_idle(engine: &Engine) {
    loop {
        let mut notified = std::pin::pin!(engine.idle.notified());
        notified.as_mut().enable();
        if engine.incoming().is_idle() {
            return;
        }
        notified.await;
    }
}

/// Waits until no call of this side waits for a response, or none can arrive.
async fn wait_for_responses(engine: &Engine) {
    // Closing is rare: polling costs less than a notification with every answer.
    while engine.outgoing().in_flight() > 0 && engine.closed.borrow().is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Delay of the first probe after the peer's end of input; doubles each time.
const FIRST_PROBE_DELAY: Duration = Duration::from_millis(100);

/// Maximum time between two probes.
const MAX_PROBE_INTERVAL: Duration = Duration::from_secs(3);

/// Makes the writer probe the peer repeatedly; a failed probe ends the connection.
async fn probe(engine: &Engine) {
    let mut wait = FIRST_PROBE_DELAY;
    loop {
        tokio::time::sleep(wait).await;
        engine.outbox.probe();
        wait = (wait * 2).min(MAX_PROBE_INTERVAL);
    }
}

/// Reads until the end, then ends everything else.
async fn run(engine: Arc<Engine>, receive: Box<dyn ReceiveHalf>, mut writer: JoinHandle<()>) {
    let (reason, flush) = tokio::select! {
        biased;
        (reason, flush) = engine.stopped() => (reason, flush),
        reason = read(&engine, receive) => {
            let flush = match reason {
                CloseReason::EndOfInput => engine.limits.drain,
                _ => Duration::ZERO,
            };
            (reason, flush)
        }
    };
    let reason = match (reason, engine.bye()) {
        (CloseReason::EndOfInput | CloseReason::Broken(_), Some(bye)) => bye.clone(),
        (reason, _) => reason,
    };
    // The peer can answer no more calls, but this side may still answer its calls.
    engine.outgoing().close(&reason.to_string());
    let until = Instant::now() + flush;
    if flush > Duration::ZERO && !engine.is_stopping() {
        tokio::select! {
            _ = timeout(flush, wait_until_idle(&engine)) => {}
            // A peer that has closed both directions looks the same until this side sends to it.
            () = probe(&engine) => {}
            _ = engine.stopped() => {}
        }
    }
    engine.incoming().abort_all();
    engine.outbox.close();
    if timeout(until.saturating_duration_since(Instant::now()), &mut writer)
        .await
        .is_err()
    {
        writer.abort();
        let _ = writer.await;
    }
    engine.outbox.clear();
    tracing::debug!(%reason, "connection closed");
    engine.closed.send_replace(Some(reason));
}

async fn read(engine: &Arc<Engine>, mut half: Box<dyn ReceiveHalf>) -> CloseReason {
    let mut first = engine.limits.first_message;
    let mut started = Vec::new();
    let mut handled = 0;
    let mut message_limit = engine.limits.message_bytes;
    let mut known = false;
    loop {
        let (_, max) = engine.max_message_bytes();
        if message_limit != max {
            message_limit = max;
            half.set_message_limit(message_limit);
        }
        let ready = half.receive_ready();
        let received = match (ready, first) {
            (Some(text), _) => Ok(Some(text)),
            (None, None) => half.receive().await,
            (None, Some(limit)) => match timeout(limit, half.receive()).await {
                Ok(received) => received,
                Err(_) => return CloseReason::FirstMessageTimeout,
            },
        };
        first = None;
        engine.received.fetch_add(1, Ordering::Relaxed);
        match received {
            Ok(Some(text)) => {
                engine.accept(text, &mut started);
                if !known && engine.is_peer_known() {
                    known = true;
                    if !half.peer_identified() {
                        // Calls in its first message are not started.
                        return CloseReason::Broken(ConnectionError::Closed.to_string());
                    }
                }
            }
            Ok(None) => return CloseReason::EndOfInput,
            Err(ConnectionError::TooLarge { head, .. }) => engine.accept_oversized(&head),
            Err(error) => return CloseReason::Broken(error.to_string()),
        }
        for call in started.drain(..) {
            start_call(engine, call).await;
        }
        handled += 1;
        if handled == MESSAGES_PER_YIELD {
            handled = 0;
            tokio::task::yield_now().await;
        }
    }
}

/// Polls a call once and spawns a task if it is not finished.
/// Calls thus start in the order of sending, and short ones need no task.
async fn start_call(engine: &Arc<Engine>, (id, mut running): StartedCall) {
    let first = poll_fn(|cx| {
        // A panic drops the values of the call, and that answers it.
        Poll::Ready(catch_unwind(AssertUnwindSafe(|| running.as_mut().poll(cx))))
    });
    // Runs without a budget: a call that finds the budget used up would start later than the next one.
    let first = unconstrained(first).await;
    if let Ok(Poll::Pending) = first {
        let task = tokio::spawn(running);
        engine.incoming().set_task(&id, task.abort_handle());
    }
}

/// Writes queued messages in batches, and sends heartbeats.
async fn write(engine: Arc<Engine>, mut half: Box<dyn SendHalf>) {
    let mut batch = VecDeque::new();
    let mut heartbeat = Heartbeat::new(&engine);
    let frame = engine.limits.frame;
    loop {
        let taken = tokio::select! {
            biased;
            taken = engine.outbox.take(&mut batch) => taken,
            () = heartbeat.tick() => {
                heartbeat.check(&engine);
                continue;
            }
        };
        let written = match taken {
            // The timeout applies to one message; a transport detects by itself that nothing moves.
            Some(_) if batch.is_empty() => timeout(frame, half.probe()).await,
            Some(_) => {
                let all = frame.saturating_mul(u32::try_from(batch.len()).unwrap_or(u32::MAX));
                timeout(all, half.send_all(&mut batch)).await
            }
            None => timeout(frame, half.close()).await,
        };
        let failed = match written {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(ConnectionError::Stalled(frame).to_string()),
        };
        if let Some(reason) = failed {
            engine.stop(CloseReason::Broken(reason), Duration::ZERO);
            engine.outbox.close();
            return;
        }
        match taken {
            Some(taken) => engine.outbox.sent(taken),
            None => return,
        }
        batch.clear();
    }
}

/// Sends pings during silence, and detects missing answers.
struct Heartbeat {
    interval: Option<tokio::time::Interval>,
    last_received: u64,
    missed: u32,
}

impl Heartbeat {
    fn new(engine: &Engine) -> Self {
        let interval = engine.limits.heartbeat.map(|every| {
            let mut interval = tokio::time::interval_at(Instant::now() + every, every);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            interval
        });
        Self {
            interval,
            last_received: 0,
            missed: 0,
        }
    }

    async fn tick(&mut self) {
        match &mut self.interval {
            Some(interval) => {
                interval.tick().await;
            }
            None => std::future::pending().await,
        }
    }

    fn check(&mut self, engine: &Arc<Engine>) {
        let received = engine.received.load(Ordering::Relaxed);
        if received != self.last_received || !engine.answers_pings() {
            self.last_received = received;
            self.missed = 0;
            return;
        }
        self.missed += 1;
        if self.missed > MAX_MISSED_HEARTBEATS {
            engine.stop(CloseReason::HeartbeatMissed, Duration::ZERO);
        } else {
            engine.control(&Control::Ping);
        }
    }
}
