//! Project quotas of ext4 and XFS: a directory limit that the kernel enforces.
//!
//! They require a file system with project quotas and the host's root. Every file below the
//! directory belongs to a project, and new files inherit it. The kernel refuses writes above the
//! limit (EDQUOT). A guest cannot change the project, because only the initial user namespace may.

use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::walk::{Entry, Found, Next};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::ioctl::{Getter, Opcode, Setter, ioctl, opcode};

use crate::raw::check;

/// Bit of all project ids of Box. Administrators usually choose small ids.
const PROJECT_BIT: u32 = 0x4000_0000;

/// Limits that this process requested, by file system and project.
///
/// Several boxes can share a directory. The kernel gets the lowest of their limits, so that the end
/// of one box does not lift the limit of another.
static REQUESTED: Mutex<BTreeMap<(u64, u32), Vec<Limit>>> = Mutex::new(BTreeMap::new());

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limit {
    bytes: u64,
    entries: u64,
}

/// A directory with a project quota.
///
/// Dropping it removes the limit, unless another box requested one for the same directory.
#[derive(Debug)]
pub struct DirectoryQuota {
    directory: OwnedFd,
    device: u64,
    project: u32,
    limit: Limit,
    /// Whether the limit stays after the drop, because the box continues to run.
    persistent: AtomicBool,
}

impl DirectoryQuota {
    /// Limits a directory, existing files included. Stops when `wanted` returns false.
    ///
    /// On an error no limit is set. The file system may not support quotas, the user may lack the
    /// privilege, or the directory may belong to another project. A limit on a parent directory
    /// also causes the latter.
    pub fn set(
        directory: BorrowedFd<'_>,
        bytes: u64,
        entries: u64,
        wanted: impl Fn() -> bool,
    ) -> io::Result<Self> {
        let before = attributes(directory)?.project;
        let stat = rustix::fs::fstat(directory)?;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "30 bits distinguish directories"
        )]
        let project = PROJECT_BIT | (stat.st_ino as u32 & (PROJECT_BIT - 1));
        let in_other_project = before != 0 && before != project;
        if in_other_project
            && (before & PROJECT_BIT == 0 || project_record(directory, before)?.dqb_bhardlimit > 0)
        {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let this = Self {
            directory: directory.try_clone_to_owned()?,
            device: stat.st_dev,
            project,
            // Zero would mean no limit.
            limit: Limit {
                bytes: bytes.max(1),
                entries: entries.max(1),
            },
            persistent: AtomicBool::new(false),
        };
        // Dropping `this` removes the request.
        this.update_limit(|limits| limits.push(this.limit))?;
        this.mark(wanted)?;
        Ok(this)
    }

    /// Bytes on disk and number of files. Deleted files that are still open count.
    ///
    /// Fails if a quota of a parent directory has replaced this one.
    pub fn used(&self) -> io::Result<(u64, u64)> {
        if attributes(self.directory.as_fd())?.project != self.project {
            return Err(io::ErrorKind::NotFound.into());
        }
        let record = project_record(self.directory.as_fd(), self.project)?;
        Ok((record.dqb_curspace, record.dqb_curinodes))
    }

    /// Sets whether the limit stays in force after the drop.
    pub fn set_persistent(&self, persistent: bool) {
        self.persistent.store(persistent, Ordering::Relaxed);
    }

    /// Changes the requested limits and updates the kernel.
    fn update_limit(&self, change: impl FnOnce(&mut Vec<Limit>)) -> io::Result<()> {
        let mut all = REQUESTED.lock().unwrap_or_else(PoisonError::into_inner);
        let limits = all.entry((self.device, self.project)).or_default();
        change(limits);
        let bytes = limits.iter().map(|limit| limit.bytes).min();
        let entries = limits.iter().map(|limit| limit.entries).min();
        if limits.is_empty() {
            all.remove(&(self.device, self.project));
        }
        let directory = self.directory.as_fd();
        limit_project(
            directory,
            self.project,
            bytes.unwrap_or(0),
            entries.unwrap_or(0),
        )
    }

    /// Assigns the directory and all files and directories below it to the project.
    ///
    /// Other file types use no space, so they keep their project.
    fn mark(&self, wanted: impl Fn() -> bool) -> io::Result<()> {
        self.assign(self.directory.as_fd(), true)?;
        let device = rustix::fs::fstat(&self.directory)?.st_dev;
        let marked = crate::walk::walk(&self.directory, |found| match found {
            _ if !wanted() => ControlFlow::Break(io::ErrorKind::Interrupted.into()),
            // A file system that is mounted here has its own projects.
            Found::Entry(entry) if entry.stat.st_dev != device => ControlFlow::Continue(Next::Skip),
            Found::Entry(entry) => match self.mark_one(&entry) {
                Ok(()) => ControlFlow::Continue(Next::Descend),
                Err(error) => ControlFlow::Break(error),
            },
            Found::Unreadable => ControlFlow::Break(io::ErrorKind::PermissionDenied.into()),
        });
        match marked {
            ControlFlow::Break(error) => Err(error),
            ControlFlow::Continue(()) => Ok(()),
        }
    }

    fn mark_one(&self, entry: &Entry<'_>) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let (flags, inherited) = match entry.kind() {
            FileType::RegularFile => (flags, false),
            FileType::Directory => (flags | OFlags::DIRECTORY, true),
            _ => return Ok(()),
        };
        // Another box may change names here. A removed file needs no project, and a new one
        // inherits it.
        match rustix::fs::openat(entry.directory, entry.name, flags, Mode::empty()) {
            Ok(file) => self.assign(file.as_fd(), inherited),
            Err(_) => Ok(()),
        }
    }

    fn assign(&self, file: BorrowedFd<'_>, inherited: bool) -> io::Result<()> {
        let before = attributes(file)?;
        let inherit = if inherited { INHERITED } else { 0 };
        let after = FileAttributes {
            project: self.project,
            flags: before.flags | inherit,
            ..before
        };
        if after == before {
            Ok(())
        } else {
            set_attributes(file, after)
        }
    }
}

