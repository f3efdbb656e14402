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
const REMEMBERED: usize = 1024;

/// Maximum number of ends of one owner, so that others keep theirs.
const OF_OWNER: usize = 128;

/// File size above which the runtime rewrites the file without dropped ends.
const FILE_BYTES: u64 = 1 << 20;

/// Maximum length of a reason.
const WHY: usize = 256;

/// The ends, in memory and optionally in a file of the state directory.
pub(crate) struct Ends {
    all: Mutex<VecDeque<End>>,
    file: Option<PathBuf>,
}

#[derive(Serialize, Deserialize)]
struct End {
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

impl End {
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

impl Ends {
    /// Loads the ends of an earlier process, if the file can be read.
    pub(crate) fn new(file: Option<PathBuf>) -> Self {
        let mut all = VecDeque::new();
        let text = file.as_ref().and_then(|file| std::fs::read(file).ok());
        // A crash may have cut the last line.
        for line in text.unwrap_or_default().split(|byte| *byte == b'\n') {
            if let Ok(end) = serde_json::from_slice(line) {
                put(&mut all, end);
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
    fn all(&self) -> MutexGuard<'_, VecDeque<End>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a box ended for this reason.
    pub(crate) fn ended(&self, entry: &BoxEntry, why: &str) {
        let cut = why.floor_char_boundary(WHY);
        self.change(entry, Some(why[..cut].to_owned()));
    }

    /// Records a deletion on request, which replaces the end of an earlier box.
    pub(crate) fn deleted(&self, entry: &BoxEntry) {
        if self.earlier(entry).is_some() {
            self.change(entry, None);
        }
    }

    /// Stores the error that later calls for an ended box get.
    pub(crate) fn gone(&self, entry: &BoxEntry) {
        let error = entry.access.why_shut();
        let mut all = self.all();
        let id = &entry.spec.box_id;
        match all.iter_mut().find(|end| end.is_of(&entry.owner, id)) {
            Some(end) => end.error = error,
            None if error.is_some() => {
                let end = End::now(entry, None);
                put(&mut all, End { error, ..end });
            }
            None => {}
        }
    }

    fn change(&self, entry: &BoxEntry, why: Option<String>) {
        let end = End::now(entry, why);
        let mut all = self.all();
        // Memory holds the end in any case. If the write fails, it is only lost after a restart.
        if matches!(self.append(&end), Ok(length) if length > FILE_BYTES) {
            self.rewrite(&all);
        }
        put(&mut all, end);
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
        let did = why.strip_prefix(&format!("box {id} "));
        let message = format!("{message}: it {}", did.unwrap_or(why));
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
    fn append(&self, end: &End) -> io::Result<u64> {
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

    fn rewrite(&self, all: &VecDeque<End>) {
        let Some(path) = &self.file else {
            return;
        };
        let write = || -> io::Result<()> {
            let fresh = path.with_extension("new");
            let mut options = File::options();
            let options = options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = io::BufWriter::new(options.open(&fresh)?);
            for end in all.iter().filter(|end| end.why.is_some()) {
                serde_json::to_writer(&mut file, end)?;
                file.write_all(b"\n")?;
            }
            file.flush()?;
            std::fs::rename(fresh, path)
        };
        if path.exists()
            && let Err(error) = write()
        {
            tracing::warn!(kind = %error.kind(), "why boxes ended is not kept");
        }
    }
}

fn put(all: &mut VecDeque<End>, end: End) {
    all.retain(|old| !old.is_of(&end.owner, &end.box_id));
    if end.why.is_none() && end.error.is_none() {
        return;
    }
    let of_owner = |old: &End| old.owner == end.owner;
    if all.iter().filter(|old| of_owner(old)).count() == OF_OWNER {
        let oldest = all.iter().position(of_owner);
        oldest.map(|oldest| all.remove(oldest));
    } else if all.len() == REMEMBERED {
        all.pop_front();
    }
    all.push_back(end);
}

#[cfg(test)]
mod tests {
    use box_protocol::SpecDraft;
    use box_protocol::error::with_end;

    use super::*;

    fn entry(owner: &str, session: &str) -> BoxEntry {
        BoxEntry::new(owner.into(), &SpecDraft::new(session).build().unwrap())
    }

    #[test]
    fn the_last_reason_is_remembered_for_its_owner_until_a_delete() {
        let ends = Ends::new(None);
        let (hers, his) = (entry("alice", "a"), entry("bob", "a"));
        assert_eq!(ends.earlier(&hers), None);
        ends.ended(&hers, "first");
        ends.ended(&hers, "second");
        assert_eq!(ends.earlier(&hers).unwrap().why, "second");
        assert_eq!(ends.earlier(&his), None, "an id is its owner's");
        ends.deleted(&hers);
        assert_eq!(ends.earlier(&hers), None);
    }

    #[test]
    fn as_many_are_remembered_as_there_is_room_for() {
        let ends = Ends::new(None);
        ends.ended(&entry("other", "b"), "idle");
        for number in 0..OF_OWNER + 10 {
            ends.ended(&entry("me", &format!("b{number}")), "idle");
        }
        assert_eq!(ends.all().len(), OF_OWNER + 1);
        assert_eq!(ends.earlier(&entry("me", "b9")), None);
        assert!(ends.earlier(&entry("me", "b10")).is_some());
        assert!(ends.earlier(&entry("other", "b")).is_some(), "another's");
        for number in 0..REMEMBERED {
            ends.ended(&entry(&format!("o{number}"), "b"), "idle");
        }
        assert_eq!(ends.all().len(), REMEMBERED);
    }

    #[test]
    fn later_calls_get_why_their_box_ended_and_a_new_box_which_end_was_before() {
        let ends = Ends::new(None);
        let plain = |id: &str| format!("box {id} not found");
        let not_found = |id: &str| ends.not_found("me", &BoxId::new(id).unwrap());
        let ended = |id: &str, why: Ended, message: &str| {
            let entry = entry("me", id);
            entry
                .access
                .shut(with_end(BoxError::conflict(message), why));
            entry
        };
        let idle = ended("a", Ended::Idle, "box a expired: no call used it");
        ends.ended(&idle, "idle");
        ends.gone(&idle);
        let error = not_found("a");
        let detail: Detail = error.detail().unwrap();
        assert_eq!(detail.ended, Some(Ended::Idle));
        let want = "box a not found: it expired: no call used it";
        assert_eq!(error.message(), want);
        assert_eq!(ends.earlier(&entry("me", "a")).unwrap().why, "idle");
        let theirs = ends.not_found("other", &BoxId::new("a").unwrap());
        assert_eq!(theirs.message(), plain("a"));
        // The next box with this id is deleted, so later calls get that reason. A third box has no
        // earlier end.
        let deleted = ended("a", Ended::Deleted, "box a was deleted");
        ends.deleted(&deleted);
        ends.gone(&deleted);
        let detail: Detail = not_found("a").detail().unwrap();
        assert_eq!((detail.ended, detail.expired), (Some(Ended::Deleted), true));
        assert_eq!(not_found("a").message(), plain("a"));
        assert_eq!(ends.earlier(&entry("me", "a")), None);
        assert_eq!(not_found("never").message(), plain("never"));
    }

    #[test]
    fn another_process_remembers_what_is_whole_in_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("ends");
        let first = Ends::new(Some(file.clone()));
        first.ended(&entry("me", "kept"), "idle");
        first.ended(&entry("me", "gone"), "idle");
        first.deleted(&entry("me", "gone"));
        File::options()
            .append(true)
            .open(&file)
            .unwrap()
            .write_all(br#"{"owner":"me","box_id":"cut"#)
            .unwrap();
        let second = Ends::new(Some(file.clone()));
        assert_eq!(second.earlier(&entry("me", "kept")).unwrap().why, "idle");
        assert_eq!(second.earlier(&entry("me", "gone")), None);
        // A cut line does not affect the lines after it.
        second.ended(&entry("me", "next"), "its time is over");
        let third = Ends::new(Some(file.clone()));
        let next = third.earlier(&entry("me", "next")).unwrap();
        assert_eq!(next.why, "its time is over");
        assert_eq!(std::fs::read_to_string(&file).unwrap().lines().count(), 2);
    }
}
