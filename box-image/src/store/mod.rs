//! The store of images: one directory, one unpacked tree for each image.
//!
//! # Layout
//! ```text
//! lock              held for the moment of a change; shared by readers
//! images/HEX/       an image by the digest of its manifest: rootfs/, image.json, manifest.json, config.json
//! tags/HASH         a name and the digest that it denotes
//! leases/HEX.ID     an image in use; locked by the process that uses it
//! partial/HEX       a layer that is downloaded; kept for a later attempt
//! pulls/HEX         an image that is pulled; locked by the process that does so
//! work/ID, ID.lock  an image that is made or removed; locked by the process that does so
//! ```
//! An item is complete before it gets its name, and the name appears by a rename. A process that dies leaves only items
//! under `work`, `leases`, `pulls` and `partial` without a lock, which the next opening removes. Several processes may use a store
//! at the same time.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::{At as _, Error, Result};
use crate::limits::Limits;

mod image;
mod lease;
mod partial;
mod query;
mod remove;
mod tags;
mod work;

pub use image::{Image, LayerInfo};
pub use lease::Lease;
pub(crate) use partial::{Partial, PullLock};
pub use query::DiskUsage;
pub use remove::{PruneOptions, Pruned, Removed, Uses};
pub(crate) use tags::Name;
pub(crate) use work::Work;

const VERSION: &str = "1\n";
const FOLDERS: [&str; 6] = ["images", "tags", "leases", "partial", "pulls", "work"];
/// Age after which a download that no process continues is removed.
const PARTIAL_AGE: Duration = Duration::from_hours(7 * 24);

/// Store of images in one directory.
///
/// Every method blocks for the time of its disk access. Clones share the directory.
#[derive(Debug, Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    limits: Limits,
    /// The thread that removes the files of dead processes.
    sweeping: Mutex<Option<JoinHandle<()>>>,
}

/// Lock on the names of the store; dropping it ends the lock.
#[derive(Debug)]
struct Guard {
    _file: File,
}

impl Store {
    /// Opens a store, creates it if it is missing, and removes what dead processes left.
    ///
    /// A thread removes their files, because that can take minutes. If this process ends before, the next
    /// opening removes the rest. The directory is private to its user, because images contain set-id programs.
    pub fn open(path: &Path, limits: Limits) -> Result<Self> {
        let at = "image store";
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .at(at)?;
        let path = fs::canonicalize(path).at(at)?;
        let found = fs::metadata(&path).at(at)?;
        let user = rustix::process::geteuid().as_raw();
        if found.uid() != user {
            return Err(Error::Denied(format!(
                "image store: it belongs to user {}, not to user {user}; choose another directory",
                found.uid()
            )));
        }
        if found.permissions().mode() & 0o077 != 0 {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).at(at)?;
        }
        let inner = Arc::new(Inner {
            path,
            limits,
            sweeping: Mutex::default(),
        });
        let store = Self { inner };
        let guard = store.exclusive()?;
        for folder in FOLDERS {
            match DirBuilder::new().mode(0o700).create(store.path(folder)) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made.at(at)?,
            }
        }
        match fs::read_to_string(store.path("version")) {
            Ok(version) if version == VERSION => {}
            Ok(_) => {
                return Err(Error::unsupported(
                    "image store: a newer version of Box wrote it; use that version or another directory",
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                store.write_file(&store.path("version"), VERSION.as_bytes())?;
            }
            Err(error) => return Err(error).at(at),
        }
        store.sweep(guard)?;
        Ok(store)
    }

    /// Returns the limits of images.
    pub fn limits(&self) -> Limits {
        self.inner.limits
    }

    fn path(&self, name: &str) -> PathBuf {
        self.inner.path.join(name)
    }

    fn folder(&self, folder: &str, name: &str) -> PathBuf {
        self.inner.path.join(folder).join(name)
    }

    fn lock_file(&self) -> Result<File> {
        lock_file(&self.path("lock")).at("image store")
    }

    /// Waits until no process reads or changes names.
    fn exclusive(&self) -> Result<Guard> {
        let file = self.lock_file()?;
        file.lock().at("image store")?;
        Ok(Guard { _file: file })
    }

    /// Waits until no process changes names.
    fn shared(&self) -> Result<Guard> {
        let file = self.lock_file()?;
        file.lock_shared().at("image store")?;
        Ok(Guard { _file: file })
    }

    /// Writes a file under a temporary name, and gives it its name when it is on disk.
    fn write_file(&self, path: &Path, content: &[u8]) -> Result<()> {
        let draft = self.folder("work", &format!("{}.draft", random_id()?));
        let written = write_new(&draft, content).and_then(|()| fs::rename(&draft, path));
        if written.is_err() {
            let _ = fs::remove_file(&draft);
        }
        written.at("image store")?;
        sync_parent(path)
    }

    /// Returns the names in a folder.
    fn entries(&self, folder: &str) -> Result<Vec<String>> {
        let entries = fs::read_dir(self.path(folder)).at("image store")?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        Ok(names.collect())
    }

    /// Removes what dead processes left.
    fn sweep(&self, guard: Guard) -> Result<()> {
        self.sweep_partial(PARTIAL_AGE)?;
        self.sweep_pulls()?;
        self.sweep_leases()?;
        self.sweep_tags()?;
        let dead = self.dead_work()?;
        drop(guard);
        if !dead.is_empty() {
            // The locks of the dead are held meanwhile. Without a thread, `spawn` drops them here.
            let sweeping = thread::Builder::new().name("image-sweep".to_owned());
            *self.sweeping() = sweeping.spawn(move || drop(dead)).ok();
        }
        Ok(())
    }

    /// Waits until the files of dead processes are removed, as far as this process does that.
    fn wait_for_sweep(&self) {
        let sweeping = self.sweeping().take();
        if let Some(sweeping) = sweeping {
            let _ = sweeping.join();
        }
    }

    fn sweeping(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        let sweeping = self.inner.sweeping.lock();
        sweeping.unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a file to lock it, and creates it if it is missing.
fn lock_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).mode(0o600);
    options.open(path)
}

/// Returns whether a process holds the lock of a file; if not, it is locked now.
fn try_lock(file: &File) -> Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(fs::TryLockError::WouldBlock) => Ok(false),
        Err(fs::TryLockError::Error(error)) => Err(error).at("image store"),
    }
}

fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Writes the directory of a path to the disk.
fn sync_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    let directory = File::open(parent).at("image store")?;
    rustix::fs::fsync(directory.as_fd()).at("image store")
}

/// Returns a random name.
fn random_id() -> Result<String> {
    let mut bytes = [0; 16];
    let read = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    if read.at("random")? != bytes.len() {
        return Err(Error::Storage("random: too few bytes".to_owned()));
    }
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}

/// Returns the seconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

fn seconds(time: io::Result<SystemTime>) -> u64 {
    let since = time
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;
