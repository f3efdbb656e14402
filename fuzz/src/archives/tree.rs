//! Directories into which archives are unpacked, and what they contain.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// Prefix of the names that an agent never packs.
const TEMPORARY: &str = ".box-tmp-";

/// Directories in memory, removed when dropped.
pub(crate) struct Trees(PathBuf);

impl Trees {
    pub(crate) fn new() -> Self {
        rustix::process::umask(Mode::empty());
        let path = PathBuf::from(format!("/dev/shm/box-fuzz-{}", std::process::id()));
        remove(&path);
        fs::create_dir(&path).expect("a directory");
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name).join("root")
    }

    /// Creates and opens the directory of this name.
    pub(crate) fn open(&self, name: &str) -> OwnedFd {
        let path = self.path(name);
        fs::create_dir_all(&path).expect("a directory");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(&path, flags, Mode::empty()).expect("a directory")
    }

    /// Checks that nothing was created beside the directories.
    pub(crate) fn check(&self) {
        for outer in fs::read_dir(&self.0).expect("a directory").flatten() {
            let count = fs::read_dir(outer.path()).expect("a directory").count();
            assert_eq!(count, 1, "something is beside {}", outer.path().display());
        }
    }
}

impl Drop for Trees {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

/// Removes a tree, also one with directories that its owner may not write.
fn remove(path: &Path) {
    let Ok(found) = path.symlink_metadata() else {
        return;
    };
    if !found.is_dir() {
        fs::remove_file(path).expect("a file");
        return;
    }
    fs::set_permissions(path, Permissions::from_mode(0o700)).expect("a directory");
    for entry in fs::read_dir(path).expect("a directory").flatten() {
        remove(&entry.path());
    }
    fs::remove_dir(path).expect("an empty directory");
}

/// The contents of a directory, by path.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tree(BTreeMap<PathBuf, Entry>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Entry {
    Directory(u32),
    File(u32, Vec<u8>),
    Link(PathBuf),
}

impl Tree {
    pub(crate) fn read(root: &Path) -> Self {
        let mut tree = Self(BTreeMap::new());
        tree.add(root, Path::new(""));
        tree
    }

    fn add(&mut self, root: &Path, folder: &Path) {
        let Ok(entries) = fs::read_dir(root.join(folder)) else {
            return;
        };
        for entry in entries.flatten() {
            let name = folder.join(entry.file_name());
            let found = entry.metadata().expect("an entry");
            let mode = found.permissions().mode() & 0o7777;
            let read = if found.is_symlink() {
                Entry::Link(fs::read_link(entry.path()).expect("a link"))
            } else if found.is_dir() {
                self.add(root, &name);
                Entry::Directory(mode)
            } else {
                assert!(found.is_file(), "{}: a special file", name.display());
                Entry::File(mode, fs::read(entry.path()).unwrap_or_default())
            };
            self.0.insert(name, read);
        }
    }

    /// Whether the user of this process may read all of it.
    pub(crate) fn is_readable(&self) -> bool {
        rustix::process::geteuid().is_root()
            || self.0.values().all(|entry| match entry {
                Entry::Directory(mode) => mode & 0o500 == 0o500,
                Entry::File(mode, _) => mode & 0o400 != 0,
                Entry::Link(_) => true,
            })
    }

    /// The tree as a copy has it: without temporary names and set-id bits.
    pub(crate) fn plain(&self) -> Self {
        let is_kept = |path: &Path| {
            let mut names = path.components().map(|name| name.as_os_str().as_encoded_bytes());
            !names.any(|name| name.starts_with(TEMPORARY.as_bytes()))
        };
        let kept = self.0.iter().filter(|(path, _)| is_kept(path));
        let plain = kept.map(|(path, entry)| {
            let entry = match entry.clone() {
                Entry::Directory(mode) => Entry::Directory(mode & 0o777),
                Entry::File(mode, data) => Entry::File(mode & 0o777, data),
                link @ Entry::Link(_) => link,
            };
            (path.clone(), entry)
        });
        Self(plain.collect())
    }
}
