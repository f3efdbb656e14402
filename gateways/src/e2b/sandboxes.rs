//! The life of boxes: create, list, connect, pause, end.

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{delete, get, post, put};
use box_protocol::actions::{
    BoxListParams, BoxUpdateParams, CommandStartParams, IfExists, TargetState,
};
use box_protocol::{
    BoxError, BoxId, BoxInfo, BoxState, Invalid, LifetimeChange, Note, Program, UnixMs,
};
use box_rpc::Turn;
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use serde_json::Value;

use super::error::ApiError;
use super::model::{self, BoxNote, DEFAULT_TIMEOUT_SEC, State};
use super::network::NetworkRequest;
use super::run::{NEW_BOX_MS, until, wait_until_ready};
use super::spec::{NewSandbox, end_after};
use super::{GATEWAY, access};
use crate::http::body::{Json, OptionalJson, Params};
use crate::http::context::Context;
use crate::http::page::{ListOrder, after_cursor};
use crate::http::refusal::json_response;

/// The header of the next page of a list.
const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");

/// The header of a request that a client may repeat.
const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// The maximum length of that key.
const MAX_KEY_BYTES: usize = 256;

/// The items of a page of a list.
const PAGE: usize = 100;

type Result<T = Response> = std::result::Result<T, ApiError>;

pub(super) fn routes() -> Router {
    let connect = post(connect);
    Router::new()
        .route("/sandboxes", post(create).get(list_running))
        .route("/v2/sandboxes", post(create).get(list))
        .route("/sandboxes/{id}", get(one).delete(kill))
        .route("/v2/sandboxes/{id}", delete(kill))
        .route("/sandboxes/{id}/connect", connect.clone())
        .route("/v2/sandboxes/{id}/connect", connect)
        .route("/sandboxes/{id}/resume", post(resume))
        .route("/sandboxes/{id}/pause", post(pause))
        .route("/sandboxes/{id}/timeout", post(set_timeout))
        .route("/sandboxes/{id}/refreshes", post(refresh))
        .route("/sandboxes/{id}/network", put(update_network))
}

/// Returns a box of this gateway.
pub(super) async fn find(context: &Context, id: &str) -> Result<BoxInfo> {
    let missing = || ApiError::no_sandbox(id);
    // Clients of the oldest versions append the id of a machine.
    let id = id.strip_suffix("-boxd").unwrap_or(id);
    let box_id = BoxId::new(id).map_err(|_| missing())?;
    let info = context.get(&box_id).await?;
    if info.gateway != GATEWAY || State::of(&info).is_none() {
        return Err(missing());
    }
    Ok(info)
}

/// Returns a box of this gateway in the turn of a request that changes its end or its state.
async fn find_in_turn(context: &Context, id: &str) -> Result<(BoxInfo, Turn<String>)> {
    let info = find(context, id).await?;
    let turn = context.turn(&info.box_id, "e2b state").await?;
    Ok((find(context, id).await?, turn))
}

/// Returns a running box as above. An end would delete a paused one.
async fn find_running(context: &Context, id: &str) -> Result<(BoxInfo, Turn<String>)> {
    let (info, turn) = find_in_turn(context, id).await?;
    if State::of(&info) == Some(State::Paused) {
        let message = format!("sandbox {id:?} is paused; connect to it first");
        return Err(ApiError::new(StatusCode::NOT_FOUND, message));
    }
    Ok((info, turn))
}

/// Makes a change of several calls, also if the client leaves meanwhile.
async fn to_its_end<T: Send + 'static>(
    change: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let failed = |_| ApiError::from(BoxError::internal("the change failed"));
    tokio::spawn(change).await.map_err(failed)?
}

