//! `cp`: files and trees, into a box or out of one.

use std::io::{ErrorKind, IsTerminal as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use box_client::{BoxClient, BoxHandle, FileWriter};
use box_protocol::actions::FileKind;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use uuid::Uuid;

use crate::args::{Arguments, CpArguments};
use crate::connect;

/// The part of a mode that is copied: no set-id, no sticky bit.
const PLAIN: u32 = 0o777;

/// One end of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// Standard input or output.
    Stream,
    /// Here.
    Here(PathBuf),
    /// In a box.
    Box(String, String),
}

impl Place {
    /// `BOX:PATH` with an absolute path is in a box; `-` is a stream; anything else is here.
    fn of(text: &str) -> Self {
        match text.split_once(':') {
            _ if text == "-" => Self::Stream,
            Some((session, path))
                if path.starts_with('/') && !session.contains('/') && !session.is_empty() =>
            {
                Self::Box(session.to_owned(), path.to_owned())
            }
            _ => Self::Here(text.into()),
        }
    }
}

/// `boxd cp`.
pub(crate) async fn run(arguments: &Arguments, asked: &CpArguments) -> Result<ExitCode> {
    let (from, to) = (Place::of(&asked.from), Place::of(&asked.to));
    let opened = async |session: &str| -> Result<BoxHandle> {
        let client: BoxClient = connect::server(arguments).await?;
        Ok(client.open(session).await?)
    };
    match (from, to) {
        (Place::Stream, Place::Box(session, path)) => {
            let there = opened(&session).await?;
            send(tokio::io::stdin(), there.files().writer(path), None).await?;
        }
        (Place::Here(here), Place::Box(session, path)) => {
            upload(&opened(&session).await?, &here, &path).await?;
        }
        (Place::Box(session, path), Place::Stream) => {
            let there = opened(&session).await?;
            let mut reader = there.files().reader(path).await?;
            let mut out = tokio::io::stdout();
            tokio::io::copy(&mut reader, &mut out).await?;
            out.flush().await?;
        }
        (Place::Box(session, path), Place::Here(here)) => {
            download(&opened(&session).await?, &path, &here).await?;
        }
        (Place::Box(..), Place::Box(..)) => bail!("copy out of one box first, then into the other"),
        _ => bail!("one of the two must be in a box, with its whole path: BOX:/PATH"),
    }
    Ok(ExitCode::SUCCESS)
}

/// The last part of a path, which a copy into a directory is called.
fn name_of(path: &Path) -> Result<&str> {
    let name = path.file_name().and_then(|name| name.to_str());
    name.with_context(|| format!("{} has no name to copy it under", path.display()))
}

/// Where a copy goes: into a directory that is there, or under the very name.
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

async fn upload(there: &BoxHandle, here: &Path, path: &str) -> Result<()> {
    let shown = here.display();
    let meta = tokio::fs::metadata(here)
        .await
        .with_context(|| format!("{shown}"))?;
    let real = tokio::fs::canonicalize(here).await?;
    let path = target(there, path, name_of(&real)?).await?;
    if !meta.is_dir() {
        ensure!(meta.is_file(), "{shown} is neither a file nor a directory");
        let file = tokio::fs::File::open(here).await?;
        let writer = there.files().writer(path).mode(meta.mode() & PLAIN);
        return send(file, writer, Some(meta.len())).await;
    }
    there.files().create_dir_all(&path).await?;
    let (reader, writer) = tokio::io::duplex(256 * 1024);
    let packing = tokio::task::spawn_blocking(move || -> std::io::Result<()> {
        let mut archive = tar::Builder::new(tokio_util::io::SyncIoBridge::new(writer));
        archive.follow_symlinks(false);
        archive.append_dir_all(".", real)?;
        archive.into_inner()?.shutdown()
    });
    let bar = progress(None);
    let sent = there
        .files()
        .upload_tree(path, bar.wrap_async_read(reader))
        .await;
    let packed = packing.await?;
    // Whoever packs only sees that nobody takes it any more.
    if !matches!(&packed, Err(error) if error.kind() == ErrorKind::BrokenPipe) {
        packed.with_context(|| format!("{shown}"))?;
    }
    sent?;
    bar.finish_and_clear();
    Ok(())
}

