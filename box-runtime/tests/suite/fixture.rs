//! A runtime over a scripted backend, and short methods for the calls of tests.

use std::time::Duration;

use box_protocol::actions::{
    BoxCreateParams, BoxCreateResult, BoxDeleteParams, BoxDeleteResult, BoxExecParams,
    BoxListParams, OnTimeout, SystemShutdownParams, SystemShutdownResult,
};
use box_protocol::{BoxError, BoxExecutionResult, BoxId, BoxInfo, Code, CommandInfo, SpecDraft};
use box_runtime::fake::FakeBackend;
use box_runtime::{BoxRuntime, Caller, RuntimeConfig};
use tokio::task::JoinHandle;

pub(crate) struct Fixture {
    pub(crate) backend: FakeBackend,
    pub(crate) runtime: BoxRuntime,
    pub(crate) caller: Caller,
}

pub(crate) fn fixture() -> Fixture {
    fixture_with(|_| {})
}

pub(crate) fn fixture_with(configure: impl FnOnce(&mut RuntimeConfig)) -> Fixture {
    let backend = FakeBackend::new();
    let mut config = RuntimeConfig::with(backend.clone());
    configure(&mut config);
    Fixture {
        backend,
        runtime: BoxRuntime::start(config),
        caller: Caller::Local,
    }
}

pub(crate) fn id(text: &str) -> BoxId {
    BoxId::new(text).unwrap()
}

pub(crate) fn spec(box_id: &str, cmd: &str) -> SpecDraft {
    SpecDraft::new(box_id).cmd(cmd)
}

pub(crate) fn exec_of(spec: SpecDraft) -> BoxExecParams {
    BoxExecParams {
        on_timeout: OnTimeout::DropBox,
        ..BoxExecParams::new(spec)
    }
}

impl Fixture {
    pub(crate) fn with_token(&self, name: &str) -> Self {
        self.with_caller(Caller::token(name))
    }

    pub(crate) fn with_caller(&self, caller: Caller) -> Self {
        Self {
            backend: self.backend.clone(),
            runtime: self.runtime.clone(),
            caller,
        }
    }

    pub(crate) async fn exec(
        &self,
        box_id: &str,
        cmd: &str,
    ) -> Result<BoxExecutionResult, BoxError> {
        self.exec_spec(spec(box_id, cmd)).await
    }

    pub(crate) async fn exec_spec(&self, spec: SpecDraft) -> Result<BoxExecutionResult, BoxError> {
        self.runtime.exec(&self.caller, exec_of(spec)).await
    }

    /// Starts an exec and lets it run as far as it can.
    pub(crate) async fn begin(
        &self,
        box_id: &str,
        cmd: &str,
    ) -> JoinHandle<Result<BoxExecutionResult, BoxError>> {
        self.begin_exec(exec_of(spec(box_id, cmd))).await
    }

    pub(crate) async fn begin_exec(
        &self,
        params: BoxExecParams,
    ) -> JoinHandle<Result<BoxExecutionResult, BoxError>> {
        let (runtime, caller) = (self.runtime.clone(), self.caller.clone());
        let task = tokio::spawn(async move { runtime.exec(&caller, params).await });
        settle().await;
        task
    }

    pub(crate) async fn create(&self, spec: SpecDraft) -> Result<BoxCreateResult, BoxError> {
        let params = BoxCreateParams::new(spec);
        self.runtime.create(&self.caller, params).await
    }

    pub(crate) async fn delete(&self, box_id: &str) -> Result<BoxDeleteResult, BoxError> {
        let params = BoxDeleteParams {
            box_id: id(box_id),
            force: false,
        };
        self.runtime.delete(&self.caller, params).await
    }

    pub(crate) async fn force_delete(&self, box_id: &str) -> Result<BoxDeleteResult, BoxError> {
        let params = BoxDeleteParams {
            box_id: id(box_id),
            force: true,
        };
        self.runtime.delete(&self.caller, params).await
    }

    pub(crate) async fn get(&self, box_id: &str) -> Result<BoxInfo, BoxError> {
        self.runtime.get(&self.caller, &id(box_id)).await
    }

    pub(crate) async fn list(&self) -> Vec<BoxInfo> {
        self.runtime
            .list(&self.caller, &BoxListParams::default())
            .await
            .unwrap()
            .items
    }

    pub(crate) async fn ids(&self) -> Vec<String> {
        self.list()
            .await
            .into_iter()
            .map(|info| info.box_id.as_str().to_owned())
            .collect()
    }

    /// The commands of a box.
    pub(crate) async fn commands(&self, box_id: &str) -> Result<Vec<CommandInfo>, BoxError> {
        let params = serde_json::json!({ "box_id": box_id });
        let params = serde_json::from_value(params).unwrap();
        let listed = self.runtime.list_commands(&self.caller, params).await;
        listed.map(|listed| listed.items)
    }

    /// The kinds of the events of a box.
    pub(crate) async fn events(&self, box_id: &str) -> Vec<String> {
        let (to, mut chunks) = tokio::sync::mpsc::channel(4096);
        let params = serde_json::json!({ "box_id": box_id });
        let params = serde_json::from_value(params).unwrap();
        let answer = self.runtime.events(&self.caller, params, Some(to)).await;
        answer.unwrap();
        let mut kinds = Vec::new();
        while let Some(event) = chunks.recv().await {
            kinds.push(event.kind);
        }
        kinds
    }

    pub(crate) async fn shutdown(&self) -> SystemShutdownResult {
        self.runtime
            .shutdown(&self.caller, SystemShutdownParams::default())
            .await
            .unwrap()
    }
}

/// Runs every task that does not wait for the clock. Needs paused time.
pub(crate) async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

pub(crate) fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[track_caller]
pub(crate) fn code<T: std::fmt::Debug>(result: Result<T, BoxError>) -> Code {
    result.unwrap_err().code()
}
