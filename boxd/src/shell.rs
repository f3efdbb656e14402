//! `shell`: an interactive shell in a box.

use std::process::ExitCode;

use anyhow::Result;
use box_client::BoxHandle;

use crate::args::{Arguments, Manner, ShellArguments};
use crate::attached::{self, code_of, explain, more_memory};
use crate::making;

/// `boxd shell`.
pub(crate) async fn run(arguments: &Arguments, asked: &ShellArguments) -> Result<ExitCode> {
    let Some(name) = &asked.name else {
        let work = async |there: &BoxHandle| open(there, asked).await;
        return making::alone(arguments, &asked.options, work).await;
    };
    let there = making::named(arguments, &asked.options, name).await?;
    open(&there, asked).await
}

async fn open(there: &BoxHandle, asked: &ShellArguments) -> Result<ExitCode> {
    let shell = match &asked.shell {
        Some(shell) => there.program([shell.as_str(), "-i"]),
        // The shell that runs the texts of the box runs this one.
        None => there.command(r#"exec "$0" -i"#),
    };
    let manner = Manner {
        tty: true,
        ..Manner::default()
    };
    let exit = attached::run(shell, &manner, false).await?;
    explain(&exit, "", more_memory(there));
    Ok(code_of(&exit))
}
