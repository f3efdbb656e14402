//! The table of LangBot's actions, with their permitted callers and their handlers.

use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use box_protocol::BoxError;
use box_rpc::{Action, Call, Cancellation, ControlPolicy, Handle, Never, Router, contract};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

use super::context::{self, Placement};
use super::errors::{key_error, stale, value_error, without_colon};
use super::files::Files;
use super::{Installation, admission, exec, processes, readiness, sessions, storage};

/// A JSON object as text.
type Text = Box<RawValue>;

/// The data of a call.
pub(super) struct Data {
    text: Text,
    /// Reports whether the caller has withdrawn the call.
    pub(super) cancellation: Cancellation,
}

impl Deref for Data {
    type Target = RawValue;

    fn deref(&self) -> &RawValue {
        &self.text
    }
}

/// A connection of one installation.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) installation: Arc<Installation>,
    /// Whether only LangBot can open this connection.
    pub(super) guarded: bool,
    /// The files received on this connection.
    pub(super) files: Arc<Mutex<Files>>,
}

pub(super) fn serve(
    installation: &Arc<Installation>,
    guarded: bool,
) -> (Router, Arc<dyn ControlPolicy>) {
    let connection = Arc::new(Connection {
        installation: Arc::clone(installation),
        guarded,
        files: Arc::default(),
    });
    let router = Actions::router(Arc::clone(&connection)).build();
    (router, connection)
}

macro_rules! actions {
    ($($action:ident = $name:literal, $access:ident: $run:expr;)*) => {
        $(
            struct $action;

            impl Action for $action {
                const NAME: &'static str = $name;
                type Params = Text;
                type Result = Text;
                type Chunk = Never;
            }

            impl Handle<$action> for Connection {
                async fn handle(&self, text: Text, call: Call<$action>) -> Result<Text, BoxError> {
                    let context = call.context::<Text>().transpose()?;
                    let context = context.as_deref().map(RawValue::get);
                    let data = Data {
                        text,
                        cancellation: call.cancellation(),
                    };
                    self.$access(context, data, $run).await.map_err(without_colon)
                }
            }
        )*

        contract! {
            /// All actions of LangBot's Box runtime.
            pub(super) Actions: $($action),*
        }
    };
}

// `unscoped` needs no workspace; `workspace` needs one; `granted` also needs a grant if grants are required.
actions! {
    BoxInit = "box_init", unscoped: readiness::init;
    BoxHealth = "box_health", unscoped: |connection, _| readiness::health(connection);
    BoxBackendInfo = "box_get_backend_info", unscoped: |connection, _| readiness::backend_info(connection);
    BoxShutdown = "box_shutdown", unscoped: |connection, _| sessions::shutdown(connection);
    BoxUpsertGrant = "box_upsert_sandbox_admission_grant", unscoped: admission::upsert;
    BoxRevokeGrant = "box_revoke_sandbox_admission_grant", unscoped: admission::revoke;
    BoxVerifyWorkspace = "box_verify_shared_workspace", unscoped: storage::verify;
    BoxStatus = "box_status", workspace: |installation, placement, _| sessions::status(installation, placement);
    BoxStorage = "box_get_storage_analysis", workspace: |installation, placement, _| storage::analysis(installation, placement);
    BoxExec = "box_exec", granted: exec::exec;
    BoxCreateSession = "box_create_session", granted: sessions::create;
    BoxGetSession = "box_get_session", granted: sessions::get;
    BoxGetSessions = "box_get_sessions", granted: |installation, placement, _| sessions::list(installation, placement);
    BoxDeleteSession = "box_delete_session", granted: sessions::delete;
    BoxStartProcess = "box_start_managed_process", granted: processes::start;
    BoxGetProcess = "box_get_managed_process", granted: processes::get;
    BoxStopProcess = "box_stop_managed_process", granted: processes::stop;
}

impl Connection {
    async fn unscoped<T: Serialize, F: Future<Output = Result<T, BoxError>>>(
        &self,
        context: Option<&str>,
        data: Data,
        work: impl FnOnce(Connection, Data) -> F,
    ) -> Result<Text, BoxError> {
        context::check_instance(context, &self.installation.instance)?;
        encode(&work(self.clone(), data).await?)
    }

