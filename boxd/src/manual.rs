//! `man`: the manual pages of the program and of each command.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::CommandFactory as _;

use crate::args::{Cli, ManArgs};
use crate::output;

/// `boxd man`.
pub(crate) fn run(args: &ManArgs) -> Result<ExitCode> {
    let mut program = Cli::command();
    program.build();
    if let Some(directory) = &args.directory {
        write(program, directory)?;
        return Ok(ExitCode::SUCCESS);
    }
    let page = match &args.command {
        None => program,
        Some(name) => {
            let found = program.find_subcommand(name).cloned();
            found.with_context(|| format!("no command {name}; see `boxd help`"))?
        }
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(page).render(&mut text)?;
    output::print(&String::from_utf8_lossy(&text))?;
    Ok(ExitCode::SUCCESS)
}

fn write(program: clap::Command, directory: &Path) -> Result<()> {
    let shown = directory.display();
    std::fs::create_dir_all(directory).with_context(|| format!("cannot create {shown}"))?;
    clap_mangen::generate_to(program, directory).with_context(|| format!("cannot write to {shown}"))
}
