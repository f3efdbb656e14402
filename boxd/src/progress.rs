//! Progress of transfers on a terminal.

use std::io::IsTerminal as _;

use indicatif::{ProgressBar, ProgressStyle};

/// Whether progress is shown as bars.
pub(crate) fn has_bars() -> bool {
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    std::io::stderr().is_terminal() && !dumb
}

/// A progress bar on a terminal; hidden elsewhere.
pub(crate) fn bar(size: Option<u64>) -> ProgressBar {
    if !has_bars() {
        return ProgressBar::hidden();
    }
    let bar = size.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
    let template = if size.is_some() {
        "{bytes} of {total_bytes} {wide_bar} {bytes_per_sec} {eta}"
    } else {
        "{bytes} {spinner} {bytes_per_sec}"
    };
    styled(bar, template)
}

/// Sets the layout of a bar.
pub(crate) fn styled(bar: ProgressBar, template: &str) -> ProgressBar {
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
