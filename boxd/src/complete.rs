//! Shell completion, including the names of boxes, commands and images.

use std::ffi::OsStr;
use std::time::Duration;

use anyhow::Result;
use box_client::{CatalogKind, CatalogListParams};
use clap::{CommandFactory as _, Parser as _};
use clap_complete::engine::{
    ArgValueCandidates, ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter as _,
};
use clap_complete::env::{CompleteEnv, Shells};

use crate::args::Cli;
use crate::image::{ImageClient, familiar};
use crate::{boxes, connect, values};

/// The environment variable of a completion request.
///
/// It does not begin with `BOXD_`, because those variables are configuration keys.
const VARIABLE: &str = "_BOXD_COMPLETE";

/// How long a server may take to list names.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Answers a completion request and exits; returns if there is none.
pub(crate) fn run_if_requested() {
    CompleteEnv::with_factory(Cli::command)
        .var(VARIABLE)
        .complete();
}

/// The completion script of a shell.
pub(crate) fn script(shell: clap_complete::Shell) -> Result<String> {
    let mut text = Vec::new();
    if let Some(completer) = Shells::builtins().completer(&shell.to_string()) {
        completer.write_registration(VARIABLE, "boxd", "boxd", "boxd", &mut text)?;
    }
    Ok(String::from_utf8(text)?)
}

/// Completes the name of a box.
pub(crate) fn boxes() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(box_names()))
}

/// Completes the name of an image.
pub(crate) fn images() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let names = query(async |cli| {
            let images = ImageClient::open(&cli).await?.images().list().await?;
            let names = images.items.iter().flat_map(|image| &image.names);
            Ok(names.map(|name| familiar(name).to_owned()).collect())
        });
        candidates(names)
    })
}

/// Completes the name of a box, or of a command in it.
pub(crate) fn targets() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let current = current.to_string_lossy();
        let mut names = match values::target(&current) {
            (name, Some(_)) => command_names(name),
            (_, None) => box_names(),
        };
        names.retain(|name| name.starts_with(&*current));
        candidates(names)
    })
}

/// Completes a local path, or the name of a box with a colon.
pub(crate) fn copy_paths() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let mut found = PathCompleter::any().complete(current);
        let current = current.to_string_lossy();
        let paths = box_names().into_iter().map(|name| format!("{name}:/"));
        found.extend(candidates(
            paths.filter(|path| path.starts_with(&*current)).collect(),
        ));
        found
    })
}

/// Completes the name of a volume.
pub(crate) fn volumes() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(item_names(CatalogKind::Volume)))
}

/// Completes the name of a template.
pub(crate) fn templates() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(item_names(CatalogKind::Template)))
}

/// Completes the name of a pool.
pub(crate) fn pools() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(item_names(CatalogKind::Pool)))
}

/// Completes the name of a snapshot.
pub(crate) fn snapshots() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(item_names(CatalogKind::Snapshot)))
}

fn item_names(kind: CatalogKind) -> Vec<String> {
    query(async |cli| {
        let client = connect::server(&cli).await?;
        let items = client.items(CatalogListParams::of(kind)).await?;
        Ok(items.iter().map(|item| item.name.to_string()).collect())
    })
}

fn candidates(names: Vec<String>) -> Vec<CompletionCandidate> {
    names.into_iter().map(CompletionCandidate::new).collect()
}

fn box_names() -> Vec<String> {
    query(async |cli| {
        let all = boxes::list_all(&connect::server(&cli).await?).await?;
        Ok(all.iter().map(|info| info.box_id.to_string()).collect())
    })
}

fn command_names(name: &str) -> Vec<String> {
    query(async |cli| {
        let client = connect::server(&cli).await?;
        let commands = client.open(name).await?.commands().await?;
        let name = |id: &box_protocol::CommandId| format!("{name}/{id}");
        Ok(commands.iter().map(|info| name(&info.command_id)).collect())
    })
}

/// Asks for names, as with the default server; returns none if they take too long.
fn query(names: impl AsyncFnOnce(Cli) -> Result<Vec<String>>) -> Vec<String> {
    let found = || {
        let cli = Cli::try_parse_from(["boxd", "ps"])?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let names = names(cli);
        runtime.block_on(async { tokio::time::timeout(TIMEOUT, names).await })?
    };
    let found: Result<_> = found();
    found.unwrap_or_default()
}