async fn send(
    mut from: impl AsyncRead + Unpin,
    mut to: FileWriter,
    size: Option<u64>,
) -> Result<()> {
    let bar = progress(size);
    copy(&mut from, &mut to, &bar).await?;
    to.finish().await?;
    bar.finish_and_clear();
    Ok(())
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

async fn download(there: &BoxHandle, path: &str, here: &Path) -> Result<()> {
    let stat = there.files().stat(path).await?;
    let name = name_of(Path::new(path.trim_end_matches('/')))?.to_owned();
    let to = if here.is_dir() {
        here.join(&name)
    } else {
        here.to_owned()
    };
    if stat.kind != FileKind::Directory {
        let bar = progress(Some(stat.size));
        let mut reader = there.files().reader(path).await?;
        let received = receive(&mut reader, &to, stat.mode & PLAIN, &bar).await;
        bar.finish_and_clear();
        return received.with_context(|| format!("{}", to.display()));
    }
    tokio::fs::create_dir_all(&to)
        .await
        .with_context(|| format!("{}", to.display()))?;
    let bar = progress(None);
    let reader = there.files().download_tree(path).await?;
    let bridge = tokio_util::io::SyncIoBridge::new(bar.wrap_async_read(reader));
    tokio::task::spawn_blocking(move || unpack(bridge, &to)).await??;
    bar.finish_and_clear();
    Ok(())
}

/// Writes a file here: into what is there if that is no plain file, a device for one, else in its place once it is whole, so
/// that what was there before is not lost to a cut. Through a link, as if its target had been named.
async fn receive(
    from: &mut (impl AsyncRead + Unpin),
    to: &Path,
    mode: u32,
    bar: &ProgressBar,
) -> Result<()> {
    let there = match tokio::fs::metadata(to).await {
        Ok(meta) => Some(meta),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    let real = match &there {
        Some(meta) if meta.is_file() => tokio::fs::canonicalize(to).await?,
        Some(_) => {
            let mut file = tokio::fs::File::options().write(true).open(to).await?;
            copy(from, &mut file, bar).await?;
            return Ok(file.flush().await?);
        }
        None => {
            ensure!(!to.is_symlink(), "a link that leads nowhere");
            to.to_owned()
        }
    };
    let name = format!(".{}.{}.part", name_of(&real)?, Uuid::now_v7().simple());
    let part = real.with_file_name(name);
    let mut options = tokio::fs::File::options();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&part)
        .await?;
    let written = async {
        copy(from, &mut file, bar).await?;
        if let Some(meta) = &there {
            // Whose it was, where that may be said.
            let _ = std::os::unix::fs::chown(&part, Some(meta.uid()), Some(meta.gid()));
            file.set_permissions(meta.permissions()).await?;
        }
        file.sync_all().await?;
        Ok(tokio::fs::rename(&part, &real).await?)
    };
    let written = written.await;
    if written.is_err() {
        let _ = tokio::fs::remove_file(&part).await;
    }
    written
}

/// Unpacks what a guest has packed: nothing outside the directory is touched, and no file is more than its bytes and the plain
/// part of its mode.
fn unpack(archive: impl std::io::Read, to: &Path) -> Result<()> {
    let mut archive = tar::Archive::new(archive);
    archive.set_preserve_permissions(false);
    archive.set_preserve_ownerships(false);
    archive.set_unpack_xattrs(false);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        if path == Path::new(".") {
            continue;
        }
        let kind = entry.header().entry_type();
        ensure!(
            kind.is_file() || kind.is_dir() || kind.is_symlink() || kind.is_hard_link(),
            "{} is a kind of file that is not copied",
            path.display()
        );
        let mut parts = path.components();
        ensure!(
            parts.all(|part| matches!(
                part,
                std::path::Component::Normal(_) | std::path::Component::CurDir
            )),
            "{} leads outside",
            path.display()
        );
        entry.unpack_in(to)?;
    }
    Ok(())
}

/// A bar for people who watch, nothing for anybody else.
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

    /// An archive with one entry of this kind and mode.
    fn archive(path: &str, kind: tar::EntryType, mode: u32) -> Vec<u8> {
        let mut header = tar::Header::new_ustar();
        // As a hostile one would: the library itself refuses to write such names.
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(0);
        header.set_cksum();
        let mut bytes = header.as_bytes().to_vec();
        bytes.resize(bytes.len() + 1024, 0);
        bytes
    }

    #[test]
    fn a_hostile_archive_is_refused_or_harmless() {
        use std::os::unix::fs::PermissionsExt as _;
        use tar::EntryType;
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("to");
        std::fs::create_dir(&to).unwrap();
        let unpacked = |path: &str, kind, mode| unpack(archive(path, kind, mode).as_slice(), &to);
        for (path, kind) in [
            ("../x", EntryType::Regular),
            ("/x", EntryType::Regular),
            ("x", EntryType::Char),
            ("x", EntryType::Fifo),
        ] {
            assert!(unpacked(path, kind, 0o644).is_err(), "{path} {kind:?}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        unpacked("set", EntryType::Regular, 0o4755).unwrap();
        let mode = std::fs::metadata(to.join("set"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o7000, 0, "{mode:o}");
    }
}