async fn create(context: Context, headers: HeaderMap, Json(request): Json<NewSandbox>) -> Result {
    let key = headers.get(IDEMPOTENCY_KEY).map(HeaderValue::as_bytes);
    let key = key.filter(|key| !key.is_empty()).map(|key| {
        let text = std::str::from_utf8(key).ok();
        text.filter(|text| text.len() <= MAX_KEY_BYTES)
            .ok_or_else(|| Invalid::new(IDEMPOTENCY_KEY, "must have at most 256 characters"))
    });
    let (id, if_exists) = match key.transpose()? {
        Some(key) => (access::id_of_key(&context.caller, key)?, IfExists::Reuse),
        None => (BoxId::fresh(), IfExists::Fail),
    };
    let (spec, ready) = request.spec(&context, &id).await?;
    let ready = ready
        .map(|ready| Program::argv(until(&ready)))
        .transpose()?;
    let created = context.create(&GATEWAY, spec, if_exists).await?;
    if let Some(ready) = ready {
        let box_id = &created.info.box_id;
        let params = CommandStartParams::new(box_id.clone(), ready);
        let waited = wait_until_ready(&context, params, NEW_BOX_MS).await;
        if waited.is_err() {
            let _ = context.delete(box_id).await;
        }
        waited?;
    }
    let body = model::sandbox(&context, &created.info);
    Ok(json_response(StatusCode::CREATED, &body))
}

async fn one(context: Context, Path(id): Path<String>) -> Result {
    let info = find(&context, &id).await?;
    Ok(json_response(
        StatusCode::OK,
        &model::detail(&context, &info),
    ))
}

