//! What a handler knows of its request: the caller, its boxes, the server, and the box in the path.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use box_protocol::actions::{
    BoxCreateParams, BoxCreateResult, BoxDeleteParams, BoxListParams, BoxTransitionParams,
    BoxUpdateParams, CommandChunk, CommandStartParams, CommandStartResult, IfExists,
    ShellRunParams, TargetState,
};
use box_protocol::{BoxError, BoxId, BoxInfo, GatewayName, SpecDraft, UnixMs};
use box_rpc::{Caller, Turn, Turns};
use box_runtime::BoxRuntime;
use box_service::{BoxService, CallGuard};
use box_transports::connection_limit::ConnectionPermit;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::sync::{mpsc, watch};

use super::capability::{Scope, SigningKey};
use super::refusal::{Refusal, RefusalReason};
use super::token_filter::TokenFilter;
use crate::target::InProcess;

/// The characters that a path segment holds unescaped.
const PATH_SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');

/// The parts of a server that its gateways use.
#[derive(Debug)]
pub struct Server {
    /// The policy layer.
    pub policy: BoxService,
    /// The runtime.
    pub runtime: BoxRuntime,
    /// The key of capabilities.
    pub key: SigningKey,
    /// The tokens that boxes must not receive.
    pub tokens: TokenFilter,
    /// The operator's domain of boxes, if any: `PORT-ID.DOMAIN` is a port of a box.
    pub box_domain: Option<String>,
    /// The status that websockets are closed with, once the server stops.
    pub closing: watch::Receiver<Option<u16>>,
    /// The turns of requests that read a part of a box before they change it.
    pub turns: Turns<String>,
}

/// A request of an authenticated caller.
///
/// A handler takes it as an argument. The request counts as a call of its caller until all clones are dropped, so a task
/// that outlives the handler keeps one.
#[derive(Debug, Clone)]
pub struct Context {
    /// The server.
    pub server: Arc<Server>,
    /// The caller, which owns the boxes it creates.
    pub caller: Caller,
    /// The URL of this server as the client sees it, without a slash at its end.
    pub url: Arc<str>,
    /// The value of `X-Request-ID`, in the logs of both sides.
    pub request_id: Arc<str>,
    /// The connection of the client, which counts against the limit.
    pub connection: ConnectionPermit,
    /// The running call.
    pub call: Arc<CallGuard>,
}

impl Context {
    /// Returns the runtime, for its typed methods.
    pub fn runtime(&self) -> &BoxRuntime {
        &self.server.runtime
    }

    /// Creates a box with a spec that the policy allows.
    pub async fn create(
        &self,
        gateway: &GatewayName,
        spec: SpecDraft,
        if_exists: IfExists,
    ) -> Result<BoxCreateResult, BoxError> {
        let params = BoxCreateParams {
            if_exists,
            ..BoxCreateParams::new(spec)
        };
        self.create_with(gateway, params).await
    }

    /// Creates a new box as above. If it cannot start, it stays with the state `failed`.
    pub(super) async fn create_and_keep_failed(
        &self,
        gateway: &GatewayName,
        spec: SpecDraft,
    ) -> Result<BoxCreateResult, BoxError> {
        let params = BoxCreateParams {
            if_exists: IfExists::Fail,
            keep_failed: true,
            ..BoxCreateParams::new(spec)
        };
        self.create_with(gateway, params).await
    }

    async fn create_with(
        &self,
        gateway: &GatewayName,
        mut params: BoxCreateParams,
    ) -> Result<BoxCreateResult, BoxError> {
        params.spec.gateway = Some(gateway.clone());
        let policy = &self.server.policy;
        let decided = policy.decide_spec(params.spec, &self.caller, gateway);
        let params = BoxCreateParams {
            spec: decided.await?,
            template_applied: true,
            ..params
        };
        self.runtime().create(&self.caller, params).await
    }

    /// Returns the record of a box.
    pub async fn get(&self, id: &BoxId) -> Result<BoxInfo, BoxError> {
        self.runtime().get(&self.caller, id).await
    }

    /// Waits for the turn of a request that reads a part of a box and then changes it. Dropping the turn ends it.
    pub(crate) async fn turn(&self, id: &BoxId, part: &str) -> Result<Turn<String>, BoxError> {
        // Callers may have different names for the box.
        let unique_id = self.get(id).await?.unique_id;
        let turn = self.server.turns.take([format!("{unique_id} {part}")]);
        turn.wait().await;
        Ok(turn)
    }

