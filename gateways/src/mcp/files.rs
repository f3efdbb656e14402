//! Tools for files: read, write and edit one.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use box_protocol::actions::{
    FileChunk, FileOutcome, FilePart, FileRead, FileReadParams, FileReplace, FileReplaceParams,
    FileStat, FileStatInfo, FileStatParams, FileWrite, FileWriteParams,
};
use box_protocol::{BoxError, BoxId, Code, Invalid};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::answer::{Answer, MAX_IMAGE_BYTES};
use super::errors::rename;
use super::follow::Progress;
use super::session::Session;
use crate::http::stream::{Step, StreamedCall};

/// The maximum length of the text in an answer.
const MAX_TEXT_BYTES: usize = 60_000;

/// The maximum length of a line in an answer.
const MAX_LINE_BYTES: usize = 2_000;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ReadFileArgs {
    /// File to read; a relative path begins at the working directory of the box.
    path: String,
    /// Box of the file; the default box if absent.
    r#box: Option<String>,
    /// First line to read, from 1.
    #[serde(default = "first_line")]
    offset: u64,
    /// Number of lines.
    #[serde(default = "default_lines")]
    limit: u64,
}

fn first_line() -> u64 {
    1
}

fn default_lines() -> u64 {
    2000
}

pub(super) async fn read_file(
    session: Session,
    args: ReadFileArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    let box_id = session.open(args.r#box.as_deref()).await?;
    let mut params = FileReadParams {
        expand: true,
        ..FileReadParams::new(box_id.clone(), args.path)
    };
    if is_image_name(&params.path) {
        let (bytes, stat) = read(&session, params.clone(), MAX_IMAGE_BYTES + 1).await?;
        // A model API refuses an image that is none, and the whole conversation with it.
        if let Some(kind) = image_kind(&bytes) {
            return image(&box_id, kind, &bytes, &stat);
        }
    }
    let start = args.offset.max(1);
    let lines = args.limit.max(1);
    params.part = Some(FilePart::Lines {
        start,
        // One line more than the answer has, to know whether it is the end.
        end: Some(start.saturating_add(lines)),
    });
    let (bytes, file) = read(&session, params, MAX_TEXT_BYTES + 1).await?;
    if bytes.contains(&0) {
        let rule = format!(
            "{:?} is a binary file of {} bytes; use run",
            file.path, file.size
        );
        return Err(Invalid::new("path", rule).into());
    }
    let (mut text, next) = numbered(&bytes, start, lines);
    let path = &file.path;
    // A write to a string cannot fail.
    let _ = match next {
        Some(next) => write!(text, "[{path}: offset {next} reads on; box {box_id}]"),
        None => write!(text, "[{path}: {} bytes; box {box_id}]", file.size),
    };
    // Clients that show data instead of the text would lose the numbers, and show the lines as JSON.
    Ok(Answer::text(text))
}

/// Returns at most this many lines with their numbers, and the number of the line that follows, if there is one.
fn numbered(bytes: &[u8], start: u64, lines: u64) -> (String, Option<u64>) {
    let is_cut = bytes.len() > MAX_TEXT_BYTES;
    let bytes = &bytes[..bytes.len().min(MAX_TEXT_BYTES)];
    let mut text = String::new();
    let mut number = start;
    let mut rest = bytes;
    while !rest.is_empty() {
        if number - start == lines {
            return (text, Some(number));
        }
        let end = memchr::memchr(b'\n', rest);
        // The last line may continue after the bytes that were read. It is shown only if it is the first.
        let continues = is_cut && end.is_none();
        if continues && number > start {
            return (text, Some(number));
        }
        let (line, after) = rest.split_at(end.map_or(rest.len(), |end| end + 1));
        rest = after;
        let line = String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(line));
        let line = line.strip_suffix('\r').unwrap_or(&line);
        let shown = &line[..line.floor_char_boundary(MAX_LINE_BYTES)];
        // A write to a string cannot fail.
        let _ = write!(text, "{number}\t{shown}");
        let more = line.len() - shown.len();
        if more > 0 {
            let least = if continues { "at least " } else { "" };
            let _ = write!(
                text,
                " [{least}{more} more bytes of this line; read them with run]"
            );
        }
        text.push('\n');
        number += 1;
    }
    (text, is_cut.then_some(number))
}

/// Returns whether a file has the name of an image.
fn is_image_name(path: &str) -> bool {
    let extension = path.rsplit_once('.').map(|(_, extension)| extension);
    let extension = extension.map(str::to_ascii_lowercase);
    matches!(
        extension.as_deref(),
        Some("png" | "jpg" | "jpeg" | "gif" | "webp")
    )
}

/// Returns the type of an image by its first bytes.
fn image_kind(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1A, b'\n', ..] => Some("image/png"),
        [0xFF, 0xD8, 0xFF, ..] => Some("image/jpeg"),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some("image/gif"),
        [
            b'R',
            b'I',
            b'F',
            b'F',
            _,
            _,
            _,
            _,
            b'W',
            b'E',
            b'B',
            b'P',
            ..,
        ] => Some("image/webp"),
        _ => None,
    }
}

fn image(
    box_id: &BoxId,
    kind: &str,
    bytes: &[u8],
    stat: &FileStatInfo,
) -> Result<Answer, BoxError> {
    if bytes.len() > MAX_IMAGE_BYTES {
        let message = format!(
            "path: an image of {} bytes, more than image_bytes {MAX_IMAGE_BYTES}; scale it down with run",
            stat.size
        );
        return Err(BoxError::new(Code::TooLarge, message));
    }
    let text = format!("[{}: {} bytes; box {box_id}]", stat.path, stat.size);
    let mut answer = Answer::text(text);
    answer.add_image(kind, STANDARD.encode(bytes));
    Ok(answer)
}

