//! A minimal RPC: ids, a map of waiting calls, one envelope, typed parameters.
//!
//! The envelope is JSON-RPC's. A reader parses the envelope first and then the parameters or result, because their type
//! depends on the method or the waiting call. Both steps borrow. The RPC has no cancellation, no deadlines, no limit on
//! calls, no batches, no second dialect, and no error except the end of the connection.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::sync::oneshot;

use crate::payload::Payload;

#[derive(Serialize)]
struct RequestOut<'a> {
    jsonrpc: &'static str,
    id: u64,
    method: &'static str,
    params: &'a Payload,
}

#[derive(Deserialize)]
struct RequestIn<'a> {
    id: u64,
    method: &'a str,
    #[serde(borrow)]
    params: &'a RawValue,
}

#[derive(Serialize)]
struct AnswerOut<'a> {
    jsonrpc: &'static str,
    id: u64,
    result: &'a Payload,
}

#[derive(Deserialize)]
struct AnswerIn<'a> {
    id: u64,
    #[serde(borrow)]
    result: &'a RawValue,
}

/// Appends a request to `out`.
pub(crate) fn write_request(out: &mut Vec<u8>, id: u64, params: &Payload) -> Result<()> {
    let request = RequestOut {
        jsonrpc: "2.0",
        id,
        method: "echo",
        params,
    };
    Ok(serde_json::to_writer(out, &request)?)
}

/// Handles one request, and appends its answer to `out`.
pub(crate) fn answer(request: &[u8], out: &mut Vec<u8>) -> Result<()> {
    let request: RequestIn<'_> = serde_json::from_slice(request)?;
    ensure!(
        request.method == "echo",
        "unknown method {}",
        request.method
    );
    let params: Payload = serde_json::from_str(request.params.get())?;
    let answer = AnswerOut {
        jsonrpc: "2.0",
        id: request.id,
        result: &params,
    };
    Ok(serde_json::to_writer(out, &answer)?)
}

/// The calls that wait for answers.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// `None` once the connection is closed.
    calls: Option<HashMap<u64, oneshot::Sender<Payload>>>,
    next: u64,
}

impl Waiting {
    pub(crate) fn new() -> Self {
        Self {
            calls: Some(HashMap::new()),
            next: 0,
        }
    }

    /// Returns a new id, and the receiver of its answer.
    pub(crate) fn register(&mut self) -> Result<(u64, oneshot::Receiver<Payload>)> {
        let calls = self.calls.as_mut().context("the connection is over")?;
        let (sender, receiver) = oneshot::channel();
        self.next += 1;
        calls.insert(self.next, sender);
        Ok((self.next, receiver))
    }

    /// Parses an answer and sends it to its caller.
    pub(crate) fn complete(&mut self, answer: &[u8]) -> Result<()> {
        let answer: AnswerIn<'_> = serde_json::from_slice(answer)?;
        let caller = self
            .calls
            .as_mut()
            .and_then(|calls| calls.remove(&answer.id));
        if let Some(caller) = caller {
            // A caller that no longer waits does not end the connection.
            let _ = caller.send(serde_json::from_str(answer.result.get())?);
        }
        Ok(())
    }

    /// Closes the connection: every current and later caller gets an error.
    pub(crate) fn close(&mut self) {
        self.calls = None;
    }
}

/// Locks a mutex; a panic in another task does not leave its state inconsistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::{Waiting, answer, write_request};
    use crate::payload::Payload;

    #[test]
    fn a_call_gets_its_own_answer() {
        let mut waiting = Waiting::new();
        let (_first, _) = waiting.register().unwrap();
        let (id, mut receiver) = waiting.register().unwrap();
        let (mut request, mut response) = (Vec::new(), Vec::new());
        write_request(&mut request, id, &Payload::small(7)).unwrap();
        answer(&request, &mut response).unwrap();
        waiting.complete(&response).unwrap();
        assert_eq!(receiver.try_recv().unwrap(), Payload::small(7));
    }

    #[test]
    fn callers_of_a_closed_connection_fail() {
        let mut waiting = Waiting::new();
        let (_, mut receiver) = waiting.register().unwrap();
        waiting.close();
        assert!(receiver.try_recv().is_err());
        assert!(waiting.register().is_err());
    }
}
