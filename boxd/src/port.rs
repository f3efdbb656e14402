//! `port`: an HTTP address for a port of a box.

use std::process::ExitCode;

use anyhow::Result;

use crate::args::{Arguments, PortArguments};
use crate::{connect, output};

/// `boxd port`.
pub(crate) async fn run(arguments: &Arguments, asked: &PortArguments) -> Result<ExitCode> {
    let client = connect::server(arguments).await?;
    let there = client.open(&asked.name).await?;
    let shared = there.share_port(asked.port, asked.lasting).await?;
    output::say_or_json(arguments.json, &output::lines([&shared.url]), &shared)?;
    Ok(ExitCode::SUCCESS)
}
