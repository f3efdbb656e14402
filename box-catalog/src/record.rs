//! One file of the store: written beside its place, synced, renamed, and its directory synced.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use box_protocol::ItemId;
use box_protocol::catalog::{CatalogItem, CatalogKind};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Version of the records.
///
/// An added field keeps the version. A change that an older program would misread increments it.
const VERSION: u32 = 1;

/// Longest record in bytes.
const RECORD_BYTES: u64 = 4 << 20;

/// Ends of the names of a record and of one that is being written.
const RECORD: &str = ".json";
const UNFINISHED: &str = ".new";

/// How long the lock of a killed process may outlive it.
///
/// A child that it was starting holds the lock from `fork` to `exec`.
const LOCK_LIMIT: Duration = Duration::from_secs(2);

/// Pause between two attempts to lock the store.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The record of an item.
#[derive(Serialize, Deserialize)]
struct Record<T> {
    version: u32,
    revision: u64,
    item: T,
}

/// A record that the opening found.
pub(crate) enum Loaded {
    /// An item, and the number of its record.
    Item(Box<CatalogItem>, u64),
    /// An item with an unreadable record.
    Damaged(ItemId),
}

/// The directory of the store.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Creates the directories and locks the store for this process.
    pub(crate) fn lock(&self) -> Result<File> {
        let create = |path: &Path| -> io::Result<()> {
            DirBuilder::new().recursive(true).mode(0o700).create(path)
        };
        let failed = Error::storage("create its directory");
        create(&self.0).map_err(&failed)?;
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false).mode(0o600);
        let lock = options
            .open(self.0.join("lock"))
            .map_err(Error::storage("open its lock"))?;
        let begun = Instant::now();
        loop {
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK) if begun.elapsed() < LOCK_LIMIT => thread::sleep(LOCK_PAUSE),
                Err(Errno::WOULDBLOCK) => return Err(Error::Locked),
                Err(error) => return Err(Error::storage("lock it")(error.into())),
            }
        }
        for kind in CatalogKind::ALL {
            create(&self.of(kind)).map_err(&failed)?;
        }
        sync(&self.0)?;
        Ok(lock)
    }

    fn of(&self, kind: CatalogKind) -> PathBuf {
        self.0.join(kind.as_str())
    }

    fn path(&self, kind: CatalogKind, id: &ItemId, end: &str) -> PathBuf {
        self.of(kind).join(format!("{id}{end}"))
    }

    /// Reads all records of a kind, and removes unfinished ones.
    pub(crate) fn load(&self, kind: CatalogKind) -> Result<Vec<Loaded>> {
        let failed = Error::storage("list its records");
        let mut loaded = Vec::new();
        for entry in fs::read_dir(self.of(kind)).map_err(&failed)? {
            let entry = entry.map_err(&failed)?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.strip_suffix(UNFINISHED).is_some_and(is_id) {
                fs::remove_file(entry.path()).map_err(Error::storage("remove a record"))?;
            }
            let Some(id) = name.strip_suffix(RECORD).filter(|id| is_id(id)) else {
                continue;
            };
            let Ok(id) = ItemId::new(id) else { continue };
            loaded.push(match read(&entry.path()) {
                Ok(record) if record.item.id == id && record.item.kind() == kind => {
                    Loaded::Item(Box::new(record.item), record.revision)
                }
                _ => Loaded::Damaged(id),
            });
        }
        Ok(loaded)
    }

    /// Replaces the record of an item.
    pub(crate) fn store(&self, item: &CatalogItem, revision: u64) -> Result<()> {
        let failed = Error::storage("write a record");
        let record = Record {
            version: VERSION,
            revision,
            item,
        };
        let text = serde_json::to_vec(&record).map_err(|error| failed(error.into()))?;
        if text.len() as u64 > RECORD_BYTES {
            let rule = format!("must not be longer than {RECORD_BYTES} bytes in all");
            return Err(box_protocol::Invalid::new("content", rule).into());
        }
        let kind = item.kind();
        let unfinished = self.path(kind, &item.id, UNFINISHED);
        let write = || -> io::Result<()> {
            let mut options = OpenOptions::new();
            let options = options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.open(&unfinished)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&unfinished, self.path(kind, &item.id, RECORD))
        };
        if let Err(error) = write() {
            let _ = fs::remove_file(&unfinished);
            return Err(failed(error));
        }
        sync(&self.of(kind))
    }

    /// Removes the record of an item, which may be gone.
    pub(crate) fn remove(&self, kind: CatalogKind, id: &ItemId) -> Result<()> {
        match fs::remove_file(self.path(kind, id, RECORD)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::storage("remove a record")(error))
            }
            _ => sync(&self.of(kind)),
        }
    }
}

/// Reads the readable records of a kind, without a lock. The store may be absent.
pub(crate) fn stored(path: &Path, kind: CatalogKind) -> Result<Vec<CatalogItem>> {
    let failed = Error::storage("list its records");
    let entries = match fs::read_dir(path.join(kind.as_str())) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(&failed)?,
    };
    let mut items = Vec::new();
    for entry in entries {
        let entry = entry.map_err(&failed)?;
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| name.ends_with(RECORD))
            && let Ok(record) = read(&entry.path())
        {
            items.push(record.item);
        }
    }
    Ok(items)
}

/// Whether a text is an id that this store has generated.
fn is_id(text: &str) -> bool {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == 32 && text.bytes().all(is_hex)
}

fn read(path: &Path) -> io::Result<Record<CatalogItem>> {
    let mut text = Vec::new();
    let file = File::open(path)?;
    file.take(RECORD_BYTES + 1).read_to_end(&mut text)?;
    let record: Record<CatalogItem> = serde_json::from_slice(&text)?;
    if record.version > VERSION {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(record)
}

/// Syncs a directory, so that the names in it survive a crash of the machine.
fn sync(directory: &Path) -> Result<()> {
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(Error::storage("sync its directory"))
}
