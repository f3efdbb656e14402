//! Arguments of `diff`, `apply` and `discard`.

use clap::Args;

use crate::complete;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  boxd diff work                  changes of an overlay workspace, otherwise of all files
  boxd diff work --since image    changes of all files except the workspace
Each line begins with A for an added, M for a changed and D for a deleted file.")]
pub(crate) struct DiffArgs {
    /// Box whose changes to list
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) name: String,
    /// List only changes at this path and below
    #[arg(value_name = "PATH")]
    pub(crate) path: Option<String>,
    /// Compare with this: image, workspace, or a checkpoint
    #[arg(long, value_name = "NAME")]
    pub(crate) since: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  boxd run --name work --workspace .:overlay 'make format'
  boxd diff work
  boxd apply work                write all changes to the directory
  boxd apply work src README.md  write only these
  boxd discard work              drop all changes instead")]
pub(crate) struct ApplyArgs {
    /// Box with an overlay workspace
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) name: String,
    /// Apply only these paths of the workspace
    #[arg(value_name = "PATH")]
    pub(crate) paths: Vec<String>,
    /// Replace files that changed on the host as well
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Write nothing; print how many files would change
    #[arg(short = 'n', long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DiscardArgs {
    /// Box with an overlay workspace
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) name: String,
    /// Discard only these paths of the workspace
    #[arg(value_name = "PATH")]
    pub(crate) paths: Vec<String>,
}
