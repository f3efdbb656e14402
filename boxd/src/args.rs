//! What can be said on the command line.

mod making;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueHint};

pub(crate) use self::making::{BoxOptions, RunArguments, ShellArguments, Switch};
use crate::complete;

/// Runs commands in isolated boxes.
///
/// A box is made of nothing but this machine's kernel: no daemon, no image, no container engine.
#[derive(Debug, Parser)]
#[command(name = "boxd", version = crate::version::SHORT, long_version = crate::version::LONG, after_help = EXAMPLES,
    max_term_width = 100)]
pub(crate) struct Arguments {
    /// Prints JSON for programs instead of text for people; errors too
    #[arg(long, global = true, help_heading = "For every command")]
    pub(crate) json: bool,
    /// The server to talk to: unix:PATH, tcp://HOST:PORT, tls://HOST:PORT or ws://HOST:PORT/rpc/ws
    #[arg(
        long,
        global = true,
        env = "BOXD_ENDPOINT",
        hide_env_values = true,
        value_name = "ENDPOINT",
        help_heading = "For every command"
    )]
    pub(crate) endpoint: Option<String>,
    /// A file with the token for that server; or the token in `BOXD_TOKEN`
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "For every command")]
    pub(crate) token: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  boxd run 'echo hello from a box'            one box, one command, gone afterwards
  boxd run --workspace . -- python3 x.py      with this directory as /workspace
  boxd serve                                  a server, for boxes that stay
  boxd run --name work 'make test'            in a box that is kept and used again
  boxd doctor                                 what this machine can do for boxes";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Runs one command in a box
    Run(Box<RunArguments>),
    /// Serves boxes to others until it is told to stop
    Serve(ServeArguments),
    /// Serves boxes to the program that started it, over its standard streams
    Stdio(StdioArguments),
    /// Lists boxes
    #[command(visible_alias = "ls")]
    Ps(PsArguments),
    /// Tells everything about a box, or about a command in it (BOX/COMMAND)
    Inspect(TargetArguments),
    /// Runs a command in a box that is there
    Exec(Box<ExecArguments>),
    /// Opens a shell in a box, on this terminal
    Shell(Box<ShellArguments>),
    /// Prints the output of a command
    Logs(LogsArguments),
    /// Copies files into a box or out of one
    Cp(CpArguments),
    /// Prints an address at which a port of a box is reached over HTTP
    Port(PortArguments),
    /// Shows what boxes use, live
    Stats(StatsArguments),
    /// Stops everything in a box where it is
    Pause(BoxesArguments),
    /// Lets a paused box go on
    Resume(BoxesArguments),
    /// Ends everything that runs in a box; its files stay
    Stop(BoxesArguments),
    /// Starts a stopped box again
    Start(BoxesArguments),
    /// Ends a command (BOX/COMMAND), or everything that runs in a box (BOX); the box stays
    Kill(KillArguments),
    /// Waits for the end of a command and exits as it did
    Wait(WaitArguments),
    /// Deletes boxes with everything in them
    Rm(RmArguments),
    /// Says what this machine can do for boxes, what is missing, and what each profile would give
    Doctor,
    /// Shows the configuration
    Config(ConfigArguments),
    /// Says which version this is
    Version,
    /// Prints a completion script for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Prints the manual: boxd man | man -l -
    Man(ManArguments),
}

/// What to run: one argument is a text for the box's shell, arguments after `--` are run as they are.
#[derive(Debug, Args)]
pub(crate) struct Program {
    /// A text for the box's shell
    #[arg(
        value_name = "TEXT",
        required_unless_present = "argv",
        conflicts_with = "argv"
    )]
    pub(crate) text: Option<String>,
    /// A program and its arguments, run as they are
    #[arg(last = true, value_name = "ARGV")]
    pub(crate) argv: Vec<String>,
}

