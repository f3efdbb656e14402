//! `cp`: copies files and directories between a box and this machine.
//!
//! 1. This file: source and target of a copy.
//! 2. `local`: the local side, and its links. `pack`, `unpack`: directories, by descriptor.
//! 3. `temp_file`: an incomplete file. `interrupt`: Ctrl-C.

mod interrupt;
mod local;
mod pack;
mod temp_file;
mod unpack;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::ExitCode;
use std::task::{Context, Poll, ready};

use anyhow::{Context as _, Result, bail};
use box_client::{BoxClient, BoxHandle, FileWriter};
use box_protocol::actions::FileKind;
use indicatif::ProgressBar;
use rustix::fs::{FileType, Mode, OFlags};
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf,
};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio_util::io::SyncIoBridge;

pub(crate) use self::interrupt::Interrupt;
use self::local::{DirEntry, Source, Target, name_of};
use self::temp_file::TempFile;
use crate::args::{Cli, CpArgs};
use crate::{connect, progress};

/// The copied part of a mode: no set-id, no sticky bit.
const PERMISSION_BITS: u32 = 0o777;

/// The buffer between the thread that reads files and the connection.
const PIPE_BYTES: usize = 256 * 1024;

/// One end of a copy.
#[derive(Debug, PartialEq, Eq)]
enum CopyPath {
    /// Standard input or output.
    Stream,
    /// On this machine.
    Local(PathBuf),
    /// In a box.
    Box(String, String),
}

impl CopyPath {
    /// Parses `BOX:/PATH`, `-` or a local path.
    fn of(text: &str) -> Self {
        match text.split_once(':') {
            _ if text == "-" => Self::Stream,
            Some((name, path))
                if path.starts_with('/') && !name.contains('/') && !name.is_empty() =>
            {
                Self::Box(name.to_owned(), path.to_owned())
            }
            _ => Self::Local(text.into()),
        }
    }
}

/// `boxd cp`.
pub(crate) async fn run(cli: &Cli, args: &CpArgs) -> Result<ExitCode> {
    Interrupt::run_until_signal(|interrupt| copy_all(cli, args, interrupt)).await?;
    Ok(ExitCode::SUCCESS)
}

async fn copy_all(cli: &Cli, args: &CpArgs, interrupt: Interrupt) -> Result<()> {
    let opened = async |name: &str| -> Result<BoxHandle> {
        let client: BoxClient = connect::server(cli).await?;
        Ok(client.open(name).await?)
    };
    match (CopyPath::of(&args.from), CopyPath::of(&args.to)) {
        (CopyPath::Stream, CopyPath::Box(name, path)) => {
            let handle = opened(&name).await?;
            let writer = handle.files().writer(path);
            send(interrupt.guard(tokio::io::stdin()), writer, None).await
        }
        (CopyPath::Local(local), CopyPath::Box(name, path)) => {
            let source = spawn_blocking({
                let local = local.clone();
                move || local::source(&local)
            });
            let source = source.await??;
            upload(&opened(&name).await?, source, &local, &path, &interrupt).await
        }
        (CopyPath::Box(name, path), CopyPath::Stream) => {
            let handle = opened(&name).await?;
            let mut reader = interrupt.guard(handle.files().reader(path).await?);
            let mut out = tokio::io::stdout();
            copy(&mut reader, &mut out, &ProgressBar::hidden()).await?;
            Ok(out.flush().await?)
        }
        (CopyPath::Box(name, path), CopyPath::Local(local)) => {
            download(&opened(&name).await?, &path, &local, &interrupt).await
        }
        (CopyPath::Box(..), CopyPath::Box(..)) => {
            bail!("cannot copy between two boxes; copy to this machine first")
        }
        _ => bail!("FROM, TO: neither is BOX:/PATH; the path in a box must be absolute"),
    }
}