    /// Returns all boxes of the caller that match, on all pages.
    pub async fn list(&self, mut params: BoxListParams) -> Result<Vec<BoxInfo>, BoxError> {
        let mut items = Vec::new();
        loop {
            let page = self.runtime().list(&self.caller, &params).await?;
            items.extend(page.items);
            params.after = page.next;
            if params.after.is_none() {
                return Ok(items);
            }
        }
    }

    /// Changes a box as far as the policy allows.
    pub async fn update(
        &self,
        gateway: &GatewayName,
        params: BoxUpdateParams,
    ) -> Result<BoxInfo, BoxError> {
        let policy = &self.server.policy;
        let params = policy.decide_update(params, &self.caller, gateway).await?;
        self.runtime().update(&self.caller, params).await
    }

    /// Pauses, resumes, stops or starts a box; returns whether its state was different.
    pub async fn transition(
        &self,
        id: &BoxId,
        to: TargetState,
    ) -> Result<(BoxInfo, bool), BoxError> {
        let box_id = id.clone();
        let params = BoxTransitionParams { box_id, to };
        let result = self.runtime().transition(&self.caller, params).await?;
        Ok((result.info, result.changed))
    }

    /// Deletes a box without waiting for its commands.
    pub async fn delete(&self, id: &BoxId) -> Result<(), BoxError> {
        let params = BoxDeleteParams {
            box_id: id.clone(),
            force: true,
        };
        self.runtime().delete(&self.caller, params).await.map(drop)
    }

    /// Starts a command, if the policy allows it.
    pub async fn start_command(
        &self,
        gateway: &GatewayName,
        params: CommandStartParams,
        chunks: Option<mpsc::Sender<CommandChunk>>,
    ) -> Result<CommandStartResult, BoxError> {
        let process = self.in_process(gateway);
        process.start_command(params, chunks).await
    }

    /// Runs a text in a shell, if the policy allows it.
    pub async fn run_in_shell(
        &self,
        gateway: &GatewayName,
        params: ShellRunParams,
        chunks: Option<mpsc::Sender<CommandChunk>>,
    ) -> Result<CommandStartResult, BoxError> {
        let process = self.in_process(gateway);
        process.run_in_shell(params, chunks).await
    }

    /// Returns the boxes of the caller, under the policy of a gateway.
    pub(crate) fn in_process(&self, gateway: &GatewayName) -> InProcess {
        InProcess {
            policy: self.server.policy.clone(),
            runtime: self.runtime().clone(),
            caller: self.caller.clone(),
            gateway: gateway.clone(),
        }
    }

    /// Signs a capability for a part of a box, for the header of a protocol.
    pub fn grant(&self, to: &BoxInfo, scope: Scope<'_>, until: Option<UnixMs>) -> String {
        self.server.key.sign(to, scope, until)
    }

    /// Returns `/boxes/ID`, where ID is unique on this server. Only a holder of a capability can use it.
    pub fn box_path(to: &BoxInfo) -> String {
        let id = utf8_percent_encode(&to.unique_id, PATH_SEGMENT);
        format!("/boxes/{id}")
    }

    /// Returns the URL of this server without its scheme.
    pub fn address(&self) -> &str {
        let url = &*self.url;
        url.split_once("://").map_or(url, |(_, rest)| rest)
    }

    /// Returns the close status once the server stops.
    pub async fn closing(&self) -> u16 {
        closing(self.server.closing.clone()).await
    }
}

/// Returns the close status once the server stops.
pub(super) async fn closing(mut closing: watch::Receiver<Option<u16>>) -> u16 {
    loop {
        if let Some(status) = *closing.borrow_and_update() {
            return status;
        }
        if closing.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Context {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        let context = parts.extensions.get::<Self>().cloned();
        context.ok_or_else(|| Refusal::new(RefusalReason::NotReady, "the route has no caller"))
    }
}

/// The box of a request below `/boxes/{box}`, as its caller names it.
///
/// A gateway can insert it into the extensions of a request that it passes to routes of the inside of a box.
#[derive(Debug, Clone)]
pub struct InBox(pub BoxId);

impl<S: Sync> FromRequestParts<S> for InBox {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        let named = parts.extensions.get::<Self>().cloned();
        named.ok_or_else(|| Refusal::new(RefusalReason::NotFound, "box not found"))
    }
}
