//! `diff`, `apply` and `discard`: what a box has changed.

use std::pin::pin;
use std::process::ExitCode;

use anyhow::Result;
use box_client::ApplyOptions;
use box_protocol::actions::{BoxApplyResult, DiffEntry, DiffKind, FileKind};
use futures::TryStreamExt as _;
use serde_json::json;

use crate::args::{ApplyArgs, Cli, DiffArgs, DiscardArgs};
use crate::{EXIT_FAILED, connect, output};

/// Lines that are printed at once.
const BATCH: usize = 1000;

/// `boxd diff`.
pub(crate) async fn diff(cli: &Cli, args: &DiffArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let handle = client.open(&args.name).await?;
    let changes = handle.changes(args.since.as_deref(), args.path.as_deref())?;
    if cli.json {
        let changes: Vec<DiffEntry> = changes.try_collect().await?;
        output::print(&output::json(&changes)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut batches = pin!(changes.try_ready_chunks(BATCH));
    let mut is_empty = true;
    while let Some(batch) = batches.try_next().await.map_err(|error| error.1)? {
        is_empty = false;
        output::print(&output::lines(batch.iter().map(line)))?;
    }
    if let (true, Some(path)) = (is_empty, &args.path) {
        let checkpoints = handle.info().await?.checkpoints;
        if checkpoints.iter().any(|it| it.name.as_str() == path) {
            let (name, path) = (output::visible(&args.name), output::visible(path));
            output::eprintln(&format!(
                "boxd: no changes at the path {path}; compare with the checkpoint {path}: boxd diff {name} --since {path}"
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
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
