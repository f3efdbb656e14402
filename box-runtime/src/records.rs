//! Records on disk of boxes without a sandbox, which survive a crash of the machine.
//!
//! A box with a sandbox has a record of its backend instead. If both exist, the box of the backend
//! counts if it lives.
//!
//! - The record of a stopped box names its layers. The runtime writes it before it removes the
//!   record of the backend.
//! - A box created with `keep_failed` has a record before it has started, once a caller has seen it,
//!   and after it has failed to start.
//!
//! The runtime removes the record after a start has written one of the backend.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use box_protocol::BoxError;
use uuid::Uuid;

/// The records of boxes without a sandbox. Clones share the directory.
///
/// Without a directory, such boxes end with this process.
#[derive(Debug, Clone, Default)]
pub(crate) struct BoxRecords(Option<Arc<PathBuf>>);

/// The place of the record of one box.
#[derive(Debug, Clone)]
pub(crate) struct RecordPlace {
    records: BoxRecords,
    id: Uuid,
}

impl BoxRecords {
    pub(crate) fn new(directory: Option<PathBuf>) -> Self {
        Self(directory.map(Arc::new))
    }

    /// The place of the record of a box with this internal id.
    pub(crate) fn place(&self, id: Uuid) -> RecordPlace {
        RecordPlace {
            records: self.clone(),
            id,
        }
    }

    /// Returns all records, with the internal ids that name them. Blocks.
    ///
    /// Removes those that an earlier process did not complete.
    pub(crate) fn list(&self) -> io::Result<Vec<(Uuid, String)>> {
        let Some(directory) = &self.0 else {
            return Ok(Vec::new());
        };
        for entry in fs::read_dir(&**directory).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|end| end == "new") {
                let _ = fs::remove_file(entry.path());
            }
        }
        list(directory)
    }
}

/// Reads all records of a directory, which may be absent.
pub(crate) fn list(directory: &Path) -> io::Result<Vec<(Uuid, String)>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let id = name.to_str().and_then(|name| name.strip_suffix(".json"));
        if let Some(id) = id.and_then(|id| Uuid::try_parse(id).ok()) {
            // A damaged record may contain anything.
            let record = fs::read(entry.path())?;
            found.push((id, String::from_utf8_lossy(&record).into_owned()));
        }
    }
    found.sort_by_key(|(id, _)| *id);
    Ok(found)
}

impl RecordPlace {
    pub(crate) fn id(&self) -> Uuid {
        self.id
    }

    fn path(&self, directory: &Path, end: &str) -> PathBuf {
        directory.join(format!("{}.{end}", self.id.simple()))
    }

    /// Writes the record, and returns when it is on disk. Blocks.
    pub(crate) fn write(&self, record: &str) -> Result<(), BoxError> {
        let Some(directory) = &self.records.0 else {
            return Ok(());
        };
        let write = || -> io::Result<()> {
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(0o700).create(&**directory)?;
            let unfinished = self.path(directory, "new");
            let mut options = OpenOptions::new();
            let options = options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.open(&unfinished)?;
            file.write_all(record.as_bytes())?;
            file.sync_all()?;
            fs::rename(&unfinished, self.path(directory, "json"))?;
            sync(directory)
        };
        write().map_err(|error| {
            let kind = error.kind();
            BoxError::unavailable(format!("the record of the box cannot be written: {kind}"))
        })
    }

    /// Removes the record, which may be absent, outside the threads of the engine.
    pub(crate) async fn remove_soon(self) {
        let _ = tokio::task::spawn_blocking(move || self.remove()).await;
    }

    /// Removes the record, which may be absent. Blocks.
    pub(crate) fn remove(&self) {
        if let Some(directory) = &self.records.0
            && fs::remove_file(self.path(directory, "json")).is_ok()
        {
            let _ = sync(directory);
        }
    }
}

/// Syncs a directory, so that the names in it survive a crash of the machine.
fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
