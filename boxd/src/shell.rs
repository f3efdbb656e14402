//! `shell`: an interactive shell in a box, on this terminal.

use std::process::ExitCode;

use anyhow::Result;
use box_client::{ClientError, SpecDraft};

use crate::args::{Arguments, Manner, ShellArguments};
use crate::attached::{self, MADE_WITH_MORE, code_of, explain};
use crate::connect;

/// `boxd shell`.
pub(crate) async fn run(arguments: &Arguments, asked: &ShellArguments) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    let there = match client.open(&asked.session).await {
        Err(error) if ClientError::is_not_found(&error) => {
            client.get_or_create(SpecDraft::new(&asked.session)).await?
        }
        other => other?,
    };
    let shell = there.program([asked.shell.as_str(), "-i"]);
    let manner = Manner {
        tty: true,
        ..Manner::default()
    };
    let exit = attached::run(shell, &manner, false).await?;
    explain(&exit, "", MADE_WITH_MORE);
    Ok(code_of(&exit))
}
