//! Collects a page of the differences.

use rustix::fs::FileType;

use super::compare::{Entry, Found, Views, Walk};
use super::{Change, ChangePage, ChangedType, shown};
use crate::error::{Error, Result};

/// Most bytes of the paths of a page, so that it is one message.
const PAGE_BYTES: usize = 24 << 10;

/// Bytes of a difference beside its path.
const CHANGE_BYTES: usize = 96;

/// Lists at most `limit` differences after a position.
pub(crate) fn list(views: Views<'_>, after: Option<&str>, limit: usize) -> Result<ChangePage> {
    let after = after.map(decode).transpose()?;
    let mut page = ChangePage::default();
    let (mut bytes, mut last) = (0, Vec::new());
    views.walk(after.as_deref(), &mut |found| {
        // A path in JSON can have six bytes for one.
        bytes += CHANGE_BYTES + found.path.len();
        let is_full = page.changes.len() == limit.max(1) || bytes > PAGE_BYTES;
        if is_full && !page.changes.is_empty() {
            page.next = Some(encode(&last));
            return Ok(Walk::End);
        }
        last.clear();
        last.extend_from_slice(found.path);
        page.changes.push(change(found));
        Ok(Walk::Continue)
    })?;
    Ok(page)
}

fn change(found: &Found<'_>) -> Change {
    let entry = found.new.as_ref().or(found.old.as_ref());
    let kind = entry.map_or(FileType::Unknown, Entry::kind);
    let size = entry.map_or(0, |entry| u64::try_from(entry.stat.st_size).unwrap_or(0));
    Change {
        path: shown(found.path),
        kind: found.kind,
        file_type: ChangedType::of(kind),
        size: if kind == FileType::RegularFile {
            size
        } else {
            0
        },
    }
}

/// A position as text. Names need not be UTF-8.
fn encode(path: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(2 * path.len());
    for byte in path {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn decode(text: &str) -> Result<Vec<u8>> {
    let invalid = || Error::Invalid("cursor: not one of this box".into());
    let digits = text.as_bytes();
    if digits.is_empty() || !digits.len().is_multiple_of(2) {
        return Err(invalid());
    }
    let digit = |digit: u8| char::from(digit).to_digit(16);
    let byte = |pair: &[u8]| match pair {
        [high, low] => u8::try_from(digit(*high)? * 16 + digit(*low)?).ok(),
        _ => None,
    };
    let bytes: Option<Vec<u8>> = digits.chunks(2).map(byte).collect();
    bytes.ok_or_else(invalid)
}
