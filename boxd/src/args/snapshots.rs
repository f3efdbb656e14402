//! Arguments of the commands for snapshots, forks and checkpoints.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use super::{ItemChanges, ItemOptions};
use crate::complete;

const SNAPSHOT_EXAMPLES: &str = "\
Examples:
  boxd snapshot work ready             make the snapshot `ready` of the box `work`
  boxd run --snapshot ready 'ls'       run in a new box with its files
  boxd snapshot ls --box work
A snapshot holds the private files of a box: no mounts, volumes, processes or limits.";

#[derive(Debug, Args)]
#[command(
    after_help = SNAPSHOT_EXAMPLES,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub(crate) struct SnapshotArgs {
    #[command(subcommand)]
    pub(crate) command: Option<SnapshotCommand>,
    /// Box to take a snapshot of
    #[arg(add = complete::boxes(), value_name = "BOX", required = true)]
    pub(crate) box_name: Option<String>,
    /// Name of the snapshot
    #[arg(value_name = "NAME", required = true)]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) options: ItemOptions,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Make a snapshot of a box
    Create(SnapshotCreateArgs),
    /// List snapshots
    #[command(visible_alias = "list")]
    Ls(SnapshotListArgs),
    /// Show details of snapshots
    Inspect(SnapshotsArgs),
    /// Change a snapshot
    Update(SnapshotUpdateArgs),
    /// Delete snapshots
    Rm(SnapshotsArgs),
    /// Write a snapshot to an archive: with an image an OCI layout, otherwise its files
    Export(SnapshotExportArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotExportArgs {
    /// Snapshot, by name, tag or id
    #[arg(add = complete::snapshots(), value_name = "SNAPSHOT")]
    pub(crate) name: String,
    /// File, or - for stdout
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotCreateArgs {
    /// Box to take a snapshot of
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) box_name: String,
    /// Name of the snapshot
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) options: ItemOptions,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotListArgs {
    /// Print only names, one per line
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// List only items with this label
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<String>,
    /// List only snapshots of this box
    #[arg(add = complete::boxes(), long = "box", value_name = "BOX")]
    pub(crate) box_name: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotsArgs {
    /// Snapshots, by name, tag or id
    #[arg(add = complete::snapshots(), value_name = "SNAPSHOT", required = true)]
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotUpdateArgs {
    /// Snapshot, by name, tag or id
    #[arg(add = complete::snapshots(), value_name = "SNAPSHOT")]
    pub(crate) item: String,
    #[command(flatten)]
    pub(crate) changes: ItemChanges,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  boxd fork work             print the name of the new box
  boxd fork work -n 10 --prefix try
The new boxes have the options of the box and its files at one moment.")]
pub(crate) struct ForkArgs {
    /// Box to copy
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) name: String,
    /// Create this many boxes, at most 100
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1)]
    pub(crate) count: u32,
    /// Name the boxes PREFIX-1, PREFIX-2 and so on
    #[arg(long, value_name = "PREFIX")]
    pub(crate) prefix: Option<String>,
    /// Add a label
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    /// Box to checkpoint
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) name: String,
    /// Name of the checkpoint [default: checkpoint-N]
    #[arg(value_name = "NAME")]
    pub(crate) checkpoint: Option<String>,
    /// List the checkpoints of the box instead
    #[arg(long, conflicts_with = "checkpoint")]
    pub(crate) ls: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RollbackArgs {
    /// Box whose files to replace
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) name: String,
    /// Checkpoint to return to [default: the newest]
    #[arg(value_name = "NAME")]
    pub(crate) checkpoint: Option<String>,
}
