//! Commands that are there: `logs`, `kill`, `wait`.

use std::process::ExitCode;

use anyhow::{Result, bail};
use box_client::{BoxClient, BoxError, BoxHandle, Chunk, ClientError, Offsets, View};
use box_protocol::actions::{
    CommandAttach, CommandAttachParams, CommandKill, CommandKillParams, ReadFrom, Until,
};
use box_protocol::{CommandId, CommandState, Role};
use futures::StreamExt as _;

use crate::args::{Arguments, KillArguments, LogsArguments, WaitArguments};
use crate::attached::{MADE_WITH_MORE, code_of, explain, print};
use crate::boxes::each;
use crate::{connect, output, values};

/// `boxd logs`.
pub(crate) async fn logs(arguments: &Arguments, asked: &LogsArguments) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    let (session, command) = values::target(&asked.target);
    let there = client.open(session).await?;
    let command_id = match command {
        Some(id) => CommandId::new(id)?,
        None => last(&there).await?,
    };
    let mut from = Offsets::default();
    if !asked.follow || asked.tail.is_some() {
        let start = asked.tail.map_or_else(ReadFrom::default, ReadFrom::Tail);
        from = so_far(arguments.json, &client, &there, &command_id, start).await?;
    }
    if asked.follow {
        // From an offset it can be read across lost connections.
        let rest = there.follow(command_id, from, view(arguments.json))?;
        print(rest, arguments.json).await?;
    }
    Ok(ExitCode::SUCCESS)
}

fn view(json: bool) -> View {
    if json { View::Text } else { View::Bytes }
}

/// Prints what there is of a command's output, and returns where to read on.
async fn so_far(
    json: bool,
    client: &BoxClient,
    there: &BoxHandle,
    command_id: &CommandId,
    from: ReadFrom,
) -> Result<Offsets> {
    let params = CommandAttachParams {
        session_id: there.id().clone(),
        command_id: command_id.clone(),
        from,
        view: view(json),
        until: Until {
            ms: Some(0),
            ..Until::default()
        },
        exclusive: None,
        pty: None,
    };
    let mut chunks = client.peer()?.stream::<CommandAttach>(&params).await?;
    let said = (&mut chunks).filter_map(async |chunk| match chunk {
        Ok(chunk) => Chunk::told(chunk).map(Ok),
        Err(error) => Some(Err(error.into())),
    });
    print(std::pin::pin!(said), json).await?;
    Ok(chunks.finish().await?.read.next)
}

/// The command of a box that was started last.
async fn last(there: &BoxHandle) -> Result<CommandId> {
    let commands = there.commands().await?;
    let mut own = commands.into_iter().filter(|info| info.role != Role::Watch);
    let last = own.next_back().map(|info| info.command_id);
    last.ok_or_else(|| {
        let message = format!("box {} has no command yet", there.id());
        ClientError::from(BoxError::not_found(message)).into()
    })
}

/// `boxd kill`.
pub(crate) async fn kill(arguments: &Arguments, asked: &KillArguments) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    each(
        arguments,
        &asked.targets,
        "killed",
        async |target, killed| {
            let (session, command) = values::target(target);
            let there = client.open(session).await?;
            let ids = if let Some(id) = command {
                vec![CommandId::new(id)?]
            } else {
                let commands = there.commands().await?;
                let running = commands.into_iter().filter(|info| {
                    matches!(
                        info.state,
                        CommandState::Running | CommandState::Pending | CommandState::Held
                    )
                });
                running.map(|info| info.command_id).collect()
            };
            for command_id in ids {
                let name = format!("{session}/{command_id}");
                let params = CommandKillParams {
                    session_id: there.id().clone(),
                    command_id,
                    signal: asked.signal.trim_start_matches("SIG").to_owned(),
                    grace_ms: None,
                    forget: false,
                };
                client.call::<CommandKill>(&params).await?;
                killed.push(name);
            }
            Ok(())
        },
    )
    .await
}

/// `boxd wait`.
pub(crate) async fn wait(arguments: &Arguments, asked: &WaitArguments) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    let (session, Some(command)) = values::target(&asked.target) else {
        bail!(
            "name a command: BOX/COMMAND; `boxd ps {}` lists them",
            asked.target
        );
    };
    let there = client.open(session).await?;
    let offsets = Offsets::default();
    let mut command = there.follow(command, offsets, View::None)?;
    let exit = command.exit().await?;
    if arguments.json {
        output::say(&format!("{}\n", serde_json::to_string_pretty(&exit)?))?;
    } else {
        explain(&exit, "", MADE_WITH_MORE);
    }
    Ok(code_of(&exit))
}
