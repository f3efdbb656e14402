//! Packing a tree into a tar archive.
//!
//! The archive is written piece by piece, so that a slow reader blocks no thread.

use std::os::fd::OwnedFd;

use box_protocol::actions::{FileKind, FilePackParams, FileTreeResult, TreeCaps};
use box_protocol::{BoxError, Code};
use rustix::fs::{Mode, OFlags, Stat};
use tar::{EntryType, Header};

use super::Pieces;
use super::error::PathContext;
use super::guest_root::{Step, beneath, too_large};
use super::stat::{MODE_BITS, kind, size};
use super::walk::{DEPTH_MAX, WalkNext, name_cost, walk};

/// Bytes produced by one step.
const STEP_BYTES: usize = 256 << 10;

/// Maximum size and number of entries of an archive.
///
/// A caller can only request less.
const BYTES_MAX: u64 = 16 << 30;
const ENTRIES_MAX: u64 = 200_000;

/// Maximum bytes of the paths while the archive is written.
const PATHS_BYTES: usize = 32 << 20;

/// The block size of an archive.
pub(super) const BLOCK: usize = 512;

/// Maximum length of a name in a header.
const NAME_BYTES: usize = 100;

/// The size of an archive so far, and its limits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tally {
    pub(super) total: FileTreeResult,
    bytes: u64,
    entries: u64,
}

impl Tally {
    pub(super) fn new(caps: TreeCaps) -> Self {
        Self {
            total: FileTreeResult::default(),
            bytes: caps.bytes.unwrap_or(BYTES_MAX).min(BYTES_MAX),
            entries: caps.entries.unwrap_or(ENTRIES_MAX).min(ENTRIES_MAX),
        }
    }

    /// Counts one more entry with this many bytes.
    pub(super) fn add(&mut self, bytes: u64) -> Result<(), BoxError> {
        self.total.entries += 1;
        self.total.bytes = self.total.bytes.saturating_add(bytes);
        let exceeded = |name: &str, max: u64| {
            let max = usize::try_from(max).unwrap_or(usize::MAX);
            BoxError::limit(Code::TooLarge, "the tree", name, max)
        };
        if self.total.entries > self.entries {
            return Err(exceeded("entries", self.entries));
        }
        if self.total.bytes > self.bytes {
            return Err(exceeded("bytes", self.bytes));
        }
        Ok(())
    }
}

/// An archive that is being written.
#[derive(Debug)]
pub(super) struct TreePacker {
    base: OwnedFd,
    path: String,
    owner: (u32, String),
    /// The remaining paths, the next one last.
    ///
    /// Each is looked up again when it is packed.
    names: Vec<String>,
    file: Option<(OwnedFd, u64)>,
    ended: bool,
    /// Bytes of the archive so far.
    offset: u64,
    tally: Tally,
}

impl TreePacker {
    /// Collects the paths to pack.
    pub(super) fn open(step: &Step<'_>, params: &FilePackParams) -> Result<Self, BoxError> {
        let path = step.guest_root.path(&params.path, params.expand)?;
        let found = step.guest_root.open(&path, OFlags::PATH).with_path(&path)?;
        let stat = rustix::fs::fstat(&found).with_path(&path)?;
        let mut tally = Tally::new(params.caps);
        let (mut names, mut room) = (Vec::new(), PATHS_BYTES);
        let base = match kind(&stat) {
            FileKind::Directory => {
                let dir = step.guest_root.open_dir(&path)?;
                let complete = walk(step, dir.try_clone().with_path(&path)?, &path, |entry| {
                    tally.add(file_bytes(&entry.stat))?;
                    let left = room.checked_sub(name_cost(&entry.path));
                    room = left.ok_or_else(|| {
                        too_large("the size of the paths", "paths_bytes", PATHS_BYTES)
                    })?;
                    names.push(entry.path.clone());
                    Ok(WalkNext::Enter)
                })?;
                if !complete {
                    return Err(BoxError::validation(format!(
                        "{path}: the tree is deeper than {DEPTH_MAX} directories"
                    )));
                }
                dir
            }
            FileKind::File => {
                let location = step.guest_root.resolve(&path)?;
                names.push(location.name);
                location.dir
            }
            FileKind::Symlink | FileKind::Other => {
                return Err(rustix::io::Errno::NXIO).with_path(&path);
            }
        };
        names.reverse();
        let guest = &step.guest_root.guest;
        Ok(Self {
            base,
            path,
            owner: (guest.id, guest.name.clone()),
            names,
            file: None,
            ended: false,
            offset: 0,
            tally: Tally::new(params.caps),
        })
    }

    /// The size of the archive so far.
    pub(super) fn total(&self) -> FileTreeResult {
        self.tally.total
    }

