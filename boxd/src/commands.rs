//! Existing commands: `logs`, `kill`, `wait`.

use std::process::ExitCode;

use anyhow::{Result, bail};
use box_client::{BoxClient, BoxError, BoxHandle, Chunk, ClientError, Offsets, View};
use box_protocol::actions::{
    CommandAttach, CommandAttachParams, CommandAttachResult, CommandKill, CommandKillParams,
    ReadFrom, Until,
};
use box_protocol::{CommandId, CommandState, Role};
use futures::StreamExt as _;

use crate::args::{Arguments, KillArguments, LogsArguments, WaitArguments};
use crate::attached::{MADE_WITH_MORE, code_of, explain, print, print_chunk};
use crate::boxes::each;
use crate::tail::{self, Tail};
use crate::{connect, output, values};

/// `boxd logs`.
pub(crate) async fn logs(arguments: &Arguments, asked: &LogsArguments) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    let (name, command) = values::target(&asked.target);
    let there = client.open(name).await?;
    let command_id = match command {
        Some(id) => CommandId::new(id)?,
        None => last(&there).await?,
    };
    let mut from = Offsets::default();
    if !asked.follow || asked.tail.is_some() {
        let past = Past {
            client: &client,
            there: &there,
            command_id: &command_id,
            view: view(arguments.json),
        };
        if let Some(lines) = asked.tail.filter(|lines| *lines <= tail::MOST) {
            from = past.last_lines(lines).await?;
        }
        let print = |chunk| print_chunk(chunk, arguments.json);
        let read = past.read(ReadFrom::Offsets(from), print).await?;
        from = read.read.next;
    }
    if asked.follow {
        // A read from an offset survives lost connections.
        let rest = there.follow(command_id, from, view(arguments.json))?;
        print(rest, arguments.json).await?;
    }
    Ok(ExitCode::SUCCESS)
}

fn view(json: bool) -> View {
    if json { View::Text } else { View::Bytes }
}

/// The output of a command so far.
struct Past<'a> {
    client: &'a BoxClient,
    there: &'a BoxHandle,
    command_id: &'a CommandId,
    view: View,
}

impl Past<'_> {
    async fn read(
        &self,
        from: ReadFrom,
        mut each: impl FnMut(Chunk) -> Result<()>,
    ) -> Result<CommandAttachResult> {
        let params = CommandAttachParams {
            box_id: self.there.id().clone(),
            command_id: self.command_id.clone(),
            from,
            view: self.view,
            until: Until {
                ms: Some(0),
                ..Until::default()
            },
            exclusive: None,
            pty: None,
        };
        let mut chunks = self.client.peer()?.stream::<CommandAttach>(&params).await?;
        while let Some(chunk) = chunks.next().await {
            if let Some(chunk) = Chunk::from_wire(chunk?) {
                each(chunk)?;
            }
        }
        Ok(chunks.finish().await?)
    }

    /// The offsets of the last lines; searches growing parts of the end, then all output.
    async fn last_lines(&self, lines: usize) -> Result<Offsets> {
        for window in [Some(64 << 10), Some(4 << 20), None] {
            let mut tail = Tail::new(lines);
            let from = window.map_or_else(ReadFrom::default, ReadFrom::Tail);
            let take = |chunk| {
                tail.take(&chunk);
                Ok(())
            };
            let read = self.read(from, take).await?;
            // Bytes that are not UTF-8 take three times the space as text.
            let size = read.info.size.sum().saturating_mul(3);
            let all_seen = window.is_none_or(|window| size <= window);
            if let Some(start) = tail.start(all_seen) {
                return Ok(start);
            }
        }
        Ok(Offsets::default())
    }
}

/// The command of a box that was started last.
async fn last(there: &BoxHandle) -> Result<CommandId> {
    let commands = there.commands().await?;
    let mut own = commands.into_iter().filter(|info| info.role != Role::Watch);
    let last = own.next_back().map(|info| info.command_id);
    last.ok_or_else(|| {
        let message = format!("box {} has no commands", there.id());
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
            let (name, command) = values::target(target);
            let there = client.open(name).await?;
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
                let name = format!("{name}/{command_id}");
                let params = CommandKillParams {
                    box_id: there.id().clone(),
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
    let (name, Some(command)) = values::target(&asked.target) else {
        bail!(
            "expected BOX/COMMAND; list the commands with `boxd ps {}`",
            asked.target
        );
    };
    let there = client.open(name).await?;
    let offsets = Offsets::default();
    let mut command = there.follow(command, offsets, View::None)?;
    let exit = command.exit().await?;
    if arguments.json {
        output::say(&output::json(&exit)?)?;
    } else {
        explain(&exit, "", MADE_WITH_MORE);
    }
    Ok(code_of(&exit))
}
