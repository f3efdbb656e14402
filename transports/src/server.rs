//! Serves a router to everyone who connects.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use box_rpc::{Options, Router, Session};
use tokio::task::JoinHandle;

use crate::endpoint::{Endpoint, Listener, PeerInfo, Refused};

/// A listener at work. Dropping it stops accepting and cuts every connection.
pub struct Server {
    endpoint: Endpoint,
    refused: Refused,
    sessions: Sessions,
    accepting: JoinHandle<()>,
}

/// The figures of a [`Server`] that somebody else keeps.
#[derive(Debug, Clone)]
pub struct Gauge {
    endpoint: Endpoint,
    refused: Refused,
    sessions: Weak<Mutex<HashMap<u64, Arc<Session>>>>,
}

impl Gauge {
    /// Where the server listens.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Connections that were turned away.
    pub fn refused(&self) -> &Refused {
        &self.refused
    }

    /// Connections open now; none once the server is gone.
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
    /// Accepts until dropped or closed. `options` decides how each connection is used: its limits,
    /// who it belongs to, whether it must say hello with a token.
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
                    keep(&sessions, next.fetch_add(1, Ordering::Relaxed), session);
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

    /// Where it really listens: the port is the one bound.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Connections that were turned away.
    pub fn refused(&self) -> &Refused {
        &self.refused
    }

    /// Connections open now.
    pub fn connections(&self) -> usize {
        lock(&self.sessions).len()
    }

    /// Its figures, for as long as it lives.
    pub fn gauge(&self) -> Gauge {
        Gauge {
            endpoint: self.endpoint.clone(),
            refused: self.refused.clone(),
            sessions: Arc::downgrade(&self.sessions),
        }
    }

    /// Waits until nobody new can connect any more: the end of a `stdio:` endpoint's only
    /// connection, or of a listener that failed for good.
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

    /// Cuts every connection, without a word; new ones are still accepted.
    pub fn cut(&self) {
        let sessions: Vec<_> = lock(&self.sessions).values().cloned().collect();
        for session in sessions {
            session.cut();
        }
    }

    /// Stops accepting and ends every connection in order, all within `within`; tells the peers
    /// whether this end will be back at once.
    pub async fn close(mut self, within: Duration, restart: bool) {
        self.accepting.abort();
        // The listener is gone, and its address free, before anything else.
        let _ = (&mut self.accepting).await;
        let sessions: Vec<_> = lock(&self.sessions).values().cloned().collect();
        let closing = sessions.iter().map(|session| async move {
            if restart {
                session.close_for_restart(within).await;
            } else {
                session.close(within).await;
            }
        });
        futures::future::join_all(closing).await;
    }
}

/// Keeps a session until it is over.
fn keep(sessions: &Sessions, number: u64, session: Session) {
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
