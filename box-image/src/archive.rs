//! Reads tar archives entry by entry, without any path of the host.
//!
//! Programs that disagree about the size of an entry see different archives (CVE-2025-62518, CVE-2026-33055). This
//! reader has one rule: the size of an extended header is final, and an archive in which another reader may find other
//! entries is refused. The `tar` crate parses the fields of a header and nothing else.

use std::io::{self, BufRead};
use std::ops::Range;

use tar::{EntryType, Header};

use crate::error::{Error, Result, shown_bytes};
use crate::limits::{ATTRIBUTE_BYTES, PATH_BYTES};

mod pax;
mod sparse;

use pax::Extended;
pub(crate) use sparse::Segment;

const BLOCK: usize = 512;

/// Reader of an archive.
#[derive(Debug)]
pub(crate) struct Archive<R> {
    inner: R,
    /// Bytes of the current entry that were not read yet.
    left: u64,
    /// Zero bytes after the current entry.
    padding: u64,
    ended: bool,
}

/// Entry of an archive.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Path as the archive states it.
    pub(crate) path: Vec<u8>,
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    /// Seconds and nanoseconds of the last change.
    pub(crate) mtime: (i64, u32),
    /// Extended attributes.
    pub(crate) attributes: Vec<(String, Vec<u8>)>,
}

/// Kind of an entry.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A file of a size; its segments if parts of it are holes.
    File(u64, Option<Vec<Segment>>),
    Directory,
    Symlink(Vec<u8>),
    /// Another name of an earlier entry.
    Link(Vec<u8>),
    Fifo,
    /// A device or anything else that an image cannot have.
    Special,
}

