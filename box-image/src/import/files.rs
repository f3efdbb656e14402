//! The files of a layout: in a directory, or in an archive.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, Read};
use std::os::unix::fs::FileExt as _;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::buffered;
use crate::archive::{Archive, Kind};
use crate::digest::Digest;
use crate::error::{At as _, Error, Result, shown};
use crate::spec::Descriptor;

/// Maximum number of files that a layout may have.
const FILES: usize = 10_000;

/// Files of a layout by name.
#[derive(Debug)]
pub(super) enum Files {
    Directory(File),
    Archive {
        file: File,
        /// Offset and size of each file.
        parts: HashMap<String, (u64, u64)>,
        /// Links to other files, which older versions of Docker write.
        links: HashMap<String, String>,
    },
}

impl Files {
    pub(super) fn directory(directory: File) -> Result<Self> {
        let files = Self::Directory(directory);
        if files.contains("index.json") {
            return Ok(files);
        }
        Err(Error::invalid(
            "import: the directory is not an OCI layout; it has no index.json",
        ))
    }

    /// Finds the files of a layout in an archive.
    pub(super) fn archive(file: File, entries_max: u64) -> Result<Self> {
        let copy = file.try_clone().at("import")?;
        let mut archive = Archive::new(Counted {
            inner: buffered(copy),
            position: 0,
        });
        let mut parts = HashMap::new();
        let mut links = HashMap::new();
        let mut entries = 0;
        while let Some(entry) = archive.next()? {
            entries += 1;
            if entries > entries_max {
                return Err(Error::too_large("import", "entries", entries_max));
            }
            let Some(name) = layout_name(&entry.path) else {
                continue;
            };
            match entry.kind {
                Kind::File(size, None) => {
                    parts.insert(name, (archive.get_ref().position, size));
                }
                Kind::Symlink(target) | Kind::Link(target) => {
                    if let Some(target) = link_target(&name, &target) {
                        links.insert(name, target);
                    }
                }
                _ => {}
            }
            if parts.len() + links.len() > FILES {
                return Err(Error::too_large("import", "files", FILES as u64));
            }
        }
        Ok(Self::Archive { file, parts, links })
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        match self {
            Self::Directory(directory) => open_file(directory, name).is_ok(),
            Self::Archive { .. } => self.part(name).is_ok(),
        }
    }

    fn part(&self, name: &str) -> Result<(u64, u64)> {
        let Self::Archive { parts, links, .. } = self else {
            return Err(missing(name));
        };
        let name = name.strip_prefix("./").unwrap_or(name);
        let found = parts.get(name).or_else(|| parts.get(links.get(name)?));
        found.copied().ok_or_else(|| missing(name))
    }

    /// Opens a file of the layout.
    pub(super) fn open(&self, name: &str) -> Result<Part> {
        let (file, offset, size) = match self {
            Self::Directory(directory) => {
                let file = open_file(directory, name)?;
                let size = file.metadata().at("import")?.len();
                (file, 0, size)
            }
            Self::Archive { file, .. } => {
                let (offset, size) = self.part(name)?;
                (file.try_clone().at("import")?, offset, size)
            }
        };
        Ok(Part {
            file,
            offset,
            left: size,
        })
    }

    pub(super) fn open_blob(&self, digest: &Digest) -> Result<Part> {
        self.open(&format!("blobs/sha256/{}", digest.hex()))
    }

    /// Reads a file of at most `max` bytes.
    pub(super) fn read(&self, name: &str, max: u64) -> Result<Vec<u8>> {
        let part = self.open(name)?;
        if part.left > max {
            return Err(Error::too_large(shown(name), "file_bytes", max));
        }
        let mut content = Vec::new();
        part.take(max).read_to_end(&mut content).at("import")?;
        Ok(content)
    }

    /// Reads a document and compares it with its digest.
    pub(super) fn blob(&self, descriptor: &Descriptor, max: u64) -> Result<Vec<u8>> {
        let content = self.read(&format!("blobs/sha256/{}", descriptor.digest.hex()), max)?;
        descriptor.digest.check(&content, "document")?;
        Ok(content)
    }
}

/// Opens a regular file of a layout, through no link.
fn open_file(directory: &File, name: &str) -> Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let file = match rustix::fs::openat2(directory, name, flags, Mode::empty(), resolve) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => return Err(missing(name)),
        file => file.at("import")?,
    };
    let stat = rustix::fs::fstat(&file).at("import")?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(missing(name));
    }
    Ok(file.into())
}

fn missing(name: &str) -> Error {
    Error::invalid(format!(
        "import: the file `{}` is missing; export the image again",
        shown(name)
    ))
}

/// Returns the name of an entry that may belong to a layout.
fn layout_name(path: &[u8]) -> Option<String> {
    let name = std::str::from_utf8(path).ok()?;
    let name = name.strip_prefix("./").unwrap_or(name);
    let depth = name.matches('/').count();
    let json = depth == 0 && name.strip_suffix(".json").is_some();
    let layer = depth <= 1 && name.strip_suffix(".tar").is_some();
    let blob = name.starts_with("blobs/sha256/");
    (name == "oci-layout" || json || layer || blob).then(|| name.to_owned())
}

/// Returns the file that a link in an archive denotes.
fn link_target(name: &str, target: &[u8]) -> Option<String> {
    let target = std::str::from_utf8(target).ok()?;
    match target.strip_prefix("../") {
        Some(rest) if name.matches('/').count() == 1 => Some(rest.to_owned()),
        _ => Some(target.to_owned()),
    }
}

/// Reader that knows its position.
#[derive(Debug)]
struct Counted<R> {
    inner: R,
    position: u64,
}

impl<R: BufRead> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.position += read as u64;
        Ok(read)
    }
}

impl<R: BufRead> BufRead for Counted<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.inner.fill_buf()
    }

    fn consume(&mut self, bytes: usize) {
        self.inner.consume(bytes);
        self.position += bytes as u64;
    }
}

/// Part of a file. It has a position of its own, so several parts can be read.
#[derive(Debug)]
pub(super) struct Part {
    file: File,
    offset: u64,
    left: u64,
}

impl Read for Part {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let max = usize::try_from(self.left)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        let read = self.file.read_at(&mut buffer[..max], self.offset)?;
        self.offset += read as u64;
        self.left -= read as u64;
        Ok(read)
    }
}
