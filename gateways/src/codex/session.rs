//! Sessions: what outlives the connection of a client, which may connect again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_protocol::BoxId;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::process::Process;
use super::wire::Fault;
use crate::target::{DefaultBox, Target};

/// How long a session without a connection stays, with its processes.
const DETACHED: Duration = Duration::from_secs(30);

/// The maximum number of sessions, with and without a connection.
const MAX_SESSIONS: usize = 1024;

/// Messages to a client; a full queue delays the output of its processes.
pub(super) type Outgoing = mpsc::Sender<String>;

/// The sessions of a transport.
#[derive(Debug, Default)]
pub(super) struct Sessions(Mutex<HashMap<String, Arc<Session>>>);

/// The box and the processes of a client.
#[derive(Debug)]
pub(super) struct Session {
    id: String,
    pub(super) place: Place,
    processes: Mutex<HashMap<String, Arc<Process>>>,
    connected: Mutex<Connected>,
}

/// The box of a client.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// Where the box is.
    pub(super) target: Target,
    pub(super) default: DefaultBox,
    /// The name of the caller, which alone can use its sessions.
    pub(super) owner: String,
}

/// The connection of a session.
#[derive(Debug, Default)]
struct Connected {
    client: Option<Outgoing>,
    /// How often the session was connected.
    times: u64,
}

impl Place {
    /// Returns the id of the box, and creates the box if it does not exist.
    pub(super) async fn open(&self) -> Result<BoxId, Fault> {
        self.default.open(&self.target).await?;
        Ok(self.default.id.clone())
    }
}

impl Sessions {
    /// Starts a session, or connects to one that has no connection.
    pub(super) fn attach(
        &self,
        resumed: Option<String>,
        place: &Place,
        client: Outgoing,
    ) -> Result<Arc<Session>, Fault> {
        let mut sessions = lock(&self.0);
        if let Some(id) = resumed {
            let found = sessions.get(&id).filter(|session| {
                let known = &session.place;
                known.owner == place.owner && known.default.id == place.default.id
            });
            let unknown = || Fault::invalid_request(format!("unknown session id {id}"));
            let session = Arc::clone(found.ok_or_else(unknown)?);
            let mut connected = lock(&session.connected);
            if connected
                .client
                .as_ref()
                .is_some_and(|client| !client.is_closed())
            {
                let rule = format!("session {id} is already attached to another connection");
                return Err(Fault::attached(rule));
            }
            connected.client = Some(client);
            connected.times += 1;
            drop(connected);
            return Ok(session);
        }
        if sessions.len() >= MAX_SESSIONS {
            let rule =
                format!("sessions: {MAX_SESSIONS} are open, the maximum; close a connection");
            return Err(Fault::internal(rule));
        }
        let session = Arc::new(Session {
            id: BoxId::fresh().as_str().to_owned(),
            place: place.clone(),
            processes: Mutex::default(),
            connected: Mutex::new(Connected {
                client: Some(client),
                times: 1,
            }),
        });
        sessions.insert(session.id.clone(), Arc::clone(&session));
        Ok(session)
    }

    /// Ends the connection of a session. Without another one, its processes are killed after a while.
    pub(super) fn detach(self: Arc<Self>, session: &Session) {
        let mut connected = lock(&session.connected);
        connected.client = None;
        let (id, times) = (session.id.clone(), connected.times);
        drop(connected);
        tokio::spawn(async move {
            sleep(DETACHED).await;
            let mut sessions = lock(&self.0);
            let is_left = sessions.get(&id).is_some_and(|session| {
                let connected = lock(&session.connected);
                connected.client.is_none() && connected.times == times
            });
            if is_left {
                sessions.remove(&id);
            }
        });
    }
}

impl Session {
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn process(&self, id: &str) -> Option<Arc<Process>> {
        lock(&self.processes).get(id).cloned()
    }

    /// Adds a process. Errors: its id is in use.
    pub(super) fn add(&self, id: String, process: Arc<Process>) -> Result<(), Fault> {
        let mut processes = lock(&self.processes);
        if processes.contains_key(&id) {
            return Err(in_use(&id));
        }
        processes.insert(id, process);
        Ok(())
    }

    pub(super) fn forget(&self, id: &str) {
        lock(&self.processes).remove(id);
    }

    /// Sends a notification, if a client is connected; another one reads the output from the log.
    pub(super) async fn notify(&self, message: String) {
        let client = lock(&self.connected).client.clone();
        if let Some(client) = client {
            // The client may leave at any time.
            let _ = client.send(message).await;
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for process in lock(&self.processes).values() {
            process.abandon();
        }
    }
}

/// The error for an id of a process that exists.
pub(super) fn in_use(id: &str) -> Fault {
    Fault::invalid_request(format!("process {id} already exists"))
}

/// Locks a value that no code leaves inconsistent.
pub(super) fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}
