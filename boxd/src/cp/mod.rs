//! `cp`: copies files and directories between a box and this machine.
//!
//! 1. This file: source and target of a copy.
//! 2. `here`: the local side, and its links. `pack`, `unpack`: directories, by descriptor.
//! 3. `draft`: an incomplete file. `stop`: Ctrl-C.

mod draft;
mod here;
mod pack;
mod stop;
mod unpack;

use std::fs::File;
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::ExitCode;
use std::task::{Context, Poll, ready};

use anyhow::{Context as _, Result, bail};
use box_client::{BoxClient, BoxHandle, FileWriter};
use box_protocol::actions::FileKind;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::{FileType, Mode, OFlags};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio_util::io::SyncIoBridge;

use self::draft::Draft;
use self::here::{Source, Spot, Target, name_of};
use self::stop::Stop;
use crate::args::{Arguments, CpArguments};
use crate::connect;

/// The copied part of a mode: no set-id, no sticky bit.
const PLAIN: u32 = 0o777;

/// The buffer between the thread that reads files and the connection.
const AHEAD: usize = 256 * 1024;

/// One end of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// Standard input or output.
    Stream,
    /// On this machine.
    Here(PathBuf),
    /// In a box.
    Box(String, String),
}

impl Place {
    /// Parses `BOX:/PATH`, `-` or a local path.
    fn of(text: &str) -> Self {
        match text.split_once(':') {
            _ if text == "-" => Self::Stream,
            Some((name, path))
                if path.starts_with('/') && !name.contains('/') && !name.is_empty() =>
            {
                Self::Box(name.to_owned(), path.to_owned())
            }
            _ => Self::Here(text.into()),
        }
    }
}

/// `boxd cp`.
pub(crate) async fn run(arguments: &Arguments, asked: &CpArguments) -> Result<ExitCode> {
    Stop::unless(|stop| copy_all(arguments, asked, stop)).await?;
    Ok(ExitCode::SUCCESS)
}

async fn copy_all(arguments: &Arguments, asked: &CpArguments, stop: Stop) -> Result<()> {
    let opened = async |name: &str| -> Result<BoxHandle> {
        let client: BoxClient = connect::server(arguments).await?;
        Ok(client.open(name).await?)
    };
    match (Place::of(&asked.from), Place::of(&asked.to)) {
        (Place::Stream, Place::Box(name, path)) => {
            let there = opened(&name).await?;
            let writer = there.files().writer(path);
            send(stop.cut(tokio::io::stdin()), writer, None).await
        }
        (Place::Here(here), Place::Box(name, path)) => {
            let source = spawn_blocking({
                let here = here.clone();
                move || here::source(&here)
            });
            let source = source.await??;
            upload(&opened(&name).await?, source, &here, &path, &stop).await
        }
        (Place::Box(name, path), Place::Stream) => {
            let there = opened(&name).await?;
            let mut reader = stop.cut(there.files().reader(path).await?);
            let mut out = tokio::io::stdout();
            copy(&mut reader, &mut out, &ProgressBar::hidden()).await?;
            Ok(out.flush().await?)
        }
        (Place::Box(name, path), Place::Here(here)) => {
            download(&opened(&name).await?, &path, &here, &stop).await
        }
        (Place::Box(..), Place::Box(..)) => {
            bail!("cannot copy between two boxes; copy to this machine first")
        }
        _ => bail!("one path must be in a box: BOX:/PATH"),
    }
}

/// The target path: below an existing directory, or the given name.
async fn target(there: &BoxHandle, path: &str, name: &str) -> Result<String> {
    let directory = match there.files().stat(path).await {
        Ok(stat) => stat.kind == FileKind::Directory,
        Err(error) if error.is_not_found() => path.ends_with('/'),
        Err(error) => return Err(error.into()),
    };
    let path = path.trim_end_matches('/');
    Ok(if directory {
        format!("{path}/{name}")
    } else {
        path.to_owned()
    })
}

async fn upload(
    there: &BoxHandle,
    source: Source,
    here: &Path,
    path: &str,
    stop: &Stop,
) -> Result<()> {
    let name = name_of(here)?;
    let name = name.to_str();
    let name = name.with_context(|| format!("{}: file name is not UTF-8", here.display()))?;
    let path = target(there, path, name).await?;
    let directory = match source {
        Source::File(file, stat) => {
            let writer = there.files().writer(path).mode(stat.st_mode & PLAIN);
            let size = u64::try_from(stat.st_size).ok();
            let file = tokio::fs::File::from_std(file);
            return send(stop.cut(file), writer, size).await;
        }
        Source::Stream(file) => {
            let file = tokio::fs::File::from_std(file);
            return send(stop.cut(file), there.files().writer(path), None).await;
        }
        Source::Directory(directory) => directory,
    };
    there.files().create_dir_all(&path).await?;
    let (reader, writer) = tokio::io::duplex(AHEAD);
    let packing = spawn_blocking(move || {
        let mut writer = SyncIoBridge::new(writer);
        pack::pack(&directory, &mut writer)?;
        Ok::<_, anyhow::Error>(writer.shutdown()?)
    });
    let bar = progress(None);
    let archive = Packed {
        reader: bar.wrap_async_read(stop.cut(reader)),
        packing: Some(packing),
    };
    let sent = there.files().upload_tree(path, archive).await;
    bar.finish_and_clear();
    sent.with_context(|| here.display().to_string())?;
    Ok(())
}

