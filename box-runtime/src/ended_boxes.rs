//! Remembers why boxes ended.
//!
//! Later calls for such a box get the reason. A caller that creates a box with the same id learns
//! that it is a different box.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::EarlierBox;
use box_protocol::error::{Detail, Ended, Subject};
use box_protocol::{BoxError, BoxId, UnixMs};
use serde::{Deserialize, Serialize};

use crate::box_actor::entry::BoxEntry;

/// Maximum number of ends remembered. The runtime drops the oldest first.
const MAX_ENDS: usize = 1024;

/// Maximum number of ends of one owner, so that others keep theirs.
const PER_OWNER: usize = 128;

/// File size above which the runtime rewrites the file without dropped ends.
const FILE_BYTES: u64 = 1 << 20;

/// Maximum length of a reason.
const REASON_BYTES: usize = 256;

/// The ends, in memory and optionally in a file of the state directory.
pub(crate) struct EndedBoxes {
    all: Mutex<VecDeque<EndedBox>>,
    file: Option<PathBuf>,
}

#[derive(Serialize, Deserialize)]
struct EndedBox {
    owner: Arc<str>,
    box_id: BoxId,
    at: UnixMs,
    /// The reason, or `None` if the box was deleted on request.
    ///
    /// It is also `None` if the reason does not concern the caller of the next box.
    why: Option<String>,
    /// The error of calls that were pending at the end. Not stored in the file.
    #[serde(skip)]
    error: Option<BoxError>,
}

impl EndedBox {
    fn now(entry: &BoxEntry, why: Option<String>) -> Self {
        Self {
            owner: Arc::clone(&entry.owner),
            box_id: entry.spec.box_id.clone(),
            at: UnixMs::now(),
            why,
            error: None,
        }
    }

    fn is_of(&self, owner: &str, box_id: &BoxId) -> bool {
        *self.owner == *owner && self.box_id == *box_id
    }
}

impl EndedBoxes {
    /// Loads the ends of an earlier process, if the file can be read.
    pub(crate) fn new(file: Option<PathBuf>) -> Self {
        let mut all = VecDeque::new();
        let text = file.as_ref().and_then(|file| std::fs::read(file).ok());
        // A crash may have cut the last line.
        for line in text.unwrap_or_default().split(|byte| *byte == b'\n') {
            if let Ok(end) = serde_json::from_slice(line) {
                insert(&mut all, end);
            }
        }
        let ends = Self {
            all: Mutex::new(all),
            file,
        };
        ends.rewrite(&ends.all());
        ends
    }

    /// Every change is one push or pop, so the data of a poisoned lock is valid.
    fn all(&self) -> MutexGuard<'_, VecDeque<EndedBox>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a box ended for this reason.
    pub(crate) fn record(&self, entry: &BoxEntry, why: &str) {
        let cut = why.floor_char_boundary(REASON_BYTES);
        self.change(entry, Some(why[..cut].to_owned()));
    }

    /// Records a deletion on request, which replaces the end of an earlier box.
    pub(crate) fn record_deletion(&self, entry: &BoxEntry) {
        if self.earlier(entry).is_some() {
            self.change(entry, None);
        }
    }

    /// Stores the error that later calls for an ended box get.
    pub(crate) fn set_error(&self, entry: &BoxEntry) {
        let error = entry.access.end_reason();
        let mut all = self.all();
        let id = &entry.spec.box_id;
        match all.iter_mut().find(|end| end.is_of(&entry.owner, id)) {
            Some(end) => end.error = error,
            None if error.is_some() => {
                let end = EndedBox::now(entry, None);
                insert(&mut all, EndedBox { error, ..end });
            }
            None => {}
        }
    }

    fn change(&self, entry: &BoxEntry, why: Option<String>) {
        let end = EndedBox::now(entry, why);
        let mut all = self.all();
        // Memory holds the end in any case. If the write fails, it is only lost after a restart.
        if matches!(self.append(&end), Ok(length) if length > FILE_BYTES) {
            self.rewrite(&all);
        }
        insert(&mut all, end);
    }