    async fn workspace<T: Serialize, F: Future<Output = Result<T, BoxError>>>(
        &self,
        context: Option<&str>,
        data: Data,
        work: impl FnOnce(Arc<Installation>, Arc<Placement>, Data) -> F,
    ) -> Result<Text, BoxError> {
        let placement = context::placement(context, &self.installation.instance)?;
        self.run_fenced(placement, data, work).await
    }

    async fn granted<T: Serialize, F: Future<Output = Result<T, BoxError>>>(
        &self,
        context: Option<&str>,
        data: Data,
        work: impl FnOnce(Arc<Installation>, Arc<Placement>, Data) -> F,
    ) -> Result<Text, BoxError> {
        let placement = context::placement(context, &self.installation.instance)?;
        self.installation.require_grant(&placement).await?;
        self.run_fenced(placement, data, work).await
    }

    /// Runs the work while the placement is the newest of its workspace.
    async fn run_fenced<T: Serialize, F: Future<Output = Result<T, BoxError>>>(
        &self,
        placement: Placement,
        data: Data,
        work: impl FnOnce(Arc<Installation>, Arc<Placement>, Data) -> F,
    ) -> Result<Text, BoxError> {
        let installation = &self.installation;
        let lease = installation.enter(&placement).await?;
        let placement = Arc::new(placement);
        let outcome = {
            let work = work(Arc::clone(installation), Arc::clone(&placement), data);
            tokio::select! {
                biased;
                outcome = work => outcome,
                () = lease.stale() => Err(stale()),
            }
        };
        if !lease.is_current() {
            // The work may have created boxes after the newer placement cleared the older ones.
            let installation = Arc::clone(installation);
            tokio::spawn(async move { installation.clear_older(&placement).await });
            return Err(stale());
        }
        encode(&outcome?)
    }
}

fn encode(result: &impl Serialize) -> Result<Text, BoxError> {
    to_raw_value(result)
        .map_err(|error| BoxError::internal(format!("cannot encode the result: {error}")))
}

/// Parses the members of a call's data.
pub(super) fn members(data: &RawValue) -> Result<Map<String, Value>, BoxError> {
    serde_json::from_str(data.get()).map_err(|error| value_error(error.to_string()))
}

/// Returns a required member as text, converted as Python does.
pub(super) fn required(members: &Map<String, Value>, name: &str) -> Result<String, BoxError> {
    members
        .get(name)
        .map(as_text)
        .ok_or_else(|| key_error(name))
}

/// Converts a member to text; null becomes the empty text.
pub(super) fn as_text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Runs work to its end even if the connection closes, as LangBot expects.
pub(super) async fn run_to_completion<T: Send + 'static>(
    work: impl Future<Output = Result<T, BoxError>> + Send + 'static,
) -> Result<T, BoxError> {
    let done = tokio::spawn(work).await;
    done.unwrap_or_else(|_| Err(BoxError::internal("the action failed")))
}

/// Work that outlives its connection and ends if the caller withdraws it.
pub(super) struct DetachUnlessCancelled<T: Send + 'static> {
    work: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    cancellation: Cancellation,
}

impl<T: Send> DetachUnlessCancelled<T> {
    pub(super) fn new(
        cancellation: Cancellation,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        let work = Some(Box::pin(work) as Pin<Box<_>>);
        Self { work, cancellation }
    }
}

impl<T: Send> Future for DetachUnlessCancelled<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Some(work) = &mut self.work else {
            return Poll::Pending;
        };
        let done = work.as_mut().poll(context);
        if done.is_ready() {
            self.work = None;
        }
        done
    }
}

impl<T: Send> Drop for DetachUnlessCancelled<T> {
    fn drop(&mut self) {
        let Some(work) = self.work.take() else {
            return;
        };
        // Outside a Tokio runtime no work can continue.
        if let Ok(runtime) = tokio::runtime::Handle::try_current()
            && !self.cancellation.was_cancelled()
        {
            runtime.spawn(async move { drop(work.await) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_without_context_exist() {
        let names = crate::langbot::view::WITHOUT_CONTEXT;
        assert_eq!(Actions::NAMES.len(), 17);
        assert!(names.iter().all(|name| Actions::NAMES.contains(name)));
    }
}