/// How it runs.
#[derive(Debug, Default, Args)]
pub(crate) struct Manner {
    /// Set a variable (NAME=VALUE), or pass one of yours on (NAME)
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// Run in this directory
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// End it after this long: 90, 1.5m, 2h; the exit code is 124 then
    #[arg(long, value_name = "TIME", value_parser = crate::values::time)]
    pub(crate) timeout: Option<std::time::Duration>,
    /// Run as this user
    #[arg(short, long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Give it a terminal
    #[arg(short = 't', long)]
    pub(crate) tty: bool,
    /// Pass standard input on, which is the default
    #[arg(short, long, conflicts_with = "no_stdin")]
    pub(crate) interactive: bool,
    /// Give it no input and read none: in a loop over lines, they stay the loop's
    #[arg(short, long, conflicts_with = "tty")]
    pub(crate) no_stdin: bool,
}

const SERVE_EXAMPLES: &str = "\
Examples:
  boxd serve                                             a Unix socket for this user, nothing else
  boxd serve --http 127.0.0.1:7080                       and HTTP on loopback
  boxd serve --http 0.0.0.0:7080 --token-file tokens     and for others, who need a token
When it is ready it prints one line with every address it listens at.";

#[derive(Debug, Args)]
#[command(after_help = SERVE_EXAMPLES)]
pub(crate) struct ServeArguments {
    /// Where to listen for RPC; may be given more than once
    #[arg(long, value_name = "ENDPOINT")]
    pub(crate) listen: Vec<String>,
    /// The one HTTP port
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) http: Option<String>,
    /// A port for LangBot, in place of its own Box runtime; unless said, port 5410 of every address if
    /// `LANGBOT_BOX_CONTROL_TOKEN` is set, else of loopback
    #[arg(long, value_name = "HOST:PORT", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub(crate) langbot: Option<String>,
    /// Where boxes and their logs are kept
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) state_dir: Option<PathBuf>,
    /// What makes boxes: auto or native
    #[arg(long, value_name = "NAME")]
    pub(crate) backend: Option<String>,
    /// Tokens of callers from the network, one a line: NAME TOKEN
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) token_file: Option<PathBuf>,
    /// Let callers with a token mount what is below this directory (repeatable); a token with a table in
    /// `policy.tokens` mounts what that names instead
    #[arg(long, value_name = "DIR")]
    pub(crate) allow_mount: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) config: ConfigFile,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigFile {
    /// The configuration; /etc/boxd/boxd.toml if that is there
    #[arg(long, env = "BOXD_CONFIG", hide_env_values = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ManArguments {
    /// The page of this command instead
    #[arg(value_name = "COMMAND")]
    pub(crate) command: Option<String>,
    /// Writes all pages into this directory instead, for example /usr/local/share/man/man1
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, conflicts_with = "command")]
    pub(crate) directory: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct StdioArguments {
    /// For LangBot, in place of its own Box runtime; `LANGBOT_BOX_TRUSTED_INSTANCE_UUID` says for which
    #[arg(long)]
    pub(crate) langbot: bool,
    /// The loopback port on which LangBot reaches its managed processes
    #[arg(long, value_name = "PORT", default_value_t = box_gateways::langbot::PORT, requires = "langbot")]
    pub(crate) ws_control_port: u16,
    #[command(flatten)]
    pub(crate) config: ConfigFile,
}