/// Names from GNU's entries before an entry.
#[derive(Debug, Default)]
struct LongNames {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

impl<R: BufRead> Archive<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self {
            inner,
            left: 0,
            padding: 0,
            ended: false,
        }
    }

    pub(crate) fn get_ref(&self) -> &R {
        &self.inner
    }

    /// Returns the next entry, after the contents of the current one.
    pub(crate) fn next(&mut self) -> Result<Option<Entry>> {
        let mut long = LongNames::default();
        let mut extended: Option<Extended> = None;
        loop {
            let Some(header) = self.header()? else {
                if extended.is_some() || long.path.is_some() || long.link.is_some() {
                    return Err(bad("ends after an extended header"));
                }
                return Ok(None);
            };
            let size = header
                .entry_size()
                .map_err(|_| bad("has an invalid size"))?;
            match header.entry_type() {
                EntryType::XGlobalHeader => {
                    // It would change every later entry, and readers disagree on how.
                    let records = self.text(size)?;
                    if Extended::parse(&records)?.changes_entries() {
                        return Err(bad("has a global header that changes entries"));
                    }
                }
                EntryType::XHeader => {
                    if extended.is_some() {
                        return Err(bad("has two extended headers for one entry"));
                    }
                    extended = Some(Extended::parse(&self.text(size)?)?);
                }
                EntryType::GNULongName => set_once(&mut long.path, self.name(size)?)?,
                EntryType::GNULongLink => set_once(&mut long.link, self.name(size)?)?,
                kind => return self.entry(&header, kind, size, long, extended).map(Some),
            }
        }
    }

    fn entry(
        &mut self,
        header: &Header,
        kind: EntryType,
        size: u64,
        long: LongNames,
        extended: Option<Extended>,
    ) -> Result<Entry> {
        if extended.is_some() && (long.path.is_some() || long.link.is_some()) {
            return Err(bad("has extended headers of two formats for one entry"));
        }
        let mut extended = extended.unwrap_or_default();
        let size = extended.size.unwrap_or(size);
        let path = extended.path.take().or(long.path);
        let path = path.unwrap_or_else(|| header.path_bytes().into_owned());
        let target = extended.link.take().or(long.link);
        let target = target.or_else(|| header.link_name_bytes().map(std::borrow::Cow::into_owned));
        let target = || {
            let usable = |t: &Vec<u8>| !t.is_empty() && t.len() < PATH_BYTES && !t.contains(&0);
            let target = target.filter(usable);
            target.ok_or_else(|| bad_at("has a link with an invalid target", &path))
        };
        let directory_by_name = header.as_bytes()[156] == 0 && path.ends_with(b"/");
        let kind = match kind {
            EntryType::Directory => Kind::Directory,
            EntryType::Regular if directory_by_name => Kind::Directory,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                Kind::File(size, None)
            }
            EntryType::Symlink => Kind::Symlink(target()?),
            EntryType::Link => Kind::Link(target()?),
            EntryType::Fifo => Kind::Fifo,
            EntryType::Char | EntryType::Block => Kind::Special,
            other => {
                let letter = char::from(other.as_byte());
                return Err(bad_at(
                    &format!(
                        "has an entry of the unknown type `{}`",
                        letter.escape_default()
                    ),
                    &path,
                ));
            }
        };
        let has_content = matches!(kind, Kind::File(..));
        if !has_content && size != 0 {
            return Err(bad_at("has contents in an entry that is not a file", &path));
        }
        if has_content && path.ends_with(b"/") {
            return Err(bad_at("has a file whose name ends in a slash", &path));
        }
        self.begin(size)?;
        let mut entry = Entry {
            mode: field(header, 100..108, header.mode(), "mode", &path)? & 0o7777,
            uid: match extended.uid {
                Some(uid) => uid,
                None => field(header, 108..116, header.uid(), "owner", &path)?,
            },
            gid: match extended.gid {
                Some(gid) => gid,
                None => field(header, 116..124, header.gid(), "group", &path)?,
            },
            mtime: if let Some(mtime) = extended.mtime {
                mtime
            } else {
                let time = field(header, 136..148, header.mtime(), "time", &path)?;
                (i64::try_from(time).unwrap_or(0), 0)
            },
            attributes: std::mem::take(&mut extended.attributes),
            path,
            kind,
        };
        if header.entry_type() == EntryType::GNUSparse {
            entry.kind = self.gnu_sparse(header, size)?;
        } else if let Some(sparse) = extended.sparse {
            if !matches!(entry.kind, Kind::File(..)) {
                return Err(bad_at("has a sparse entry that is not a file", &entry.path));
            }
            entry.path = sparse.name.unwrap_or(entry.path);
            entry.kind = self.pax_sparse(sparse.size)?;
        }
        Ok(entry)
    }

    /// Returns the next bytes of the current entry; empty at its end.
    pub(crate) fn contents(&mut self) -> io::Result<&[u8]> {
        if self.left == 0 {
            return Ok(&[]);
        }
        let available = self.inner.fill_buf()?;
        if available.is_empty() {
            return Err(truncated().into());
        }
        let max = usize::try_from(self.left).unwrap_or(usize::MAX);
        Ok(&available[..available.len().min(max)])
    }

    /// Marks bytes of [`contents`](Self::contents) as used.
    pub(crate) fn consume(&mut self, bytes: usize) {
        self.inner.consume(bytes);
        self.left -= bytes as u64;
    }

    /// Reads the next header; `None` at the end of the archive.
    fn header(&mut self) -> Result<Option<Header>> {
        if self.ended {
            return Ok(None);
        }
        self.skip(self.left)?;
        self.left = 0;
        self.skip(self.padding)?;
        self.padding = 0;
        let mut block = [0; BLOCK];
        if !self.block(&mut block)? {
            self.ended = true;
            return Ok(None);
        }
        if block == [0; BLOCK] {
            self.ended = true;
            // Two blocks of zeros end an archive; behind a single one, readers disagree.
            if self.block(&mut block)? && block != [0; BLOCK] {
                return Err(bad("has entries behind a single block of zeros"));
            }
            return Ok(None);
        }
        let header = Header::from_byte_slice(&block).clone();
        let sum = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>();
        let stated = header.cksum().map_err(|_| bad("is not a tar archive"))?;
        if sum(&block[..148]) + 8 * 32 + sum(&block[156..]) != stated {
            return Err(bad("has a header with a wrong checksum"));
        }
        Ok(Some(header))
    }

    fn begin(&mut self, size: u64) -> Result<()> {
        let padded = size.checked_next_multiple_of(BLOCK as u64);
        let padded = padded.filter(|size| i64::try_from(*size).is_ok());
        self.padding = padded.ok_or_else(|| bad("has an invalid size"))? - size;
        self.left = size;
        Ok(())
    }

    /// Reads a block; `false` if the archive ends before it.
    fn block(&mut self, block: &mut [u8; BLOCK]) -> Result<bool> {
        let mut filled = 0;
        while filled < BLOCK {
            let available = self.inner.fill_buf().map_err(|e| Error::io("layer", &e))?;
            if available.is_empty() {
                return if filled == 0 {
                    Ok(false)
                } else {
                    Err(truncated())
                };
            }
            let read = available.len().min(BLOCK - filled);
            block[filled..filled + read].copy_from_slice(&available[..read]);
            self.inner.consume(read);
            filled += read;
        }
        Ok(true)
    }

    fn skip(&mut self, mut bytes: u64) -> Result<()> {
        while bytes > 0 {
            let available = self
                .inner
                .fill_buf()
                .map_err(|e| Error::io("layer", &e))?
                .len();
            if available == 0 {
                return Err(truncated());
            }
            let read = available.min(usize::try_from(bytes).unwrap_or(usize::MAX));
            self.inner.consume(read);
            bytes -= read as u64;
        }
        Ok(())
    }

    /// Reads the contents of an extended header.
    fn text(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > ATTRIBUTE_BYTES {
            return Err(Error::too_large(
                "layer",
                "attribute_bytes",
                ATTRIBUTE_BYTES,
            ));
        }
        self.begin(size)?;
        let mut text = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
        while self.left > 0 {
            let piece = self.contents().map_err(|e| Error::io("layer", &e))?;
            text.extend_from_slice(piece);
            let read = piece.len();
            self.consume(read);
        }
        Ok(text)
    }

    /// Reads the contents of GNU's entry with a long name.
    fn name(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > PATH_BYTES as u64 + 1 {
            return Err(Error::too_large("layer", "path_bytes", PATH_BYTES as u64));
        }
        let mut name = self.text(size)?;
        if name.last() == Some(&0) {
            name.pop();
        }
        Ok(name)
    }
}

/// Returns a number of a header; a blank field is zero, as other readers have it.
fn field<T: Default>(
    header: &Header,
    range: Range<usize>,
    parsed: io::Result<T>,
    name: &str,
    path: &[u8],
) -> Result<T> {
    if header.as_bytes()[range]
        .iter()
        .all(|c| matches!(c, 0 | b' '))
    {
        return Ok(T::default());
    }
    parsed.map_err(|_| bad_at(&format!("has an invalid {name}"), path))
}

fn set_once(slot: &mut Option<Vec<u8>>, name: Vec<u8>) -> Result<()> {
    if slot.replace(name).is_some() {
        return Err(bad("has two long names for one entry"));
    }
    Ok(())
}

/// Error about the form of an archive.
pub(crate) fn bad(problem: &str) -> Error {
    Error::invalid(format!(
        "layer: the archive {problem}; build the image again"
    ))
}

/// As [`bad`], with the name of the entry.
pub(crate) fn bad_at(problem: &str, path: &[u8]) -> Error {
    bad(&format!("{problem}, `{}`", shown_bytes(path)))
}

fn truncated() -> Error {
    bad("ends in the middle of an entry")
}

#[cfg(test)]
mod tests;
