//! `image`: the images of a server, or those of this user.
//!
//! 1. This file: the commands. `login`: passwords of registries.
//! 2. `pull_display`: the progress of a pull.

mod login;
mod pull_display;

use std::io::IsTerminal as _;
use std::ops::Deref;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use box_client::{BoxClient, ClientError, Images, PullPolicy};
use box_protocol::UnixMs;
use box_protocol::actions::{ImageInfo, ImagePruneParams};
use box_transports::server::Server;
use tokio::io::{AsyncRead, AsyncWriteExt as _};

use self::pull_display::PullDisplay;
use crate::args::{
    Cli, ExportArgs, ImageArg, ImageArgs, ImageCommand, ImageLsArgs, ImageRmArgs, ImportArgs,
    PruneArgs, PullArgs,
};
use crate::boxes::{for_each_target, format_age};
use crate::cp::{self, Interrupt};
use crate::embedded::EmbeddedServer;
use crate::signals::Signals;
use crate::stats::bytes;
use crate::{config, connect, output, progress};

/// Digits of a digest in a table.
const DIGITS: usize = 12;

/// `boxd image`.
pub(crate) async fn run(cli: &Cli, args: &ImageArgs) -> Result<ExitCode> {
    match &args.command {
        ImageCommand::Pull(args) => pull(cli, args).await,
        ImageCommand::Ls(args) => ls(cli, args).await,
        ImageCommand::Inspect(args) => inspect(cli, args).await,
        ImageCommand::Rm(args) => rm(cli, args).await,
        ImageCommand::Prune(args) => prune(cli, args).await,
        ImageCommand::Import(args) => import(cli, args).await,
        ImageCommand::Export(args) => export(cli, args).await,
        ImageCommand::Login(args) => login::login(cli, args).await,
        ImageCommand::Logout(args) => login::logout(cli, args).await,
    }
}

/// A client of the server, or of a runtime in this process if no server runs.
pub(crate) struct ImageClient {
    client: BoxClient,
    _embedded: Option<(EmbeddedServer, Server)>,
}

impl Deref for ImageClient {
    type Target = BoxClient;

    fn deref(&self) -> &BoxClient {
        &self.client
    }
}

impl ImageClient {
    pub(crate) async fn open(cli: &Cli) -> Result<Self> {
        if let Some(client) = connect::server_if_running(cli).await? {
            return Ok(Self {
                client,
                _embedded: None,
            });
        }
        let file = std::env::var_os("BOXD_CONFIG");
        let (config, _) = config::load(
            file.as_deref().map(Path::new),
            config::variables()?,
            Vec::new(),
        )?;
        let embedded = EmbeddedServer::for_images(&config)?;
        let (client, server) = embedded.client().await?;
        Ok(Self {
            client,
            _embedded: Some((embedded, server)),
        })
    }
}

/// Pulls an image and shows the progress.
///
/// On a terminal, this process catches signals from then on, because a signal must remove the bars.
pub(crate) async fn pull_shown(
    images: &Images,
    name: &str,
    policy: PullPolicy,
    quiet: bool,
) -> Result<ImageInfo, ClientError> {
    let has_bars = !quiet && progress::has_bars();
    let signals = has_bars.then(|| Signals::listen().ok()).flatten();
    let mut display = PullDisplay::new(name, quiet);
    let pulling = Box::pin(images.pull(name, policy, |progress| display.show(progress)));
    let pulled = match signals {
        Some(signals) => signals.until(pulling).await,
        None => Ok(pulling.await),
    };
    match pulled {
        Ok(pulled) => {
            display.finish(pulled.is_ok());
            pulled
        }
        Err(number) => {
            display.clear();
            output::eprintln("boxd: interrupted");
            std::process::exit(128 + number)
        }
    }
}

async fn pull(cli: &Cli, args: &PullArgs) -> Result<ExitCode> {
    let client = ImageClient::open(cli).await?;
    let quiet = args.quiet || cli.json;
    let images = client.images();
    let pulled = pull_shown(&images, &args.name, PullPolicy::Always, quiet).await?;
    print_made(cli, &pulled)
}

/// Prints the digest of a new image.
fn print_made(cli: &Cli, image: &ImageInfo) -> Result<ExitCode> {
    output::print_or_json(cli.json, &format!("{}\n", image.digest), image)?;
    Ok(ExitCode::SUCCESS)
}

