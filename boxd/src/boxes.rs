//! Commands about whole boxes: `ps`, `inspect`, `pause`, `resume`, `stop`, `start`, `rm`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use box_client::{BoxClient, BoxError, BoxListParams, ClientError};
use box_protocol::actions::{BoxDelete, BoxDeleteParams};
use box_protocol::{BoxId, BoxInfo, BoxState, CommandInfo, Role, UnixMs};
use serde::Serialize;
use serde_json::json;

use crate::args::{BoxesArgs, Cli, PsArgs, RmArgs, TargetArgs};
use crate::{EXIT_FAILED, connect, error_report, output, values};

/// `boxd ps`.
pub(crate) async fn ps(cli: &Cli, args: &PsArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    if let Some(name) = &args.name {
        let commands = client.open(name).await?.commands().await?;
        let names = commands
            .iter()
            .map(|info| format!("{name}/{}", info.command_id));
        return show(cli, args.quiet, names, &commands, || {
            command_table(name, &commands)
        });
    }
    let boxes = list_all(&client).await?;
    let names = boxes.iter().map(|info| info.box_id.to_string());
    show(cli, args.quiet, names, &boxes, || box_table(&boxes))
}

pub(crate) fn show(
    cli: &Cli,
    quiet: bool,
    names: impl Iterator<Item = String>,
    items: &impl Serialize,
    table: impl FnOnce() -> String,
) -> Result<ExitCode> {
    if quiet && !cli.json {
        output::print(&output::lines(names))?;
    } else {
        output::print_or_json(cli.json, &table(), items)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Every box that the caller sees, page by page.
pub(crate) async fn list_all(client: &BoxClient) -> Result<Vec<BoxInfo>> {
    let mut boxes = Vec::new();
    let mut params = BoxListParams::default();
    loop {
        let page = client.list(params.clone()).await?;
        boxes.extend(page.items);
        match page.next {
            Some(next) => params.after = Some(next),
            None => return Ok(boxes),
        }
    }
}

fn box_table(boxes: &[BoxInfo]) -> String {
    let now = UnixMs::now();
    let row = |info: &BoxInfo| {
        vec![
            info.box_id.to_string(),
            wire_name(&info.state),
            format_age(now.since(info.created_at)),
            format_age(now.since(info.last_used_at)),
            format!("{}", info.cpus),
            format!("{} MiB", info.memory_mb),
            wire_name(&info.network),
            match info.rootfs.as_deref() {
                Some("host") => "this machine".to_owned(),
                _ => info.image.clone().unwrap_or_default(),
            },
        ]
    };
    let rows: Vec<_> = boxes.iter().map(row).collect();
    output::table(
        &[
            "BOX", "STATE", "AGE", "IDLE", "CPUS", "MEMORY", "NET", "SYSTEM",
        ],
        &rows,
    )
}

fn command_table(name: &str, commands: &[CommandInfo]) -> String {
    let now = UnixMs::now();
    let row = |info: &CommandInfo| {
        let exit = info
            .exit
            .map_or_else(String::new, |exit| match (exit.code, exit.signal) {
                (Some(code), _) => code.to_string(),
                (None, Some(signal)) => format!("signal {signal}"),
                (None, None) => wire_name(&exit.why),
            });
        vec![
            format!("{name}/{}", info.command_id),
            wire_name(&info.state),
            exit,
            format_age(now.since(info.created_at)),
            info.program.to_string(),
        ]
    };
    let rows: Vec<_> = commands.iter().map(row).collect();
    output::table(&["COMMAND", "STATE", "EXIT", "AGE", "WHAT"], &rows)
}

/// The name of a value on the wire.
fn wire_name(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(wire_name)) => wire_name,
        _ => String::new(),
    }
}

