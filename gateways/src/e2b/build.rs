//! Builds of templates: steps that run in a box, whose files become a snapshot.
//!
//! Uploaded files wait in a box of their own, because the image of the build is unknown until it starts.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::http::StatusCode;
use box_protocol::actions::{
    BoxSnapshotParams, BoxUpdateParams, CatalogGetParams, CatalogUpdateParams, CommandKillParams,
    CommandStartParams, FileReadParams, FileWriteParams, IfExists,
};
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemChange, ItemContent, TemplateDraft};
use box_protocol::{
    Blob, BoxId, CommandId, Defaults, Invalid, ItemRef, Lifetime, LifetimeChange, Main, Name,
    Network, Note, Program, Role, SpecDraft,
};
use bytes::Bytes;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde_json::Value;

use super::access::upload_signature;
use super::builds::{Builds, RunningBuild};
use super::connect::other_user;
use super::entries::absolute;
use super::error::ApiError;
use super::model::TemplateNote;
use super::run::{output, run, until, wait_until_ready};
use super::spec::{HOME, PRESET, end_after, env, run_as_root, set_template};
use super::tags::{BUILT, release, set_tags, snapshot_of};
use super::templates::status_of;
use super::variables::{expanded, variables};
use super::{GATEWAY, copy};
use crate::http::context::Context;
use crate::http::download::read_file;
use crate::http::upload::write_file;

/// The labels of a template: its build, the state of it, and why it failed; the CPUs and the memory that the build asks
/// for.
pub(super) const BUILD: &str = "e2b.build";
pub(super) const STATUS: &str = "e2b.status";
pub(super) const REASON: &str = "e2b.reason";
pub(super) const CPUS: &str = "e2b.cpus";
pub(super) const MEMORY: &str = "e2b.memory_mb";

/// The maximum time of a build, in seconds.
const BUILD_SEC: u64 = 3600;

/// The time that the box of an ended build stays for its logs, in seconds.
///
/// It counts towards the limit of boxes. Clients ask for logs several times in a second.
const LOGS_SEC: u64 = 30;

/// The time in which the start command of a build must become ready, in milliseconds.
const READY_MS: u64 = 300_000;

/// The maximum number of steps of a build.
const MAX_STEPS: usize = 1000;

/// The ready command of a Dockerfile with a start command: clients put it in because the Dockerfile names none.
///
/// The build waits so long. A box does not, because it would wait for nothing.
const DOCKERFILE_READY: &str = "sleep 20";

/// The images of E2B's own cloud, which are the system directories of this machine.
const HOST_IMAGES: [&str; 2] = ["e2bdev/base", "e2bdev/code-interpreter"];

type Result<T> = std::result::Result<T, ApiError>;

/// A request to start a build.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Start {
    from_image: Option<String>,
    from_template: Option<String>,
    from_image_registry: Option<Value>,
    #[serde(default)]
    steps: Vec<BuildStep>,
    #[serde(rename = "startCmd")]
    main: Option<String>,
    #[serde(rename = "readyCmd")]
    ready: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct BuildStep {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    args: Option<Vec<String>>,
    files_hash: Option<String>,
}

/// Returns the box with the uploaded files of a build.
fn files_box(item: &CatalogItem) -> Result<BoxId> {
    let build = item.labels.get(BUILD).map_or("", String::as_str);
    Ok(BoxId::new(format!("{build}-files"))?)
}

fn file_of(hash: &str) -> Result<String> {
    if hash.is_empty() || !hash.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err(Invalid::new("hash", "must be letters and digits").into());
    }
    Ok(format!("{HOME}/{hash}.tar"))
}

/// Returns the CPUs and the memory that the boxes of a template have after its build.
fn resources(item: &CatalogItem) -> (Option<f64>, Option<u64>) {
    let label = |name| item.labels.get(name);
    (
        label(CPUS).and_then(|text| text.parse().ok()),
        label(MEMORY).and_then(|text| text.parse().ok()),
    )
}

/// Returns a box of a build. It has the memory of the template, in which the files of the build have to fit.
fn temporary(id: &BoxId, item: &CatalogItem) -> SpecDraft {
    let mut spec = SpecDraft::new(id.as_str());
    (spec.cpus, spec.memory_mb) = resources(item);
    spec.persistent = Some(true);
    spec.lifetime = Some(Lifetime {
        expires_at: Some(end_after(BUILD_SEC)),
        ..Lifetime::default()
    });
    spec
}

