//! Finds since when a box has had its own versions of files (`snapshot/version_times.rs`).

use rustix::fs::{FileType, OFlags};

use super::compare::{Level, Opened, Part, Views};
use super::open_dir;
use crate::error::{At, Result};
use crate::snapshot::{VersionTimes, open_below};

/// How a walk finds the times of the box's versions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    pub(crate) made: VersionTimes,
    /// For files whose time is unknown.
    pub(crate) fallback: i64,
}

impl Views<'_> {
    /// The time before which the box had no private files.
    pub(super) fn made_at_top(&self, parts: &[Part]) -> Result<i64> {
        let Some(Times { made, fallback }) = self.times else {
            return Ok(0);
        };
        let mut earliest = i64::MAX;
        for part in parts.iter().filter(|part| part.in_new && !part.in_old) {
            let directory = open_dir(&part.directory, b"").at("open a directory of the box")?;
            let made_at = made.at_top(&directory, part.is_copy).unwrap_or(fallback);
            earliest = earliest.min(made_at);
        }
        Ok(if earliest == i64::MAX {
            fallback
        } else {
            earliest
        })
    }

    /// When the box made its own version under a name, or an earlier time.
    ///
    /// All layers count: since the lowest one, the guest has not seen the file of the host. A discard
    /// ends that.
    pub(super) fn made_at(&self, level: &Level, opened: &Opened<'_>) -> i64 {
        let Some(Times { made, .. }) = self.times.filter(|_| !level.hides) else {
            return level.made_at;
        };
        let mut earliest = None::<i64>;
        for (part, stat) in level.parts.iter().zip(&opened.stats) {
            let Some(stat) = stat.filter(|_| part.in_new && !part.in_old) else {
                continue;
            };
            let flags = match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => Some(OFlags::NONBLOCK),
                FileType::Directory => Some(OFlags::DIRECTORY),
                // Links and marks have no attributes, and the kernel shares marks.
                _ => None,
            };
            let file = flags.and_then(|flags| {
                open_below(&part.directory, opened.name, OFlags::RDONLY | flags).ok()
            });
            let taken = file.as_ref().and_then(|file| made.taken(file));
            let made_at = taken.or_else(|| file.and_then(|file| made.at(&file)));
            let made_at = made_at.unwrap_or(level.made_at);
            earliest = Some(earliest.map_or(made_at, |earliest| earliest.min(made_at)));
            if taken.is_some() {
                break;
            }
        }
        earliest.unwrap_or(level.made_at)
    }
}
