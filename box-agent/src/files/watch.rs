//! What `file.watch` sees: a tree of directories under inotify, and its events as lines.
//!
//! A directory is opened as everything here is, by descriptor and as the guest, and watched by that descriptor; what a guest
//! swaps meanwhile is not watched in its place. Events name entries of directories, so a map from watches to paths is kept, and
//! follows what is moved.

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

use super::draft::HIDDEN;
use super::error::About;
use super::ground::{Step, beneath};
use super::path::{is_within, join};
use super::walk::{NAMES_BYTES, names};

/// Directories of one watch. The kernel has a limit, too, for all boxes of a user.
const DIRECTORIES: usize = 4096;

/// Bytes of lines after which a look ends, so that a reader gets something and the log can slow this down.
const LINES: usize = 32 << 10;

/// The same for what a tree holds that has come as a whole; the rest of it is told as lost.
const TREE_LINES: usize = 1 << 20;

/// The longest path of a directory that is watched: of one that is deeper, nobody could ask for anything.
const PATH_BYTES: usize = 4095;

/// Bytes of events that are read at once.
const EVENTS: usize = 16 << 10;

/// The two halves of a move are queued one right after the other; the second is given so long.
const OTHER_HALF: Duration = Duration::from_millis(2);

/// A tree that is watched.
#[derive(Debug)]
pub(crate) struct Watched {
    inotify: OwnedFd,
    /// Which directory the root is: device and number. It is not held open, because then its removal would not be seen.
    root: (u64, u64),
    /// What the root is called.
    path: String,
    /// The one name in it that counts, if a file is watched.
    only: Option<String>,
    recursive: bool,
    /// Where each watched directory is, below the root.
    dirs: HashMap<i32, String>,
    /// What was moved from here, and not yet to anywhere.
    leaving: Option<Leaving>,
    /// Whether a directory had vanished before it could be watched. It may have moved, with a directory around it.
    vanished: bool,
    over: bool,
}

#[derive(Debug)]
struct Leaving {
    cookie: u32,
    at: String,
    is_dir: bool,
}

struct Event {
    wd: i32,
    what: ReadFlags,
    cookie: u32,
    name: Option<String>,
}

/// What a look at the events gave.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) lines: Vec<u8>,
    /// There is nothing more for now.
    pub(crate) drained: bool,
    /// What was watched is gone.
    pub(crate) over: bool,
}

/// What to do about entries of a directory that were there before it was watched.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Entries {
    Known,
    New,
}

