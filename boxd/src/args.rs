//! The command line: options, arguments and subcommands.

mod box_options;
mod changes;
mod image;
mod items;
mod snapshots;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueHint};

pub(crate) use self::box_options::{
    Action, BoxOptions, FOREVER_MS, McpArgs, Pull, RunArgs, ShellArgs, Switch,
};
pub(crate) use self::changes::{ApplyArgs, DiffArgs, DiscardArgs};
pub(crate) use self::image::{
    ExportArgs, ImageArg, ImageArgs, ImageCommand, ImageLsArgs, ImageRmArgs, ImportArgs, LoginArgs,
    LogoutArgs, PruneArgs, PullArgs,
};
pub(crate) use self::items::{
    ItemChanges, ItemListArgs, ItemOptions, PoolArgs, PoolCommand, TemplateArgs, TemplateCommand,
    TemplateSpec, VolumeArgs, VolumeCommand,
};
pub(crate) use self::snapshots::{
    CheckpointArgs, ForkArgs, RollbackArgs, SnapshotArgs, SnapshotCommand, SnapshotListArgs,
};
use crate::complete;

/// Run commands in isolated boxes.
///
/// A box needs only the Linux kernel: no daemon and no container engine.
#[derive(Debug, Parser)]
#[command(name = "boxd", version = crate::version::SHORT, long_version = crate::version::LONG, after_help = EXAMPLES,
    max_term_width = 100)]
pub(crate) struct Cli {
    /// Print JSON instead of text, for errors too
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,
    /// Use this server: unix:PATH, tcp://HOST:PORT, tls://HOST:PORT or ws://HOST:PORT/rpc/ws
    #[arg(
        long,
        global = true,
        env = "BOXD_ENDPOINT",
        hide_env_values = true,
        value_name = "ENDPOINT",
        help_heading = "Global options"
    )]
    pub(crate) endpoint: Option<String>,
    /// File with the server's token.
    #[arg(long, global = true, help = TOKEN_HELP, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Global options")]
    pub(crate) token: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const TOKEN_HELP: &str = "Read the server's token from this file [default: BOXD_TOKEN]";

const EXAMPLES: &str = "\
Examples:
  boxd run 'echo hello from a box'            run in a new box and delete it afterwards
  boxd run --workspace . -- python3 x.py      mount this directory as /workspace
  boxd run --image debian:12 'apt --version'  use an image as the root file system
  boxd serve                                  start a server that keeps boxes
  boxd run --name work 'make test'            run in a box that is kept and reused
  boxd doctor                                 check this machine";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command in a box
    Run(Box<RunArgs>),
    /// Serve boxes over sockets and HTTP
    Serve(ServeArgs),
    /// Serve boxes to the parent process over stdin and stdout
    Stdio(StdioArgs),
    /// Serve a box as MCP tools over stdin and stdout
    #[command(after_help = box_options::MCP_EXAMPLES)]
    Mcp(Box<McpArgs>),
    /// Serve a box as the exec-server of OpenAI Codex over stdin and stdout
    #[command(after_help = box_options::CODEX_EXAMPLES, mut_arg("workspace", box_options::codex_workspace))]
    CodexExec(Box<McpArgs>),
    /// List boxes, or the commands of a box
    #[command(visible_alias = "ls")]
    Ps(PsArgs),
    /// Show details of a box or command
    Inspect(TargetArgs),
    /// Run a command in an existing box
    Exec(Box<ExecArgs>),
    /// Open an interactive shell in a box
    Shell(Box<ShellArgs>),
    /// Print the output of a command
    Logs(LogsArgs),
    /// Copy files between a box and this machine
    Cp(CpArgs),
    /// List what a box has changed
    Diff(DiffArgs),
    /// Write the changes of an overlay workspace to its directory
    Apply(ApplyArgs),
    /// Drop the changes of an overlay workspace
    Discard(DiscardArgs),
    /// Pull, list, import, export and remove images
    Image(ImageArgs),
    /// Print an HTTP address for a port of a box
    Port(PortArgs),
    /// Show live resource usage of boxes
    Stats(StatsArgs),
    /// Pause all processes in a box
    Pause(BoxesArgs),
    /// Resume a paused box
    Resume(BoxesArgs),
    /// Stop all processes in a box and keep its files
    Stop(BoxesArgs),
    /// Start a stopped box
    Start(BoxesArgs),
    /// Create and manage snapshots of the files of a box
    Snapshot(SnapshotArgs),
    /// Create boxes with the options and the files of a box
    Fork(ForkArgs),
    /// Save a checkpoint of the files of a box
    Checkpoint(CheckpointArgs),
    /// Restore the files of a checkpoint and kill all commands
    Rollback(RollbackArgs),
    /// Kill a command, or every command in a box
    Kill(KillArgs),
    /// Wait for a command and exit with its exit code
    Wait(WaitArgs),
    /// Delete boxes and their files
    Rm(RmArgs),
    /// Manage volumes: directories that outlive boxes
    Volume(VolumeArgs),
    /// Manage templates: options that boxes are created with
    Template(TemplateArgs),
    /// Manage pools: boxes that are started in advance
    Pool(PoolArgs),
    /// Create tokens for remote callers
    Token(TokenArgs),
    /// Check whether this machine can run boxes
    Doctor,
    /// Show or check the configuration
    Config(ConfigArgs),
    /// Print version information
    Version,
    /// Print a shell completion script
    Completions {
        /// Shell to generate the script for
        shell: clap_complete::Shell,
    },
    /// Print the manual page: boxd man | man -l -
    Man(ManArgs),
}

