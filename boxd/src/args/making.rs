//! Options of a new box, for `run` and `shell`.

use std::time::Duration;

use box_client::NetworkRule;
use clap::{Args, ValueEnum};

use super::{ConfigFile, Manner, Program};
use crate::complete;
use crate::values;

const BOX: &str = "Box";
const FILES: &str = "Files";
const NETWORK: &str = "Network";
const LIMITS: &str = "Limits";

const RUN_EXAMPLES: &str = "\
Examples:
  boxd run 'echo $HOSTNAME; id'
  boxd run --workspace . -m 256m --timeout 2m 'make test'
  cat data.csv | boxd run -- python3 -c 'import sys; print(len(sys.stdin.read()))'
  boxd run --allow pypi.org --allow files.pythonhosted.org 'pip download requests'
  boxd run -it bash
  boxd run -d --name work --keep 'make all'     requires a server: boxd serve
Exit codes: that of the command; 122 quota exceeded; 124 timeout; 125 boxd failed;
126 program not executable; 127 program not found.
With --json, each piece of output is a line {\"stream\", \"offset\", \"at\", \"text\"}; {\"exit\"} is last.";

#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArguments {
    #[command(flatten)]
    pub(crate) program: Program,
    #[command(flatten)]
    pub(crate) manner: Manner,
    /// Run in the background on a server and print BOX/COMMAND
    #[arg(short, long, conflicts_with_all = ["tty", "interactive"])]
    pub(crate) detach: bool,
    /// Name the box, keep it and reuse it; requires a server
    #[arg(add = complete::boxes(), long, alias = "session", value_name = "NAME", help_heading = BOX)]
    pub(crate) name: Option<String>,
    /// Delete the box after the command; always so without --name
    #[arg(long, help_heading = BOX, conflicts_with_all = ["keep", "ttl"])]
    pub(crate) rm: bool,
    #[command(flatten)]
    pub(crate) options: BoxOptions,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  boxd shell                     open a shell in a new box; requires no server
  boxd shell --workspace .       mount this directory as /workspace
  boxd shell work                open a shell in the box `work` and keep the box")]
pub(crate) struct ShellArguments {
    /// Box on the server, created if missing [default: a box that ends with the shell]
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) session: Option<String>,
    /// Shell to run
    #[arg(long, default_value = "bash")]
    pub(crate) shell: String,
    #[command(flatten)]
    pub(crate) options: BoxOptions,
}

/// Options of the box: lifetime, files, network and limits.
#[derive(Debug, Args)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "each is a flag of the command line"
)]
pub(crate) struct BoxOptions {
    /// Delete a named box after this idle time (90, 30m, 2d) [default: the server's]
    #[arg(long, value_name = "TIME", value_parser = values::time, conflicts_with = "keep", help_heading = BOX)]
    pub(crate) ttl: Option<Duration>,
    /// Keep a named box until it is deleted
    #[arg(long, help_heading = BOX)]
    pub(crate) keep: bool,
    /// Use this image as the root filesystem
    #[arg(long, value_name = "NAME", help_heading = BOX)]
    pub(crate) image: Option<String>,
    /// Use this profile; not with a server, which has its own
    #[arg(long, value_name = "NAME", help_heading = BOX)]
    pub(crate) profile: Option<String>,
    /// Fail if the machine lacks a protection or a limit
    #[arg(long, help_heading = BOX)]
    pub(crate) strict: bool,
    #[command(flatten)]
    pub(crate) config: ConfigFile,
    /// Mount a directory as /workspace
    #[arg(long, value_name = "DIR[:ro]", help_heading = FILES)]
    pub(crate) workspace: Option<String>,
    /// Mount a directory read-only
    #[arg(long, value_name = "DIR:PLACE[:rw]", help_heading = FILES)]
    pub(crate) mount: Vec<String>,
    /// Mount a directory read-write
    #[arg(short, long, value_name = "DIR:PLACE[:ro]", help_heading = FILES)]
    pub(crate) volume: Vec<String>,
    /// Mount toolchains of your home read-only: rustup, uv, nvm, pyenv, volta, bun, deno, go
    #[arg(long, help_heading = FILES)]
    pub(crate) with_toolchains: bool,
    /// Limit the workspace to this many MiB
    #[arg(long, value_name = "MIB", help_heading = FILES)]
    pub(crate) quota_mb: Option<u64>,
    /// Make the root filesystem writable; /usr stays read-only
    #[arg(long, help_heading = FILES)]
    pub(crate) writable: bool,
    /// Enable or disable the network [default: from the profile, off]
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, help_heading = NETWORK)]
    pub(crate) network: Option<Switch>,
    /// Allow connections to this host only; repeatable (*.github.com:443, 10.1.2.0/24)
    #[arg(long, value_name = "HOST[:PORT]", help_heading = NETWORK)]
    pub(crate) allow: Vec<NetworkRule>,
    /// Use `boxd port` instead
    #[arg(short, long, hide = true, value_name = "PORT")]
    pub(crate) publish: Vec<String>,
    /// Limit CPUs: 2, 0.5
    #[arg(long, value_name = "N", help_heading = LIMITS)]
    pub(crate) cpus: Option<f64>,
    /// Limit memory, in MiB or with a unit: 512m, 2g
    #[arg(short, long, alias = "memory", value_name = "MIB", value_parser = values::mebibytes, help_heading = LIMITS)]
    pub(crate) memory_mb: Option<u64>,
    /// Limit processes and threads
    #[arg(long, alias = "pids-limit", value_name = "N", help_heading = LIMITS)]
    pub(crate) pids: Option<u64>,
}

/// A switch: on or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    #[value(alias = "bridge")]
    On,
    #[value(alias = "none")]
    Off,
}
