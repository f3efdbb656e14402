//! `file.watch`: a tree of directories under inotify, with its events as lines.
//!
//! The agent opens each directory by descriptor with the guest's rights and watches that descriptor. A guest that swaps
//! a directory meanwhile does not redirect the watch.
//!
//! Events name entries of directories, so the watch keeps a map from inotify watches to paths and updates it on moves.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use box_protocol::actions::{AgentWatch, ChangeKind, FileChange};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, Code, UnixMs};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{AtFlags, FileType, OFlags};
use rustix::io::Errno;

use super::error::PathContext;
use super::guest_root::{Step, beneath};
use super::path::{is_within, join};
use super::temp_file::TEMP_PREFIX;
use super::walk::{NAMES_BYTES, names};

/// Maximum number of directories of one watch. The kernel has its own limit.
const DIRECTORIES_MAX: usize = 4096;

/// Bytes of lines after which a poll returns.
///
/// Readers then get output, and a full log can slow the watch down.
const BATCH_BYTES: usize = 32 << 10;

/// The same limit for a tree that is moved in. The rest is an overflow.
const TREE_BATCH_BYTES: usize = 1 << 20;

/// Maximum path length of a watched directory, as in the kernel.
const PATH_BYTES: usize = 4095;

/// Bytes of events in one read.
const EVENT_BYTES: usize = 16 << 10;

/// How long the second half of a move may take after the first.
const MOVE_PAIR_WAIT: Duration = Duration::from_millis(2);

/// A watched tree.
#[derive(Debug)]
pub(crate) struct WatchedTree {
    inotify: OwnedFd,
    /// Device and inode of the root. An open root would not report its removal.
    root: (u64, u64),
    /// The path of the root.
    path: String,
    /// The only reported name, if a file is watched.
    only_name: Option<String>,
    recursive: bool,
    /// The path of each watched directory, relative to the root.
    dirs: HashMap<i32, String>,
    /// The first half of a move.
    pending_move: Option<PendingMove>,
    /// The move by which a file that the agent has written gets its name.
    install_cookie: Option<u32>,
    /// Whether a directory vanished, or moved with a parent, before it was watched.
    vanished: bool,
    ended: bool,
}

#[derive(Debug)]
struct PendingMove {
    cookie: u32,
    at: String,
    is_dir: bool,
}

struct Event {
    wd: i32,
    flags: ReadFlags,
    cookie: u32,
    name: Option<String>,
}

/// The result of a poll.
#[derive(Debug, Default)]
pub(crate) struct WatchBatch {
    pub(crate) lines: Vec<u8>,
    /// The kernel has no more events for now.
    pub(crate) drained: bool,
    /// The watched file or directory is gone.
    pub(crate) ended: bool,
}

/// How to treat entries that existed before their directory was watched.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Entries {
    Known,
    New,
}

