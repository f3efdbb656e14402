//! The `boxd` binary: command line, server, fork server and the first process of every box.
//!
//! # Reading order
//! 1. `args`: the command line; `values`: parsers of its values. `config`: the configuration.
//! 2. `local`: a runtime and its policy in this process. `connect`: the connection to a server.
//! 3. `making`: from options to a box; `toolchains`: mounts from a home directory. `run`: `run` and `exec`; `attached`: a
//!    command on the streams of this process; `refused`: refused connections; `signals`, `terminal`. `boxes`, `commands`,
//!    `tail`, `shell`, `cp`, `port` and `stats`: commands for boxes of a server.
//! 4. `serve`: the server; `stdio`: the server of a parent process; `langbot`: settings for LangBot.
//! 5. `backend`: the backend of the configuration. `doctor`: the check of this machine.
//! 6. `output`, `said`, `complaint`: text and JSON output, and errors. `log`, `manual`, `complete`, `version`.

mod args;
mod attached;
mod backend;
mod boxes;
mod commands;
mod complaint;
mod complete;
mod config;
mod connect;
mod cp;
mod doctor;
mod langbot;
mod local;
mod log;
mod making;
mod manual;
mod output;
mod port;
mod refused;
mod run;
mod said;
mod serve;
mod shell;
mod signals;
mod stats;
mod stdio;
mod tail;
mod terminal;
mod toolchains;
mod values;
mod version;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser as _;

use crate::args::{Arguments, Command, ConfigArguments, ConfigCommand};
use crate::boxes::Turn;

/// The exit code for a failure of boxd; every other code may be that of a command.
pub(crate) const FAILED: u8 = 125;

/// The exit code for a workspace over its quota.
pub(crate) const OVER_QUOTA: u8 = 122;

/// The exit code for a closed stdout: 128 plus SIGPIPE.
const UNHEARD: u8 = 141;

fn main() -> ExitCode {
    backend::serve_if_asked();
    complete::answer_if_asked();
    raise_descriptors();
    let arguments = Arguments::try_parse().unwrap_or_else(|error| complaint::usage(&error));
    match dispatch(&arguments) {
        Ok(code) => code,
        Err(error) if complaint::is_unheard(&error) => ExitCode::from(UNHEARD),
        Err(error) => {
            complaint::tell(&arguments, &error);
            ExitCode::from(complaint::exit_code(&error))
        }
    }
}

/// Raises the limit of open descriptors to its maximum.
///
/// A server needs one per connection. The kernel also refuses to pass a descriptor if the user has more in flight, boxes
/// included, than the sender may have open.
fn raise_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let before = getrlimit(Resource::Nofile);
    let all = Rlimit {
        current: before.maximum,
        ..before
    };
    // With a lower limit boxd works too, for fewer connections.
    let _ = setrlimit(Resource::Nofile, all);
}

fn dispatch(arguments: &Arguments) -> Result<ExitCode> {
    match &arguments.command {
        Command::Doctor => doctor::run(arguments.json),
        Command::Version => {
            let contract = box_agent::CONTRACT;
            let text = format!("boxd {}\nagent contract {contract}\n", version::LONG);
            output::say_or_json(arguments.json, &text, &version::json())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Config(asked) => show_config(asked, arguments.json),
        Command::Completions { shell } => {
            output::say(&complete::script(*shell)?)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man(asked) => manual::run(asked),
        Command::Run(asked) => wait_for(run::run(arguments, asked)),
        Command::Exec(asked) => wait_for(run::exec(arguments, asked)),
        Command::Serve(asked) => wait_for(serve::run(arguments, asked)),
        Command::Stdio(asked) => wait_for(stdio::run(asked)),
        Command::Ps(asked) => wait_for(boxes::ps(arguments, asked)),
        Command::Inspect(asked) => wait_for(boxes::inspect(arguments, asked)),
        Command::Pause(asked) => wait_for(boxes::turn(arguments, asked, Turn::Pause)),
        Command::Resume(asked) => wait_for(boxes::turn(arguments, asked, Turn::Resume)),
        Command::Stop(asked) => wait_for(boxes::turn(arguments, asked, Turn::Stop)),
        Command::Start(asked) => wait_for(boxes::turn(arguments, asked, Turn::Start)),
        Command::Rm(asked) => wait_for(boxes::rm(arguments, asked)),
        Command::Shell(asked) => wait_for(shell::run(arguments, asked)),
        Command::Logs(asked) => wait_for(commands::logs(arguments, asked)),
        Command::Kill(asked) => wait_for(commands::kill(arguments, asked)),
        Command::Wait(asked) => wait_for(commands::wait(arguments, asked)),
        Command::Cp(asked) => wait_for(cp::run(arguments, asked)),
        Command::Port(asked) => wait_for(port::run(arguments, asked)),
        Command::Stats(asked) => wait_for(stats::run(arguments, asked)),
    }
}

/// Runs a future to its end on a new runtime.
fn wait_for(work: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let code = runtime.block_on(work);
    // Do not wait for a thread that blocks on stdin.
    runtime.shutdown_background();
    code
}

fn show_config(asked: &ConfigArguments, json: bool) -> Result<ExitCode> {
    let page = match asked.what {
        ConfigCommand::Example => Some(config::example()),
        ConfigCommand::Reference => Some(config::reference()),
        ConfigCommand::Show | ConfigCommand::Check => None,
    };
    if let Some(page) = page {
        output::say(&page)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (config, values) = config::load(asked.config.as_deref(), config::variables()?, Vec::new())?;
    if let ConfigCommand::Show = asked.what {
        output::say(&config::show(&values, json))?;
    } else {
        serve::check(&config)?;
        let text = "configuration is valid\n";
        output::say_or_json(json, text, &serde_json::json!({"usable": true}))?;
    }
    Ok(ExitCode::SUCCESS)
}
