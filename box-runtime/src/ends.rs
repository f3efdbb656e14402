//! Why boxes ended that were not deleted on request, so that a caller who makes one of the same id learns that it is another.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::EarlierBox;
use box_protocol::{SessionId, UnixMs};
use serde::{Deserialize, Serialize};

use crate::card::Card;

/// Ends that are remembered, of all boxes together. The oldest go first.
const REMEMBERED: usize = 1024;

/// Bytes of the file from which on it is written anew, without what is forgotten.
const FILE_BYTES: u64 = 1 << 20;

/// Longer reasons are cut.
const WHY: usize = 256;

/// The ends, in memory and, if there is a state directory, in a file of it.
pub(crate) struct Ends {
    all: Mutex<VecDeque<End>>,
    file: Option<PathBuf>,
}

#[derive(Serialize, Deserialize)]
struct End {
    owner: Arc<str>,
    session_id: SessionId,
    at: UnixMs,
    /// Nothing if the box was deleted on request after all.
    why: Option<String>,
}

impl End {
    fn is_of(&self, owner: &str, session_id: &SessionId) -> bool {
        *self.owner == *owner && self.session_id == *session_id
    }
}

impl Ends {
    /// What an earlier process remembered, if its file can be read.
    pub(crate) fn new(file: Option<PathBuf>) -> Self {
        let mut all = VecDeque::new();
        let text = file.as_ref().and_then(|file| std::fs::read(file).ok());
        // The last line may have been cut by a crash.
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

    /// Every change is one push or pop, so a poisoned lock still holds sound ends.
    fn all(&self) -> MutexGuard<'_, VecDeque<End>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A box ended for this reason.
    pub(crate) fn ended(&self, card: &Card, why: &str) {
        let cut = why.floor_char_boundary(WHY);
        self.change(card, Some(why[..cut].to_owned()));
    }

    /// A box was deleted on request: its caller knows.
    pub(crate) fn deleted(&self, card: &Card) {
        if self.earlier(card).is_some() {
            self.change(card, None);
        }
    }

    fn change(&self, card: &Card, why: Option<String>) {
        let end = End {
            owner: Arc::clone(&card.owner),
            session_id: card.spec.session_id.clone(),
            at: UnixMs::now(),
            why,
        };
        let mut all = self.all();
        // Memory has it in any case; a file that cannot be written costs what is known after a restart.
        if matches!(self.append(&end), Ok(length) if length > FILE_BYTES) {
            self.rewrite(&all);
        }
        put(&mut all, end);
    }

    /// How the last box ended that this owner had under this id.
    pub(crate) fn earlier(&self, card: &Card) -> Option<EarlierBox> {
        let id = &card.spec.session_id;
        let all = self.all();
        let end = all.iter().rev().find(|end| end.is_of(&card.owner, id))?;
        Some(EarlierBox {
            ended_at: end.at,
            why: end.why.clone()?,
        })
    }

    /// The length of the file afterwards.
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
    all.retain(|old| !old.is_of(&end.owner, &end.session_id));
    if end.why.is_none() {
        return;
    }
    if all.len() == REMEMBERED {
        all.pop_front();
    }
    all.push_back(end);
}

#[cfg(test)]
mod tests {
    use box_protocol::SpecDraft;

    use super::*;

    fn card(owner: &str, session: &str) -> Card {
        Card::new(owner.into(), &SpecDraft::new(session).build().unwrap())
    }

    #[test]
    fn the_last_reason_is_remembered_for_its_owner_until_a_delete() {
        let ends = Ends::new(None);
        let (hers, his) = (card("alice", "a"), card("bob", "a"));
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
        for number in 0..REMEMBERED + 10 {
            ends.ended(&card("me", &format!("b{number}")), "idle");
        }
        assert_eq!(ends.all().len(), REMEMBERED);
        assert_eq!(ends.earlier(&card("me", "b9")), None);
        assert!(ends.earlier(&card("me", "b10")).is_some());
    }

    #[test]
    fn another_process_remembers_what_is_whole_in_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("ends");
        let first = Ends::new(Some(file.clone()));
        first.ended(&card("me", "kept"), "idle");
        first.ended(&card("me", "gone"), "idle");
        first.deleted(&card("me", "gone"));
        File::options()
            .append(true)
            .open(&file)
            .unwrap()
            .write_all(br#"{"owner":"me","session_id":"cut"#)
            .unwrap();
        let second = Ends::new(Some(file.clone()));
        assert_eq!(second.earlier(&card("me", "kept")).unwrap().why, "idle");
        assert_eq!(second.earlier(&card("me", "gone")), None);
        // What was cut does not spoil what follows.
        second.ended(&card("me", "next"), "its time is over");
        let third = Ends::new(Some(file.clone()));
        let next = third.earlier(&card("me", "next")).unwrap();
        assert_eq!(next.why, "its time is over");
        assert_eq!(std::fs::read_to_string(&file).unwrap().lines().count(), 2);
    }
}