impl WatchedTree {
    /// Starts a watch, and returns a second descriptor of its events to wait for.
    pub(super) fn open(step: &Step<'_>, params: &AgentWatch) -> Result<(Self, OwnedFd), BoxError> {
        let path = step.guest_root.path(&params.path, params.expand)?;
        let found = step.guest_root.open(&path, OFlags::PATH).with_path(&path)?;
        let stat = rustix::fs::fstat(&found).with_path(&path)?;
        let (root, path, only_name) =
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                (step.guest_root.open_dir(&path)?, path, None)
            } else {
                // By name: a file is usually written by renaming another one over it.
                let location = step.guest_root.resolve(&path)?;
                let dir = beneath(&location.dir, "", OFlags::RDONLY | OFlags::DIRECTORY);
                (dir.with_path(&path)?, path, Some(location.name))
            };
        let inotify =
            inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).with_path(&path)?;
        let events = inotify.try_clone().with_path(&path)?;
        let mut watched = Self {
            inotify,
            root: identity(&root).with_path(&path)?,
            path,
            recursive: params.recursive && only_name.is_none(),
            only_name,
            dirs: HashMap::new(),
            pending_move: None,
            install_cookie: None,
            vanished: false,
            ended: false,
        };
        watched.watch_tree(step, &root, String::new(), Entries::Known, &mut Vec::new())?;
        Ok((watched, events))
    }

    /// Returns the changes since the last poll.
    pub(super) fn poll(&mut self, step: &Step<'_>) -> Result<WatchBatch, BoxError> {
        let mut batch = WatchBatch::default();
        let mut waited = false;
        while !self.ended && batch.lines.len() < BATCH_BYTES {
            step.cancel.check()?;
            let events = self.read()?;
            if events.is_empty() {
                if self.pending_move.is_none() {
                    batch.drained = true;
                    break;
                }
                if waited {
                    self.report_moved_out(&mut batch.lines);
                } else {
                    std::thread::sleep(MOVE_PAIR_WAIT);
                }
            }
            waited = events.is_empty() && !waited;
            for event in events {
                self.handle(step, event, &mut batch.lines)?;
            }
        }
        batch.ended = self.ended;
        Ok(batch)
    }

    /// Reads one buffer of events; empty if none are pending.
    fn read(&self) -> Result<Vec<Event>, BoxError> {
        let mut buffer = [MaybeUninit::uninit(); EVENT_BYTES];
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        let mut events = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => events.push(Event {
                    wd: event.wd(),
                    flags: event.events(),
                    cookie: event.cookie(),
                    name: event
                        .file_name()
                        .map(|name| name.to_string_lossy().into_owned()),
                }),
                Err(Errno::AGAIN | Errno::INTR) => return Ok(events),
                Err(errno) => return Err(errno).with_path(&self.path),
            }
            if reader.is_buffer_empty() {
                return Ok(events);
            }
        }
    }

    fn handle(
        &mut self,
        step: &Step<'_>,
        event: Event,
        lines: &mut Vec<u8>,
    ) -> Result<(), BoxError> {
        let is_arrival = event.flags.contains(ReadFlags::MOVED_TO);
        let same = |pending_move: &PendingMove| is_arrival && pending_move.cookie == event.cookie;
        if !self.pending_move.as_ref().is_some_and(same) {
            self.report_moved_out(lines);
        }
        if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.report(ChangeKind::Overflow, "", lines);
            return self.rescan(step, lines);
        }
        let gone = ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT;
        if event.flags.intersects(gone | ReadFlags::IGNORED) {
            let is_root = self.dirs.get(&event.wd).is_some_and(String::is_empty);
            if is_root && !self.ended {
                let name = self.only_name.clone().unwrap_or_default();
                self.report(ChangeKind::Removed, &name, lines);
                self.ended = true;
            }
            if event.flags.contains(ReadFlags::IGNORED) {
                self.dirs.remove(&event.wd);
            }
            return Ok(());
        }
        let (Some(dir), Some(name)) = (self.dirs.get(&event.wd), event.name) else {
            return Ok(());
        };
        if event.flags.contains(ReadFlags::MOVED_FROM) && name.starts_with(TEMP_PREFIX) {
            self.install_cookie = Some(event.cookie);
        }
        let is_reported = self
            .only_name
            .as_ref()
            .is_none_or(|only_name| *only_name == name);
        if self.ended || !is_reported || name.starts_with(TEMP_PREFIX) {
            return Ok(());
        }
        let at = join_relative(dir, &name);
        let is_dir = event.flags.contains(ReadFlags::ISDIR);
        if event.flags.contains(ReadFlags::CREATE) {
            self.report(ChangeKind::Created, &at, lines);
            self.watch_new(step, at, is_dir, lines)
        } else if is_arrival {
            if let Some(pending_move) = self.pending_move.take() {
                let from = Some(self.full_path(&pending_move.at));
                let moved = self.change(ChangeKind::Moved, &at);
                write_line(&FileChange { from, ..moved }, lines);
                self.rename_dirs(&pending_move.at, &at, lines);
                // The directory or its contents may have moved on before they could be watched.
                if self.dirs.values().any(|dir| *dir == at) && !self.vanished {
                    return Ok(());
                }
                self.vanished = false;
            } else {
                let is_written = self.install_cookie.take() == Some(event.cookie);
                let created = FileChange {
                    content: is_written,
                    attributes: is_written,
                    ..self.change(ChangeKind::Created, &at)
                };
                write_line(&created, lines);
            }
            self.watch_new(step, at, is_dir, lines)
        } else if event.flags.contains(ReadFlags::MOVED_FROM) {
            let cookie = event.cookie;
            self.pending_move = Some(PendingMove { cookie, at, is_dir });
            Ok(())
        } else if event.flags.contains(ReadFlags::DELETE) {
            self.report(ChangeKind::Removed, &at, lines);
            self.ended = self.only_name.is_some();
            Ok(())
        } else {
            let attributes = event.flags.contains(ReadFlags::ATTRIB);
            let changed = FileChange {
                content: !attributes,
                attributes,
                ..self.change(ChangeKind::Changed, &at)
            };
            write_line(&changed, lines);
            Ok(())
        }
    }

    /// Reports a removal: the move leads outside the watched tree.
    fn report_moved_out(&mut self, lines: &mut Vec<u8>) {
        let Some(PendingMove { at, is_dir, .. }) = self.pending_move.take() else {
            return;
        };
        self.report(ChangeKind::Removed, &at, lines);
        self.ended = self.only_name.is_some();
        if is_dir {
            let inotify = &self.inotify;
            self.dirs.retain(|wd, dir| {
                let stays = !is_within(dir, &at);
                if !stays {
                    // The kernel may have removed the watch already.
                    let _ = inotify::remove_watch(inotify, *wd);
                }
                stays
            });
        }
    }

    /// Updates the paths of a moved directory and its contents.
    ///
    /// Directories that are now too deep are no longer watched.
    fn rename_dirs(&mut self, from: &str, to: &str, lines: &mut Vec<u8>) {
        let (inotify, mut all_stay) = (&self.inotify, true);
        self.dirs.retain(|wd, dir| {
            if !is_within(dir, from) {
                return true;
            }
            *dir = format!("{to}{}", &dir[from.len()..]);
            let stays = dir.len() <= PATH_BYTES;
            if !stays {
                let _ = inotify::remove_watch(inotify, *wd);
            }
            all_stay &= stays;
            stays
        });
        if !all_stay {
            self.report(ChangeKind::Overflow, to, lines);
        }
    }

    /// Watches a new directory, and reports an overflow if that fails.
    fn watch_new(
        &mut self,
        step: &Step<'_>,
        at: String,
        is_dir: bool,
        lines: &mut Vec<u8>,
    ) -> Result<(), BoxError> {
        if !(self.recursive && is_dir) {
            return Ok(());
        }
        let path = at.clone();
        let watched = self
            .root(step)
            .and_then(|root| self.watch_tree(step, &root, at, Entries::New, lines));
        self.report_missed(step, watched.is_ok(), &path, lines)
    }

    /// Watches the current tree again after lost events.
    fn rescan(&mut self, step: &Step<'_>, lines: &mut Vec<u8>) -> Result<(), BoxError> {
        if !self.recursive {
            return Ok(());
        }
        let Ok(root) = self.root(step) else {
            return self.report_missed(step, false, "", lines);
        };
        let before = std::mem::take(&mut self.dirs);
        let watched = self.watch_tree(step, &root, String::new(), Entries::Known, lines);
        for wd in before.into_keys() {
            if !self.dirs.contains_key(&wd) {
                let _ = inotify::remove_watch(&self.inotify, wd);
            }
        }
        self.report_missed(step, watched.is_ok(), "", lines)
    }

    /// Opens the root, if it is still the same directory.
    fn root(&self, step: &Step<'_>) -> Result<OwnedFd, BoxError> {
        let root = step.guest_root.open_dir(&self.path)?;
        if identity(&root).with_path(&self.path)? != self.root {
            return Err(Errno::NOENT).with_path(&self.path);
        }
        Ok(root)
    }

    fn report_missed(
        &mut self,
        step: &Step<'_>,
        done: bool,
        at: &str,
        lines: &mut Vec<u8>,
    ) -> Result<(), BoxError> {
        step.cancel.check()?;
        if !done {
            self.report(ChangeKind::Overflow, at, lines);
        }
        Ok(())
    }

    /// Watches a directory and, for a recursive watch, everything below it.
    ///
    /// Directories that vanish meanwhile or that the guest may not read are skipped, except for the root.
    fn watch_tree(
        &mut self,
        step: &Step<'_>,
        root: &OwnedFd,
        from: String,
        entries: Entries,
        lines: &mut Vec<u8>,
    ) -> Result<(), BoxError> {
        let top = from.clone();
        let (mut pending, mut all_reported) = (vec![from], true);
        while let Some(at) = pending.pop() {
            step.cancel.check()?;
            let path = self.full_path(&at);
            let dir = match beneath(root, &at, OFlags::RDONLY | OFlags::DIRECTORY) {
                Ok(dir) => dir,
                Err(errno) if at.is_empty() || is_exhausted(errno) => {
                    return Err(errno).with_path(&path);
                }
                Err(errno) => {
                    self.vanished |= errno == Errno::NOENT;
                    continue;
                }
            };
            let stat = rustix::fs::fstat(&dir).with_path(&path)?;
            if step.guest_root.is_procfs(&stat) {
                continue;
            }
            // The entries of a directory that is watched already have been reported.
            let watched = match self.add(&dir) {
                Ok(wd) => self.dirs.insert(wd, at.clone()).is_some(),
                Err(Errno::NOSPC) => return Err(inotify_full()),
                Err(errno) if at.is_empty() => return Err(errno).with_path(&path),
                Err(_) => continue,
            };
            if self.dirs.len() > DIRECTORIES_MAX {
                return Err(too_many());
            }
            if !self.recursive {
                continue;
            }
            // Read after the watch exists: later entries are events.
            for name in names(&dir, &path, NAMES_BYTES)? {
                let inner = join_relative(&at, &name);
                let is_new = entries == Entries::New && !watched;
                all_reported &= !is_new || lines.len() < TREE_BATCH_BYTES;
                let stat = rustix::fs::statat(&dir, &*name, AtFlags::SYMLINK_NOFOLLOW);
                let kind = stat.map(|stat| FileType::from_raw_mode(stat.st_mode));
                if is_new && all_reported {
                    let created = FileChange {
                        content: kind == Ok(FileType::RegularFile),
                        ..self.change(ChangeKind::Created, &inner)
                    };
                    write_line(&created, lines);
                }
                if kind != Ok(FileType::Directory) {
                    continue;
                }
                if inner.len() > PATH_BYTES {
                    return Err(too_deep());
                }
                pending.push(inner);
                if self.dirs.len() + pending.len() > DIRECTORIES_MAX {
                    return Err(too_many());
                }
            }
        }
        if !all_reported {
            self.report(ChangeKind::Overflow, &top, lines);
        }
        Ok(())
    }

    fn add(&self, dir: &OwnedFd) -> Result<i32, Errno> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::MOVE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::EXCL_UNLINK
            | WatchFlags::ONLYDIR;
        // The only path of a descriptor. The link is the kernel's and belongs to the agent itself.
        let fd_path = format!("/proc/self/fd/{}", dir.as_raw_fd());
        inotify::add_watch(&self.inotify, fd_path, flags)
    }

    /// The absolute path of a path relative to the root.
    fn full_path(&self, at: &str) -> String {
        if at.is_empty() || self.only_name.is_some() {
            return self.path.clone();
        }
        join(&self.path, at)
    }

    fn report(&self, kind: ChangeKind, at: &str, lines: &mut Vec<u8>) {
        write_line(&self.change(kind, at), lines);
    }

    fn change(&self, kind: ChangeKind, at: &str) -> FileChange {
        FileChange {
            kind,
            path: self.full_path(at),
            from: None,
            content: false,
            attributes: false,
            at: UnixMs::now(),
        }
    }
}

