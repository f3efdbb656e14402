//! The `boxd` binary: command line, server, fork server and the first process of every box.
//!
//! # Reading order
//! 1. `args`: the command line; `values`: parsers of its values. `config`: the configuration.
//! 2. `embedded`: a runtime and its policy in this process. `connect`: the connection to a server.
//! 3. `create`: from options to a box; `toolchains`: mounts from a home directory. `run`: `run` and `exec`; `attached`: a
//!    command on the streams of this process; `refused`: refused connections; `signals`, `terminal`. `boxes`, `commands`,
//!    `tail`, `shell`, `cp`, `changes`, `port` and `stats`: commands for boxes of a server. `image`: images; `progress`: bars.
//!    `items`: volumes, templates and pools; `snapshots`: snapshots, forks and checkpoints.
//! 4. `serve`: the server; `stdio` and `mcp`: servers of a parent process; `langbot`: settings for LangBot.
//! 5. `backend`: the backend of the configuration. `doctor`: the check of this machine.
//! 6. `output`, `stream_output`, `error_report`: text and JSON output, and errors. `log`, `manual`, `complete`, `version`.

mod args;
mod attached;
mod backend;
mod boxes;
mod changes;
mod commands;
mod complete;
mod config;
mod connect;
mod cp;
mod create;
mod doctor;
mod embedded;
mod error_report;
mod image;
mod items;
mod langbot;
mod log;
mod manual;
mod mcp;
mod output;
mod port;
mod progress;
mod refused;
mod run;
mod serve;
mod shell;
mod signals;
mod snapshots;
mod stats;
mod stdio;
mod stream_output;
mod tail;
mod terminal;
mod token;
mod toolchains;
mod values;
mod version;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser as _;

use crate::args::{Cli, Command, ConfigArgs, ConfigCommand};
use crate::boxes::StateChange;

/// The exit code for a failure of boxd; every other code may be that of a command.
pub(crate) const EXIT_FAILED: u8 = 125;

/// The exit code for a workspace over its quota.
pub(crate) const EXIT_OVER_QUOTA: u8 = 122;

/// The exit code for a closed stdout: 128 plus SIGPIPE.
const EXIT_BROKEN_PIPE: u8 = 141;

fn main() -> ExitCode {
    backend::run_as_asked();
    complete::run_if_requested();
    raise_descriptor_limit();
    let mut cli = Cli::try_parse().unwrap_or_else(|error| error_report::exit_with_usage(&error));
    if let Command::Run(args) = &mut cli.command {
        args.settle(cli.json);
    }
    match dispatch(&cli) {
        Ok(code) => code,
        Err(error) if error_report::is_broken_pipe(&error) => ExitCode::from(EXIT_BROKEN_PIPE),
        Err(error) => {
            error_report::print(&cli, &error);
            ExitCode::from(error_report::exit_code(&error))
        }
    }
}

/// Raises the limit of open descriptors to its maximum.
///
/// A server needs one per connection. The kernel also refuses to pass a descriptor if the user has more in flight, boxes
/// included, than the sender may have open.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let before = getrlimit(Resource::Nofile);
    let all = Rlimit {
        current: before.maximum,
        ..before
    };
    // With a lower limit boxd works too, for fewer connections.
    let _ = setrlimit(Resource::Nofile, all);
}

fn dispatch(cli: &Cli) -> Result<ExitCode> {
    match &cli.command {
        Command::Doctor => doctor::run(cli.json),
        Command::Version => {
            let contract = box_agent::CONTRACT;
            let text = format!("boxd {}\nagent contract {contract}\n", version::LONG);
            output::print_or_json(cli.json, &text, &version::json())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Config(args) => show_config(args, cli.json),
        Command::Completions { shell } => {
            output::print(&complete::script(*shell)?)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man(args) => manual::run(args),
        Command::Token(args) => token::run(args, cli.json),
        Command::Run(args) => block_on(run::run(cli, args)),
        Command::Exec(args) => block_on(run::exec(cli, args)),
        Command::Serve(args) => block_on(serve::run(cli, args)),
        Command::Stdio(args) => block_on(stdio::run(args)),
        Command::Mcp(args) => block_on(mcp::run(cli, args, mcp::Protocol::Mcp)),
        Command::CodexExec(args) => block_on(mcp::run(cli, args, mcp::Protocol::Codex)),
        Command::Ps(args) => block_on(boxes::ps(cli, args)),
        Command::Inspect(args) => block_on(boxes::inspect(cli, args)),
        Command::Pause(args) => block_on(boxes::change_state(cli, args, StateChange::Pause)),
        Command::Resume(args) => block_on(boxes::change_state(cli, args, StateChange::Resume)),
        Command::Stop(args) => block_on(boxes::change_state(cli, args, StateChange::Stop)),
        Command::Start(args) => block_on(boxes::change_state(cli, args, StateChange::Start)),
        Command::Rm(args) => block_on(boxes::rm(cli, args)),
        Command::Shell(args) => block_on(shell::run(cli, args)),
        Command::Logs(args) => block_on(commands::logs(cli, args)),
        Command::Kill(args) => block_on(commands::kill(cli, args)),
        Command::Wait(args) => block_on(commands::wait(cli, args)),
        Command::Cp(args) => block_on(cp::run(cli, args)),
        Command::Diff(args) => block_on(changes::diff(cli, args)),
        Command::Apply(args) => block_on(changes::apply(cli, args)),
        Command::Discard(args) => block_on(changes::discard(cli, args)),
        Command::Image(args) => block_on(image::run(cli, args)),
        Command::Port(args) => block_on(port::run(cli, args)),
        Command::Stats(args) => block_on(stats::run(cli, args)),
        Command::Snapshot(args) => block_on(snapshots::snapshot(cli, args)),
        Command::Fork(args) => block_on(snapshots::fork(cli, args)),
        Command::Checkpoint(args) => block_on(snapshots::checkpoint(cli, args)),
        Command::Rollback(args) => block_on(snapshots::rollback(cli, args)),
        Command::Volume(args) => block_on(items::volume(cli, args)),
        Command::Template(args) => block_on(items::template(cli, args)),
        Command::Pool(args) => block_on(items::pool(cli, args)),
    }
}

/// Runs a future to its end on a new runtime.
fn block_on(work: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let code = runtime.block_on(work);
    // Do not wait for a thread that blocks on stdin.
    runtime.shutdown_background();
    code
}

fn show_config(args: &ConfigArgs, json: bool) -> Result<ExitCode> {
    let page = match args.command {
        ConfigCommand::Example => Some(config::example()),
        ConfigCommand::Reference => Some(config::reference()),
        ConfigCommand::Show | ConfigCommand::Check => None,
    };
    if let Some(page) = page {
        output::print(&page)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (config, values) = config::load(args.config.as_deref(), config::variables()?, Vec::new())?;
    if let ConfigCommand::Show = args.command {
        output::print(&config::show(&values, json))?;
    } else {
        serve::check(&config, &values)?;
        let text = "configuration is valid\n";
        output::print_or_json(json, text, &serde_json::json!({"usable": true}))?;
    }
    Ok(ExitCode::SUCCESS)
}