    /// Starts an entry. Vanished entries and special files are omitted.
    fn add_entry(&mut self, name: &str, out: &mut Vec<u8>) -> Result<(), BoxError> {
        let Ok(found) = beneath(&self.base, name, OFlags::PATH | OFlags::NOFOLLOW) else {
            return Ok(());
        };
        let stat = rustix::fs::fstat(&found).with_path(&self.path)?;
        let bytes = file_bytes(&stat);
        match kind(&stat) {
            FileKind::Directory => {
                self.tally.add(0)?;
                self.add_header(&format!("{name}/"), EntryType::Directory, &stat, None, out);
            }
            FileKind::Symlink => {
                let target =
                    rustix::fs::readlinkat(&found, "", Vec::new()).with_path(&self.path)?;
                self.tally.add(0)?;
                let target = Some(target.to_bytes());
                self.add_header(name, EntryType::Symlink, &stat, target, out);
            }
            FileKind::File => {
                let Ok(file) = self.open_file(name) else {
                    return Ok(());
                };
                self.tally.add(bytes)?;
                self.add_header(name, EntryType::Regular, &stat, None, out);
                if bytes > 0 {
                    self.file = Some((file, bytes));
                }
            }
            FileKind::Other => {}
        }
        Ok(())
    }

    /// Opens a file if it still is one.
    ///
    /// A pipe in its place is neither waited for nor read.
    fn open_file(&self, name: &str) -> Result<OwnedFd, BoxError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = beneath(&self.base, name, flags).with_path(&self.path)?;
        let stat = rustix::fs::fstat(&file).with_path(&self.path)?;
        super::guest_root::check_regular(&stat, &self.path)?;
        Ok(file)
    }

    fn add_header(
        &self,
        name: &str,
        entry: EntryType,
        stat: &Stat,
        target: Option<&[u8]>,
        out: &mut Vec<u8>,
    ) {
        let mut header = Header::new_gnu();
        header.set_entry_type(entry);
        header.set_mode(stat.st_mode & MODE_BITS);
        header.set_uid(self.owner.0.into());
        header.set_gid(self.owner.0.into());
        // A name that is too long for its field is omitted.
        let _ = header.set_username(&self.owner.1);
        let _ = header.set_groupname(&self.owner.1);
        header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
        header.set_size(if entry == EntryType::Regular {
            size(stat)
        } else {
            0
        });
        if let Some(target) = target {
            if target.len() > NAME_BYTES {
                long_name(EntryType::GNULongLink, target, out);
            }
            let head = &target[..target.len().min(NAME_BYTES)];
            header.as_old_mut().linkname[..head.len()].copy_from_slice(head);
        }
        if name.len() > NAME_BYTES {
            long_name(EntryType::GNULongName, name.as_bytes(), out);
        }
        let head = &name.as_bytes()[..name.len().min(NAME_BYTES)];
        header.as_old_mut().name[..head.len()].copy_from_slice(head);
        header.set_cksum();
        out.extend_from_slice(header.as_bytes());
    }

    /// Adds bytes of a file.
    ///
    /// A file that has shrunk is padded, one that has grown is truncated.
    fn add_content(&mut self, file: OwnedFd, left: u64, out: &mut Vec<u8>) -> Result<(), BoxError> {
        let max = usize::try_from(left).unwrap_or(usize::MAX).min(STEP_BYTES);
        let start = out.len();
        out.resize(start + max, 0);
        let read = rustix::io::retry_on_intr(|| rustix::io::read(&file, &mut out[start..]));
        let read = read.with_path(&self.path)?;
        let added = if read == 0 { max } else { read };
        out.truncate(start + added);
        let left = left - added as u64;
        if left > 0 {
            self.file = Some((file, left));
        } else {
            out.resize(out.len().next_multiple_of(BLOCK), 0);
        }
        Ok(())
    }
}

impl Pieces for TreePacker {
    fn next(&mut self, step: &Step<'_>) -> Result<Option<(u64, Vec<u8>)>, BoxError> {
        let mut out = Vec::with_capacity(STEP_BYTES + 4 * BLOCK);
        while out.len() < STEP_BYTES && !self.ended {
            step.cancel.check()?;
            if let Some((file, left)) = self.file.take() {
                self.add_content(file, left, &mut out)?;
            } else if let Some(name) = self.names.pop() {
                self.add_entry(&name, &mut out)?;
            } else {
                out.resize(out.len() + 2 * BLOCK, 0);
                self.ended = true;
            }
        }
        let offset = self.offset;
        self.offset += out.len() as u64;
        Ok((!out.is_empty()).then_some((offset, out)))
    }
}

fn file_bytes(stat: &Stat) -> u64 {
    if kind(stat) == FileKind::File {
        size(stat)
    } else {
        0
    }
}

/// Writes an entry that holds the long name of the next one.
fn long_name(entry: EntryType, name: &[u8], out: &mut Vec<u8>) {
    let mut header = Header::new_gnu();
    header.set_entry_type(entry);
    header.set_mode(Mode::RUSR.bits());
    let title = b"././@LongLink";
    header.as_old_mut().name[..title.len()].copy_from_slice(title);
    header.set_size(name.len() as u64 + 1);
    header.set_cksum();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(name);
    let end = (out.len() + 1).next_multiple_of(BLOCK);
    out.resize(end, 0);
}
