//! Box's one program. It is also the fork server and the first process of every box it makes.
//!
//! # Reading order
//! This file: the arguments. `doctor`: what this machine can do for boxes. `primitives`: what each thing is that a box is made of.

mod doctor;
mod primitives;

use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs commands in isolated boxes.
#[derive(Debug, Parser)]
#[command(name = "boxd", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Says what this machine can do for boxes, what is missing, and what each profile would give.
    Doctor {
        /// As JSON, for programs.
        #[arg(long)]
        json: bool,
    },
    /// Says which version this is.
    Version,
}

fn main() -> anyhow::Result<ExitCode> {
    box_sys::serve_if_asked(box_agent::prepare);
    match Arguments::parse().command {
        Command::Doctor { json } => doctor::run(json),
        Command::Version => {
            let version = env!("CARGO_PKG_VERSION");
            say(&format!(
                "boxd {version}, agent contract {}\n",
                box_agent::CONTRACT
            ))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Prints to standard output. A reader that has heard enough, `head` for one, is no failure.
fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