#[derive(Debug, Args)]
pub(crate) struct TokenArgs {
    #[command(subcommand)]
    pub(crate) command: TokenCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Print a line for the token file: boxd token new ann >> tokens
    New {
        /// Name of the caller, which owns the boxes it creates
        name: String,
        /// Make an API key that E2B's SDKs of all versions accept
        #[arg(long)]
        e2b: bool,
    },
}

/// The program to run: a shell script, or an argument vector after `--`.
#[derive(Debug, Args)]
pub(crate) struct Program {
    /// Shell script to run, as one argument
    #[arg(
        value_name = "SCRIPT",
        required_unless_present = "argv",
        conflicts_with = "argv"
    )]
    pub(crate) text: Option<String>,
    /// Program and arguments to run without a shell
    #[arg(last = true, value_name = "ARGV")]
    pub(crate) argv: Vec<String>,
}

/// How a command runs: environment, directory, user, time and terminal.
#[derive(Debug, Default, Args)]
pub(crate) struct ExecOptions {
    /// Set an environment variable; NAME alone inherits its value
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// Run in this directory
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// Kill the command after this time (90, 1.5m, 2h); exit code 124
    #[arg(long, value_name = "TIME", value_parser = crate::values::duration)]
    pub(crate) timeout: Option<std::time::Duration>,
    /// Run as this user
    #[arg(short, long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Allocate a terminal
    #[arg(short = 't', long)]
    pub(crate) tty: bool,
    /// Attach stdin; this is the default
    #[arg(short, long, conflicts_with = "no_stdin")]
    pub(crate) interactive: bool,
    /// Do not attach stdin, for example inside `while read` loops
    #[arg(short, long, conflicts_with = "tty")]
    pub(crate) no_stdin: bool,
}

const SERVE_EXAMPLES: &str = "\
Examples:
  boxd serve                                             listen on a Unix socket for this user only
  boxd serve --http 127.0.0.1:7080                       also listen on HTTP, loopback only
  boxd serve --http 0.0.0.0:7080 --token-file tokens     also listen on HTTP, for callers with a token
When the server is ready, it prints one line with the addresses it listens on.";

#[derive(Debug, Args)]
#[command(after_help = SERVE_EXAMPLES)]
pub(crate) struct ServeArgs {
    /// Listen for RPC on this endpoint; repeatable
    #[arg(long, value_name = "ENDPOINT")]
    pub(crate) listen: Vec<String>,
    /// Listen for HTTP on this address
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) http: Option<String>,
    /// Serve LangBot on this address [default: port 5410, on loopback unless a token is set]
    #[arg(long, value_name = "HOST:PORT", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub(crate) langbot: Option<String>,
    /// Keep boxes and their logs in this directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) state_dir: Option<PathBuf>,
    /// Create boxes with this backend: auto or native
    #[arg(long, value_name = "NAME")]
    pub(crate) backend: Option<String>,
    /// Read the tokens of remote callers; one line each: NAME TOKEN
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) token_file: Option<PathBuf>,
    /// Let callers with a token mount directories below this one; repeatable
    #[arg(long, value_name = "DIR")]
    pub(crate) allow_mount: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) config: ConfigFile,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigFile {
    /// Read this configuration file [default: /etc/boxd/boxd.toml if it exists]
    #[arg(long, env = "BOXD_CONFIG", hide_env_values = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Print the page of this command instead
    #[arg(value_name = "COMMAND")]
    pub(crate) command: Option<String>,
    /// Write all pages to this directory, such as /usr/local/share/man/man1
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, conflicts_with = "command")]
    pub(crate) directory: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct StdioArgs {
    /// Serve the LangBot instance of `LANGBOT_BOX_TRUSTED_INSTANCE_UUID`
    #[arg(long)]
    pub(crate) langbot: bool,
    /// Serve LangBot's managed processes on this loopback port
    #[arg(long, value_name = "PORT", default_value_t = box_gateways::langbot::PORT, requires = "langbot")]
    pub(crate) ws_control_port: u16,
    #[command(flatten)]
    pub(crate) config: ConfigFile,
}

