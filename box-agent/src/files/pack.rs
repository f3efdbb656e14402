//! A tree as a tar archive, a piece at a time: a slow reader holds no thread.

use std::os::fd::OwnedFd;

use box_protocol::actions::{FileKind, FilePackParams, FileTreeResult, TreeCaps};
use box_protocol::{BoxError, Code};
use rustix::fs::{Mode, OFlags, Stat};
use tar::{EntryType, Header};

use super::error::About;
use super::ground::{Step, beneath, too_large};
use super::stat::{MODE_BITS, kind, size};
use super::walk::{Next, taken, walk};

/// Bytes that one step gives.
const STEP_BYTES: usize = 256 << 10;

/// The most that an archive may hold, whatever is asked for.
const BYTES: u64 = 16 << 30;
const ENTRIES: u64 = 200_000;

/// Bytes that the paths in it may take while it is made.
const PATHS_BYTES: usize = 32 << 20;

/// A unit of an archive.
pub(super) const BLOCK: usize = 512;

/// The longest name that fits a header.
const NAME_BYTES: usize = 100;

/// What an archive has been found to hold, and may.
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
            bytes: caps.bytes.unwrap_or(BYTES).min(BYTES),
            entries: caps.entries.unwrap_or(ENTRIES).min(ENTRIES),
        }
    }

    /// Counts one more entry, with this many bytes.
    pub(super) fn add(&mut self, bytes: u64) -> Result<(), BoxError> {
        self.total.entries += 1;
        self.total.bytes = self.total.bytes.saturating_add(bytes);
        let over = |name: &str, max: u64| {
            let max = usize::try_from(max).unwrap_or(usize::MAX);
            BoxError::limit(Code::TooLarge, "the tree", name, max)
        };
        if self.total.entries > self.entries {
            return Err(over("entries", self.entries));
        }
        if self.total.bytes > self.bytes {
            return Err(over("bytes", self.bytes));
        }
        Ok(())
    }
}

/// An archive that is being written.
#[derive(Debug)]
pub(super) struct Packing {
    base: OwnedFd,
    path: String,
    owner: (u32, String),
    /// What is in it, the next one last. Looked up again when its turn comes.
    names: Vec<String>,
    file: Option<(OwnedFd, u64)>,
    ended: bool,
    tally: Tally,
}

impl Packing {
    /// Looks at what there is to pack.
    pub(super) fn open(step: &Step<'_>, params: &FilePackParams) -> Result<Self, BoxError> {
        let path = step.ground.path(&params.path, params.expand)?;
        let found = step.ground.open(&path, OFlags::PATH).about(&path)?;
        let stat = rustix::fs::fstat(&found).about(&path)?;
        let mut tally = Tally::new(params.caps);
        let (mut names, mut room) = (Vec::new(), PATHS_BYTES);
        let base = match kind(&stat) {
            FileKind::Directory => {
                let dir = step.ground.open_dir(&path)?;
                let whole = walk(step, dir.try_clone().about(&path)?, &path, |entry| {
                    tally.add(file_bytes(&entry.stat))?;
                    let left = room.checked_sub(taken(&entry.path));
                    room = left.ok_or_else(|| too_large("the tree", "paths_bytes", PATHS_BYTES))?;
                    names.push(entry.path.clone());
                    Ok(Next::Into)
                })?;
                if !whole {
                    return Err(BoxError::validation(format!("{path}: too deep a tree")));
                }
                dir
            }
            FileKind::File => {
                let spot = step.ground.settle(&path)?;
                names.push(spot.name);
                spot.dir
            }
            FileKind::Symlink | FileKind::Other => {
                return Err(rustix::io::Errno::NXIO).about(&path);
            }
        };
        names.reverse();
        let guest = &step.ground.guest;
        Ok(Self {
            base,
            path,
            owner: (guest.id, guest.name.clone()),
            names,
            file: None,
            ended: false,
            tally: Tally::new(params.caps),
        })
    }

