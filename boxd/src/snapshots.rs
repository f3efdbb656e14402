//! Commands for snapshots, forks and checkpoints.

use std::process::ExitCode;

use anyhow::Result;
use box_client::{CatalogKind, CatalogListParams};
use box_protocol::actions::{BoxForkParams, BoxSnapshotParams};
use box_protocol::{BoxId, Checkpoint, Name, UnixMs};

use crate::args::{
    CheckpointArgs, Cli, ForkArgs, ItemOptions, RollbackArgs, SnapshotArgs, SnapshotCommand,
    SnapshotListArgs,
};
use crate::boxes::format_age;
use crate::items::{self, labels, names};
use crate::{connect, image, output};

const KIND: CatalogKind = CatalogKind::Snapshot;

/// `boxd snapshot`.
pub(crate) async fn snapshot(cli: &Cli, args: &SnapshotArgs) -> Result<ExitCode> {
    match &args.command {
        Some(SnapshotCommand::Create(args)) => {
            create(cli, &args.box_name, &args.name, &args.options).await
        }
        Some(SnapshotCommand::Ls(args)) => list(cli, args).await,
        Some(SnapshotCommand::Inspect(args)) => items::inspect(cli, &args.names, KIND).await,
        Some(SnapshotCommand::Update(args)) => {
            items::update(cli, KIND, &args.item, &args.changes, None).await
        }
        Some(SnapshotCommand::Rm(args)) => items::remove(cli, &args.names, KIND).await,
        Some(SnapshotCommand::Export(args)) => {
            let client = connect::server(cli).await?;
            let open = async || Ok(client.export_snapshot(&args.name).await?);
            image::save_archive(&args.file, open).await
        }
        None => {
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            let (box_name, name) = (text(&args.box_name), text(&args.name));
            create(cli, &box_name, &name, &args.options).await
        }
    }
}

async fn create(cli: &Cli, box_name: &str, name: &str, options: &ItemOptions) -> Result<ExitCode> {
    let params = BoxSnapshotParams {
        tags: names(&options.tag)?,
        labels: labels(&options.label)?,
        ..BoxSnapshotParams::new(BoxId::new(box_name)?, Name::new(name)?)
    };
    let client = connect::server(cli).await?;
    let item = client.snapshot(&params).await?;
    items::print_item(cli, &item)
}

async fn list(cli: &Cli, args: &SnapshotListArgs) -> Result<ExitCode> {
    let filter = CatalogListParams {
        labels: labels(&args.label)?,
        source_box: args.box_name.as_ref().map(BoxId::new).transpose()?,
        ..CatalogListParams::of(KIND)
    };
    items::list_with(cli, args.quiet, filter).await
}

/// `boxd fork`.
pub(crate) async fn fork(cli: &Cli, args: &ForkArgs) -> Result<ExitCode> {
    let params = BoxForkParams {
        count: args.count,
        prefix: args.prefix.as_ref().map(BoxId::new).transpose()?,
        labels: labels(&args.label)?,
        ..BoxForkParams::new(BoxId::new(&args.name)?)
    };
    params.check()?;
    let client = connect::server(cli).await?;
    let boxes = client.fork(&params).await?;
    let ids = boxes.iter().map(|info| &info.box_id);
    output::print_or_json(cli.json, &output::lines(ids), &boxes)?;
    Ok(ExitCode::SUCCESS)
}

/// `boxd checkpoint`.
pub(crate) async fn checkpoint(cli: &Cli, args: &CheckpointArgs) -> Result<ExitCode> {
    let name = args.checkpoint.as_ref().map(Name::new).transpose()?;
    let handle = connect::server(cli).await?.open(&args.name).await?;
    if args.ls {
        let checkpoints = handle.info().await?.checkpoints;
        output::print_or_json(cli.json, &table(&checkpoints), &checkpoints)?;
    } else {
        let made = handle.checkpoint(name).await?;
        output::print_or_json(cli.json, &output::lines([&made.name]), &made)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// `boxd rollback`.
pub(crate) async fn rollback(cli: &Cli, args: &RollbackArgs) -> Result<ExitCode> {
    let name = args.checkpoint.as_ref().map(Name::new).transpose()?;
    let handle = connect::server(cli).await?.open(&args.name).await?;
    let info = handle.rollback(name).await?;
    output::print_or_json(cli.json, &output::lines([&info.box_id]), &info)?;
    Ok(ExitCode::SUCCESS)
}

fn table(checkpoints: &[Checkpoint]) -> String {
    let now = UnixMs::now();
    let row = |checkpoint: &Checkpoint| {
        vec![
            checkpoint.name.to_string(),
            items::mebibytes(checkpoint.size_bytes),
            checkpoint.entries.to_string(),
            format_age(now.since(checkpoint.created_at)),
        ]
    };
    let rows: Vec<_> = checkpoints.iter().map(row).collect();
    output::table(&["CHECKPOINT", "SIZE", "FILES", "AGE"], &rows)
}
