//! Commands that are there: `logs`, `kill`, `wait`.

use std::io;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use box_client::BoxHandle;
use box_protocol::actions::{
    CommandAttach, CommandAttachParams, CommandChunk, CommandKill, CommandKillParams, OutputPiece,
    ReadFrom, Until, View,
};
use box_protocol::{CommandId, CommandState, Role};
use futures::StreamExt as _;
use serde_json::json;

use crate::args::{Arguments, KillArguments, LogsArguments, WaitArguments};
use crate::attached::code_of;
use crate::said::{self, Piece};
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
    let until = Until {
        ms: (!asked.follow).then_some(0),
        ..Until::default()
    };
    let params = CommandAttachParams {
        session_id: there.id().clone(),
        command_id,
        from: asked.tail.map_or_else(ReadFrom::default, ReadFrom::Tail),
        view: if arguments.json {
            View::Text
        } else {
            View::Bytes
        },
        until,
        exclusive: None,
        pty: None,
    };
    let mut chunks = client.peer()?.stream::<CommandAttach>(&params).await?;
    while let Some(chunk) = chunks.next().await {
        match chunk? {
            CommandChunk::Text(piece) => print(arguments.json, &piece, piece.data.as_bytes())?,
            CommandChunk::Bytes(piece) => print(arguments.json, &piece, &piece.data)?,
            CommandChunk::Gap(gap) => {
                said::gap(arguments.json, gap.stream, gap.offset, gap.bytes)?;
            }
            _ => {}
        }
    }
    chunks.finish().await?;
    Ok(ExitCode::SUCCESS)
}

fn print<T>(json: bool, piece: &OutputPiece<T>, data: &[u8]) -> io::Result<()> {
    let OutputPiece {
        stream, offset, at, ..
    } = *piece;
    let piece = Piece {
        stream,
        offset,
        at,
        data,
    };
    said::piece(json, piece)
}

/// The command of a box that was started last.
async fn last(there: &BoxHandle) -> Result<CommandId> {
    let commands = there.commands().await?;
    let mut own = commands.into_iter().filter(|info| info.role != Role::Watch);
    let last = own.next_back().map(|info| info.command_id);
    last.with_context(|| format!("not_found: box {} has no command", there.id()))
}

/// `boxd kill`.
pub(crate) async fn kill(arguments: &Arguments, asked: &KillArguments) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    let mut killed = Vec::new();
    for target in &asked.targets {
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
            let sent = client.call::<CommandKill>(&params).await;
            sent.with_context(|| format!("{name}, signal {}", asked.signal))?;
            killed.push(name);
        }
    }
    let text = output::lines(&killed);
    output::say_or_json(arguments.json, &text, &json!({"killed": killed}))?;
    Ok(ExitCode::SUCCESS)
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
    let params = CommandAttachParams {
        session_id: there.id().clone(),
        command_id: CommandId::new(command)?,
        from: ReadFrom::default(),
        view: View::None,
        until: Until::default(),
        exclusive: None,
        pty: None,
    };
    let end = client
        .peer()?
        .stream::<CommandAttach>(&params)
        .await?
        .finish()
        .await?;
    let exit = end.info.exit.context("the stream ended without an exit")?;
    if arguments.json {
        output::say(&format!("{}\n", serde_json::to_string_pretty(&exit)?))?;
    }
    Ok(code_of(&exit))
}
