//! Reading a file piece by piece, so that a slow reader blocks no thread.

use std::os::fd::OwnedFd;

use box_protocol::BoxError;
use box_protocol::actions::{FILE_PIECE, FilePart, FileReadParams, FileStatInfo};
use rustix::buffer::spare_capacity;

use super::Pieces;
use super::error::PathContext;
use super::guest_root::Step;
use super::stat::{created_at, info, size};

/// A file that is being read.
#[derive(Debug)]
pub(super) struct FileReader {
    file: OwnedFd,
    pub(super) info: FileStatInfo,
    at: u64,
    /// The offset to stop at.
    end: u64,
    lines: Option<Lines>,
}

/// The requested range of lines, and the number of the next line.
#[derive(Debug, Clone, Copy)]
struct Lines {
    next: u64,
    start: u64,
    end: u64,
}

impl FileReader {
    /// Opens the file.
    pub(super) fn open(step: &Step<'_>, params: &FileReadParams) -> Result<Self, BoxError> {
        let path = step.guest_root.path(&params.path, params.expand)?;
        let (file, stat) = step.guest_root.open_file(&path)?;
        let mut info = info(&step.guest_root.guest, path, &stat);
        info.created_at = created_at(&file, "");
        if params
            .if_match
            .as_ref()
            .is_some_and(|etag| *etag != info.etag)
        {
            return Err(BoxError::conflict(
                "if_match: etag mismatch; read the file again",
            ));
        }
        let mut reader = Self {
            file,
            info,
            at: 0,
            end: u64::MAX,
            lines: None,
        };
        match params.part {
            None => {}
            Some(FilePart::Bytes { offset, len }) => {
                if offset > size(&stat) {
                    return Err(BoxError::validation(
                        "range: starts after the end of the file",
                    ));
                }
                reader.at = offset;
                reader.end = len.map_or(u64::MAX, |len| offset.saturating_add(len));
            }
            Some(FilePart::Lines { start, end }) => {
                let end = end.unwrap_or(u64::MAX);
                if start == 0 || end < start {
                    return Err(BoxError::validation(
                        "lines: start must be at least 1 and end not before start",
                    ));
                }
                let next = 1;
                reader.lines = Some(Lines { next, start, end });
            }
        }
        Ok(reader)
    }
}

impl Pieces for FileReader {
    /// The data is empty if the piece contains no requested line.
    fn next(&mut self, _: &Step<'_>) -> Result<Option<(u64, Vec<u8>)>, BoxError> {
        let max = usize::try_from(FILE_PIECE.min(self.end - self.at)).unwrap_or(usize::MAX);
        if max == 0 {
            return Ok(None);
        }
        let mut piece = Vec::with_capacity(max);
        let read = rustix::io::retry_on_intr(|| {
            rustix::io::pread(&self.file, spare_capacity(&mut piece), self.at)
        })
        .with_path(&self.info.path)?;
        if read == 0 {
            return Ok(None);
        }
        // The buffer can have more capacity than requested, so the read can return more.
        let read = read.min(max);
        piece.truncate(read);
        let start = self.at;
        self.at += read as u64;
        let range = match &mut self.lines {
            None => 0..read,
            Some(lines) => {
                let range = lines.within(&piece);
                if lines.next > lines.end {
                    self.end = self.at;
                }
                range
            }
        };
        let offset = start + range.start as u64;
        Ok(Some((offset, bytes_of(piece, range))))
    }
}

fn bytes_of(mut piece: Vec<u8>, range: std::ops::Range<usize>) -> Vec<u8> {
    piece.truncate(range.end);
    piece.drain(..range.start);
    piece
}

impl Lines {
    /// The part of a piece that belongs to the requested lines.
    fn within(&mut self, piece: &[u8]) -> std::ops::Range<usize> {
        let (mut from, mut at) = (None, 0);
        while at < piece.len() && self.next <= self.end {
            if self.next >= self.start {
                from.get_or_insert(at);
            }
            match piece[at..].iter().position(|byte| *byte == b'\n') {
                Some(length) => {
                    at += length + 1;
                    self.next += 1;
                }
                None => at = piece.len(),
            }
        }
        from.unwrap_or(at)..at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_for_every_piece_size() {
        let text = b"one\ntwo\n\nfour\nfive";
        for (start, end, want) in [
            (1, 1, "one\n"),
            (2, 3, "two\n\n"),
            (4, u64::MAX, "four\nfive"),
            (5, 9, "five"),
            (6, 9, ""),
        ] {
            for cut in 1..=text.len() {
                let mut lines = Lines {
                    next: 1,
                    start,
                    end,
                };
                let mut got = Vec::new();
                for piece in text.chunks(cut) {
                    got.extend_from_slice(&piece[lines.within(piece)]);
                }
                assert_eq!(
                    String::from_utf8(got).unwrap(),
                    want,
                    "{start}-{end} by {cut}"
                );
            }
        }
    }
}
