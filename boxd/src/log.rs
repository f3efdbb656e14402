//! What is told to standard error while serving.

use std::io::IsTerminal as _;

use anyhow::{Context as _, Result};
use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, LogSection};

/// What is told.
pub(crate) fn filter(section: &LogSection) -> Result<EnvFilter> {
    EnvFilter::try_new(&section.level).with_context(|| format!("log.level {:?}", section.level))
}

/// Begins to log, for the rest of this process.
pub(crate) fn start(section: &LogSection) -> Result<()> {
    let filter = filter(section)?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match section.format {
        LogFormat::Json => lines.json().init(),
        LogFormat::Human => {
            let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
            lines
                .with_ansi(std::io::stderr().is_terminal() && !plain)
                .init();
        }
    }
    Ok(())
}