/// The target path: below an existing directory, or the given name.
async fn target(handle: &BoxHandle, path: &str, name: &str) -> Result<String> {
    let directory = match handle.files().stat(path).await {
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
    handle: &BoxHandle,
    source: Source,
    local: &Path,
    path: &str,
    interrupt: &Interrupt,
) -> Result<()> {
    let name = name_of(local)?;
    let name = name.to_str();
    let name = name.with_context(|| format!("{}: file name is not UTF-8", local.display()))?;
    let path = target(handle, path, name).await?;
    let directory = match source {
        Source::File(file, stat) => {
            let writer = handle
                .files()
                .writer(path)
                .mode(stat.st_mode & PERMISSION_BITS);
            let size = u64::try_from(stat.st_size).ok();
            let file = tokio::fs::File::from_std(file);
            return send(interrupt.guard(file), writer, size).await;
        }
        Source::Stream(file) => {
            let file = tokio::fs::File::from_std(file);
            return send(interrupt.guard(file), handle.files().writer(path), None).await;
        }
        Source::Directory(directory) => directory,
    };
    handle.files().create_dir_all(&path).await?;
    let bar = progress::bar(None);
    let archive = interrupt.guard(pack_directory(directory));
    let archive = bar.wrap_async_read(archive);
    let sent = handle.files().upload_tree(path, archive).await;
    bar.finish_and_clear();
    sent.with_context(|| local.display().to_string())?;
    Ok(())
}

/// Sends a whole stream, or discards the upload.
async fn send(
    mut from: impl AsyncRead + Unpin,
    mut to: FileWriter,
    size: Option<u64>,
) -> Result<()> {
    let bar = progress::bar(size);
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
pub(crate) struct Packed {
    reader: DuplexStream,
    packing: Option<JoinHandle<Result<()>>>,
}

/// Packs a directory into an archive.
pub(crate) fn pack_directory(directory: OwnedFd) -> Packed {
    let (reader, writer) = tokio::io::duplex(PIPE_BYTES);
    let packing = spawn_blocking(move || {
        let mut writer = SyncIoBridge::new(writer);
        pack::pack(&directory, &mut writer)?;
        Ok::<_, anyhow::Error>(writer.shutdown()?)
    });
    Packed {
        reader,
        packing: Some(packing),
    }
}

impl AsyncRead for Packed {
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

/// Copies a stream to its end.
pub(crate) async fn copy(
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

async fn download(
    handle: &BoxHandle,
    path: &str,
    local: &Path,
    interrupt: &Interrupt,
) -> Result<()> {
    let stat = handle.files().stat(path).await?;
    let name = name_of(Path::new(path.trim_end_matches('/')))?;
    let to = spawn_blocking({
        let local = local.to_owned();
        move || local::target(&local)
    });
    let to = to.await??;
    let display = || local.display().to_string();
    if stat.kind != FileKind::Directory {
        let bar = progress::bar(Some(stat.size));
        let mut reader = interrupt.guard(handle.files().reader(path).await?);
        let to = match to {
            Target::Directory(directory) => Target::Named(DirEntry { directory, name }, None),
            to => to,
        };
        let received = write_target(&mut reader, to, stat.mode & PERMISSION_BITS, &bar).await;
        bar.finish_and_clear();
        return received.with_context(display);
    }
    let entry = match to {
        Target::Directory(directory) => DirEntry { directory, name },
        Target::Named(entry, _) => entry,
        Target::Stream(_) => bail!("{}: cannot copy a directory to a stream", display()),
    };
    let root = entry.make_directory().with_context(display)?;
    let bar = progress::bar(None);
    let reader = handle.files().download_tree(path).await?;
    let reader = bar.wrap_async_read(interrupt.guard(reader));
    let bridge = SyncIoBridge::new(reader);
    let unpacked = spawn_blocking(move || unpack::unpack(bridge, &root)).await?;
    bar.finish_and_clear();
    unpacked.with_context(display)
}

/// Writes a stream to a local file, pipe or device.
pub(crate) async fn save(
    from: &mut (impl AsyncRead + Unpin),
    path: &Path,
    bar: &ProgressBar,
) -> Result<()> {
    let to = spawn_blocking({
        let path = path.to_owned();
        move || local::target(&path)
    });
    let saved = write_target(from, to.await??, 0o666, bar).await;
    saved.with_context(|| path.display().to_string())
}

async fn write_target(
    from: &mut (impl AsyncRead + Unpin),
    to: Target,
    mode: u32,
    bar: &ProgressBar,
) -> Result<()> {
    match to {
        Target::Stream(file) => write_to(from, file, bar).await,
        Target::Named(entry, Some(kind)) if kind != FileType::RegularFile => {
            write_to(from, open(entry).await?, bar).await
        }
        Target::Named(entry, _) => receive(from, entry, mode, bar).await,
        Target::Directory(_) => bail!("a directory; name a file"),
    }
}

/// Writes a local file, and replaces an existing one only when it is complete.
async fn receive(
    from: &mut (impl AsyncRead + Unpin),
    entry: DirEntry,
    mode: u32,
    bar: &ProgressBar,
) -> Result<()> {
    let temp_file = TempFile::new(&entry, mode)?;
    let mut file = tokio::fs::File::from_std(temp_file.file.try_clone()?);
    copy(from, &mut file, bar).await?;
    file.flush().await?;
    file.sync_all().await?;
    spawn_blocking(move || temp_file.persist(&entry)).await??;
    Ok(())
}

/// Writes into an existing pipe, device or stream.
async fn write_to(from: &mut (impl AsyncRead + Unpin), to: File, bar: &ProgressBar) -> Result<()> {
    let mut file = tokio::fs::File::from_std(to);
    copy(from, &mut file, bar).await?;
    Ok(file.flush().await?)
}

/// Opens a pipe or device without following links. Waits for the reader of a pipe.
async fn open(entry: DirEntry) -> Result<File> {
    let opened = spawn_blocking(move || {
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::CLOEXEC;
        rustix::fs::openat(&entry.directory, &entry.name, flags, Mode::empty())
    });
    Ok(opened.await??.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_path_is_a_stream_local_or_in_a_box() {
        assert_eq!(CopyPath::of("-"), CopyPath::Stream);
        assert_eq!(CopyPath::of("b:/x"), CopyPath::Box("b".into(), "/x".into()));
        for local in ["b", "./b:/x", "b:x", "/a/b", ":/x"] {
            assert_eq!(
                CopyPath::of(local),
                CopyPath::Local(local.into()),
                "{local}"
            );
        }
    }
}
