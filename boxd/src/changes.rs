//! `diff`, `apply` and `discard`: what a box has changed.

use std::pin::pin;
use std::process::ExitCode;

use anyhow::{Error, Result};
use box_client::{ApplyOptions, BoxHandle, ClientError, Code};
use box_protocol::actions::{BoxApplyResult, DiffEntry, DiffKind, FileKind};
use futures::TryStreamExt as _;
use serde_json::json;

use crate::args::{ApplyArgs, Cli, DiffArgs, DiscardArgs};
use crate::{EXIT_FAILED, connect, error_report, output};

/// Lines that are printed at once.
const BATCH: usize = 1000;

/// `boxd diff`.
pub(crate) async fn diff(cli: &Cli, args: &DiffArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let handle = client.open(&args.name).await?;
    let Err(error) = print_changes(cli, args, &handle).await else {
        return Ok(ExitCode::SUCCESS);
    };
    let Some(hint) = checkpoint_hint(args, &handle, &error).await else {
        return Err(error);
    };
    error_report::print_with_hint(cli, &error, hint);
    Ok(ExitCode::from(error_report::exit_code(&error)))
}

async fn print_changes(cli: &Cli, args: &DiffArgs, handle: &BoxHandle) -> Result<()> {
    let changes = handle.changes(args.since.as_deref(), args.path.as_deref())?;
    if cli.json {
        let changes: Vec<DiffEntry> = changes.try_collect().await?;
        output::print(&output::json(&changes)?)?;
        return Ok(());
    }
    let mut batches = pin!(changes.try_ready_chunks(BATCH));
    while let Some(batch) = batches.try_next().await.map_err(|error| error.1)? {
        output::print(&output::lines(batch.iter().map(line)))?;
    }
    Ok(())
}

/// The hint for a path that does not exist, but is the name of a checkpoint.
async fn checkpoint_hint(args: &DiffArgs, handle: &BoxHandle, error: &Error) -> Option<String> {
    let path = args.path.as_deref()?;
    let refused: &ClientError = error.downcast_ref()?;
    if refused.code() != Code::NotFound || refused.detail().field.as_deref() != Some("path") {
        return None;
    }
    let checkpoints = handle.info().await.ok()?.checkpoints;
    let name = &args.name;
    let is_checkpoint = checkpoints.iter().any(|it| it.name.as_str() == path);
    is_checkpoint
        .then(|| format!("compare with the checkpoint {path}: `boxd diff {name} --since {path}`"))
}

/// `A path`, `M path` or `D path`; a directory ends with a slash.
fn line(change: &DiffEntry) -> String {
    let letter = match change.change {
        DiffKind::Added => 'A',
        DiffKind::Changed => 'M',
        DiffKind::Deleted => 'D',
    };
    let slash = if change.kind == FileKind::Directory {
        "/"
    } else {
        ""
    };
    format!("{letter} {}{slash}", change.path)
}

/// `boxd apply`.
pub(crate) async fn apply(cli: &Cli, args: &ApplyArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let handle = client.open(&args.name).await?;
    let options = ApplyOptions {
        paths: args.paths.clone(),
        force: args.force,
        dry_run: args.dry_run,
    };
    let applied = handle.apply(options).await?;
    output::print_or_json(cli.json, &summary(&applied, args.dry_run), &applied)?;
    for skipped in &applied.skipped {
        let (path, why) = (output::visible(&skipped.path), &skipped.why);
        output::eprintln(&format!("boxd: {path}: not applied: {why}"));
    }
    for path in &applied.conflicts {
        let path = output::visible(path);
        output::eprintln(&format!("boxd: {path}: also changed on the host"));
    }
    if applied.conflicts.is_empty() {
        Ok(ExitCode::SUCCESS)
    } else {
        Ok(ExitCode::from(EXIT_FAILED))
    }
}

fn summary(applied: &BoxApplyResult, dry_run: bool) -> String {
    let BoxApplyResult {
        added,
        changed,
        deleted,
        ..
    } = applied;
    let verb = if dry_run { "would apply" } else { "applied" };
    format!("{verb}: {added} added, {changed} changed, {deleted} deleted\n")
}

/// `boxd discard`.
pub(crate) async fn discard(cli: &Cli, args: &DiscardArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let handle = client.open(&args.name).await?;
    let discarded = handle.discard(args.paths.clone()).await?;
    let text = format!("discarded: {discarded} changes\n");
    output::print_or_json(cli.json, &text, &json!({"discarded": discarded}))?;
    Ok(ExitCode::SUCCESS)
}
