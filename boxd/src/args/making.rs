//! What can be said of a box that is made: for `run` and for `shell`.

use std::time::Duration;

use box_client::NetworkRule;
use clap::{Args, ValueEnum};

use super::{ConfigFile, Manner, Program};
use crate::complete;
use crate::values;

const BOX: &str = "The box";
const FILES: &str = "Its files";
const NETWORK: &str = "Its network";
const LIMITS: &str = "Its limits";

const RUN_EXAMPLES: &str = "\
Examples:
  boxd run 'echo $HOSTNAME; id'
  boxd run --workspace . -m 256m --timeout 2m 'make test'
  cat data.csv | boxd run -- python3 -c 'import sys; print(len(sys.stdin.read()))'
  boxd run --allow pypi.org --allow files.pythonhosted.org 'pip download requests'
  boxd run -it bash
  boxd run -d --name work --keep 'make all'     needs a server: boxd serve
The exit code is the command's; 122 if the workspace exceeded its quota, 124 if it ran out of time,
125 if boxd itself failed, 126 if the program cannot be run, 127 if it is not there. With --json every piece of output is a line:
{\"stream\", \"offset\", \"at\", \"text\"}, and the last is {\"exit\"}.";

#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArguments {
    #[command(flatten)]
    pub(crate) program: Program,
    #[command(flatten)]
    pub(crate) manner: Manner,
    /// Leave it running in a box of the server, and print BOX/COMMAND
    #[arg(short, long, conflicts_with_all = ["tty", "interactive"])]
    pub(crate) detach: bool,
    /// Keep the box under this name and use it again; needs a server
    #[arg(add = complete::boxes(), long, alias = "session", value_name = "NAME", help_heading = BOX)]
    pub(crate) name: Option<String>,
    /// Delete the box after the command, as a box without a name always is
    #[arg(long, help_heading = BOX, conflicts_with_all = ["keep", "ttl"])]
    pub(crate) rm: bool,
    #[command(flatten)]
    pub(crate) options: BoxOptions,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  boxd shell                     a box that goes with the shell; needs no server
  boxd shell --workspace .       with this directory as /workspace
  boxd shell work                in the box of this name, which is kept")]
pub(crate) struct ShellArguments {
    /// The box; a server makes it if it is not there. Without it, a box that goes with the shell
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) session: Option<String>,
    /// Which shell
    #[arg(long, default_value = "bash")]
    pub(crate) shell: String,
    #[command(flatten)]
    pub(crate) options: BoxOptions,
}

/// What a box shall be.
#[derive(Debug, Args)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "each is a flag of the command line"
)]
pub(crate) struct BoxOptions {
    /// Delete a named box after this long without use: 90, 30m, 2d [default: the server's]
    #[arg(long, value_name = "TIME", value_parser = values::time, conflicts_with = "keep", help_heading = BOX)]
    pub(crate) ttl: Option<Duration>,
    /// Keep a named box until it is deleted
    #[arg(long, help_heading = BOX)]
    pub(crate) keep: bool,
    /// Make the box of this image
    #[arg(long, value_name = "NAME", help_heading = BOX)]
    pub(crate) image: Option<String>,
    /// Take defaults and locks from this profile; a server has its own
    #[arg(long, value_name = "NAME", help_heading = BOX)]
    pub(crate) profile: Option<String>,
    /// Refuse a box that lacks any protection or limit
    #[arg(long, help_heading = BOX)]
    pub(crate) strict: bool,
    #[command(flatten)]
    pub(crate) config: ConfigFile,
    /// Mount a directory as /workspace
    #[arg(long, value_name = "DIR[:ro]", help_heading = FILES)]
    pub(crate) workspace: Option<String>,
    /// Mount another directory, for reading
    #[arg(long, value_name = "DIR:PLACE[:rw]", help_heading = FILES)]
    pub(crate) mount: Vec<String>,
    /// Mount another directory, for writing too
    #[arg(short, long, value_name = "DIR:PLACE[:ro]", help_heading = FILES)]
    pub(crate) volume: Vec<String>,
    /// Mount the tools of your home for reading, and set PATH: rustup, uv, nvm, pyenv, volta, bun, deno, go
    #[arg(long, help_heading = FILES)]
    pub(crate) with_toolchains: bool,
    /// Limit the workspace to this many MiB
    #[arg(long, value_name = "MIB", help_heading = FILES)]
    pub(crate) quota_mb: Option<u64>,
    /// Make the root file system writable, as far as it is the box's own: /, /opt, … but not /usr
    #[arg(long, help_heading = FILES)]
    pub(crate) writable: bool,
    /// Give the box network access or none [default: what the profile says, off]
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, help_heading = NETWORK)]
    pub(crate) network: Option<Switch>,
    /// Allow connections to this host and to no other; repeatable: pypi.org, *.github.com:443, 10.1.2.0/24
    #[arg(long, value_name = "HOST[:PORT]", help_heading = NETWORK)]
    pub(crate) allow: Vec<NetworkRule>,
    /// Ports are reached by `boxd port`
    #[arg(short, long, hide = true, value_name = "PORT")]
    pub(crate) publish: Vec<String>,
    /// Limit processors: 2, 0.5
    #[arg(long, value_name = "N", help_heading = LIMITS)]
    pub(crate) cpus: Option<f64>,
    /// Limit memory, in MiB or with a unit: 512m, 2g
    #[arg(short, long, alias = "memory", value_name = "MIB", value_parser = values::mebibytes, help_heading = LIMITS)]
    pub(crate) memory_mb: Option<u64>,
    /// Limit processes and threads
    #[arg(long, alias = "pids-limit", value_name = "N", help_heading = LIMITS)]
    pub(crate) pids: Option<u64>,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    #[value(alias = "bridge")]
    On,
    #[value(alias = "none")]
    Off,
}
