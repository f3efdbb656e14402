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

use crate::args::{Cli, KillArgs, LogsArgs, WaitArgs};
use crate::attached::{RECREATE_HINT, exit_code, print, print_chunk, report_abnormal_exit};
use crate::boxes::for_each_target;
use crate::tail::{self, Tail};
use crate::{connect, output, values};

/// `boxd logs`.
pub(crate) async fn logs(cli: &Cli, args: &LogsArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let (name, command) = values::target(&args.target);
    let handle = client.open(name).await?;
    let command_id = match command {
        Some(id) => CommandId::new(id)?,
        None => last_command(&handle).await?,
    };
    let mut from = Offsets::default();
    if !args.follow || args.tail.is_some() {
        let reader = OutputReader {
            client: &client,
            handle: &handle,
            command_id: &command_id,
            view: view(cli.json),
        };
        if let Some(lines) = args.tail.filter(|lines| *lines <= tail::MAX_LINES) {
            from = reader.last_lines(lines).await?;
        }
        let print = |chunk| print_chunk(chunk, cli.json);
        let read = reader.read(ReadFrom::Offsets(from), print).await?;
        from = read.read.next;
    }
    if args.follow {
        // A read from an offset survives lost connections.
        let rest = handle.follow(command_id, from, view(cli.json))?;
        print(rest, cli.json).await?;
    }
    Ok(ExitCode::SUCCESS)
}

fn view(json: bool) -> View {
    if json { View::Text } else { View::Bytes }
}

/// The output of a command so far.
struct OutputReader<'a> {
    client: &'a BoxClient,
    handle: &'a BoxHandle,
    command_id: &'a CommandId,
    view: View,
}

impl OutputReader<'_> {
    async fn read(
        &self,
        from: ReadFrom,
        mut for_each_target: impl FnMut(Chunk) -> Result<()>,
    ) -> Result<CommandAttachResult> {
        let params = CommandAttachParams {
            from,
            view: self.view,
            until: Until {
                ms: Some(0),
                ..Until::default()
            },
            ..CommandAttachParams::new(self.handle.id().clone(), self.command_id.clone())
        };
        let mut chunks = self.client.peer()?.stream::<CommandAttach>(&params).await?;
        while let Some(chunk) = chunks.next().await {
            if let Some(chunk) = Chunk::from_wire(chunk?) {
                for_each_target(chunk)?;
            }
        }
        Ok(chunks.finish().await?)
    }

    /// The offsets of the last lines; searches growing parts of the end, then all output.
    async fn last_lines(&self, lines: usize) -> Result<Offsets> {
        for window in [Some(64 << 10), Some(4 << 20), None] {
            let mut tail = Tail::new(lines);
            let from = window.map_or_else(ReadFrom::default, ReadFrom::Tail);
            let push = |chunk| {
                tail.push(&chunk);
                Ok(())
            };
            let read = self.read(from, push).await?;
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
async fn last_command(handle: &BoxHandle) -> Result<CommandId> {
    let commands = handle.commands().await?;
    let mut own = commands.into_iter().filter(|info| info.role != Role::Watch);
    let last = own.next_back().map(|info| info.command_id);
    last.ok_or_else(|| {
        let message = format!("box {} has no commands", handle.id());
        ClientError::from(BoxError::not_found(message)).into()
    })
}

/// `boxd kill`.
pub(crate) async fn kill(cli: &Cli, args: &KillArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    for_each_target(cli, &args.targets, "killed", async |target, killed| {
        let (name, command) = values::target(target);
        let handle = client.open(name).await?;
        let ids = if let Some(id) = command {
            vec![CommandId::new(id)?]
        } else {
            let commands = handle.commands().await?;
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
                signal: args.signal.trim_start_matches("SIG").to_owned(),
                ..CommandKillParams::new(handle.id().clone(), command_id)
            };
            client.call::<CommandKill>(&params).await?;
            killed.push(name);
        }
        Ok(())
    })
    .await
}

/// `boxd wait`.
pub(crate) async fn wait(cli: &Cli, args: &WaitArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let (name, Some(command)) = values::target(&args.target) else {
        bail!(
            "expected BOX/COMMAND; list the commands with `boxd ps {}`",
            args.target
        );
    };
    let handle = client.open(name).await?;
    let offsets = Offsets::default();
    let mut command = handle.follow(command, offsets, View::None)?;
    let exit = command.exit().await?;
    if cli.json {
        output::print(&output::json(&exit)?)?;
    } else {
        report_abnormal_exit(&exit, "", RECREATE_HINT);
    }
    Ok(exit_code(&exit))
}
