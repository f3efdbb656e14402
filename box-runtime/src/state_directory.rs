//! The directory of a runtime's own files: layers, records of boxes without a sandbox, commands of stopped boxes.

use std::path::{Path, PathBuf};

use uuid::Uuid;

/// Parent of the directory of a runtime without a state directory. `/tmp` is often in memory.
const TEMPORARY: &str = "/var/tmp";

/// The directory of a runtime's own files.
#[derive(Debug)]
pub(crate) struct StateDirectory {
    path: PathBuf,
    /// Whether the directory ends with this process.
    is_temporary: bool,
}

impl StateDirectory {
    /// This directory, or a temporary one. The runtime creates it at the first use.
    pub(crate) fn new(path: Option<PathBuf>) -> Self {
        let is_temporary = path.is_none();
        // The backend needs a path without links.
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let path = match path {
            Some(path) => real(&path),
            None => real(Path::new(TEMPORARY)).join(format!("boxd-{}", Uuid::now_v7().simple())),
        };
        Self { path, is_temporary }
    }

    /// The directory of layers.
    pub(crate) fn layers(&self) -> PathBuf {
        self.path.join("layers")
    }

    /// The directory of the records of boxes without a sandbox, if they outlive this process.
    pub(crate) fn stopped(&self) -> Option<PathBuf> {
        (!self.is_temporary).then(|| self.path.join("stopped"))
    }

    /// The directory of the marks of forks in progress, if boxes can outlive this process.
    pub(crate) fn forks(&self) -> Option<PathBuf> {
        (!self.is_temporary).then(|| self.path.join("forks"))
    }

    fn histories(&self) -> PathBuf {
        self.path.join("history")
    }

    /// A directory for the commands of a box that stops for the first time.
    pub(crate) fn new_history(&self) -> PathBuf {
        let id = Uuid::now_v7().simple().to_string();
        self.histories().join(id)
    }

    /// The directory of the commands of a stopped box, if this is the name of one.
    pub(crate) fn history(&self, name: &str) -> Option<PathBuf> {
        let id = Uuid::try_parse(name).ok()?;
        Some(self.histories().join(id.simple().to_string()))
    }

    /// Removes the commands of boxes that no longer exist. Blocks.
    pub(crate) fn retain_histories(&self, known: &[String]) {
        let Ok(entries) = std::fs::read_dir(self.histories()) else {
            return;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            if name
                .to_str()
                .is_none_or(|name| !known.iter().any(|known| known == name))
            {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }
}

impl Drop for StateDirectory {
    fn drop(&mut self) {
        if self.is_temporary && self.path.exists() {
            let _ = crate::layers::remove_tree(&self.path);
        }
    }
}
