//! A connection: the handshake, and the requests of its client in order.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::files::Handles;
use super::session::{Outgoing, Place, Session, Sessions};
use super::wire::{Fault, Message, RequestId, answer};
use super::{environment, files, process, walk};

/// The number of messages that wait for the client; each may be long.
const WAITING_MESSAGES: usize = 8;

/// The number of `process/read` that wait for output at once. A further one returns the output so far.
const MAX_READS: usize = 64;

/// How long such a further one may take, because the requests behind it wait.
const READ_LIMIT: Duration = Duration::from_secs(5);

/// The server of one connection. Dropping it leaves its session to a later connection.
#[derive(Debug)]
pub(super) struct Connection {
    sessions: Arc<Sessions>,
    place: Place,
    outgoing: Outgoing,
    session: Option<Arc<Session>>,
    is_ready: bool,
    handles: Handles,
    /// Requests that wait for output, beside which others are served.
    reads: JoinSet<()>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct InitializeParams {
    #[serde(rename = "clientName")]
    _client_name: String,
    #[serde(default)]
    resume_session_id: Option<String>,
}

impl Connection {
    /// Creates a connection, and returns the messages to its client.
    pub(super) fn new(sessions: Arc<Sessions>, place: Place) -> (Self, mpsc::Receiver<String>) {
        let (outgoing, messages) = mpsc::channel(WAITING_MESSAGES);
        let connection = Self {
            sessions,
            place,
            outgoing,
            session: None,
            is_ready: false,
            handles: Handles::default(),
            reads: JoinSet::new(),
        };
        (connection, messages)
    }

    /// Serves a message of the client.
    pub(super) async fn receive(&mut self, text: &str) {
        let message = match Message::read(text) {
            Ok(message) => message,
            Err(fault) => return self.send(None, Err(fault)).await,
        };
        let Some(id) = message.id.clone() else {
            if let Err(fault) = self.notified(&message.method) {
                self.send(None, Err(fault)).await;
            }
            return;
        };
        match message.method.as_str() {
            "process/start" => {
                let started = async {
                    let session = self.ready()?;
                    let params = message.params()?;
                    Ok((process::start(session, params).await?, session))
                };
                match started.await {
                    Ok((started, session)) => {
                        let session = Arc::clone(session);
                        self.send(Some(id), Ok(started.answer())).await;
                        started.follow(&session);
                    }
                    Err(fault) => self.send(Some(id), Err(fault)).await,
                }
            }
            "process/read" => {
                if let Err(fault) = self.read(id.clone(), &message).await {
                    self.send(Some(id), Err(fault)).await;
                }
            }
            _ => {
                let called = self.call(&message).await;
                self.send(Some(id), called).await;
            }
        }
    }

    async fn send(&self, id: Option<RequestId>, called: Result<Value, Fault>) {
        // The transport notices that the client has left.
        let _ = self.outgoing.send(answer(id, called)).await;
    }

    fn notified(&mut self, method: &str) -> Result<(), Fault> {
        if method != "initialized" {
            let rule = format!("method: {method:?} is not a client notification");
            return Err(Fault::invalid_request(rule));
        }
        if self.session.is_none() {
            return Err(Fault::invalid_request("initialized: send initialize first"));
        }
        self.is_ready = true;
        Ok(())
    }

    /// Returns the session, after the handshake.
    fn ready(&self) -> Result<&Arc<Session>, Fault> {
        let missing = |what| Fault::invalid_request(format!("method: send {what} first"));
        let session = self.session.as_ref().ok_or_else(|| missing("initialize"))?;
        if !self.is_ready {
            return Err(missing("initialized"));
        }
        Ok(session)
    }

    fn initialize(&mut self, params: InitializeParams) -> Result<Value, Fault> {
        if self.session.is_some() {
            let rule = "initialize: may be sent once per connection";
            return Err(Fault::invalid_request(rule));
        }
        let (resumed, client) = (params.resume_session_id, self.outgoing.clone());
        let session = self.sessions.attach(resumed, &self.place, client)?;
        let session = self.session.insert(session);
        Ok(json!({"sessionId": session.id()}))
    }

    /// Answers `process/read` when there is output, and serves other requests meanwhile.
    async fn read(&mut self, id: RequestId, message: &Message<'_>) -> Result<(), Fault> {
        let session = Arc::clone(self.ready()?);
        let mut params: process::ReadParams = message.params()?;
        while self.reads.try_join_next().is_some() {}
        if self.reads.len() >= MAX_READS {
            // The client asks again. If this read waited, so would all requests behind it.
            params.wait_ms = None;
            let read = timeout(READ_LIMIT, process::read(&session, params)).await;
            let late = "process/read: the box did not answer within 5 seconds; try again later";
            let read = read.unwrap_or_else(|_| Err(Fault::internal(late)));
            self.send(Some(id), read).await;
            return Ok(());
        }
        let outgoing = self.outgoing.clone();
        self.reads.spawn(async move {
            let read = process::read(&session, params).await;
            let _ = outgoing.send(answer(Some(id), read)).await;
        });
        Ok(())
    }

    async fn call(&mut self, message: &Message<'_>) -> Result<Value, Fault> {
        if message.method == "initialize" {
            return self.initialize(message.params()?);
        }
        let session = Arc::clone(self.ready()?);
        let place = &session.place;
        match message.method.as_str() {
            "process/write" => process::write(&session, message.params()?).await,
            "process/signal" => process::signal(&session, message.params()?).await,
            "process/terminate" => process::terminate(&session, message.params()?).await,
            "environment/info" => environment::info(place).await,
            "environment/status" => Ok(json!({"status": "ready"})),
            "fs/readFile" => files::read(place, message.params()?).await,
            "fs/open" => self.handles.open(place, message.params()?).await,
            "fs/readBlock" => self.handles.read(place, message.params()?).await,
            "fs/close" => Ok(self.handles.close(&message.params()?)),
            "fs/writeFile" => files::write(place, message.params()?).await,
            "fs/createDirectory" => files::create_directory(place, message.params()?).await,
            "fs/getMetadata" => files::metadata(place, message.params()?).await,
            "fs/canonicalize" => files::canonicalize(place, message.params()?).await,
            "fs/readDirectory" => walk::read_directory(place, message.params()?).await,
            "fs/walk" => walk::walk(place, message.params()?).await,
            "fs/remove" => files::remove(place, message.params()?).await,
            "fs/copy" => files::copy(place, message.params()?).await,
            method => Err(Fault::unknown_method(method)),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            Arc::clone(&self.sessions).detach(&session);
        }
    }
}
