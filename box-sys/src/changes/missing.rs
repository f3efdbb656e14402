//! Finds selected paths that do not exist, which are mistakes of the caller.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::Views;
use crate::snapshot::open_below;

impl Views<'_> {
    /// The first selected path that no layer has.
    ///
    /// The mark of a deleted file counts, so that its apply can be repeated. Paths below a file, a
    /// link or a mark are not looked for.
    pub(crate) fn missing(&self) -> Option<&Path> {
        let mut paths = self.selection.paths.iter().map(PathBuf::as_path);
        paths.find(|path| !self.is_known(path))
    }

    fn is_known(&self, path: &Path) -> bool {
        let (hidden, made) = (&self.comparison.hidden, &self.comparison.made);
        if path.as_os_str().is_empty()
            || hidden.iter().any(|hidden| path.starts_with(hidden))
            || made.iter().any(|made| made == path)
        {
            return true;
        }
        let mut parts = self.parts.iter();
        parts.any(|part| has(&part.directory, path))
            || self.workspace.is_some_and(|(at, directory)| {
                let inner = path.strip_prefix(at);
                inner.is_ok_and(|inner| inner.as_os_str().is_empty() || has(directory, inner))
            })
    }
}

fn has(directory: &OwnedFd, path: &Path) -> bool {
    match open_below(directory, path, OFlags::PATH) {
        Ok(_) => true,
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}
