//! `stdio`: boxes for the program that started this one, over its standard streams. They end with it.

use std::process::ExitCode;

use anyhow::Result;
use box_protocol::actions::SystemShutdownParams;
use box_rpc::{Limits, Options, Session};
use box_runtime::Caller;
use box_transports::stdio;

use crate::args::StdioArguments;
use crate::config;
use crate::local::Boxes;
use crate::log;

/// `boxd stdio`.
pub(crate) async fn run(asked: &StdioArguments) -> Result<ExitCode> {
    let (config, _) = config::load(asked.config.config.as_deref(), std::env::vars(), Vec::new())?;
    log::start(&config.log)?;
    let limits = Limits::default();
    let connection = stdio::serve(&limits)?;
    let boxes = Boxes::start(&config, None, config.policy.clone())?;
    boxes.service.initialize().await?;
    let options = Options {
        limits,
        ..Options::default()
    };
    let session = Session::start(connection, boxes.service.router(), options);
    tokio::select! {
        _ = session.closed() => {}
        () = boxes.runtime.exit_asked() => session.close(std::time::Duration::from_secs(config.server.drain_sec)).await,
    }
    let all = SystemShutdownParams::default();
    boxes.runtime.shutdown(&Caller::local(), all).await?;
    Ok(ExitCode::SUCCESS)
}