/// Reads at most this many bytes.
async fn read(
    session: &Session,
    params: FileReadParams,
    max_bytes: usize,
) -> Result<(Vec<u8>, FileStatInfo), BoxError> {
    let stat = session.target().forward::<FileRead>(&params).await?;
    let session = session.clone();
    let mut call = StreamedCall::<FileChunk, FileStatInfo>::new(|chunks| async move {
        let target = session.target();
        target.forward_streamed::<FileRead>(&params, chunks).await
    });
    let mut bytes = Vec::new();
    loop {
        match call.next().await {
            Step::Chunk(chunk) => {
                let room = max_bytes - bytes.len();
                bytes.extend_from_slice(&chunk.data[..chunk.data.len().min(room)]);
                if bytes.len() == max_bytes {
                    return Ok((bytes, stat));
                }
            }
            Step::End(ended) => return Ok((bytes, ended?)),
            Step::Idle => {}
        }
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct WriteFileArgs {
    /// File to write; missing directories are created.
    path: String,
    /// The whole content.
    content: String,
    /// Box of the file; the default box if absent.
    r#box: Option<String>,
}

/// A file that was written.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct WrittenAnswer {
    /// The box.
    r#box: String,
    /// The file.
    path: String,
    /// Size of the file in bytes.
    size: u64,
}

pub(super) async fn write_file(
    session: Session,
    args: WriteFileArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    let box_id = session.open(args.r#box.as_deref()).await?;
    let params = FileWriteParams {
        expand: true,
        parents: true,
        ..FileWriteParams::new(box_id.clone(), args.path, args.content.into_bytes())
    };
    let stat = session.target().forward::<FileWrite>(&params).await?;
    let data = WrittenAnswer {
        r#box: box_id.as_str().to_owned(),
        path: stat.path,
        size: stat.size,
    };
    let text = format!("{}: {} bytes written [box {box_id}]", data.path, data.size);
    Answer::new(text, &data)
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct EditFileArgs {
    /// File to change.
    path: String,
    /// Text to replace, with its white space; it must occur exactly once unless `all` is set.
    old: String,
    /// The replacement.
    new: String,
    /// Whether to replace all occurrences.
    #[serde(default)]
    all: bool,
    /// Box of the file; the default box if absent.
    r#box: Option<String>,
}

/// A file that was changed.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct EditedAnswer {
    /// The box.
    r#box: String,
    /// The file.
    path: String,
    /// Number of replaced occurrences.
    replaced: u64,
}

pub(super) async fn edit_file(
    session: Session,
    args: EditFileArgs,
    _: Progress,
) -> Result<Answer, BoxError> {
    if args.old.is_empty() {
        return Err(Invalid::new("old", "must not be empty; use write_file for a new file").into());
    }
    let box_id = session.open(args.r#box.as_deref()).await?;
    let params = FileReplaceParams {
        expand: true,
        expect: (!args.all).then_some(1),
        ..FileReplaceParams::new(box_id.clone(), args.path.clone(), args.old, args.new)
    };
    let target = session.target();
    let replaced = target.forward::<FileReplace>(&params).await;
    let replaced = replaced.map_err(|error| {
        let error = rename(error, &[("expect", "old")]);
        if error.code() != Code::Conflict {
            return error;
        }
        let remedy = "; read the file, and give more of its text in old, or set all";
        BoxError::conflict(format!("{}{remedy}", error.message()))
    })?;
    let replaced = replaced.count;
    if replaced == 0 {
        let rule = "does not occur in the file; read the file again";
        return Err(Invalid::new("old", rule).into());
    }
    let stat = FileStatParams {
        expand: true,
        ..FileStatParams::new(box_id.clone(), vec![args.path.clone()])
    };
    let stat = target.forward::<FileStat>(&stat).await?.paths;
    let data = EditedAnswer {
        r#box: box_id.as_str().to_owned(),
        path: match stat.into_values().next() {
            Some(FileOutcome::Stat(stat)) => stat.path,
            _ => args.path,
        },
        replaced,
    };
    let text = format!("{}: {replaced} replaced [box {box_id}]", data.path);
    Answer::new(text, &data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_file_is_known_and_a_cut_line_says_so() {
        let file = b"one\ntwo\r\nthree\n";
        let whole = "1\tone\n2\ttwo\n3\tthree\n";
        assert_eq!(numbered(file, 1, 3), (whole.to_owned(), None));
        assert_eq!(numbered(file, 1, 2).1, Some(3));
        assert_eq!(numbered(b"", 1, 2), (String::new(), None));
        let long = "x".repeat(MAX_LINE_BYTES + 7);
        let text = numbered(long.as_bytes(), 1, 1).0;
        assert!(text.contains("x [7 more bytes of this line"), "{text}");
        let huge = "y".repeat(MAX_TEXT_BYTES + 1);
        let (text, next) = numbered(huge.as_bytes(), 4, 9);
        assert!(text.contains("[at least 58000 more bytes"), "{text}");
        assert_eq!(next, Some(5));
        let both = format!("one\n{huge}");
        assert_eq!(
            numbered(both.as_bytes(), 1, 9),
            ("1\tone\n".to_owned(), Some(2))
        );
    }

    #[test]
    fn an_image_is_known_by_its_bytes() {
        assert_eq!(image_kind(b"\x89PNG\r\n\x1a\n...."), Some("image/png"));
        assert_eq!(image_kind(b"RIFF0000WEBPVP8 "), Some("image/webp"));
        assert_eq!(image_kind(b"hello"), None);
        assert_eq!(image_kind(b""), None);
    }
}
