//! Server: serves a router to every accepted connection.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use box_rpc::{Options, Router, Session};
use tokio::task::JoinHandle;

use crate::endpoint::{Endpoint, Listener, PeerInfo, Refused};

/// A running listener. Dropping it stops accepting and cuts every connection.
pub struct Server {
    endpoint: Endpoint,
    refused: Refused,
    sessions: Sessions,
    accepting: JoinHandle<()>,
}

/// Metrics of a [`Server`] that another owner holds.
#[derive(Debug, Clone)]
pub struct ServerMetrics {
    endpoint: Endpoint,
    refused: Refused,
    sessions: Weak<Mutex<HashMap<u64, Arc<Session>>>>,
}

impl ServerMetrics {
    /// Returns the endpoint of the server.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the counters of refused connections.
    pub fn refused(&self) -> &Refused {
        &self.refused
    }

    /// Returns the number of open connections; zero once the server is gone.
    pub fn connections(&self) -> usize {
        let sessions = self.sessions.upgrade();
        sessions.map_or(0, |sessions| lock(&sessions).len())
    }
}

type Sessions = Arc<Mutex<HashMap<u64, Arc<Session>>>>;

fn lock(sessions: &Sessions) -> MutexGuard<'_, HashMap<u64, Arc<Session>>> {
    sessions.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Starts accepting, until the server is dropped or closed.
    /// `options` sets how each connection is used: its limits, its caller and whether its hello needs a token.
    pub fn start(
        mut listener: Listener,
        router: Router,
        options: impl Fn(&PeerInfo) -> Options + Send + Sync + 'static,
    ) -> Self {
        let sessions = Sessions::default();
        let (endpoint, refused) = (listener.local_endpoint().clone(), listener.refused());
        let accepting = tokio::spawn({
            let sessions = Arc::clone(&sessions);
            async move {
                let next = AtomicU64::new(0);
                while let Ok(accepted) = listener.accept().await {
                    let options = options(&accepted.peer);
                    let session =
                        Session::start_boxed(accepted.connection, router.clone(), options);
                    track(&sessions, next.fetch_add(1, Ordering::Relaxed), session);
                }
            }
        });
        Self {
            endpoint,
            refused,
            sessions,
            accepting,
        }
    }

    /// Returns the actual endpoint, with the bound port.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the counters of refused connections.
    pub fn refused(&self) -> &Refused {
        &self.refused
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> usize {
        lock(&self.sessions).len()
    }

    /// Returns its metrics, which stay valid while the server lives.
    pub fn metrics(&self) -> ServerMetrics {
        ServerMetrics {
            endpoint: self.endpoint.clone(),
            refused: self.refused.clone(),
            sessions: Arc::downgrade(&self.sessions),
        }
    }

    /// Waits until the server accepts no new connection any more.
    /// This is the end of the only connection of a `stdio:` endpoint, or a permanent failure of the listener.
    pub async fn finished(&mut self) {
        let _ = (&mut self.accepting).await;
        loop {
            let Some(session) = lock(&self.sessions).values().next().cloned() else {
                return;
            };
            session.closed().await;
            tokio::task::yield_now().await;
        }
    }

    /// Cuts every connection without a goodbye; new ones are still accepted.
    pub fn cut(&self) {
        let sessions: Vec<_> = lock(&self.sessions).values().cloned().collect();
        for session in sessions {
            session.cut();
        }
    }

    /// Stops accepting and closes every connection in order, all within `within`.
    /// `restart` announces to the peers whether this server returns at once.
    pub async fn close(mut self, within: Duration, restart: bool) {
        self.accepting.abort();
        // The listener is gone and its address free before the connections close.
        let _ = (&mut self.accepting).await;
        let sessions: Vec<_> = lock(&self.sessions).values().cloned().collect();
        close_all(&sessions, within, restart).await;
    }
}

/// Closes sessions in order, all at the same time, each within `within`.
/// `restart` announces to the peers whether this server returns at once.
pub async fn close_all(sessions: &[Arc<Session>], within: Duration, restart: bool) {
    let closing = sessions.iter().map(|session| async move {
        if restart {
            session.close_for_restart(within).await;
        } else {
            session.close(within).await;
        }
    });
    futures::future::join_all(closing).await;
}

/// Stores a session until it is over.
fn track(sessions: &Sessions, number: u64, session: Session) {
    let session = Arc::new(session);
    lock(sessions).insert(number, Arc::clone(&session));
    let sessions = Arc::downgrade(sessions);
    tokio::spawn(async move {
        session.closed().await;
        if let Some(sessions) = sessions.upgrade() {
            lock(&sessions).remove(&number);
        }
    });
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}