async fn ls(cli: &Cli, args: &ImageLsArgs) -> Result<ExitCode> {
    let client = ImageClient::open(cli).await?;
    let images = client.images().list().await?.items;
    if args.quiet && !cli.json {
        let digests = images.iter().map(|image| &image.digest);
        output::print(&output::lines(digests))?;
    } else {
        output::print_or_json(cli.json, &table(&images), &images)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(images: &[ImageInfo]) -> String {
    let now = UnixMs::now();
    let row = |image: &ImageInfo, name: String| {
        let hex = image.digest.rsplit(':').next().unwrap_or_default();
        vec![
            name,
            hex.chars().take(DIGITS).collect(),
            bytes(image.disk_bytes),
            format_age(now.since(image.created_at)),
            format_age(now.since(image.used_at)),
            image.uses.to_string(),
        ]
    };
    let mut rows = Vec::new();
    for image in images {
        if image.names.is_empty() {
            rows.push(row(image, "-".to_owned()));
        }
        let names = image.names.iter();
        rows.extend(names.map(|name| row(image, familiar(name).to_owned())));
    }
    output::table(&["IMAGE", "DIGEST", "SIZE", "AGE", "IDLE", "USES"], &rows)
}

/// The name without the parts that are implied.
pub(crate) fn familiar(name: &str) -> &str {
    let Some(path) = name.strip_prefix("docker.io/") else {
        return name;
    };
    match path.strip_prefix("library/") {
        Some(official) if !official.contains('/') => official,
        _ => path,
    }
}

async fn inspect(cli: &Cli, args: &ImageArg) -> Result<ExitCode> {
    let client = ImageClient::open(cli).await?;
    let image = client.images().get(&args.image).await?;
    // Always JSON, the only format with every field.
    output::print(&output::json(&image)?)?;
    Ok(ExitCode::SUCCESS)
}

async fn rm(cli: &Cli, args: &ImageRmArgs) -> Result<ExitCode> {
    let client = ImageClient::open(cli).await?;
    let images = client.images();
    for_each_target(cli, &args.images, "removed", async |image, removed| {
        let result = images.remove(image).await?;
        let names = result.names.iter().map(|name| familiar(name).to_owned());
        removed.extend(names);
        removed.extend(result.digest);
        Ok(())
    })
    .await
}

async fn prune(cli: &Cli, args: &PruneArgs) -> Result<ExitCode> {
    let client = ImageClient::open(cli).await?;
    let unused_for = args.unused_for.unwrap_or_default();
    let params = ImagePruneParams {
        all: args.all,
        unused_for_ms: u64::try_from(unused_for.as_millis()).unwrap_or(u64::MAX),
    };
    let pruned = client.images().prune(params).await?;
    let text = output::lines(&pruned.digests);
    output::print_or_json(cli.json, &text, &pruned)?;
    if !cli.json {
        output::eprintln(&format!("boxd: freed {}", bytes(pruned.freed_bytes)));
    }
    Ok(ExitCode::SUCCESS)
}

async fn import(cli: &Cli, args: &ImportArgs) -> Result<ExitCode> {
    let client = ImageClient::open(cli).await?;
    let images = client.images();
    let work = async |interrupt: Interrupt| {
        let send = async |archive: &mut (dyn AsyncRead + Unpin + Send), size: Option<u64>| {
            let bar = progress::bar(size);
            let archive = bar.wrap_async_read(interrupt.guard(archive));
            let select = args.select.clone();
            let imported = images.import(&args.name, select, archive).await;
            bar.finish_and_clear();
            anyhow::Ok(imported?)
        };
        if args.file == Path::new("-") {
            return send(&mut tokio::io::stdin(), None).await;
        }
        let shown = || args.file.display().to_string();
        let mut file = tokio::fs::File::open(&args.file)
            .await
            .with_context(shown)?;
        let found = file.metadata().await.with_context(shown)?;
        if found.is_dir() {
            let directory = file.into_std().await.into();
            return send(&mut cp::pack_directory(directory), None).await;
        }
        send(&mut file, found.is_file().then_some(found.len())).await
    };
    let image = Interrupt::run_until_signal(work).await?;
    print_made(cli, &image)
}

async fn export(cli: &Cli, args: &ExportArgs) -> Result<ExitCode> {
    let client = ImageClient::open(cli).await?;
    let images = client.images();
    save_archive(&args.file, async || Ok(images.export(&args.image).await?)).await
}

/// Writes an archive of the server to a file, or to stdout for `-`.
pub(crate) async fn save_archive<R: AsyncRead + Unpin>(
    file: &Path,
    open: impl AsyncFnOnce() -> Result<R>,
) -> Result<ExitCode> {
    let to_stdout = file == Path::new("-");
    ensure!(
        !to_stdout || !std::io::stdout().is_terminal(),
        "export: stdout is a terminal; name a file, or redirect stdout"
    );
    let work = async |interrupt: Interrupt| {
        let mut reader = interrupt.guard(open().await?);
        let bar = progress::bar(None);
        let saved = if to_stdout {
            let mut out = tokio::io::stdout();
            let copied = cp::copy(&mut reader, &mut out, &bar).await;
            copied.and(out.flush().await.map_err(Into::into))
        } else {
            cp::save(&mut reader, file, &bar).await
        };
        bar.finish_and_clear();
        saved
    };
    Interrupt::run_until_signal(work).await?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shown_as_people_write_them() {
        for (name, shown) in [
            ("docker.io/library/debian:12", "debian:12"),
            ("docker.io/acme/app:1", "acme/app:1"),
            ("docker.io/library/a/b:1", "library/a/b:1"),
            ("ghcr.io/library/debian:12", "ghcr.io/library/debian:12"),
        ] {
            assert_eq!(familiar(name), shown);
        }
    }
}