/// Formats a duration in its largest unit.
pub(crate) fn format_age(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// `boxd inspect`.
pub(crate) async fn inspect(cli: &Cli, args: &TargetArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let (name, command) = values::target(&args.target);
    let handle = client.open(name).await?;
    // Always JSON, the only format with every field.
    let text = match command {
        None => {
            let info = handle.info().await?;
            let guest = handle.inspect().await.ok().and_then(|found| found.guest);
            output::json(&json!({"box": info, "guest": guest}))?
        }
        Some(id) => {
            let commands = handle.commands().await?;
            let found = commands
                .into_iter()
                .find(|info| info.command_id.as_str() == id);
            let Some(info) = found else {
                let message = format!("no command {id} in box {name}");
                return Err(ClientError::from(BoxError::not_found(message)).into());
            };
            output::json(&info)?
        }
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `act` for each of several targets, and prints the error of each failure.
///
/// `act` adds the names of the boxes or commands that it changed.
pub(crate) async fn for_each_target(
    cli: &Cli,
    targets: &[String],
    done: &str,
    act: impl AsyncFn(&str, &mut Vec<String>) -> Result<()>,
) -> Result<ExitCode> {
    let mut failed = false;
    let mut names = Vec::new();
    for target in targets {
        if let Err(error) = act(target, &mut names).await {
            error_report::print_for_target(cli, target, &error);
            failed = true;
        }
    }
    let text = output::lines(&names);
    output::print_or_json(cli.json, &text, &json!({ done: names }))?;
    Ok(if failed {
        ExitCode::from(EXIT_FAILED)
    } else {
        ExitCode::SUCCESS
    })
}

/// A state change of a box.
#[derive(Debug, Clone, Copy)]
pub(crate) enum StateChange {
    Pause,
    Resume,
    Stop,
    Start,
}

/// `boxd pause`, `resume`, `stop` and `start`.
pub(crate) async fn change_state(
    cli: &Cli,
    args: &BoxesArgs,
    change_state: StateChange,
) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let done = match change_state {
        StateChange::Pause => "paused",
        StateChange::Resume => "resumed",
        StateChange::Stop => "stopped",
        StateChange::Start => "started",
    };
    for_each_target(cli, &args.names, done, async |name, names| {
        let handle = client.open(name).await?;
        match change_state {
            StateChange::Pause => handle.pause().await,
            StateChange::Resume => handle.resume().await,
            StateChange::Stop => handle.stop().await,
            StateChange::Start => handle.start().await,
        }?;
        names.push(name.to_owned());
        Ok(())
    })
    .await
}

/// `boxd rm`.
pub(crate) async fn rm(cli: &Cli, args: &RmArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let names = if args.all {
        let boxes = list_all(&client).await?;
        boxes.iter().map(|info| info.box_id.to_string()).collect()
    } else {
        args.names.clone()
    };
    for_each_target(cli, &names, "deleted", async |name, names| {
        if !args.force {
            check_unused(&client, name).await?;
        }
        let params = BoxDeleteParams {
            box_id: BoxId::new(name)?,
            force: args.force,
        };
        client.call::<BoxDelete>(&params).await?;
        names.push(name.to_owned());
        Ok(())
    })
    .await
}

/// Fails if the box is paused or has running commands.
async fn check_unused(client: &BoxClient, name: &str) -> Result<()> {
    let in_use = |why: String| {
        let message = format!("in use: {why}; delete it with --force");
        Err(ClientError::from(BoxError::conflict(message)).into())
    };
    let handle = client.open(name).await?;
    match handle.info().await?.state {
        BoxState::Running => {}
        BoxState::Paused => return in_use("paused".to_owned()),
        _ => return Ok(()),
    }
    let commands = handle.commands().await?;
    let mut running = commands
        .iter()
        .filter(|info| info.role != Role::Watch && info.exit.is_none());
    match (running.next(), running.count()) {
        (None, _) => Ok(()),
        (Some(one), 0) => in_use(format!("{name}/{} is running", one.command_id)),
        (Some(one), more) => in_use(format!(
            "{name}/{} and {more} more are running",
            one.command_id
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_use_their_largest_unit() {
        for (seconds, text) in [(5, "5s"), (119, "1m"), (7300, "2h"), (200_000, "2d")] {
            assert_eq!(format_age(Duration::from_secs(seconds)), text);
        }
    }
}