#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Print only ids, one per line
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Box whose commands to list
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) name: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    /// Box, or command of a box
    #[arg(add = complete::targets(), value_name = "BOX[/COMMAND]")]
    pub(crate) target: String,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  boxd exec work 'make test'
  boxd exec --shell s work 'cd /tmp; export A=b'
  boxd exec --shell s work 'pwd; echo $A'    run in the same shell
  boxd exec --detach work 'make all'         print BOX/COMMAND for logs, kill and wait")]
pub(crate) struct ExecArgs {
    /// Box to run the command in
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) program: Program,
    #[command(flatten)]
    pub(crate) exec_options: ExecOptions,
    /// Run in the background and print BOX/COMMAND
    #[arg(short, long, conflicts_with = "tty")]
    pub(crate) detach: bool,
    /// Run the script in this named shell, which keeps `cd` and `export`
    #[arg(long, value_name = "NAME", conflicts_with_all = ["detach", "tty", "argv", "user"])]
    pub(crate) shell: Option<String>,
    /// Set the command id; if the same command exists, read its output instead
    #[arg(long, value_name = "ID")]
    pub(crate) id: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Command, or box whose last command to read
    #[arg(add = complete::targets(), value_name = "BOX[/COMMAND]")]
    pub(crate) target: String,
    /// Follow the output until the command ends
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Print only the last LINES lines
    #[arg(short = 'n', long, value_name = "LINES")]
    pub(crate) tail: Option<usize>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  boxd cp report.csv work:/workspace/
  boxd cp work:/workspace/out .           copy a directory with its contents
  boxd cp - work:/tmp/input < data        copy from stdin
cp copies a symbolic link as a link. To copy the directory that a link points to, end the path with /.")]
pub(crate) struct CpArgs {
    /// Local path, BOX:PATH, or - for stdin
    #[arg(add = complete::copy_paths(), value_name = "FROM")]
    pub(crate) from: String,
    /// Local path, BOX:PATH, or - for stdout
    #[arg(add = complete::copy_paths(), value_name = "TO")]
    pub(crate) to: String,
}

#[derive(Debug, Args)]
#[command(after_help = "\
The address is a credential: anyone with it can use the port without a token. It expires when the box ends, or after --for.
The server must listen on HTTP: boxd serve --http 127.0.0.1:7080

Example:
  boxd exec --detach work 'python3 -m http.server 8000'
  curl $(boxd port work 8000)")]
pub(crate) struct PortArgs {
    /// Box with a server on the port
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) name: String,
    /// Port inside the box
    #[arg(value_name = "PORT")]
    pub(crate) port: std::num::NonZeroU16,
    /// Expire the address after this time (90, 1.5m, 2h) [default: when the box ends]
    #[arg(long = "for", value_name = "TIME", value_parser = crate::values::duration)]
    pub(crate) expires_after: Option<std::time::Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    /// Boxes to show [default: all]
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) names: Vec<String>,
    /// Print once and exit
    #[arg(long)]
    pub(crate) once: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BoxesArgs {
    /// Names of the boxes
    #[arg(add = complete::boxes(), value_name = "BOX", required = true)]
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct KillArgs {
    /// Commands, or boxes whose commands to kill
    #[arg(add = complete::targets(), value_name = "BOX[/COMMAND]", required = true)]
    pub(crate) targets: Vec<String>,
    /// Signal to send
    #[arg(short, long, default_value = "KILL")]
    pub(crate) signal: String,
}

#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Command to wait for
    #[arg(add = complete::targets(), value_name = "BOX/COMMAND")]
    pub(crate) target: String,
}

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// Boxes to delete
    #[arg(add = complete::boxes(), value_name = "BOX", required_unless_present = "all")]
    pub(crate) names: Vec<String>,
    /// Delete paused boxes and boxes with running commands too
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Delete all boxes
    #[arg(long, conflicts_with = "names")]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
    /// Read this configuration file [default: /etc/boxd/boxd.toml if it exists]
    #[arg(
        long,
        global = true,
        env = "BOXD_CONFIG",
        hide_env_values = true,
        value_name = "FILE"
    )]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print effective values and their origins
    Show,
    /// Print an example file with every key
    Example,
    /// Print every key as a Markdown table
    Reference,
    /// Check whether a server can start with the configuration
    Check,
}