/// Sends a whole stream, or discards the upload.
async fn send(
    mut from: impl AsyncRead + Unpin,
    mut to: FileWriter,
    size: Option<u64>,
) -> Result<()> {
    let bar = progress(size);
    let sent = copy(&mut from, &mut to, &bar).await;
    bar.finish_and_clear();
    if let Err(error) = sent {
        to.discard().await;
        return Err(error);
    }
    to.finish().await?;
    Ok(())
}

/// An archive during packing. If packing fails, reading it fails.
struct Packed<R> {
    reader: R,
    packing: Option<JoinHandle<Result<()>>>,
}

impl<R: AsyncRead + Unpin> AsyncRead for Packed<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        ready!(Pin::new(&mut self.reader).poll_read(cx, into))?;
        if into.filled().len() > before {
            return Poll::Ready(Ok(()));
        }
        let Some(packing) = &mut self.packing else {
            return Poll::Ready(Ok(()));
        };
        let packed = ready!(Pin::new(packing).poll(cx));
        self.packing = None;
        let packed = packed.map_err(io::Error::other)?;
        Poll::Ready(packed.map_err(|error| io::Error::other(format!("{error:#}"))))
    }
}

async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    bar: &ProgressBar,
) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..length]).await?;
        bar.inc(length as u64);
    }
}

async fn download(there: &BoxHandle, path: &str, here: &Path, stop: &Stop) -> Result<()> {
    let stat = there.files().stat(path).await?;
    let name = name_of(Path::new(path.trim_end_matches('/')))?;
    let to = spawn_blocking({
        let here = here.to_owned();
        move || here::target(&here)
    });
    let to = to.await??;
    let shown = || here.display().to_string();
    if stat.kind != FileKind::Directory {
        let bar = progress(Some(stat.size));
        let mut reader = stop.cut(there.files().reader(path).await?);
        let received = match to {
            Target::Stream(file) => write_to(&mut reader, file, &bar).await,
            Target::Named(spot, Some(kind)) if kind != FileType::RegularFile => {
                write_to(&mut reader, open(spot).await?, &bar).await
            }
            Target::Named(spot, _) => receive(&mut reader, spot, stat.mode & PLAIN, &bar).await,
            Target::Directory(directory) => {
                let spot = Spot { directory, name };
                receive(&mut reader, spot, stat.mode & PLAIN, &bar).await
            }
        };
        bar.finish_and_clear();
        return received.with_context(shown);
    }
    let spot = match to {
        Target::Directory(directory) => Spot { directory, name },
        Target::Named(spot, _) => spot,
        Target::Stream(_) => bail!("{}: cannot copy a directory to a stream", shown()),
    };
    let root = spot.make_directory().with_context(shown)?;
    let bar = progress(None);
    let reader = there.files().download_tree(path).await?;
    let reader = bar.wrap_async_read(stop.cut(reader));
    let bridge = SyncIoBridge::new(reader);
    let unpacked = spawn_blocking(move || unpack::unpack(bridge, &root)).await?;
    bar.finish_and_clear();
    unpacked.with_context(shown)
}

/// Writes a local file, and replaces an existing one only when it is complete.
async fn receive(
    from: &mut (impl AsyncRead + Unpin),
    spot: Spot,
    mode: u32,
    bar: &ProgressBar,
) -> Result<()> {
    let draft = Draft::new(&spot, mode)?;
    let mut file = tokio::fs::File::from_std(draft.file.try_clone()?);
    copy(from, &mut file, bar).await?;
    file.flush().await?;
    file.sync_all().await?;
    spawn_blocking(move || draft.place(&spot)).await??;
    Ok(())
}

/// Writes into an existing pipe, device or stream.
async fn write_to(from: &mut (impl AsyncRead + Unpin), to: File, bar: &ProgressBar) -> Result<()> {
    let mut file = tokio::fs::File::from_std(to);
    copy(from, &mut file, bar).await?;
    Ok(file.flush().await?)
}

/// Opens a pipe or device without following links. Waits for the reader of a pipe.
async fn open(spot: Spot) -> Result<File> {
    let opened = spawn_blocking(move || {
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::CLOEXEC;
        rustix::fs::openat(&spot.directory, &spot.name, flags, Mode::empty())
    });
    Ok(opened.await??.into())
}

/// A progress bar on a terminal; hidden elsewhere.
fn progress(size: Option<u64>) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = size.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
    let form = if size.is_some() {
        "{bytes} of {total_bytes} {wide_bar} {bytes_per_sec} {eta}"
    } else {
        "{bytes} {spinner} {bytes_per_sec}"
    };
    match ProgressStyle::with_template(form) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_here_or_in_a_box() {
        assert_eq!(Place::of("-"), Place::Stream);
        assert_eq!(Place::of("b:/x"), Place::Box("b".into(), "/x".into()));
        for here in ["b", "./b:/x", "b:x", "/a/b", ":/x"] {
            assert_eq!(Place::of(here), Place::Here(here.into()), "{here}");
        }
    }
}
