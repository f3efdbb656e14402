//! The record of a layer: written beside its place, synced and renamed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::backend::{LayerFiles, LayerKind};

/// Version of the records.
///
/// An added field keeps the version. A change that an older program would misread increments it.
const VERSION: u32 = 1;

/// Longest record in bytes.
const RECORD_BYTES: u64 = 64 << 10;

/// Names of a record and of one that is being written.
const RECORD: &str = "layer.json";
const UNFINISHED: &str = "layer.new";

/// The properties of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LayerRecord {
    version: u32,
    #[serde(flatten)]
    pub(crate) files: LayerFiles,
    /// The boot of the machine in which the files were copied, until they are on disk.
    ///
    /// After a later boot, files may be missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) unsynced_since: Option<Uuid>,
}

impl Default for LayerRecord {
    fn default() -> Self {
        Self::new(LayerFiles {
            kind: LayerKind::Directory,
            bytes: 0,
            entries: 0,
        })
    }
}

impl LayerRecord {
    pub(crate) fn new(files: LayerFiles) -> Self {
        Self {
            version: VERSION,
            files,
            unsynced_since: None,
        }
    }

    /// The record of a layer whose files are not on disk yet.
    pub(super) fn unsynced(files: LayerFiles) -> io::Result<Self> {
        Ok(Self {
            unsynced_since: Some(boot()?),
            ..Self::new(files)
        })
    }

    /// Whether the machine was restarted before the files were on disk.
    pub(super) fn is_incomplete(&self) -> bool {
        let since = self.unsynced_since;
        since.is_some_and(|since| boot().map_or(true, |boot| boot != since))
    }

    /// Reads the record in the directory of a layer.
    pub(super) fn read(directory: &Path) -> io::Result<Self> {
        let mut text = Vec::new();
        let file = File::open(directory.join(RECORD))?;
        file.take(RECORD_BYTES).read_to_end(&mut text)?;
        let record: Self = serde_json::from_slice(&text)?;
        if record.version > VERSION {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(record)
    }

    /// Writes the record. That of files on disk survives a crash of the machine.
    pub(super) fn write(&self, directory: &Path) -> io::Result<()> {
        let unfinished = directory.join(UNFINISHED);
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&unfinished)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        let is_synced = self.unsynced_since.is_none();
        if is_synced {
            file.sync_all()?;
        }
        fs::rename(&unfinished, directory.join(RECORD))?;
        if is_synced {
            sync(directory)?;
        }
        Ok(())
    }

    /// Removes the record, which may be absent.
    pub(super) fn remove(directory: &Path) {
        let _ = fs::remove_file(directory.join(RECORD));
        let _ = sync(directory);
    }
}

/// Identifies the time since the start of the machine.
fn boot() -> io::Result<Uuid> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Uuid::try_parse(text.trim()).map_err(io::Error::other)
}

/// Syncs a directory, so that the names in it survive a crash of the machine.
pub(super) fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