    /// The next bytes; none at the end.
    pub(super) fn next(&mut self, step: &Step<'_>) -> Result<Vec<u8>, BoxError> {
        let mut out = Vec::with_capacity(STEP_BYTES + 4 * BLOCK);
        while out.len() < STEP_BYTES && !self.ended {
            step.wanted.check()?;
            if let Some((file, left)) = self.file.take() {
                self.content(file, left, &mut out)?;
            } else if let Some(name) = self.names.pop() {
                self.entry(&name, &mut out)?;
            } else {
                out.resize(out.len() + 2 * BLOCK, 0);
                self.ended = true;
            }
        }
        Ok(out)
    }

    /// What was packed.
    pub(super) fn total(&self) -> FileTreeResult {
        self.tally.total
    }

    /// Begins an entry. What has vanished is left out, and so is what is no file, directory or link.
    fn entry(&mut self, name: &str, out: &mut Vec<u8>) -> Result<(), BoxError> {
        let Ok(found) = beneath(&self.base, name, OFlags::PATH | OFlags::NOFOLLOW) else {
            return Ok(());
        };
        let stat = rustix::fs::fstat(&found).about(&self.path)?;
        let bytes = file_bytes(&stat);
        match kind(&stat) {
            FileKind::Directory => {
                self.tally.add(0)?;
                self.header(&format!("{name}/"), EntryType::Directory, &stat, None, out);
            }
            FileKind::Symlink => {
                let target = rustix::fs::readlinkat(&found, "", Vec::new()).about(&self.path)?;
                self.tally.add(0)?;
                let target = Some(target.to_bytes());
                self.header(name, EntryType::Symlink, &stat, target, out);
            }
            FileKind::File => {
                let Ok(file) = self.open_file(name) else {
                    return Ok(());
                };
                self.tally.add(bytes)?;
                self.header(name, EntryType::Regular, &stat, None, out);
                if bytes > 0 {
                    self.file = Some((file, bytes));
                }
            }
            FileKind::Other => {}
        }
        Ok(())
    }

    /// Opens a file if it is one now; a pipe that took its place neither blocks nor is read.
    fn open_file(&self, name: &str) -> Result<OwnedFd, BoxError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = beneath(&self.base, name, flags).about(&self.path)?;
        let stat = rustix::fs::fstat(&file).about(&self.path)?;
        super::ground::regular(&stat, &self.path)?;
        Ok(file)
    }

    fn header(
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
        // A name that is too long for its field is left out.
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
                long(EntryType::GNULongLink, target, out);
            }
            let fits = &target[..target.len().min(NAME_BYTES)];
            header.as_old_mut().linkname[..fits.len()].copy_from_slice(fits);
        }
        if name.len() > NAME_BYTES {
            long(EntryType::GNULongName, name.as_bytes(), out);
        }
        let fits = &name.as_bytes()[..name.len().min(NAME_BYTES)];
        header.as_old_mut().name[..fits.len()].copy_from_slice(fits);
        header.set_cksum();
        out.extend_from_slice(header.as_bytes());
    }

    /// Adds bytes of a file. One that has become shorter is filled up, one that has grown is cut.
    fn content(&mut self, file: OwnedFd, left: u64, out: &mut Vec<u8>) -> Result<(), BoxError> {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(STEP_BYTES);
        let begin = out.len();
        out.resize(begin + most, 0);
        let read = rustix::io::retry_on_intr(|| rustix::io::read(&file, &mut out[begin..]));
        let read = read.about(&self.path)?;
        let given = if read == 0 { most } else { read };
        out.truncate(begin + given);
        let left = left - given as u64;
        if left > 0 {
            self.file = Some((file, left));
        } else {
            out.resize(out.len().next_multiple_of(BLOCK), 0);
        }
        Ok(())
    }
}

fn file_bytes(stat: &Stat) -> u64 {
    if kind(stat) == FileKind::File {
        size(stat)
    } else {
        0
    }
}

/// An entry that holds the long name of the next one.
fn long(entry: EntryType, name: &[u8], out: &mut Vec<u8>) {
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
