//! `file.replace`.

use std::io::Read as _;

use box_protocol::BoxError;
use box_protocol::actions::{FileReplaceParams, FileReplaceResult};
use box_protocol::error::{Detail, Subject};
use memchr::memmem::Finder;

use super::error::PathContext;
use super::guest_root::{Step, too_large};
use super::stat::{AttributeChange, etag};
use super::temp_file::{TempFile, write_at};

/// Maximum size of the file.
const FILE_BYTES: usize = 16 << 20;

/// `file.replace`.
pub(super) fn replace(
    step: &Step<'_>,
    params: &FileReplaceParams,
) -> Result<FileReplaceResult, BoxError> {
    let guest_root = step.guest_root;
    let path = guest_root.path(&params.path, params.expand)?;
    let (file, stat) = guest_root.open_file(&path)?;
    let old = read_bounded(file.into(), FILE_BYTES, &path)?
        .ok_or_else(|| too_large("the file", "replace_bytes", FILE_BYTES))?;
    let (new, count) = apply_change(&old, params)?;
    if count == 0 {
        return Ok(FileReplaceResult { count });
    }
    guest_root.check_size(new.len() as u64)?;
    let location = guest_root.resolve(&path)?;
    location.check_writable(&path)?;
    step.cancel.check()?;
    let temp_file = TempFile::new(location, &path)?;
    write_at(&temp_file.file, &new, 0).with_path(&path)?;
    let change = AttributeChange::new(guest_root, None, None, None)?;
    change
        .apply(guest_root, &temp_file.file, stat.st_mode)
        .with_path(&path)?;
    // Only if the file is unchanged, so that no concurrent change is lost.
    temp_file.install(guest_root, Some(&etag(&stat)), true, &path)?;
    Ok(FileReplaceResult { count })
}

/// Reads a whole file; `None` if it is larger than `max`.
///
/// The reported size is not trusted.
pub(super) fn read_bounded(
    file: std::fs::File,
    max: usize,
    path: &str,
) -> Result<Option<Vec<u8>>, BoxError> {
    let mut bytes = Vec::new();
    let limit = max as u64 + 1;
    file.take(limit).read_to_end(&mut bytes).with_path(path)?;
    Ok((bytes.len() <= max).then_some(bytes))
}

fn apply_change(old: &[u8], params: &FileReplaceParams) -> Result<(Vec<u8>, u64), BoxError> {
    if let Some(line) = params.insert_line {
        if !params.old.is_empty() {
            return Err(BoxError::validation("old: must be empty with insert_line"));
        }
        if params.expect.is_some() {
            return Err(BoxError::validation(
                "expect: not possible with insert_line",
            ));
        }
        return Ok((insert_after_line(old, line, params.new.as_bytes())?, 1));
    }
    if params.old.is_empty() {
        return Err(BoxError::validation(
            "old: must not be empty without insert_line",
        ));
    }
    // Linear in the length of the file, also for a long text.
    let finder = Finder::new(&params.old);
    let max = if params.first_only { 1 } else { usize::MAX };
    if let Some(expected) = params.expect {
        let found = finder.find_iter(old).count() as u64;
        if found != expected {
            return Err(wrong_count(expected, found));
        }
    }
    let (mut new, mut at, mut count) = (Vec::with_capacity(old.len()), 0, 0);
    for found in finder.find_iter(old).take(max) {
        new.extend_from_slice(&old[at..found]);
        new.extend_from_slice(params.new.as_bytes());
        if new.len() > FILE_BYTES {
            return Err(too_large("the new file", "replace_bytes", FILE_BYTES));
        }
        at = found + params.old.len();
        count += 1;
    }
    new.extend_from_slice(&old[at..]);
    Ok((new, count))
}

fn wrong_count(expected: u64, found: u64) -> BoxError {
    let message = format!("expect: the file has {found} occurrences of old, not {expected}");
    BoxError::conflict(message).with_detail(&Detail::of_field("expect").of(Subject::File))
}

/// Inserts text after a line.
///
/// The text starts on a new line, and gets a terminator if a line follows.
fn insert_after_line(old: &[u8], line: u64, text: &[u8]) -> Result<Vec<u8>, BoxError> {
    let mut at = 0;
    for _ in 0..line {
        if at == old.len() {
            return Err(BoxError::validation("insert_line: beyond the last line"));
        }
        let end = old[at..].iter().position(|byte| *byte == b'\n');
        at = end.map_or(old.len(), |end| at + end + 1);
    }
    let (before, after) = old.split_at(at);
    let mut new = before.to_vec();
    if !before.is_empty() && !before.ends_with(b"\n") {
        new.push(b'\n');
    }
    new.extend_from_slice(text);
    if !after.is_empty() && !text.ends_with(b"\n") {
        new.push(b'\n');
    }
    new.extend_from_slice(after);
    Ok(new)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use box_protocol::BoxId;

    use super::*;

    fn request(
        old: &str,
        new: &str,
        first_only: bool,
        insert_line: Option<u64>,
    ) -> FileReplaceParams {
        FileReplaceParams {
            first_only,
            insert_line,
            ..FileReplaceParams::new(BoxId::new("s").unwrap(), "/f", old, new)
        }
    }

    #[test]
    fn a_long_text_that_almost_occurs_everywhere_takes_no_quadratic_time() {
        let file = vec![b'a'; FILE_BYTES];
        let old = format!("{}b", "a".repeat(1 << 20));
        let began = Instant::now();
        let (new, count) = apply_change(&file, &request(&old, "c", false, None)).unwrap();
        assert_eq!((new.len(), count), (FILE_BYTES, 0));
        // The product of both lengths would take hours.
        assert!(began.elapsed() < Duration::from_mins(2));
    }

    #[test]
    fn text_is_replaced_literally_or_inserted() {
        let text = b"a.b a.b axb\n";
        for (params, want, count) in [
            (request("a.b", "$1", false, None), "$1 $1 axb\n", 2),
            (request("a.b", "c", true, None), "c a.b axb\n", 1),
            (request("none", "c", false, None), "a.b a.b axb\n", 0),
            (request("", "top", false, Some(0)), "top\na.b a.b axb\n", 1),
            (request("", "end", false, Some(1)), "a.b a.b axb\nend", 1),
        ] {
            let (new, changes) = apply_change(text, &params).unwrap();
            assert_eq!(
                (String::from_utf8(new).unwrap().as_str(), changes),
                (want, count)
            );
        }
        for invalid in [
            request("", "x", false, None),
            request("", "x", false, Some(2)),
            request("old", "x", false, Some(0)),
        ] {
            assert!(apply_change(text, &invalid).is_err());
        }
        assert_eq!(insert_after_line(b"a\nb", 2, b"c").unwrap(), b"a\nb\nc");
        for (old, expect, first_only, fits) in [
            ("a.b", 2, false, true),
            ("a.b", 2, true, true),
            ("a.b", 1, true, false),
            ("axb", 1, false, true),
            ("none", 1, false, false),
            ("none", 0, false, true),
        ] {
            let mut params = request(old, "c", first_only, None);
            params.expect = Some(expect);
            let changed = apply_change(text, &params);
            assert_eq!(changed.is_ok(), fits, "{old} {expect}");
        }
    }
}