fn write_line(change: &FileChange, lines: &mut Vec<u8>) {
    let before = lines.len();
    match serde_json::to_writer(&mut *lines, change) {
        Ok(()) => lines.push(b'\n'),
        Err(_) => lines.truncate(before),
    }
}

fn identity(dir: &OwnedFd) -> Result<(u64, u64), Errno> {
    rustix::fs::fstat(dir).map(|stat| (stat.st_dev, stat.st_ino))
}

fn join_relative(dir: &str, name: &str) -> String {
    if dir.is_empty() {
        return name.to_owned();
    }
    join(dir, name)
}

fn is_exhausted(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM)
}

fn too_many() -> BoxError {
    let what = "the number of watched directories";
    BoxError::limit(Code::Capacity, what, "watched_directories", DIRECTORIES_MAX)
}

fn too_deep() -> BoxError {
    let what = "the path of a watched directory";
    BoxError::limit(Code::Capacity, what, "watched_path_bytes", PATH_BYTES)
}

fn inotify_full() -> BoxError {
    BoxError::capacity(
        "watch: the machine's inotify limit is reached; raise fs.inotify.max_user_watches",
    )
    .with_detail(&Detail {
        errno: Some("ENOSPC".to_owned()),
        ..Detail::about(Subject::Disk)
    })
}

#[cfg(test)]
mod tests;
