//! Arguments of the commands for volumes, templates and pools.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};

use super::BoxOptions;
use super::box_options::Switch;
use crate::{complete, values};

const VOLUME_EXAMPLES: &str = "\
Examples:
  boxd volume create data --size 10g
  boxd run -v data:/data 'echo kept > /data/file'
  boxd run -v data:/data:ro 'cat /data/file'";

#[derive(Debug, Args)]
#[command(after_help = VOLUME_EXAMPLES)]
pub(crate) struct VolumeArgs {
    #[command(subcommand)]
    pub(crate) command: VolumeCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Create a volume
    Create(VolumeCreateArgs),
    /// List volumes
    #[command(visible_alias = "list")]
    Ls(ItemListArgs),
    /// Show details of volumes
    Inspect(VolumesArgs),
    /// Change a volume
    Update(VolumeUpdateArgs),
    /// Delete volumes and their files
    Rm(VolumesArgs),
}

#[derive(Debug, Args)]
pub(crate) struct VolumeCreateArgs {
    /// Name of the volume
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// Limit its files, in MiB or with a unit: 512m, 10g [default: 1g]
    #[arg(long, value_name = "MIB", value_parser = values::mebibytes)]
    pub(crate) size: Option<u64>,
    /// Let several boxes write to it at once
    #[arg(long)]
    pub(crate) shared: bool,
    #[command(flatten)]
    pub(crate) options: ItemOptions,
}

#[derive(Debug, Args)]
pub(crate) struct VolumesArgs {
    /// Volumes, by name, tag or id
    #[arg(add = complete::volumes(), value_name = "VOLUME", required = true)]
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct VolumeUpdateArgs {
    /// Volume, by name, tag or id
    #[arg(add = complete::volumes(), value_name = "VOLUME")]
    pub(crate) item: String,
    /// Change the size, in MiB or with a unit; requires that no box uses the volume
    #[arg(long, value_name = "MIB", value_parser = values::mebibytes)]
    pub(crate) size: Option<u64>,
    /// Let several boxes write to it at once, or not
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true)]
    pub(crate) shared: Option<Switch>,
    #[command(flatten)]
    pub(crate) changes: ItemChanges,
}

const TEMPLATE_EXAMPLES: &str = "\
Examples:
  boxd template create web --memory 1g --allow pypi.org
  boxd run --template web 'pip download requests'
  boxd template create full --spec spec.json";

#[derive(Debug, Args)]
#[command(after_help = TEMPLATE_EXAMPLES)]
pub(crate) struct TemplateArgs {
    #[command(subcommand)]
    pub(crate) command: TemplateCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TemplateCommand {
    /// Create a template
    Create(Box<TemplateCreateArgs>),
    /// List templates
    #[command(visible_alias = "list")]
    Ls(ItemListArgs),
    /// Show details of templates
    Inspect(TemplatesArgs),
    /// Change a template; options of a box replace its whole spec
    Update(Box<TemplateUpdateArgs>),
    /// Delete templates
    Rm(TemplatesArgs),
}

/// The spec of a template: a file, options, or both.
#[derive(Debug, Args)]
pub(crate) struct TemplateSpec {
    /// Read the spec from this JSON file, or from stdin with -; options override it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) spec: Option<PathBuf>,
    /// Set an environment variable of every command
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    #[command(flatten)]
    pub(crate) box_options: BoxOptions,
}

#[derive(Debug, Args)]
pub(crate) struct TemplateCreateArgs {
    /// Name of the template
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) options: ItemOptions,
    #[command(flatten)]
    pub(crate) spec: TemplateSpec,
}

#[derive(Debug, Args)]
pub(crate) struct TemplatesArgs {
    /// Templates, by name, tag or id
    #[arg(add = complete::templates(), value_name = "TEMPLATE", required = true)]
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct TemplateUpdateArgs {
    /// Template, by name, tag or id
    #[arg(add = complete::templates(), value_name = "TEMPLATE")]
    pub(crate) item: String,
    #[command(flatten)]
    pub(crate) changes: ItemChanges,
    #[command(flatten)]
    pub(crate) spec: TemplateSpec,
}

const POOL_EXAMPLES: &str = "\
Examples:
  boxd template create web --prepare 'pip install requests' --network on
  boxd pool create ready --template web --size 4
  boxd run --pool ready 'python3 -c \"import requests\"'";

#[derive(Debug, Args)]
#[command(after_help = POOL_EXAMPLES)]
pub(crate) struct PoolArgs {
    #[command(subcommand)]
    pub(crate) command: PoolCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PoolCommand {
    /// Create a pool and start its boxes
    Create(PoolCreateArgs),
    /// List pools
    #[command(visible_alias = "list")]
    Ls(ItemListArgs),
    /// Show details of pools
    Inspect(PoolsArgs),
    /// Change a pool
    Update(PoolUpdateArgs),
    /// Delete pools and the boxes that wait in them
    Rm(PoolsArgs),
}

#[derive(Debug, Args)]
pub(crate) struct PoolCreateArgs {
    /// Name of the pool
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// Template of its boxes
    #[arg(add = complete::templates(), long, value_name = "TEMPLATE")]
    pub(crate) template: String,
    /// Number of boxes to keep ready
    #[arg(long, value_name = "N")]
    pub(crate) size: u32,
    /// Replace a waiting box at this age [default: 1h]
    #[arg(long, value_name = "TIME", value_parser = values::duration)]
    pub(crate) max_age: Option<Duration>,
    #[command(flatten)]
    pub(crate) options: ItemOptions,
}

#[derive(Debug, Args)]
pub(crate) struct PoolsArgs {
    /// Pools, by name, tag or id
    #[arg(add = complete::pools(), value_name = "POOL", required = true)]
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct PoolUpdateArgs {
    /// Pool, by name, tag or id
    #[arg(add = complete::pools(), value_name = "POOL")]
    pub(crate) item: String,
    /// Use another template
    #[arg(add = complete::templates(), long, value_name = "TEMPLATE")]
    pub(crate) template: Option<String>,
    /// Change the number of boxes to keep ready
    #[arg(long, value_name = "N")]
    pub(crate) size: Option<u32>,
    /// Replace a waiting box at this age
    #[arg(long, value_name = "TIME", value_parser = values::duration)]
    pub(crate) max_age: Option<Duration>,
    #[command(flatten)]
    pub(crate) changes: ItemChanges,
}

/// Properties that items of every kind have.
#[derive(Debug, Args)]
pub(crate) struct ItemOptions {
    /// Add a tag; it moves here from any other item
    #[arg(long, value_name = "TAG")]
    pub(crate) tag: Vec<String>,
    /// Add a label
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<String>,
}

/// Changes of the properties that items of every kind have.
#[derive(Debug, Args)]
pub(crate) struct ItemChanges {
    /// Change the name
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Remove a tag
    #[arg(long, value_name = "TAG")]
    pub(crate) untag: Vec<String>,
    /// Remove a label
    #[arg(long, value_name = "NAME")]
    pub(crate) unlabel: Vec<String>,
    #[command(flatten)]
    pub(crate) options: ItemOptions,
}

#[derive(Debug, Args)]
pub(crate) struct ItemListArgs {
    /// Print only names, one per line
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// List only items with this label
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<String>,
}