/// Returns an address to which the client uploads the files of a step.
pub(super) async fn upload_url(
    context: &Context,
    item: &CatalogItem,
    hash: &str,
) -> Result<String> {
    let path = file_of(hash)?;
    let mut spec = temporary(&files_box(item)?, item);
    PRESET.apply(&mut spec);
    let made = context.create(&GATEWAY, spec, IfExists::Reuse).await?;
    let signature = upload_signature(context, &made.info, &path);
    let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let (path, signature) = (encode(&path), encode(&signature));
    Ok(format!(
        "{}/files?path={path}&signature={signature}",
        context.url
    ))
}

/// Starts the build of a template.
pub(super) async fn start(
    context: Context,
    builds: &Arc<Builds>,
    item: &CatalogItem,
    request: Start,
) -> Result<()> {
    if request
        .from_image_registry
        .as_ref()
        .is_some_and(|it| !it.is_null())
    {
        let message = "fromImageRegistry: not supported by this server; use boxd image login";
        return Err(ApiError::unsupported(message));
    }
    if request.steps.len() > MAX_STEPS {
        let rule = format!("must have at most {MAX_STEPS} steps");
        return Err(Invalid::new("steps", rule).into());
    }
    for step in &request.steps {
        if !matches!(
            step.kind.as_str(),
            "RUN" | "COPY" | "ENV" | "WORKDIR" | "USER"
        ) {
            let message = format!(
                "steps: {:?} is not supported by this server; use RUN, COPY, ENV, WORKDIR or USER",
                step.kind
            );
            return Err(ApiError::unsupported(message));
        }
    }
    let build = item.labels.get(BUILD).cloned().unwrap_or_default();
    let id = BoxId::new(&build)?;
    let running = builds
        .begin(&build)
        .filter(|_| status_of(item) == "waiting");
    let running = running.ok_or_else(|| {
        let message = format!("build {build:?} was started before; request a new one");
        ApiError::new(StatusCode::CONFLICT, message)
    })?;
    let mut spec = temporary(&id, item);
    spec.network = Some(Network::On);
    spec.read_only_rootfs = Some(false);
    let mut base = SpecDraft::default();
    if let Some(template) = &request.from_template {
        set_template(&context, &mut spec, template).await?;
        base = inherited(&context, &spec).await?;
    }
    let defaults = base.defaults.take().unwrap_or_default();
    if let Some(image) = &request.from_image {
        let name = image.split([':', '@']).next().unwrap_or_default();
        if !HOST_IMAGES.contains(&name) {
            spec.image = Some(image.clone());
            run_as_root(&mut spec);
        }
    }
    PRESET.apply(&mut spec);
    set_status(&context, item, "building", None).await?;
    let build = Build {
        context,
        item: item.clone(),
        id,
        env: BTreeMap::clone(&defaults.env),
        cwd: defaults.cwd.unwrap_or_else(|| HOME.to_owned()),
        base,
        user: None,
        _running: running,
    };
    tokio::spawn(build.run(spec, request));
    Ok(())
}

/// Returns the spec of the template that a build begins with; the new template has its variables, directory and start
/// command, too.
async fn inherited(context: &Context, spec: &SpecDraft) -> Result<SpecDraft> {
    let Some(item) = spec.template.clone() else {
        return Ok(SpecDraft::default());
    };
    let kind = CatalogKind::Template;
    let params = CatalogGetParams { kind, item };
    let found = context.runtime().item(&context.caller, params).await?;
    Ok(match found.content {
        ItemContent::Template(template) => template.spec,
        _ => SpecDraft::default(),
    })
}

async fn set_status(
    context: &Context,
    item: &CatalogItem,
    status: &str,
    reason: Option<String>,
) -> Result<()> {
    let mut change =
        CatalogUpdateParams::of(CatalogKind::Template, ItemRef::new(item.id.as_str())?);
    change
        .labels
        .insert(STATUS.to_owned(), Some(status.to_owned()));
    change.labels.insert(REASON.to_owned(), reason);
    context
        .runtime()
        .update_item(&context.caller, change)
        .await?;
    Ok(())
}

