//! Replacing text in a file.

use std::io::Read as _;

use box_protocol::BoxError;
use box_protocol::actions::{FileReplaceParams, FileReplaceResult};

use super::draft::{Draft, write_at};
use super::error::About;
use super::ground::{Step, too_large};
use super::stat::{Change, etag};

/// The largest file in which text is replaced.
const FILE_BYTES: usize = 8 << 20;

/// `file.replace`.
pub(super) fn replace(
    step: &Step<'_>,
    params: &FileReplaceParams,
) -> Result<FileReplaceResult, BoxError> {
    let ground = step.ground;
    let path = ground.path(&params.path, params.expand)?;
    let (file, stat) = ground.open_file(&path)?;
    let old = bounded(file.into(), FILE_BYTES, &path)?
        .ok_or_else(|| too_large("the file", "replace_bytes", FILE_BYTES))?;
    let (new, count) = changed(&old, params)?;
    if count == 0 {
        return Ok(FileReplaceResult { count });
    }
    ground.room(new.len() as u64)?;
    let spot = ground.settle(&path)?;
    spot.writable(&path)?;
    step.wanted.check()?;
    let draft = Draft::new(spot, &path)?;
    write_at(&draft.file, &new, 0).about(&path)?;
    let change = Change::new(ground, None, None, None)?;
    change
        .apply(ground, &draft.file, stat.st_mode)
        .about(&path)?;
    // Only if it still is what was read: nobody's change is lost.
    draft.place(ground, Some(&etag(&stat)), true, &path)?;
    Ok(FileReplaceResult { count })
}

/// A whole file, unless it is larger than this, whatever it says of its size.
pub(super) fn bounded(
    file: std::fs::File,
    most: usize,
    path: &str,
) -> Result<Option<Vec<u8>>, BoxError> {
    let mut bytes = Vec::new();
    let limit = most as u64 + 1;
    file.take(limit).read_to_end(&mut bytes).about(path)?;
    Ok((bytes.len() <= most).then_some(bytes))
}

fn changed(old: &[u8], params: &FileReplaceParams) -> Result<(Vec<u8>, u64), BoxError> {
    if let Some(line) = params.insert_line {
        if !params.old.is_empty() {
            return Err(BoxError::validation("old: must be empty with insert_line"));
        }
        return Ok((inserted(old, line, params.new.as_bytes())?, 1));
    }
    if params.old.is_empty() {
        return Err(BoxError::validation("old: empty"));
    }
    let finder = regex::bytes::Regex::new(&regex::escape(&params.old))
        .map_err(|_| BoxError::validation("old: too long"))?;
    let most = if params.first_only { 1 } else { usize::MAX };
    let (mut new, mut at, mut count) = (Vec::with_capacity(old.len()), 0, 0);
    for found in finder.find_iter(old).take(most) {
        new.extend_from_slice(&old[at..found.start()]);
        new.extend_from_slice(params.new.as_bytes());
        if new.len() > FILE_BYTES {
            return Err(too_large("the new file", "replace_bytes", FILE_BYTES));
        }
        at = found.end();
        count += 1;
    }
    new.extend_from_slice(&old[at..]);
    Ok((new, count))
}

/// With text after a line. It begins a line of its own, and ends one if another follows.
fn inserted(old: &[u8], line: u64, text: &[u8]) -> Result<Vec<u8>, BoxError> {
    let mut at = 0;
    for _ in 0..line {
        if at == old.len() {
            return Err(BoxError::validation("insert_line: after the last line"));
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
    use box_protocol::SessionId;

    use super::*;

    fn asked(
        old: &str,
        new: &str,
        first_only: bool,
        insert_line: Option<u64>,
    ) -> FileReplaceParams {
        FileReplaceParams {
            session_id: SessionId::new("s").unwrap(),
            user: None,
            expand: false,
            path: "/f".into(),
            old: old.into(),
            new: new.into(),
            first_only,
            insert_line,
        }
    }

    #[test]
    fn text_is_replaced_literally_or_inserted() {
        let text = b"a.b a.b axb\n";
        for (params, want, count) in [
            (asked("a.b", "$1", false, None), "$1 $1 axb\n", 2),
            (asked("a.b", "c", true, None), "c a.b axb\n", 1),
            (asked("none", "c", false, None), "a.b a.b axb\n", 0),
            (asked("", "top", false, Some(0)), "top\na.b a.b axb\n", 1),
            (asked("", "end", false, Some(1)), "a.b a.b axb\nend", 1),
        ] {
            let (new, changes) = changed(text, &params).unwrap();
            assert_eq!(
                (String::from_utf8(new).unwrap().as_str(), changes),
                (want, count)
            );
        }
        for wrong in [
            asked("", "x", false, None),
            asked("", "x", false, Some(2)),
            asked("old", "x", false, Some(0)),
        ] {
            assert!(changed(text, &wrong).is_err());
        }
        assert_eq!(inserted(b"a\nb", 2, b"c").unwrap(), b"a\nb\nc");
    }
}
