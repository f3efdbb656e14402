//! `port`: an HTTP address for a port of a box.

use std::process::ExitCode;

use anyhow::Result;

use crate::args::{Cli, PortArgs};
use crate::{connect, output};

/// `boxd port`.
pub(crate) async fn run(cli: &Cli, args: &PortArgs) -> Result<ExitCode> {
    let client = connect::server(cli).await?;
    let handle = client.open(&args.name).await?;
    let shared = handle.share_port(args.port, args.expires_after).await?;
    output::print_or_json(cli.json, &output::lines([&shared.url]), &shared)?;
    Ok(ExitCode::SUCCESS)
}