/// Keeps the box of an ended build for a moment, in which clients ask for its logs.
pub(super) async fn keep_logs(context: &Context, id: &BoxId) {
    let mut change = BoxUpdateParams::of(id.clone());
    change.lifetime = Some(LifetimeChange {
        expires_at: Some(Some(end_after(LOGS_SEC))),
        ..LifetimeChange::default()
    });
    // A build whose box did not start has no logs.
    let _ = context.update(&GATEWAY, change).await;
}

/// A running build.
struct Build {
    context: Context,
    item: CatalogItem,
    id: BoxId,
    env: BTreeMap<String, String>,
    cwd: String,
    user: Option<String>,
    /// The spec of the template that the build begins with.
    base: SpecDraft,
    _running: RunningBuild,
}

impl Build {
    /// Runs a build to its end, and records how it ended.
    async fn run(mut self, spec: SpecDraft, request: Start) {
        let ended = self.steps(spec, request).await;
        let recorded = match ended {
            Ok(()) => set_status(&self.context, &self.item, "ready", None).await,
            Err(error) => {
                let mut reason = error.to_json()["message"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned();
                reason.truncate(reason.floor_char_boundary(2000));
                set_status(&self.context, &self.item, "error", Some(reason)).await
            }
        };
        if let Err(error) = recorded {
            tracing::warn!(?error, "cannot record the end of a build");
        }
        if let Ok(files) = files_box(&self.item) {
            let _ = self.context.delete(&files).await;
        }
        keep_logs(&self.context, &self.id).await;
    }

    async fn steps(&mut self, spec: SpecDraft, request: Start) -> Result<()> {
        self.context.create(&GATEWAY, spec, IfExists::Fail).await?;
        for (index, step) in request.steps.iter().enumerate() {
            let number = index + 1;
            let done = self.step(number, step).await;
            done.map_err(|error| {
                let message = error.to_json()["message"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned();
                ApiError::new(error.status(), format!("step {number}: {message}"))
            })?;
        }
        let not_empty = |text: &String| !text.is_empty();
        let main = request.main.filter(not_empty);
        let ready = request.ready.filter(not_empty);
        if let (Some(main), Some(ready)) = (&main, &ready) {
            self.check_start(main, ready).await?;
        }
        let (main, note) = if main.is_none() && ready.is_none() {
            (self.base.main.take(), self.base.note.take())
        } else {
            let ready = ready.filter(|ready| ready != DOCKERFILE_READY);
            let note = ready.map(|ready| Note::new(&TemplateNote { ready }));
            let main = main.map(|text| Main {
                argv: shell(&text),
                ends_box: false,
            });
            (main, note.transpose()?)
        };
        let name = Name::new(format!("template-{}", self.id))?;
        let mut params = BoxSnapshotParams::new(self.id.clone(), name);
        params.labels = [(BUILT.to_owned(), self.item.id.to_string())].into();
        let runtime = self.context.runtime();
        let snapshot = runtime.snapshot(&self.context.caller, params).await?;
        let (cpus, memory_mb) = resources(&self.item);
        let defaults = Defaults {
            env: env("ENV", std::mem::take(&mut self.env))?,
            cwd: Some(self.cwd.clone()),
            ..Defaults::default()
        };
        let spec = SpecDraft {
            snapshot: Some(ItemRef::new(snapshot.id.as_str())?),
            defaults: Some(defaults),
            read_only_rootfs: Some(false),
            note,
            main,
            cpus,
            memory_mb,
            ..SpecDraft::default()
        };
        let item = ItemRef::new(self.item.id.as_str())?;
        let mut change = CatalogUpdateParams::of(CatalogKind::Template, item);
        let draft = TemplateDraft { spec: spec.clone() };
        change.content = Some(ItemChange::Template(Box::new(draft)));
        runtime.update_item(&self.context.caller, change).await?;
        set_tags(&self.context, &self.item, &spec).await?;
        if let Some(before) = snapshot_of(&self.item) {
            release(&self.context, before).await;
        }
        Ok(())
    }

    /// Runs the start command until it is ready, so that a broken one fails the build and not each box.
    async fn check_start(&self, main: &str, ready: &str) -> Result<()> {
        let (context, id) = (&self.context, CommandId::new("start")?);
        let params = self.params(id.clone(), shell(main), &self.cwd)?;
        context.start_command(&GATEWAY, params, None).await?;
        let params = self.params(CommandId::new("ready")?, until(ready), &self.cwd)?;
        let waited = wait_until_ready(context, params, READY_MS).await;
        let kill = CommandKillParams::new(self.id.clone(), id);
        // It may have ended by itself.
        let _ = context.runtime().kill_command(&context.caller, kill).await;
        waited
    }

    async fn step(&mut self, number: usize, step: &BuildStep) -> Result<()> {
        let args = step.args.clone().unwrap_or_default();
        let arg = |at: usize| args.get(at).map(String::as_str).unwrap_or_default();
        match step.kind.as_str() {
            "ENV" => {
                let known = self.variables(&args).await?;
                for pair in args.chunks_exact(2) {
                    let value = expanded("ENV", &pair[1], &known)?;
                    self.env.insert(pair[0].clone(), value);
                }
                Ok(())
            }
            "WORKDIR" => {
                let known = self.variables(&args).await?;
                let path = expanded("WORKDIR", arg(0), &known)?;
                self.cwd = match path.as_str() {
                    path if path.starts_with(['/', '~']) => absolute(path, None),
                    path => absolute(&format!("{}/{path}", self.cwd), None),
                };
                let words = ["mkdir", "-p", &self.cwd].map(str::to_owned);
                self.command(number, words.into(), "/", None).await
            }
            "USER" => {
                self.user = other_user(Some(arg(0)));
                Ok(())
            }
            "RUN" => {
                let user = if arg(1).is_empty() {
                    self.user.clone()
                } else {
                    other_user(Some(arg(1)))
                };
                self.command(number, shell(arg(0)), &self.cwd, user).await
            }
            _ => {
                let hash = step.files_hash.as_deref().unwrap_or_default();
                let place = self.fetch(hash).await?;
                let words = copy::command(&place, &args, &self.cwd)?;
                self.command(number, words, "/", None).await
            }
        }
    }

    /// Returns the variables of the commands of the build, if one of these texts names any.
    async fn variables(&self, texts: &[String]) -> Result<BTreeMap<String, String>> {
        if !texts.iter().any(|text| text.contains('$')) {
            return Ok(BTreeMap::new());
        }
        let words = ["/bin/cat", "/proc/self/environ"].map(str::to_owned);
        let mut params = self.params(CommandId::fresh(), words.into(), "/")?;
        // Logs have no such commands.
        params.role = Role::Exec;
        Ok(variables(&output(&self.context, params).await?))
    }

    /// Copies an uploaded file into the box of the build.
    async fn fetch(&self, hash: &str) -> Result<String> {
        let path = file_of(hash)?;
        let read = FileReadParams::new(files_box(&self.item)?, path);
        let body = read_file(&self.context, read).await?;
        let place = format!("/tmp/{hash}.tar");
        let empty = Blob::from(Bytes::new());
        let write = FileWriteParams::new(self.id.clone(), place.clone(), empty);
        write_file(&self.context, write, body.into_data_stream()).await?;
        Ok(place)
    }

    /// Runs a command of a step to its end.
    async fn command(
        &self,
        number: usize,
        argv: Vec<String>,
        cwd: &str,
        user: Option<String>,
    ) -> Result<()> {
        let id = CommandId::new(format!("step-{number:04}"))?;
        let mut params = self.params(id, argv, cwd)?;
        params.user = user;
        match run(&self.context, params).await? {
            Some(0) => Ok(()),
            Some(code) => Err(failed(format!("the command failed with exit code {code}"))),
            None => Err(failed("the command exceeded its time limit".to_owned())),
        }
    }

    fn params(&self, id: CommandId, argv: Vec<String>, cwd: &str) -> Result<CommandStartParams> {
        Ok(CommandStartParams {
            command_id: Some(id),
            cwd: Some(cwd.to_owned()),
            env: env("ENV", self.env.clone())?,
            timeout_ms: Some(BUILD_SEC * 1000),
            retain_ms: Some(-1),
            ..CommandStartParams::new(self.id.clone(), Program::argv(argv)?)
        })
    }
}

/// Returns the words that run a text in a login shell.
fn shell(text: &str) -> Vec<String> {
    ["/bin/bash", "-l", "-c", text].map(str::to_owned).into()
}

fn failed(message: String) -> ApiError {
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, message)
}
