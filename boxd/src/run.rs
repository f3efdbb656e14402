//! `run` and `exec`: one command on the streams of this process.

use std::process::ExitCode;

use anyhow::{Result, anyhow, ensure};
use box_client::{BoxHandle, CommandBuilder, Exit, ShellRunBuilder};
use box_protocol::LifetimeChange;

use crate::args::{Cli, ExecArgs, ExecOptions, RunArgs};
use crate::attached::{self, RECREATE_HINT, exit_code, memory_hint, report_abnormal_exit};
use crate::refused::RefusalWatch;
use crate::{connect, create, output, stream_output, values};

/// Idle milliseconds after which a box of a detached command with `--rm` is deleted.
const DETACHED_IDLE_MS: u64 = 10_000;

/// `boxd run`.
pub(crate) async fn run(cli: &Cli, args: &RunArgs) -> Result<ExitCode> {
    if args.detach {
        return detach(cli, args).await;
    }
    let work = async |handle: &BoxHandle| run_in_box(cli, handle, args).await;
    match &args.name {
        Some(name) if args.rm => create::in_new_box(cli, &args.options, name, work).await,
        Some(name) => {
            let handle = create::open_named(cli, &args.options, name).await?;
            work(&handle).await
        }
        None => create::in_temporary_box(cli, &args.options, work).await,
    }
}

/// Starts a detached command in a box of the server.
async fn detach(cli: &Cli, args: &RunArgs) -> Result<ExitCode> {
    let name = args.name.clone().unwrap_or_else(create::generated_name);
    let handle = if args.rm {
        create::create_new(cli, &args.options, &name).await?
    } else {
        create::open_named(cli, &args.options, &name).await?
    };
    if args.rm {
        let change = LifetimeChange {
            idle_ms: Some(Some(DETACHED_IDLE_MS)),
            ..LifetimeChange::default()
        };
        handle.update_lifetime(change).await?;
    }
    let command = run_command(&handle, args).await?;
    start_detached(cli, &handle, command).await
}

/// Starts a detached command and prints `BOX/COMMAND`.
async fn start_detached(
    cli: &Cli,
    handle: &BoxHandle,
    command: CommandBuilder,
) -> Result<ExitCode> {
    let started = command.detached().start().await?;
    let name = format!("{}/{}", handle.id(), started.id());
    output::print_or_json(
        cli.json,
        &format!("{name}\n"),
        &serde_json::json!({"command": name}),
    )?;
    Ok(ExitCode::SUCCESS)
}

/// `boxd exec`.
pub(crate) async fn exec(cli: &Cli, args: &ExecArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let handle = client.open(&args.name).await?;
    if let (Some(shell), Some(text)) = (&args.shell, &args.program.text) {
        let run = shell_run(&handle, shell, text, args).await?;
        let running = attached::run_in_shell(run, &args.exec_options, cli.json);
        let exit = with_refusal_reports(cli, &handle, &args.exec_options, running).await?;
        return finish(cli, &exit, RECREATE_HINT);
    }
    let program = (args.program.text.as_deref(), &*args.program.argv);
    let mut command = command(&handle, program, &args.exec_options)?;
    if let Some(id) = &args.id {
        command = command.id(id);
    }
    if args.detach {
        return start_detached(cli, &handle, command).await;
    }
    let running = attached::run(command, &args.exec_options, cli.json);
    let exit = with_refusal_reports(cli, &handle, &args.exec_options, running).await?;
    finish(cli, &exit, RECREATE_HINT)
}

/// Prints refused connections while a command runs, or after it if the command has the terminal.
async fn with_refusal_reports(
    cli: &Cli,
    handle: &BoxHandle,
    exec_options: &ExecOptions,
    running: impl Future<Output = Result<Exit>>,
) -> Result<Exit> {
    let running = Box::pin(running);
    let Some(mut refused) = RefusalWatch::start(handle, cli.json).await else {
        return running.await;
    };
    let exit = if exec_options.tty {
        running.await
    } else {
        tokio::select! {
            exit = running => exit,
            never = refused.watch() => never,
        }
    };
    refused.print_new().await;
    exit
}

/// Runs the text in a named shell.
async fn shell_run(
    handle: &BoxHandle,
    shell: &str,
    text: &str,
    args: &ExecArgs,
) -> Result<ShellRunBuilder> {
    let mut run = handle.shell(shell).open().await?.run(text);
    if let Some(id) = &args.id {
        run = run.id(id);
    }
    for text in &args.exec_options.env {
        let (name, value) = values::variable(text)?;
        run = run.env(name, value);
    }
    if let Some(workdir) = &args.exec_options.workdir {
        run = run.cwd(workdir);
    }
    if let Some(timeout) = args.exec_options.timeout {
        run = run.timeout(timeout);
    }
    Ok(run)
}

async fn run_in_box(cli: &Cli, handle: &BoxHandle, args: &RunArgs) -> Result<ExitCode> {
    let command = run_command(handle, args).await?;
    let running = attached::run(command, &args.exec_options, cli.json);
    let exit = with_refusal_reports(cli, handle, &args.exec_options, running).await?;
    finish(cli, &exit, memory_hint(handle))
}

fn finish(cli: &Cli, exit: &Exit, memory_hint: &str) -> Result<ExitCode> {
    if cli.json {
        stream_output::print_json_line(&serde_json::json!({"exit": exit}))?;
    } else {
        report_abnormal_exit(exit, "; raise --timeout", memory_hint);
    }
    Ok(exit_code(exit))
}

/// Builds the command of `run`: the given one, or that of the image.
async fn run_command(handle: &BoxHandle, args: &RunArgs) -> Result<CommandBuilder> {
    if args.text.is_some() || !args.argv.is_empty() {
        return command(
            handle,
            (args.text.as_deref(), &args.argv),
            &args.exec_options,
        );
    }
    let info = handle.info().await?;
    let mut words = Vec::new();
    if let Some(digest) = info.image_resolved {
        let image = handle.client().images().get(digest).await?;
        words = image.config.unwrap_or_default().argv();
    }
    ensure!(
        !words.is_empty(),
        "the image has no command; name a script, or a program after --"
    );
    command(handle, (None, &words), &args.exec_options)
}

/// Builds the requested command from a script or an argument vector.
fn command(
    handle: &BoxHandle,
    (text, argv): (Option<&str>, &[String]),
    exec_options: &ExecOptions,
) -> Result<CommandBuilder> {
    let mut command = match text {
        Some(text) => handle.command(text),
        None if argv.is_empty() => return Err(anyhow!("no command given")),
        None => handle.program(argv.to_vec()),
    };
    for text in &exec_options.env {
        let (name, value) = values::variable(text)?;
        command = command.env(name, value);
    }
    if let Some(workdir) = &exec_options.workdir {
        command = command.cwd(workdir);
    }
    if let Some(timeout) = exec_options.timeout {
        command = command.timeout(timeout);
    }
    if let Some(user) = &exec_options.user {
        command = command.user(user);
    }
    Ok(command)
}