impl Watched {
    /// Begins to watch; and a second descriptor of its events, to wait for.
    pub(super) fn open(step: &Step<'_>, asked: &AgentWatch) -> Result<(Self, OwnedFd), BoxError> {
        let path = step.ground.path(&asked.path, asked.expand)?;
        let found = step.ground.open(&path, OFlags::PATH).about(&path)?;
        let stat = rustix::fs::fstat(&found).about(&path)?;
        let (root, path, only) = if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            (step.ground.open_dir(&path)?, path, None)
        } else {
            // By its name: a file is mostly written by putting another one in its place.
            let spot = step.ground.settle(&path)?;
            let dir = beneath(&spot.dir, "", OFlags::RDONLY | OFlags::DIRECTORY);
            (dir.about(&path)?, path, Some(spot.name))
        };
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).about(&path)?;
        let events = inotify.try_clone().about(&path)?;
        let mut watched = Self {
            inotify,
            root: identity(&root).about(&path)?,
            path,
            recursive: asked.recursive && only.is_none(),
            only,
            dirs: HashMap::new(),
            leaving: None,
            vanished: false,
            over: false,
        };
        watched.descend(step, &root, String::new(), Entries::Known, &mut Vec::new())?;
        Ok((watched, events))
    }

    /// What has happened since the last look.
    pub(super) fn look(&mut self, step: &Step<'_>) -> Result<Seen, BoxError> {
        let mut seen = Seen::default();
        let mut waited = false;
        while !self.over && seen.lines.len() < LINES {
            step.wanted.check()?;
            let events = self.read()?;
            if events.is_empty() {
                if self.leaving.is_none() {
                    seen.drained = true;
                    break;
                }
                if waited {
                    self.has_left(&mut seen.lines);
                } else {
                    std::thread::sleep(OTHER_HALF);
                }
            }
            waited = events.is_empty() && !waited;
            for event in events {
                self.take(step, event, &mut seen.lines)?;
            }
        }
        seen.over = self.over;
        Ok(seen)
    }

    /// One buffer of events; none if there are none.
    fn read(&self) -> Result<Vec<Event>, BoxError> {
        let mut buffer = [MaybeUninit::uninit(); EVENTS];
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        let mut events = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => events.push(Event {
                    wd: event.wd(),
                    what: event.events(),
                    cookie: event.cookie(),
                    name: event
                        .file_name()
                        .map(|name| name.to_string_lossy().into_owned()),
                }),
                Err(Errno::AGAIN | Errno::INTR) => return Ok(events),
                Err(errno) => return Err(errno).about(&self.path),
            }
            if reader.is_buffer_empty() {
                return Ok(events);
            }
        }
    }

    fn take(&mut self, step: &Step<'_>, event: Event, lines: &mut Vec<u8>) -> Result<(), BoxError> {
        let arrives = event.what.contains(ReadFlags::MOVED_TO);
        let same = |leaving: &Leaving| arrives && leaving.cookie == event.cookie;
        if !self.leaving.as_ref().is_some_and(same) {
            self.has_left(lines);
        }
        if event.what.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.tell(ChangeKind::Overflow, "", None, lines);
            return self.begin_again(step, lines);
        }
        let gone = ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT;
        if event.what.intersects(gone | ReadFlags::IGNORED) {
            let is_root = self.dirs.get(&event.wd).is_some_and(String::is_empty);
            if is_root && !self.over {
                let name = self.only.clone().unwrap_or_default();
                self.tell(ChangeKind::Removed, &name, None, lines);
                self.over = true;
            }
            if event.what.contains(ReadFlags::IGNORED) {
                self.dirs.remove(&event.wd);
            }
            return Ok(());
        }
        let (Some(dir), Some(name)) = (self.dirs.get(&event.wd), event.name) else {
            return Ok(());
        };
        let counts = self.only.as_ref().is_none_or(|only| *only == name);
        if self.over || !counts || name.starts_with(HIDDEN) {
            return Ok(());
        }
        let at = below(dir, &name);
        let is_dir = event.what.contains(ReadFlags::ISDIR);
        if event.what.contains(ReadFlags::CREATE) {
            self.tell(ChangeKind::Created, &at, None, lines);
            self.enter(step, at, is_dir, lines)
        } else if arrives {
            if let Some(leaving) = self.leaving.take() {
                self.tell(ChangeKind::Moved, &at, Some(&leaving.at), lines);
                self.follow(&leaving.at, &at, lines);
                // It, or what is in it, may have moved on before it could be watched.
                if self.dirs.values().any(|dir| *dir == at) && !self.vanished {
                    return Ok(());
                }
                self.vanished = false;
            } else {
                self.tell(ChangeKind::Created, &at, None, lines);
            }
            self.enter(step, at, is_dir, lines)
        } else if event.what.contains(ReadFlags::MOVED_FROM) {
            let cookie = event.cookie;
            self.leaving = Some(Leaving { cookie, at, is_dir });
            Ok(())
        } else if event.what.contains(ReadFlags::DELETE) {
            self.tell(ChangeKind::Removed, &at, None, lines);
            self.over = self.only.is_some();
            Ok(())
        } else {
            self.tell(ChangeKind::Changed, &at, None, lines);
            Ok(())
        }
    }

    /// What was moved away was not moved to anywhere that is watched.
    fn has_left(&mut self, lines: &mut Vec<u8>) {
        let Some(Leaving { at, is_dir, .. }) = self.leaving.take() else {
            return;
        };
        self.tell(ChangeKind::Removed, &at, None, lines);
        self.over = self.only.is_some();
        if is_dir {
            let inotify = &self.inotify;
            self.dirs.retain(|wd, dir| {
                let stays = !is_within(dir, &at);
                if !stays {
                    // It may be gone by itself.
                    let _ = inotify::remove_watch(inotify, *wd);
                }
                stays
            });
        }
    }

    /// A directory has moved, and what is in it. What is too deep by now is not watched any more.
    fn follow(&mut self, from: &str, to: &str, lines: &mut Vec<u8>) {
        let (inotify, mut is_whole) = (&self.inotify, true);
        self.dirs.retain(|wd, dir| {
            if !is_within(dir, from) {
                return true;
            }
            *dir = format!("{to}{}", &dir[from.len()..]);
            let stays = dir.len() <= PATH_BYTES;
            if !stays {
                let _ = inotify::remove_watch(inotify, *wd);
            }
            is_whole &= stays;
            stays
        });
        if !is_whole {
            self.tell(ChangeKind::Overflow, to, None, lines);
        }
    }

    /// Watches what is new, if it is a directory; what cannot be watched is told.
    fn enter(
        &mut self,
        step: &Step<'_>,
        at: String,
        is_dir: bool,
        lines: &mut Vec<u8>,
    ) -> Result<(), BoxError> {
        if !(self.recursive && is_dir) {
            return Ok(());
        }
        let place = at.clone();
        let entered = self
            .root(step)
            .and_then(|root| self.descend(step, &root, at, Entries::New, lines));
        self.or_missed(step, entered.is_ok(), &place, lines)
    }

    /// Events are lost: what there is now is watched, whatever was before.
    fn begin_again(&mut self, step: &Step<'_>, lines: &mut Vec<u8>) -> Result<(), BoxError> {
        if !self.recursive {
            return Ok(());
        }
        let Ok(root) = self.root(step) else {
            return self.or_missed(step, false, "", lines);
        };
        let before = std::mem::take(&mut self.dirs);
        let entered = self.descend(step, &root, String::new(), Entries::Known, lines);
        for wd in before.into_keys() {
            if !self.dirs.contains_key(&wd) {
                let _ = inotify::remove_watch(&self.inotify, wd);
            }
        }
        self.or_missed(step, entered.is_ok(), "", lines)
    }

    /// The directory that is watched, if it still is where it was.
    fn root(&self, step: &Step<'_>) -> Result<OwnedFd, BoxError> {
        let root = step.ground.open_dir(&self.path)?;
        if identity(&root).about(&self.path)? != self.root {
            return Err(Errno::NOENT).about(&self.path);
        }
        Ok(root)
    }

    fn or_missed(
        &mut self,
        step: &Step<'_>,
        done: bool,
        at: &str,
        lines: &mut Vec<u8>,
    ) -> Result<(), BoxError> {
        step.wanted.check()?;
        if !done {
            self.tell(ChangeKind::Overflow, at, None, lines);
        }
        Ok(())
    }

    /// Watches a directory and, if that was asked for, all below it. What vanishes meanwhile, or may not be looked into, is
    /// passed over, but not the root.
    fn descend(
        &mut self,
        step: &Step<'_>,
        root: &OwnedFd,
        from: String,
        entries: Entries,
        lines: &mut Vec<u8>,
    ) -> Result<(), BoxError> {
        let begin = from.clone();
        let (mut ahead, mut is_told) = (vec![from], true);
        while let Some(at) = ahead.pop() {
            step.wanted.check()?;
            let place = self.name_of(&at);
            let dir = match beneath(root, &at, OFlags::RDONLY | OFlags::DIRECTORY) {
                Ok(dir) => dir,
                Err(errno) if at.is_empty() || is_full(errno) => return Err(errno).about(&place),
                Err(errno) => {
                    self.vanished |= errno == Errno::NOENT;
                    continue;
                }
            };
            let stat = rustix::fs::fstat(&dir).about(&place)?;
            if step.ground.is_procfs(&stat) {
                continue;
            }
            // What is in one that is watched already was told when it came.
            let watched = match self.add(&dir) {
                Ok(wd) => self.dirs.insert(wd, at.clone()).is_some(),
                Err(Errno::NOSPC) => return Err(full()),
                Err(errno) if at.is_empty() => return Err(errno).about(&place),
                Err(_) => continue,
            };
            if self.dirs.len() > DIRECTORIES {
                return Err(too_many());
            }
            if !self.recursive {
                continue;
            }
            // After the watch is there: what comes later is an event.
            for name in names(&dir, &place, NAMES_BYTES)? {
                let inner = below(&at, &name);
                let is_new = entries == Entries::New && !watched;
                is_told &= !is_new || lines.len() < TREE_LINES;
                if is_new && is_told {
                    self.tell(ChangeKind::Created, &inner, None, lines);
                }
                let stat = rustix::fs::statat(&dir, &*name, AtFlags::SYMLINK_NOFOLLOW);
                let is_dir = |mode| FileType::from_raw_mode(mode) == FileType::Directory;
                if !stat.is_ok_and(|stat| is_dir(stat.st_mode)) {
                    continue;
                }
                if inner.len() > PATH_BYTES {
                    return Err(too_deep());
                }
                ahead.push(inner);
                if self.dirs.len() + ahead.len() > DIRECTORIES {
                    return Err(too_many());
                }
            }
        }
        if !is_told {
            self.tell(ChangeKind::Overflow, &begin, None, lines);
        }
        Ok(())
    }

    fn add(&self, dir: &OwnedFd) -> Result<i32, Errno> {
        let what = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::MOVE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::EXCL_UNLINK
            | WatchFlags::ONLYDIR;
        // The one way to name a descriptor. The link is the kernel's own, of this very process.
        let own = format!("/proc/self/fd/{}", dir.as_raw_fd());
        inotify::add_watch(&self.inotify, own, what)
    }

    /// What a place below the root is called.
    fn name_of(&self, at: &str) -> String {
        if at.is_empty() || self.only.is_some() {
            return self.path.clone();
        }
        join(&self.path, at)
    }

    fn tell(&self, kind: ChangeKind, at: &str, from: Option<&str>, lines: &mut Vec<u8>) {
        let change = FileChange {
            kind,
            path: self.name_of(at),
            from: from.map(|from| self.name_of(from)),
            at: UnixMs::now(),
        };
        let before = lines.len();
        match serde_json::to_writer(&mut *lines, &change) {
            Ok(()) => lines.push(b'\n'),
            Err(_) => lines.truncate(before),
        }
    }
}

fn identity(dir: &OwnedFd) -> Result<(u64, u64), Errno> {
    rustix::fs::fstat(dir).map(|stat| (stat.st_dev, stat.st_ino))
}

fn below(dir: &str, name: &str) -> String {
    if dir.is_empty() {
        return name.to_owned();
    }
    join(dir, name)
}

fn is_full(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM)
}

fn too_many() -> BoxError {
    let what = "directories of one watch";
    BoxError::limit(Code::Capacity, what, "watched_directories", DIRECTORIES)
}

fn too_deep() -> BoxError {
    let what = "the path of a watched directory";
    BoxError::limit(Code::Capacity, what, "watched_path_bytes", PATH_BYTES)
}

fn full() -> BoxError {
    BoxError::capacity("the machine watches as many directories as it can").with_detail(&Detail {
        errno: Some("ENOSPC".to_owned()),
        ..Detail::about(Subject::Disk)
    })
}

#[cfg(test)]
mod tests;