    /// Returns the error for a missing box, with its end if the owner had such a box.
    pub(crate) fn not_found(&self, owner: &str, id: &BoxId) -> BoxError {
        let message = format!("box {id} not found");
        let detail = Detail::about(Subject::Box);
        let all = self.all();
        let end = all.iter().find(|end| end.is_of(owner, id));
        let Some(why) = end.and_then(|end| end.error.as_ref()) else {
            return BoxError::not_found(message).with_detail(&detail);
        };
        let ended = why.detail().and_then(|detail: Detail| detail.ended);
        let detail = Detail {
            expired: true,
            ended,
            ..detail
        };
        if ended == Some(Ended::Deleted) {
            return BoxError::not_found(message).with_detail(&detail);
        }
        let why = why.message();
        let message = match why.strip_prefix(&format!("box {id} ")) {
            Some(suffix) => format!("{message}: it {suffix}"),
            None => format!("{message}: {why}"),
        };
        BoxError::not_found(message).with_detail(&detail)
    }

    /// Returns how the owner's previous box with this id ended.
    pub(crate) fn earlier(&self, entry: &BoxEntry) -> Option<EarlierBox> {
        let id = &entry.spec.box_id;
        let all = self.all();
        let end = all.iter().find(|end| end.is_of(&entry.owner, id))?;
        Some(EarlierBox {
            ended_at: end.at,
            why: end.why.clone()?,
        })
    }

    /// Appends an end to the file and returns the file's new length.
    fn append(&self, end: &EndedBox) -> io::Result<u64> {
        let Some(path) = &self.file else {
            return Ok(0);
        };
        let mut options = File::options();
        let mut file = options.append(true).create(true).mode(0o600).open(path)?;
        let mut line = serde_json::to_vec(end)?;
        line.push(b'\n');
        file.write_all(&line)?;
        Ok(file.metadata()?.len())
    }

    fn rewrite(&self, all: &VecDeque<EndedBox>) {
        let Some(path) = &self.file else {
            return;
        };
        let write = || -> io::Result<()> {
            let temporary = path.with_extension("new");
            let mut options = File::options();
            let options = options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = io::BufWriter::new(options.open(&temporary)?);
            for end in all.iter().filter(|end| end.why.is_some()) {
                serde_json::to_writer(&mut file, end)?;
                file.write_all(b"\n")?;
            }
            file.flush()?;
            std::fs::rename(temporary, path)
        };
        if path.exists()
            && let Err(error) = write()
        {
            tracing::warn!(kind = %error.kind(), "cannot store why boxes ended");
        }
    }
}

fn insert(all: &mut VecDeque<EndedBox>, end: EndedBox) {
    all.retain(|old| !old.is_of(&end.owner, &end.box_id));
    if end.why.is_none() && end.error.is_none() {
        return;
    }
    let is_of_owner = |old: &EndedBox| old.owner == end.owner;
    if all.iter().filter(|old| is_of_owner(old)).count() == PER_OWNER {
        let oldest = all.iter().position(is_of_owner);
        oldest.map(|oldest| all.remove(oldest));
    } else if all.len() == MAX_ENDS {
        all.pop_front();
    }
    all.push_back(end);
}

#[cfg(test)]
mod tests {
    use box_protocol::SpecDraft;
    use box_protocol::error::with_end;

    use super::*;

    fn entry(owner: &str, box_id: &str) -> BoxEntry {
        BoxEntry::new(owner.into(), &SpecDraft::new(box_id).build().unwrap())
    }

    #[test]
    fn the_last_reason_of_an_owner_is_stored_until_a_delete() {
        let ends = EndedBoxes::new(None);
        let (hers, his) = (entry("alice", "a"), entry("bob", "a"));
        assert_eq!(ends.earlier(&hers), None);
        ends.record(&hers, "first");
        ends.record(&hers, "second");
        assert_eq!(ends.earlier(&hers).unwrap().why, "second");
        assert_eq!(ends.earlier(&his), None, "an id belongs to its owner");
        ends.record_deletion(&hers);
        assert_eq!(ends.earlier(&hers), None);
    }