async fn kill(context: Context, Path(id): Path<String>) -> Result<StatusCode> {
    let info = find(&context, &id).await?;
    context.delete(&info.box_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn list(context: Context, params: Params) -> Result {
    let states: Vec<&str> = params
        .all("state")
        .flat_map(|states| states.split(','))
        .filter(|state| !state.is_empty())
        .collect();
    if let Some(other) = states
        .iter()
        .find(|state| !matches!(**state, "running" | "paused"))
    {
        let problem = format!("{other:?} must be running or paused");
        return Err(Invalid::new("state", problem).into());
    }
    let is_asked = |state: State| match state {
        State::Running => states.is_empty() || states.contains(&"running"),
        State::Paused => states.is_empty() || states.contains(&"paused"),
    };
    listed(&context, &params, is_asked).await
}

async fn list_running(context: Context, params: Params) -> Result {
    listed(&context, &params, |state| state == State::Running).await
}

async fn listed(context: &Context, params: &Params, is_asked: impl Fn(State) -> bool) -> Result {
    let asked = BoxListParams {
        gateway: Some(GATEWAY),
        labels: metadata(params)?,
        ..BoxListParams::default()
    };
    let after = params.get("startedAfter").map(|text| {
        let rule = "must be a time such as 2026-01-31T12:00:00Z";
        time_of(text).ok_or_else(|| Invalid::new("startedAfter", rule))
    });
    let after = after.transpose()?;
    let ascending = match params.get("order") {
        None | Some("desc") => false,
        Some("asc") => true,
        Some(_) => return Err(Invalid::new("order", "must be asc or desc").into()),
    };
    let template = params.get("template");
    let mut boxes = context.list(asked).await?;
    boxes.retain(|info| {
        // Boxes of builds have no note, or that of the template that the build begins with.
        let note: Option<BoxNote> = info.note.as_ref().and_then(Note::read);
        note.is_some()
            && State::of(info).is_some_and(&is_asked)
            && after.is_none_or(|after| info.created_at >= after)
            && template.is_none_or(|template| BoxNote::of(info).template == template)
    });
    boxes.sort_by(|one, other| {
        let order = (one.created_at, &one.box_id).cmp(&(other.created_at, &other.box_id));
        if ascending { order } else { order.reverse() }
    });
    let order = if ascending {
        ListOrder::Ascending
    } else {
        ListOrder::Descending
    };
    let items = page(boxes, params, order, |info| {
        format!("{:020}{}", info.created_at.0, info.box_id)
    })?;
    let body = items.0.iter().map(model::listed).collect();
    Ok(with_next(&Value::Array(body), items.1))
}

/// Cuts the page out of a list that a request asks for.
pub(super) fn page<T, K: AsRef<str>>(
    items: Vec<T>,
    params: &Params,
    order: ListOrder,
    key: impl Fn(&T) -> K,
) -> Result<(Vec<T>, Option<String>)> {
    let limit = params.parsed("limit", "must be a number from 1 to 100")?;
    let limit = limit.unwrap_or(PAGE).clamp(1, PAGE);
    let next = params.get("nextToken");
    after_cursor(items, next, limit, order, key).map_err(|_| {
        let rule = "invalid; use the X-Next-Token of the previous page";
        Invalid::new("nextToken", rule).into()
    })
}

/// Returns a list with the token of its next page.
pub(super) fn with_next(body: &Value, next: Option<String>) -> Response {
    let mut response = json_response(StatusCode::OK, body);
    if let Some(Ok(next)) = next.map(HeaderValue::try_from) {
        response.headers_mut().insert(NEXT_TOKEN, next);
    }
    response
}

/// Returns the metadata that a list is filtered by. Clients encode it twice.
fn metadata(params: &Params) -> Result<box_protocol::Labels> {
    let text = params.get("metadata").unwrap_or_default();
    let invalid = || Invalid::new("metadata", "must be pairs name=value, encoded twice");
    let mut labels = box_protocol::Labels::new();
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').ok_or_else(invalid)?;
        let decode = |text: &str| {
            let spaced = text.replace('+', " ");
            let once = percent_decode_str(&spaced).decode_utf8().ok()?;
            let twice = percent_decode_str(&once).decode_utf8().ok()?;
            Some(twice.into_owned())
        };
        let name = decode(name).ok_or_else(invalid)?;
        labels.insert(name, decode(value).ok_or_else(invalid)?);
    }
    Ok(labels)
}

/// Parses a time with any offset from UTC.
fn time_of(text: &str) -> Option<UnixMs> {
    if let Some(time) = UnixMs::from_text(text) {
        return Some(time);
    }
    let (local, offset) = text.split_at_checked(text.len().checked_sub(6)?)?;
    let (hours, minutes) = offset.get(1..)?.split_once(':')?;
    let minutes = hours.parse::<u64>().ok()? * 60 + minutes.parse::<u64>().ok()?;
    let local = UnixMs::from_text(&format!("{local}Z"))?.0;
    let offset_ms = minutes * 60_000;
    match offset.as_bytes().first()? {
        b'+' => local.checked_sub(offset_ms),
        b'-' => local.checked_add(offset_ms),
        _ => None,
    }
    .map(UnixMs)
}

/// A request to use a box, or to prolong it.
#[derive(Debug, Default, Deserialize)]
struct Connect {
    timeout: Option<u64>,
    memory: Option<bool>,
}

async fn connect(
    context: Context,
    Path(id): Path<String>,
    OptionalJson(request): OptionalJson<Connect>,
) -> Result {
    let (info, turn) = find_in_turn(&context, &id).await?;
    let end = end_after(request.timeout.unwrap_or(DEFAULT_TIMEOUT_SEC));
    if State::of(&info) == Some(State::Running) {
        let info = match end_of(&info) {
            Some(known) if known < end => set_end(&context, &info.box_id, Some(end)).await?,
            _ => info,
        };
        let body = model::sandbox(&context, &info);
        return Ok(json_response(StatusCode::OK, &body));
    }
    let held = context.clone();
    let info = to_its_end(async move {
        let _turn = turn;
        let id = &info.box_id;
        if request.memory == Some(false) && info.state == BoxState::Paused {
            // The client wants the files without the processes.
            held.transition(id, TargetState::Stopped).await?;
        }
        held.transition(id, TargetState::Running).await?;
        // Before, it would end a box that cannot start.
        set_end(&held, id, Some(end)).await
    });
    let body = model::sandbox(&context, &info.await?);
    Ok(json_response(StatusCode::CREATED, &body))
}

/// Resumes a box for clients of old versions, which expect it to be paused.
async fn resume(
    context: Context,
    Path(id): Path<String>,
    OptionalJson(request): OptionalJson<Connect>,
) -> Result {
    let info = find(&context, &id).await?;
    if State::of(&info) == Some(State::Running) {
        let message = format!("sandbox {id:?} is running");
        return Err(ApiError::new(StatusCode::CONFLICT, message));
    }
    connect(context, Path(id), OptionalJson(request)).await
}

fn end_of(info: &BoxInfo) -> Option<UnixMs> {
    info.lifetime.as_ref()?.expires_at
}

async fn set_end(context: &Context, id: &BoxId, end: Option<UnixMs>) -> Result<BoxInfo> {
    let mut change = BoxUpdateParams::of(id.clone());
    change.lifetime = Some(LifetimeChange {
        expires_at: Some(end),
        ..LifetimeChange::default()
    });
    Ok(context.update(&GATEWAY, change).await?)
}

#[derive(Debug, Default, Deserialize)]
struct Pause {
    memory: Option<bool>,
}

async fn pause(
    context: Context,
    Path(id): Path<String>,
    OptionalJson(request): OptionalJson<Pause>,
) -> Result<StatusCode> {
    let (info, turn) = find_in_turn(&context, &id).await?;
    if State::of(&info) == Some(State::Paused) {
        let message = format!("sandbox {id:?} is already paused");
        return Err(ApiError::new(StatusCode::CONFLICT, message));
    }
    let target = if request.memory == Some(false) {
        TargetState::Stopped
    } else {
        TargetState::Paused
    };
    to_its_end(async move {
        let _turn = turn;
        // A paused box does not end by itself, also if the server ends meanwhile.
        set_end(&context, &info.box_id, None).await?;
        let paused = context.transition(&info.box_id, target).await;
        if paused.is_err() {
            let _ = set_end(&context, &info.box_id, end_of(&info)).await;
        }
        paused?;
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}

#[derive(Debug, Deserialize)]
struct Timeout {
    timeout: u64,
}

async fn set_timeout(
    context: Context,
    Path(id): Path<String>,
    Json(request): Json<Timeout>,
) -> Result<StatusCode> {
    let (info, _turn) = find_running(&context, &id).await?;
    let end = end_after(request.timeout);
    set_end(&context, &info.box_id, Some(end)).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Default, Deserialize)]
struct Refresh {
    duration: Option<u64>,
}

/// Prolongs a box for clients of old versions, which do so every few seconds.
async fn refresh(
    context: Context,
    Path(id): Path<String>,
    OptionalJson(request): OptionalJson<Refresh>,
) -> Result<StatusCode> {
    /// The time that one request adds if it does not say otherwise, in seconds.
    const DURATION_SEC: u64 = 15;
    let (info, _turn) = find_running(&context, &id).await?;
    let end = end_after(request.duration.unwrap_or(DURATION_SEC));
    if end_of(&info).is_some_and(|known| known < end) {
        set_end(&context, &info.box_id, Some(end)).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Deserialize)]
struct NetworkUpdate {
    #[serde(flatten)]
    network: NetworkRequest,
    #[serde(rename = "allow_internet_access")]
    internet: Option<bool>,
}

async fn update_network(
    context: Context,
    Path(id): Path<String>,
    Json(request): Json<NetworkUpdate>,
) -> Result {
    let info = find(&context, &id).await?;
    if State::of(&info) == Some(State::Paused) {
        let message = format!("sandbox {id:?} is paused; connect to it first");
        return Err(ApiError::new(StatusCode::CONFLICT, message));
    }
    let internet = request.internet.unwrap_or(true);
    let mut note = BoxNote::of(&info);
    note.network = request.network.kept(internet);
    let mut change = BoxUpdateParams::of(info.box_id);
    change.network_policy = Some(request.network.policy(internet)?);
    change.note = Some(Note::new(&note)?);
    context.update(&GATEWAY, change).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_decoded_twice() {
        let params = Params::parse("metadata=a%2520b%3Dx%2526y%26k%3Dv").unwrap();
        let labels = metadata(&params).unwrap();
        assert_eq!(labels["a b"], "x&y");
        assert_eq!(labels["k"], "v");
        let broken = Params::parse("metadata=a").unwrap();
        assert!(metadata(&broken).is_err());
    }

    #[test]
    fn times_may_have_an_offset() {
        let utc = time_of("2026-01-31T12:00:00Z").unwrap();
        assert_eq!(time_of("2026-01-31T14:30:00+02:30"), Some(utc));
        assert_eq!(time_of("2026-01-31T04:00:00.000001-08:00"), Some(utc));
        for bad in ["", "x", "2026-01-31", "2026-01-31T12:00:00*02:00"] {
            assert_eq!(time_of(bad), None, "{bad}");
        }
    }
}
