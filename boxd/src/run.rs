//! `run` and `exec`: one command on the streams of this process.

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use box_client::{BoxHandle, CommandBuilder, Exit, ShellRunBuilder};
use box_protocol::LifetimeChange;

use crate::args::{Arguments, ExecArguments, Manner, Program, RunArguments};
use crate::attached::{self, MADE_WITH_MORE, code_of, explain, more_memory};
use crate::refused::Refused;
use crate::{connect, making, output, said, values};

/// Idle milliseconds after which a box of a detached command with `--rm` is deleted.
const AFTER_DETACHED_MS: u64 = 10_000;

/// `boxd run`.
pub(crate) async fn run(arguments: &Arguments, asked: &RunArguments) -> Result<ExitCode> {
    if asked.detach {
        return detach(arguments, asked).await;
    }
    let work = async |there: &BoxHandle| go(arguments, there, asked).await;
    match &asked.name {
        Some(name) if asked.rm => making::briefly(arguments, &asked.options, name, work).await,
        Some(name) => {
            let there = making::named(arguments, &asked.options, name).await?;
            work(&there).await
        }
        None => making::alone(arguments, &asked.options, work).await,
    }
}

/// Starts a detached command in a box of the server.
async fn detach(arguments: &Arguments, asked: &RunArguments) -> Result<ExitCode> {
    let name = asked.name.clone().unwrap_or_else(making::fresh_name);
    let there = if asked.rm {
        making::new(arguments, &asked.options, &name).await?
    } else {
        making::named(arguments, &asked.options, &name).await?
    };
    if asked.rm {
        let change = LifetimeChange {
            idle_ms: Some(Some(AFTER_DETACHED_MS)),
            ..LifetimeChange::default()
        };
        there.update_lifetime(change).await?;
    }
    let command = command(&there, &asked.program, &asked.manner)?;
    leave(arguments, &there, command).await
}

/// Starts a detached command and prints `BOX/COMMAND`.
async fn leave(
    arguments: &Arguments,
    there: &BoxHandle,
    command: CommandBuilder,
) -> Result<ExitCode> {
    let started = command.detached().start().await?;
    let name = format!("{}/{}", there.id(), started.id());
    output::say_or_json(
        arguments.json,
        &format!("{name}\n"),
        &serde_json::json!({"command": name}),
    )?;
    Ok(ExitCode::SUCCESS)
}

/// `boxd exec`.
pub(crate) async fn exec(arguments: &Arguments, asked: &ExecArguments) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    let there = client.open(&asked.name).await?;
    if let (Some(shell), Some(text)) = (&asked.shell, &asked.program.text) {
        let run = in_shell(&there, shell, text, asked).await?;
        let running = attached::run_in_shell(run, &asked.manner, arguments.json);
        let exit = watched(arguments, &there, &asked.manner, running).await?;
        return ended(arguments, &exit, MADE_WITH_MORE);
    }
    let mut command = command(&there, &asked.program, &asked.manner)?;
    if let Some(id) = &asked.id {
        command = command.id(id);
    }
    if asked.detach {
        return leave(arguments, &there, command).await;
    }
    let running = attached::run(command, &asked.manner, arguments.json);
    let exit = watched(arguments, &there, &asked.manner, running).await?;
    ended(arguments, &exit, MADE_WITH_MORE)
}

/// Prints refused connections while a command runs, or after it if the command has the terminal.
async fn watched(
    arguments: &Arguments,
    there: &BoxHandle,
    manner: &Manner,
    running: impl Future<Output = Result<Exit>>,
) -> Result<Exit> {
    let running = Box::pin(running);
    let Some(mut refused) = Refused::from_now(there, arguments.json).await else {
        return running.await;
    };
    let exit = if manner.tty {
        running.await
    } else {
        tokio::select! {
            exit = running => exit,
            never = refused.watch() => never,
        }
    };
    refused.tell().await;
    exit
}

/// Runs the text in a named shell.
async fn in_shell(
    there: &BoxHandle,
    shell: &str,
    text: &str,
    asked: &ExecArguments,
) -> Result<ShellRunBuilder> {
    let mut run = there.shell(shell).open().await?.run(text);
    if let Some(id) = &asked.id {
        run = run.id(id);
    }
    for text in &asked.manner.env {
        let (name, value) = values::variable(text)?;
        run = run.env(name, value);
    }
    if let Some(workdir) = &asked.manner.workdir {
        run = run.cwd(workdir);
    }
    if let Some(timeout) = asked.manner.timeout {
        run = run.timeout(timeout);
    }
    Ok(run)
}

async fn go(arguments: &Arguments, there: &BoxHandle, asked: &RunArguments) -> Result<ExitCode> {
    let command = command(there, &asked.program, &asked.manner)?;
    let running = attached::run(command, &asked.manner, arguments.json);
    let exit = watched(arguments, there, &asked.manner, running).await?;
    ended(arguments, &exit, more_memory(there))
}

fn ended(arguments: &Arguments, exit: &Exit, more_memory: &str) -> Result<ExitCode> {
    if arguments.json {
        said::line(&serde_json::json!({"exit": exit}))?;
    } else {
        explain(exit, "; raise --timeout", more_memory);
    }
    Ok(code_of(exit))
}

/// Builds the requested command.
fn command(there: &BoxHandle, program: &Program, manner: &Manner) -> Result<CommandBuilder> {
    let mut command = match &program.text {
        Some(text) => there.command(text),
        None if program.argv.is_empty() => return Err(anyhow!("no command given")),
        None => there.program(program.argv.clone()),
    };
    for text in &manner.env {
        let (name, value) = values::variable(text)?;
        command = command.env(name, value);
    }
    if let Some(workdir) = &manner.workdir {
        command = command.cwd(workdir);
    }
    if let Some(timeout) = manner.timeout {
        command = command.timeout(timeout);
    }
    if let Some(user) = &manner.user {
        command = command.user(user);
    }
    Ok(command)
}
