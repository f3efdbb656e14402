//! Marks of forks in progress: one file for each call.
//!
//! The records of the boxes name the mark of their call. The runtime removes the mark when all boxes
//! exist. A server that starts again ends the boxes whose mark is still there, so that a fork makes
//! all boxes or none, also across a kill.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use box_protocol::BoxError;
use uuid::Uuid;

/// The directory of the marks. Without one, boxes end with this process.
#[derive(Debug, Clone)]
pub(crate) struct ForkMarks(Option<PathBuf>);

/// The mark of a call.
#[derive(Debug, Clone)]
pub(super) struct ForkMark {
    marks: ForkMarks,
    pub(super) id: Uuid,
}

impl ForkMarks {
    pub(crate) fn new(directory: Option<PathBuf>) -> Self {
        Self(directory)
    }

    /// Marks a new call as in progress. Blocks.
    pub(super) fn begin(self) -> Result<ForkMark, BoxError> {
        let mark = ForkMark {
            marks: self,
            id: Uuid::now_v7(),
        };
        let Some(directory) = &mark.marks.0 else {
            return Ok(mark);
        };
        let create = || {
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(0o700).create(directory)?;
            let path = directory.join(mark.id.simple().to_string());
            let mut options = File::options();
            options.write(true).create_new(true).mode(0o600).open(path)
        };
        create().map_err(|error| failed(&error))?;
        Ok(mark)
    }

    /// Returns the calls that an earlier process has not completed. Blocks.
    pub(crate) fn incomplete(&self) -> io::Result<HashSet<Uuid>> {
        let Some(directory) = &self.0 else {
            return Ok(HashSet::new());
        };
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(HashSet::new()),
            entries => entries?,
        };
        let mut found = HashSet::new();
        for entry in entries {
            let name = entry?.file_name();
            found.extend(name.to_str().and_then(|name| Uuid::try_parse(name).ok()));
        }
        Ok(found)
    }

    /// Removes a mark, also for a machine that crashes later. Blocks.
    pub(crate) fn remove(&self, id: Uuid) -> io::Result<()> {
        let Some(directory) = &self.0 else {
            return Ok(());
        };
        fs::remove_file(directory.join(id.simple().to_string()))?;
        File::open(directory)?.sync_all()
    }
}

impl ForkMark {
    /// Records that all boxes exist, or that none is left. Blocks.
    pub(super) fn complete(self) -> Result<(), BoxError> {
        self.marks.remove(self.id).map_err(|error| failed(&error))
    }
}

fn failed(error: &io::Error) -> BoxError {
    let kind = error.kind();
    BoxError::unavailable(format!("the mark of the fork cannot be written: {kind}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_there_until_its_call_is_complete() {
        let directory = tempfile::tempdir().unwrap();
        let marks = ForkMarks::new(Some(directory.path().join("forks")));
        assert!(marks.incomplete().unwrap().is_empty());
        let (one, other) = (marks.clone().begin().unwrap(), marks.clone().begin());
        let other = other.unwrap().id;
        assert_eq!(marks.incomplete().unwrap(), HashSet::from([one.id, other]));
        one.clone().complete().unwrap();
        assert_eq!(marks.incomplete().unwrap(), HashSet::from([other]));
        assert!(one.complete().is_err(), "a mark that is gone");
        ForkMarks::new(None).begin().unwrap().complete().unwrap();
    }
}
