//! The engine writes errors on both wires by tables of its own, because it stands below the contract.
//! Here both are held against the contract's one table.
#![allow(clippy::unwrap_used)] // the helpers below are tests, too

use std::sync::Arc;

use async_trait::async_trait;
use box_protocol::error::{Detail, Fault, MAPPINGS, Subject, json_rpc_number, langbot_class};
use box_protocol::{BoxError, Code};
use box_rpc::{
    Action, Call, ConnectionError, Empty, Handle, Never, Options, ReceiveHalf, Router, SendHalf,
    Session,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};

struct Out(Sender<String>);
struct In(Receiver<String>);

#[async_trait]
impl SendHalf for Out {
    async fn send(&mut self, message: String) -> Result<(), ConnectionError> {
        self.0
            .send(message)
            .await
            .map_err(|_| ConnectionError::Closed)
    }
}

#[async_trait]
impl ReceiveHalf for In {
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError> {
        Ok(self.0.recv().await)
    }
}

/// Answers with the error it is asked for.
struct Fail;

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FailParams {
    code: Code,
    subject: Option<Subject>,
}

impl FailParams {
    fn error(self) -> BoxError {
        let detail = Detail {
            subject: self.subject,
            ..Detail::default()
        };
        BoxError::new(self.code, "the text").with_detail(&detail)
    }
}

impl Action for Fail {
    const NAME: &'static str = "fail";
    type Params = FailParams;
    type Result = Empty;
    type Chunk = Never;
}

impl Handle<Fail> for Fail {
    async fn handle(&self, params: FailParams, _: Call<Fail>) -> Result<Empty, BoxError> {
        Err(params.error())
    }
}

/// A server, and the two ends of its wire.
struct Wire {
    _server: Session,
    requests: Sender<String>,
    answers: Receiver<String>,
}

impl Wire {
    fn new() -> Self {
        let ((requests, from_client), (to_client, answers)) = (channel(4), channel(4));
        let router = Router::builder(Arc::new(Fail)).on::<Fail>().build();
        let server = Session::start(
            (Out(to_client), In(from_client)),
            router,
            Options::default(),
        );
        Self {
            _server: server,
            requests,
            answers,
        }
    }

    async fn ask(&mut self, request: Value) -> Value {
        self.requests.send(request.to_string()).await.unwrap();
        serde_json::from_str(&self.answers.recv().await.unwrap()).unwrap()
    }

    async fn json_rpc(&mut self, method: &str, params: Value) -> Value {
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        self.ask(request).await["error"].clone()
    }

    async fn langbot(&mut self, action: &str, data: Value) -> String {
        let answer = self
            .ask(json!({"seq_id": 1, "action": action, "data": data}))
            .await;
        assert_eq!(answer["code"], 1);
        answer["message"].as_str().unwrap().to_owned()
    }
}

/// Every word with every subject its row knows, and without one.
fn every_error() -> impl Iterator<Item = FailParams> {
    MAPPINGS.iter().flat_map(|row| {
        let subjects = row
            .langbot_by_subject
            .iter()
            .map(|(subject, _)| Some(*subject));
        subjects.chain([None]).map(|subject| FailParams {
            code: row.code,
            subject,
        })
    })
}

#[tokio::test]
async fn on_the_numbers_of_json_rpc() {
    let mut wire = Wire::new();
    for params in every_error() {
        let answer = wire.json_rpc("fail", json!(params)).await;
        assert_eq!(
            answer["code"],
            json_rpc_number(&params.error()),
            "{}",
            params.code
        );
    }
    let unknown = wire.json_rpc("fly", json!({})).await;
    assert_eq!(
        unknown["code"],
        json_rpc_number(&BoxError::fault(Fault::UnknownAction, ""))
    );
    let misshapen = wire.json_rpc("fail", json!({"code": 5})).await;
    assert_eq!(
        misshapen["code"],
        json_rpc_number(&BoxError::fault(Fault::InvalidParams, ""))
    );
}

#[tokio::test]
async fn on_the_classes_of_langbot() {
    let mut wire = Wire::new();
    // A cancelled call is not answered there.
    for params in every_error().filter(|params| params.code != Code::Cancelled) {
        let message = wire.langbot("fail", json!(params)).await;
        let expected = format!("{}: the text", langbot_class(&params.error()));
        assert_eq!(message, expected, "{}", params.code);
    }
    let unknown = wire.langbot("box_fly", json!({})).await;
    let class = langbot_class(&BoxError::fault(Fault::UnknownAction, ""));
    assert!(unknown.starts_with(&format!("{class}: ")), "{unknown}");
    let misshapen = wire.langbot("fail", json!({"code": 5})).await;
    let class = langbot_class(&BoxError::fault(Fault::InvalidParams, ""));
    assert!(misshapen.starts_with(&format!("{class}: ")), "{misshapen}");
}