#[derive(Debug, Args)]
pub(crate) struct PsArguments {
    /// Only ids, one a line
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// The commands of this box instead
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) session: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct TargetArguments {
    /// BOX or BOX/COMMAND
    #[arg(add = complete::targets(), value_name = "BOX[/COMMAND]")]
    pub(crate) target: String,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  boxd exec work 'make test'
  boxd exec --shell s work 'cd /tmp; export A=b'
  boxd exec --shell s work 'pwd; echo $A'    in the same shell
  boxd exec --detach work 'make all'         prints BOX/COMMAND, which logs, kill and wait take")]
pub(crate) struct ExecArguments {
    /// The box
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) session: String,
    #[command(flatten)]
    pub(crate) program: Program,
    #[command(flatten)]
    pub(crate) manner: Manner,
    /// Lets it run on, and prints its name
    #[arg(short, long, conflicts_with = "tty")]
    pub(crate) detach: bool,
    /// Run the text in the shell of this name, which keeps `cd` and `export` between calls
    #[arg(long, value_name = "NAME", conflicts_with_all = ["detach", "tty", "argv", "user"])]
    pub(crate) shell: Option<String>,
    /// The command's id; if it is there already, the same command is read instead of started twice, and another one is refused
    #[arg(long, value_name = "ID")]
    pub(crate) id: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArguments {
    /// BOX/COMMAND; of a box alone, its last command
    #[arg(add = complete::targets(), value_name = "BOX[/COMMAND]")]
    pub(crate) target: String,
    /// Goes on until the command ends
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Only the last lines of what is kept
    #[arg(short = 'n', long, value_name = "LINES")]
    pub(crate) tail: Option<usize>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  boxd cp report.csv work:/workspace/
  boxd cp work:/workspace/out .           directories come with what is in them
  boxd cp - work:/tmp/input < data        from standard input
A link is copied as a link and never followed; a path that ends with / means the directory that a link leads to.")]
pub(crate) struct CpArguments {
    /// A path here, BOX:PATH, or - for standard input
    #[arg(add = complete::places(), value_name = "FROM")]
    pub(crate) from: String,
    /// A path here, BOX:PATH, or - for standard output
    #[arg(add = complete::places(), value_name = "TO")]
    pub(crate) to: String,
}

#[derive(Debug, Args)]
#[command(after_help = "\
The address is a credential: whoever has it may use the port, without a token. It ends with the box, or after --for.
The server needs an HTTP port: boxd serve --http 127.0.0.1:7080

Example:
  boxd exec --detach work 'python3 -m http.server 8000'
  curl $(boxd port work 8000)")]
pub(crate) struct PortArguments {
    /// The box
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) session: String,
    /// The port that somebody listens on in the box
    #[arg(value_name = "PORT")]
    pub(crate) port: std::num::NonZeroU16,
    /// How long the address holds: 90, 1.5m, 2h; unless said, as long as the box lives
    #[arg(long = "for", value_name = "TIME", value_parser = crate::values::time)]
    pub(crate) lasting: Option<std::time::Duration>,
}

#[derive(Debug, Args)]
pub(crate) struct StatsArguments {
    /// The boxes; all if none is named
    #[arg(add = complete::boxes(), value_name = "BOX")]
    pub(crate) sessions: Vec<String>,
    /// Shows them once
    #[arg(long)]
    pub(crate) once: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BoxesArguments {
    /// The boxes
    #[arg(add = complete::boxes(), value_name = "BOX", required = true)]
    pub(crate) sessions: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct KillArguments {
    /// BOX/COMMAND, or BOX for everything that runs in it
    #[arg(add = complete::targets(), value_name = "BOX[/COMMAND]", required = true)]
    pub(crate) targets: Vec<String>,
    /// The signal
    #[arg(short, long, default_value = "KILL")]
    pub(crate) signal: String,
}

#[derive(Debug, Args)]
pub(crate) struct WaitArguments {
    /// The command
    #[arg(add = complete::targets(), value_name = "BOX/COMMAND")]
    pub(crate) target: String,
}

#[derive(Debug, Args)]
pub(crate) struct RmArguments {
    /// The boxes
    #[arg(add = complete::boxes(), value_name = "BOX", required_unless_present = "all")]
    pub(crate) sessions: Vec<String>,
    /// Also boxes in which something runs, and paused ones
    #[arg(short, long)]
    pub(crate) force: bool,
    /// All boxes
    #[arg(long, conflicts_with = "sessions")]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArguments {
    #[command(subcommand)]
    pub(crate) what: ConfigCommand,
    /// The configuration; /etc/boxd/boxd.toml if that is there
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
    /// The effective one, and where each value came from
    Show,
    /// Every key with its default, explained
    Example,
    /// Every key in a table of Markdown
    Reference,
    /// Only says whether a server can start with it
    Check,
}
