//! `shell`: an interactive shell in a box.

use std::process::ExitCode;

use anyhow::Result;
use box_client::BoxHandle;

use crate::args::{Cli, ExecOptions, ShellArgs};
use crate::attached::{self, exit_code, memory_hint, report_abnormal_exit};
use crate::create;

/// `boxd shell`.
pub(crate) async fn run(cli: &Cli, args: &ShellArgs) -> Result<ExitCode> {
    let Some(name) = &args.name else {
        let work = async |handle: &BoxHandle| open(handle, args).await;
        return create::in_temporary_box(cli, &args.options, work).await;
    };
    let handle = create::open_named(cli, &args.options, name).await?;
    open(&handle, args).await
}

async fn open(handle: &BoxHandle, args: &ShellArgs) -> Result<ExitCode> {
    let shell = match &args.shell {
        Some(shell) => handle.program([shell.as_str(), "-i"]),
        // The shell that runs the texts of the box runs this one.
        None => handle.command(r#"exec "$0" -i"#),
    };
    let exec_options = ExecOptions {
        tty: true,
        ..ExecOptions::default()
    };
    let exit = attached::run(shell, &exec_options, false).await?;
    report_abnormal_exit(&exit, "", memory_hint(handle));
    Ok(exit_code(&exit))
}
