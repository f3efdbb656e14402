//! Tools for boxes: create, list, delete, fork, roll back, and share a port.

use std::fmt::Write as _;
use std::num::NonZeroU16;

use box_protocol::actions::{
    BoxCheckpointParams, BoxDeleteParams, BoxForkParams, BoxListParams, BoxRollbackParams,
    IfExists, PortShareParams,
};
use box_protocol::{BoxError, BoxId, BoxInfo, BoxState, Code, ItemRef, Name, Network, SpecDraft};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::answer::Answer;
use super::errors::{rename, reword};
use super::follow::Progress;
use super::session::Session;
use crate::http::capability::Scope;
use crate::http::context::Context;

/// A box.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct BoxAnswer {
    /// The box.
    r#box: String,
    /// The state, such as running or stopped.
    state: String,
    /// The image, if the box has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<String>,
    /// Whether it has network access.
    network: bool,
    /// The names of its checkpoints, oldest first.
    checkpoints: Vec<String>,
}

impl BoxAnswer {
    fn of(info: &BoxInfo) -> Self {
        let names = info.checkpoints.iter();
        Self {
            r#box: info.box_id.to_string(),
            state: state(info.state).to_owned(),
            image: info.image.clone(),
            network: info.network == Network::On,
            checkpoints: names.map(|point| point.name.to_string()).collect(),
        }
    }