impl Drop for DirectoryQuota {
    fn drop(&mut self) {
        if !self.persistent.load(Ordering::Relaxed) {
            let _ = self.update_limit(|limits| {
                if let Some(own) = limits.iter().position(|limit| *limit == self.limit) {
                    limits.swap_remove(own);
                }
            });
        }
    }
}

/// Attributes of a file (`struct fsxattr`). Box changes flags and project.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct FileAttributes {
    flags: u32,
    extent: u32,
    extents: u32,
    project: u32,
    cow_extent: u32,
    rest: [u8; 8],
}

/// Flag of a directory: new entries inherit its project.
const INHERITED: u32 = 0x200;

/// `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR`.
const GET: Opcode = opcode::read::<FileAttributes>(b'X', 31);
const SET: Opcode = opcode::write::<FileAttributes>(b'X', 32);

/// The attributes of a file or directory.
fn attributes(file: BorrowedFd<'_>) -> io::Result<FileAttributes> {
    // SAFETY: the opcode belongs to a request that writes one structure of this layout.
    let get = unsafe { Getter::<GET, FileAttributes>::new() };
    // SAFETY: as above.
    Ok(unsafe { ioctl(file, get) }?)
}

fn set_attributes(file: BorrowedFd<'_>, attributes: FileAttributes) -> io::Result<()> {
    // SAFETY: the opcode belongs to a request that reads one structure of this layout.
    let set = unsafe { Setter::<SET, FileAttributes>::new(attributes) };
    // SAFETY: as above.
    Ok(unsafe { ioctl(file, set) }?)
}

/// Sets the limits of a project on the file system of a descriptor.
///
/// Zero means no limit.
fn limit_project(on: BorrowedFd<'_>, project: u32, bytes: u64, entries: u64) -> io::Result<()> {
    /// The record contains limits of blocks and of inodes.
    const VALID: u32 = 1 | 4;
    /// Unit of block limits. Usage is in bytes.
    const BLOCK: u64 = 1024;
    let mut record = no_record();
    record.dqb_bhardlimit = bytes.div_ceil(BLOCK);
    record.dqb_ihardlimit = entries;
    record.dqb_valid = VALID;
    quota(on, libc::Q_SETQUOTA, project, &mut record)
}

/// Usage and limits of a project.
fn project_record(on: BorrowedFd<'_>, project: u32) -> io::Result<libc::dqblk> {
    let mut record = no_record();
    quota(on, libc::Q_GETQUOTA, project, &mut record)?;
    Ok(record)
}

fn no_record() -> libc::dqblk {
    // SAFETY: the structure consists of integers, for which zero is valid.
    unsafe { std::mem::zeroed() }
}

fn quota(
    on: BorrowedFd<'_>,
    command: libc::c_int,
    project: u32,
    record: &mut libc::dqblk,
) -> io::Result<()> {
    /// `PRJQUOTA`: quotas of projects, not of users or groups.
    const PROJECTS: libc::c_int = 2;
    let command = libc::QCMD(command, PROJECTS);
    // SAFETY: both commands take one record, which is valid for reads and writes.
    check(unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            on.as_raw_fd(),
            command,
            project,
            record,
        )
    })
    .map(drop)
}
