//! Commands about whole boxes: `ps`, `inspect`, `pause`, `resume`, `stop`, `start`, `rm`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use box_client::{BoxClient, BoxError, BoxListParams, ClientError};
use box_protocol::actions::{BoxDelete, BoxDeleteParams};
use box_protocol::{BoxId, BoxInfo, BoxState, CommandInfo, Role, UnixMs};
use serde::Serialize;
use serde_json::json;

use crate::args::{Arguments, BoxesArguments, PsArguments, RmArguments, TargetArguments};
use crate::{FAILED, complaint, connect, output, values};

/// `boxd ps`.
pub(crate) async fn ps(arguments: &Arguments, asked: &PsArguments) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    if let Some(name) = &asked.name {
        let commands = client.open(name).await?.commands().await?;
        let names = commands
            .iter()
            .map(|info| format!("{name}/{}", info.command_id));
        return show(arguments, asked.quiet, names, &commands, || {
            command_table(name, &commands)
        });
    }
    let boxes = all(&client).await?;
    let names = boxes.iter().map(|info| info.box_id.to_string());
    show(arguments, asked.quiet, names, &boxes, || box_table(&boxes))
}

fn show(
    arguments: &Arguments,
    quiet: bool,
    names: impl Iterator<Item = String>,
    items: &impl Serialize,
    table: impl FnOnce() -> String,
) -> Result<ExitCode> {
    if quiet && !arguments.json {
        output::say(&output::lines(names))?;
    } else {
        output::say_or_json(arguments.json, &table(), items)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Every box that the caller sees, page by page.
pub(crate) async fn all(client: &BoxClient) -> Result<Vec<BoxInfo>> {
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
            word(&info.state),
            ago(now.since(info.created_at)),
            ago(now.since(info.last_used_at)),
            format!("{}", info.cpus),
            format!("{} MiB", info.memory_mb),
            word(&info.network),
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
                (None, None) => word(&exit.why),
            });
        vec![
            format!("{name}/{}", info.command_id),
            word(&info.state),
            exit,
            ago(now.since(info.created_at)),
            info.program.to_string(),
        ]
    };
    let rows: Vec<_> = commands.iter().map(row).collect();
    output::table(&["COMMAND", "STATE", "EXIT", "AGE", "WHAT"], &rows)
}

/// The name of a value on the wire.
fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        _ => String::new(),
    }
}

/// Formats a duration in its largest unit.
pub(crate) fn ago(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// `boxd inspect`.
pub(crate) async fn inspect(arguments: &Arguments, asked: &TargetArguments) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    let (name, command) = values::target(&asked.target);
    let there = client.open(name).await?;
    // Always JSON, the only format with every field.
    let text = match command {
        None => {
            let info = there.info().await?;
            let inside = there.inspect().await.ok().and_then(|found| found.guest);
            output::json(&json!({"box": info, "guest": inside}))?
        }
        Some(id) => {
            let commands = there.commands().await?;
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
    output::say(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `act` for each of several targets, and prints the error of each failure.
///
/// `act` adds the names of the boxes or commands that it changed.
pub(crate) async fn each(
    arguments: &Arguments,
    targets: &[String],
    done: &str,
    act: impl AsyncFn(&str, &mut Vec<String>) -> Result<()>,
) -> Result<ExitCode> {
    let mut failed = false;
    let mut names = Vec::new();
    for target in targets {
        if let Err(error) = act(target, &mut names).await {
            complaint::tell_about(arguments, target, &error);
            failed = true;
        }
    }
    let text = output::lines(&names);
    output::say_or_json(arguments.json, &text, &json!({ done: names }))?;
    Ok(if failed {
        ExitCode::from(FAILED)
    } else {
        ExitCode::SUCCESS
    })
}

/// A state change of a box.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Turn {
    Pause,
    Resume,
    Stop,
    Start,
}

/// `boxd pause`, `resume`, `stop` and `start`.
pub(crate) async fn turn(
    arguments: &Arguments,
    asked: &BoxesArguments,
    turn: Turn,
) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    let done = match turn {
        Turn::Pause => "paused",
        Turn::Resume => "resumed",
        Turn::Stop => "stopped",
        Turn::Start => "started",
    };
    each(arguments, &asked.names, done, async |name, names| {
        let there = client.open(name).await?;
        match turn {
            Turn::Pause => there.pause().await,
            Turn::Resume => there.resume().await,
            Turn::Stop => there.stop().await,
            Turn::Start => there.start().await,
        }?;
        names.push(name.to_owned());
        Ok(())
    })
    .await
}

/// `boxd rm`.
pub(crate) async fn rm(arguments: &Arguments, asked: &RmArguments) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    let names = if asked.all {
        let boxes = all(&client).await?;
        boxes.iter().map(|info| info.box_id.to_string()).collect()
    } else {
        asked.names.clone()
    };
    each(arguments, &names, "deleted", async |name, names| {
        if !asked.force {
            unused(&client, name).await?;
        }
        let params = BoxDeleteParams {
            box_id: BoxId::new(name)?,
            force: asked.force,
        };
        client.call::<BoxDelete>(&params).await?;
        names.push(name.to_owned());
        Ok(())
    })
    .await
}

/// Fails if the box is paused or has running commands.
async fn unused(client: &BoxClient, name: &str) -> Result<()> {
    let in_use = |why: String| {
        let message = format!("in use: {why}; delete it with --force");
        Err(ClientError::from(BoxError::conflict(message)).into())
    };
    let there = client.open(name).await?;
    match there.info().await?.state {
        BoxState::Running => {}
        BoxState::Paused => return in_use("paused".to_owned()),
        _ => return Ok(()),
    }
    let commands = there.commands().await?;
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
    fn times_fit_a_table() {
        for (seconds, text) in [(5, "5s"), (119, "1m"), (7300, "2h"), (200_000, "2d")] {
            assert_eq!(ago(Duration::from_secs(seconds)), text);
        }
    }
}