    fn line(&self) -> String {
        let mut line = format!("box {}: {}", self.r#box, self.state);
        if let Some(image) = &self.image {
            line.extend([", image ", image]);
        }
        if self.network {
            line.push_str(", network");
        }
        if !self.checkpoints.is_empty() {
            line.extend([", checkpoints ", &self.checkpoints.join(" ")]);
        }
        line
    }
}

fn state(state: BoxState) -> &'static str {
    match state {
        BoxState::Starting => "starting",
        BoxState::Running => "running",
        BoxState::Paused => "paused",
        BoxState::Stopped => "stopped",
        BoxState::Failed => "failed",
        BoxState::Unreachable => "unreachable",
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CreateBoxArgs {
    /// Name of the new box; generated if absent.
    r#box: Option<String>,
    /// Image of its root file system, such as `python:3.12`; the system of the machine if absent.
    image: Option<String>,
    /// Whether it has network access.
    network: Option<bool>,
    /// Template that fills in what is absent.
    template: Option<String>,
    /// Snapshot with its first files.
    snapshot: Option<String>,
    /// CPU limit, in CPUs.
    cpus: Option<f64>,
    /// Memory limit, in MiB.
    memory_mb: Option<u64>,
}

pub(super) async fn create_box(
    session: Session,
    args: CreateBoxArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    let named = args.r#box.filter(|name| !name.is_empty());
    let id = named.unwrap_or_else(|| format!("mcp-{}", BoxId::fresh()));
    let spec = SpecDraft {
        box_id: Some(id),
        image: args.image,
        network: args
            .network
            .map(|on| if on { Network::On } else { Network::Off }),
        template: args.template.map(ItemRef::new).transpose()?,
        snapshot: args.snapshot.map(ItemRef::new).transpose()?,
        cpus: args.cpus,
        memory_mb: args.memory_mb,
        ..SpecDraft::default()
    };
    let created = session.create(spec, IfExists::Fail).await?;
    let data = BoxAnswer::of(&created.info);
    Answer::new(data.line(), &data)
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ListBoxesArgs {}

/// All boxes.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct BoxesAnswer {
    /// The boxes, sorted by name.
    boxes: Vec<BoxAnswer>,
    /// The box of calls without `box`, which exists after the first call.
    default: String,
}

pub(super) async fn list_boxes(
    session: Session,
    _: ListBoxesArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    let mut params = BoxListParams::default();
    let mut boxes = Vec::new();
    loop {
        let page = session.target().list(&params).await?;
        boxes.extend(page.items.iter().map(BoxAnswer::of));
        params.after = page.next;
        if params.after.is_none() {
            break;
        }
    }
    let mut text = String::new();
    for found in &boxes {
        // A write to a string cannot fail.
        let _ = writeln!(text, "{}", found.line());
    }
    let default = session.default_id().to_string();
    let _ = write!(text, "[{} boxes; default box {default}]", boxes.len());
    Answer::new(text, &BoxesAnswer { boxes, default })
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct DeleteBoxArgs {
    /// Box to delete, with its files and commands.
    r#box: String,
}

/// A box that was deleted.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct DeletedAnswer {
    /// The box.
    deleted: String,
}

pub(super) async fn delete_box(
    session: Session,
    args: DeleteBoxArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    let params = BoxDeleteParams {
        box_id: BoxId::new(args.r#box)?,
        force: true,
    };
    let deleted = session.target().delete(params).await?.deleted;
    let deleted = deleted.to_string();
    Answer::new(
        format!("box {deleted}: deleted"),
        &DeletedAnswer { deleted },
    )
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ForkArgs {
    /// Box to copy; the default box if absent.
    r#box: Option<String>,
    /// Number of copies, 1 to 100.
    #[serde(default = "one")]
    count: u32,
    /// The copies are named PREFIX-1, PREFIX-2 and so on; generated if absent.
    prefix: Option<String>,
}

fn one() -> u32 {
    1
}

/// Boxes that were created.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ForkedAnswer {
    /// The new boxes.
    boxes: Vec<BoxAnswer>,
}

pub(super) async fn fork(
    session: Session,
    args: ForkArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    let prefix = args.prefix.map(BoxId::new).transpose();
    let params = BoxForkParams {
        count: args.count,
        prefix: prefix.map_err(|error| rename(error, &[("box_id", "prefix")]))?,
        ..BoxForkParams::new(session.open(args.r#box.as_deref()).await?)
    };
    let forked = session.target().fork(params).await?;
    let boxes: Vec<_> = forked.items.iter().map(BoxAnswer::of).collect();
    let lines: Vec<_> = boxes.iter().map(BoxAnswer::line).collect();
    Answer::new(lines.join("\n"), &ForkedAnswer { boxes })
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CheckpointArgs {
    /// Box; the default box if absent.
    r#box: Option<String>,
    /// Name of the checkpoint; generated for a new one, the newest for a rollback if absent.
    name: Option<String>,
}

/// A checkpoint of a box.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct CheckpointAnswer {
    /// The box.
    r#box: String,
    /// The checkpoint.
    checkpoint: String,
}

pub(super) async fn checkpoint(
    session: Session,
    args: CheckpointArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    let box_id = session.open(args.r#box.as_deref()).await?;
    let params = BoxCheckpointParams {
        box_id: box_id.clone(),
        name: args.name.map(Name::new).transpose()?,
    };
    let made = session.target().checkpoint(params).await?;
    let data = CheckpointAnswer {
        r#box: box_id.to_string(),
        checkpoint: made.name.to_string(),
    };
    let text = format!("checkpoint {} [box {box_id}]", data.checkpoint);
    Answer::new(text, &data)
}

pub(super) async fn rollback(
    session: Session,
    args: CheckpointArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    let params = BoxRollbackParams {
        box_id: session.id_of(args.r#box.as_deref())?,
        name: args.name.map(Name::new).transpose()?,
    };
    let rolled_back = session.target().rollback(params).await;
    let rolled_back = rolled_back.map_err(|error| match error.code() {
        Code::NotFound => {
            let known = "name: the box has no such checkpoint; save one with checkpoint";
            reword(error, "name", known)
        }
        _ => error,
    })?;
    let data = BoxAnswer::of(&rolled_back);
    Answer::new(format!("{}; rolled back", data.line()), &data)
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SharePortArgs {
    /// Port of an HTTP server inside the box.
    port: NonZeroU16,
    /// Box; the default box if absent.
    r#box: Option<String>,
}

/// The address of a port.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct PortAnswer {
    /// The box.
    r#box: String,
    /// The address, which is valid without a token until the box ends.
    url: String,
}

/// Returns an address of a port on the server of this request.
async fn signed_url(
    session: &Session,
    web: &Context,
    box_id: &BoxId,
    port: NonZeroU16,
) -> Result<String, BoxError> {
    let info = session.target().get(box_id).await?;
    let path = Context::box_path(&info);
    let signature = web.grant(&info, Scope::Port(port), None);
    tracing::info!(
        target: "audit",
        caller = &*web.caller.name(),
        box_id = box_id.as_str(),
        port,
        "port shared"
    );
    Ok(format!("{}{path}~{signature}/port/{port}/", web.url))
}

pub(super) async fn share_port(
    session: Session,
    args: SharePortArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    let box_id = session.open(args.r#box.as_deref()).await?;
    let params = PortShareParams {
        box_id: box_id.clone(),
        port: args.port,
        for_ms: None,
    };
    let shared = session.target().shared_by_server(&params).await;
    let url = match (shared, session.web()) {
        (Some(shared), _) => shared?,
        (None, Some(web)) => signed_url(&session, web, &box_id, args.port).await?,
        (None, None) => {
            let message = "share_port: this process does not listen on HTTP; use boxd serve --http";
            return Err(BoxError::unsupported(message));
        }
    };
    let data = PortAnswer {
        r#box: box_id.to_string(),
        url,
    };
    Answer::new(format!("{} [box {box_id}]", data.url), &data)
}
