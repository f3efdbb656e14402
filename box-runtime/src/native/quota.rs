//! The size of a workspace while its box runs.
//!
//! Where the file system can, it keeps the quota itself, to the byte: what is over it is not written ([`DirectoryQuota`]).
//!
//! Elsewhere a host directory has no size of its own, so it is measured again and again: every 10 ms while it grows, every 100 ms
//! otherwise, and not at all while the box uses no processor time. A box whose workspace is too large is killed. What it can
//! write beyond its quota is what it writes between two looks: its rate, times 10 to 100 ms and the time one look takes. One
//! file cannot be larger than the whole quota, which the kernel sees to (`RLIMIT_FSIZE`), and no call that allocates without
//! writing gets through.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

use box_protocol::BoxSpec;
use box_sys::DirectoryQuota;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};

use super::Living;

/// Looks while the workspace grows, and while it does not.
const OFTEN: Duration = Duration::from_millis(10);
const SELDOM: Duration = Duration::from_millis(100);

/// Directories within each other that are followed. A guest that goes deeper is up to no good, and counted as too large.
const DEPTH: usize = 128;

/// A quota is also one of files, of this many bytes each: what holds nothing would never be too large.
const ENTRY: u64 = 512;

/// A workspace with a quota.
#[derive(Debug)]
pub(super) struct Quota {
    directory: OwnedFd,
    bytes: u64,
    /// Set where the file system keeps it.
    kernel: Option<DirectoryQuota>,
}

impl Quota {
    /// The quota of a box, if it has one, in force from now on if the file system keeps it. `workspace` is the descriptor it is
    /// mounted from; `outlives` if the box may outlive this process.
    pub(super) async fn of(
        spec: &BoxSpec,
        workspace: Option<&OwnedFd>,
        outlives: bool,
    ) -> io::Result<Option<Self>> {
        match (spec.file_bytes(), workspace) {
            (Some(bytes), Some(workspace)) => {
                Self::again(workspace, bytes, outlives).await.map(Some)
            }
            _ => Ok(None),
        }
    }

    /// That of a box that has one.
    pub(super) async fn again(workspace: &OwnedFd, bytes: u64, outlives: bool) -> io::Result<Self> {
        let directory = open(workspace, c".")?;
        let limited = directory.try_clone()?;
        // Looks at every file there is.
        let set = move || DirectoryQuota::set(limited.as_fd(), bytes, bytes / ENTRY);
        let mut kernel = tokio::task::spawn_blocking(set).await?.ok();
        if let Some(kernel) = &mut kernel {
            kernel.keep(outlives);
        }
        Ok(Self {
            directory,
            bytes,
            kernel,
        })
    }

    /// Watches until the box is gone, or over its quota.
    pub(super) async fn watch(mut self, living: Weak<Living>) {
        if let Some(mut kernel) = self.kernel.take() {
            while let Some(living) = living.upgrade() {
                *living.disk() = kernel.used().ok();
                drop(living);
                tokio::time::sleep(SELDOM).await;
            }
            return kernel.keep(false);
        }
        let this = Arc::new(self);
        let (mut last, mut cpu) = (Size::default(), None);
        let mut rest = OFTEN;
        loop {
            tokio::time::sleep(rest).await;
            let Some(living) = living.upgrade() else {
                return;
            };
            rest = SELDOM;
            let used = living.sandbox.usage().cpu;
            if used.is_some() && used == cpu {
                continue;
            }
            cpu = used;
            let quota = Arc::clone(&this);
            let measured = tokio::task::spawn_blocking(move || Size::of(&quota.directory));
            let Ok(size) = measured.await else {
                return;
            };
            *living.disk() = Some(size.bytes);
            if size.bytes.max(size.entries.saturating_mul(ENTRY)) > this.bytes {
                living.end_for("the workspace has outgrown workspace_quota_mb");
                return;
            }
            if size != last {
                rest = OFTEN;
            }
            last = size;
        }
    }
}

fn open(at: &OwnedFd, name: &std::ffi::CStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, name, flags, Mode::empty())
}

/// What is below a directory.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Size {
    /// On disk.
    bytes: u64,
    /// Files, directories and everything else that has a name.
    entries: u64,
}

impl Size {
    fn of(directory: &OwnedFd) -> Self {
        let mut size = Self::default();
        size.add(directory, DEPTH);
        size
    }

    /// Adds what is below a directory. What vanishes meanwhile does not count; what cannot be looked into counts as what it is
    /// itself.
    fn add(&mut self, directory: &OwnedFd, depth: usize) {
        if depth == 0 {
            self.bytes = u64::MAX;
            return;
        }
        let Ok(entries) = Dir::read_from(directory) else {
            return;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let Ok(stat) = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
            self.bytes = self.bytes.saturating_add(blocks.saturating_mul(512));
            self.entries += 1;
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory
                && let Ok(inner) = open(directory, name)
            {
                self.add(&inner, depth - 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_as_large_as_its_files_and_too_deep_is_too_large() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("a/b");
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::write(inner.join("f"), vec![1; 1 << 20]).unwrap();
        std::os::unix::fs::symlink("/", inner.join("everything")).unwrap();
        let directory = OwnedFd::from(std::fs::File::open(dir.path()).unwrap());
        let size = Size::of(&directory);
        assert!((1 << 20..1 << 21).contains(&size.bytes), "{size:?}");
        assert_eq!(size.entries, 4);
        let mut shallow = Size::default();
        shallow.add(&directory, 2);
        assert_eq!(shallow.bytes, u64::MAX);
    }
}