    #[test]
    fn the_number_of_stored_ends_is_limited() {
        let ends = EndedBoxes::new(None);
        ends.record(&entry("other", "b"), "idle");
        for number in 0..PER_OWNER + 10 {
            ends.record(&entry("me", &format!("b{number}")), "idle");
        }
        assert_eq!(ends.all().len(), PER_OWNER + 1);
        assert_eq!(ends.earlier(&entry("me", "b9")), None);
        assert!(ends.earlier(&entry("me", "b10")).is_some());
        assert!(ends.earlier(&entry("other", "b")).is_some(), "another's");
        for number in 0..MAX_ENDS {
            ends.record(&entry(&format!("o{number}"), "b"), "idle");
        }
        assert_eq!(ends.all().len(), MAX_ENDS);
    }

    #[test]
    fn later_calls_get_the_end_reason_and_a_new_box_the_earlier_end() {
        let ends = EndedBoxes::new(None);
        let plain = |id: &str| format!("box {id} not found");
        let not_found = |id: &str| ends.not_found("me", &BoxId::new(id).unwrap());
        let ended = |id: &str, why: Ended, message: &str| {
            let entry = entry("me", id);
            entry
                .access
                .close(with_end(BoxError::conflict(message), why));
            entry
        };
        let idle = ended("a", Ended::Idle, "box a expired: no call used it");
        ends.record(&idle, "idle");
        ends.set_error(&idle);
        let error = not_found("a");
        let detail: Detail = error.detail().unwrap();
        assert_eq!(detail.ended, Some(Ended::Idle));
        let want = "box a not found: it expired: no call used it";
        assert_eq!(error.message(), want);
        assert_eq!(ends.earlier(&entry("me", "a")).unwrap().why, "idle");
        let theirs = ends.not_found("other", &BoxId::new("a").unwrap());
        assert_eq!(theirs.message(), plain("a"));
        let failed = ended(
            "f",
            Ended::Failed,
            "the server's disk has no room for the box",
        );
        ends.record(&failed, "failed");
        ends.set_error(&failed);
        let want = "box f not found: the server's disk has no room for the box";
        assert_eq!(not_found("f").message(), want);
        // The next box with this id is deleted, so later calls get that reason. A third box has no
        // earlier end.
        let deleted = ended("a", Ended::Deleted, "box a was deleted");
        ends.record_deletion(&deleted);
        ends.set_error(&deleted);
        let detail: Detail = not_found("a").detail().unwrap();
        assert_eq!((detail.ended, detail.expired), (Some(Ended::Deleted), true));
        assert_eq!(not_found("a").message(), plain("a"));
        assert_eq!(ends.earlier(&entry("me", "a")), None);
        assert_eq!(not_found("never").message(), plain("never"));
    }

    #[test]
    fn another_process_loads_the_complete_lines_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("ends");
        let first = EndedBoxes::new(Some(file.clone()));
        first.record(&entry("me", "kept"), "idle");
        first.record(&entry("me", "gone"), "idle");
        first.record_deletion(&entry("me", "gone"));
        File::options()
            .append(true)
            .open(&file)
            .unwrap()
            .write_all(br#"{"owner":"me","box_id":"cut"#)
            .unwrap();
        let second = EndedBoxes::new(Some(file.clone()));
        assert_eq!(second.earlier(&entry("me", "kept")).unwrap().why, "idle");
        assert_eq!(second.earlier(&entry("me", "gone")), None);
        // A cut line does not affect the lines after it.
        second.record(&entry("me", "next"), "its lifetime has expired");
        let third = EndedBoxes::new(Some(file.clone()));
        let next = third.earlier(&entry("me", "next")).unwrap();
        assert_eq!(next.why, "its lifetime has expired");
        assert_eq!(std::fs::read_to_string(&file).unwrap().lines().count(), 2);
    }
}
