//! Reading a file, a piece at a time: a slow reader holds no thread.

use std::os::fd::OwnedFd;

use box_protocol::BoxError;
use box_protocol::actions::{FILE_PIECE, FilePart, FileReadParams, FileStatInfo};
use rustix::buffer::spare_capacity;

use super::error::About;
use super::ground::Step;
use super::stat::{info, size};

/// A file that is being read.
#[derive(Debug)]
pub(super) struct Reading {
    file: OwnedFd,
    pub(super) info: FileStatInfo,
    at: u64,
    /// Where to stop, in bytes.
    end: u64,
    lines: Option<Lines>,
}

/// Which lines are wanted, and the number of the one that is next.
#[derive(Debug, Clone, Copy)]
struct Lines {
    next: u64,
    start: u64,
    end: u64,
}

impl Reading {
    /// Opens the file.
    pub(super) fn open(step: &Step<'_>, params: &FileReadParams) -> Result<Self, BoxError> {
        let path = step.ground.path(&params.path, params.expand)?;
        let (file, stat) = step.ground.open_file(&path)?;
        let info = info(&step.ground.guest, path, &stat);
        if params
            .if_match
            .as_ref()
            .is_some_and(|etag| *etag != info.etag)
        {
            return Err(BoxError::conflict("if_match: the file is another one"));
        }
        let mut reading = Self {
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
                    return Err(BoxError::validation("range: begins after the end"));
                }
                reading.at = offset;
                reading.end = len.map_or(u64::MAX, |len| offset.saturating_add(len));
            }
            Some(FilePart::Lines { start, end }) => {
                let end = end.unwrap_or(u64::MAX);
                if start == 0 || end < start {
                    return Err(BoxError::validation(
                        "lines: counted from 1, and not backwards",
                    ));
                }
                let next = 1;
                reading.lines = Some(Lines { next, start, end });
            }
        }
        Ok(reading)
    }

    /// The next piece and where it begins; none at the end. May give nothing of a piece that is not wanted, so `None` is the
    /// end.
    pub(super) fn next(&mut self) -> Result<Option<(u64, Vec<u8>)>, BoxError> {
        let most = usize::try_from(FILE_PIECE.min(self.end - self.at)).unwrap_or(usize::MAX);
        if most == 0 {
            return Ok(None);
        }
        let mut piece = Vec::with_capacity(most);
        let read = rustix::io::retry_on_intr(|| {
            rustix::io::pread(&self.file, spare_capacity(&mut piece), self.at)
        })
        .about(&self.info.path)?;
        if read == 0 {
            return Ok(None);
        }
        // More may have come than was asked for: a buffer may have more room than that.
        let read = read.min(most);
        piece.truncate(read);
        let begin = self.at;
        self.at += read as u64;
        let wanted = match &mut self.lines {
            None => 0..read,
            Some(lines) => {
                let wanted = lines.within(&piece);
                if lines.next > lines.end {
                    self.end = self.at;
                }
                wanted
            }
        };
        let offset = begin + wanted.start as u64;
        Ok(Some((offset, bytes_of(piece, wanted))))
    }
}

fn bytes_of(mut piece: Vec<u8>, wanted: std::ops::Range<usize>) -> Vec<u8> {
    piece.truncate(wanted.end);
    piece.drain(..wanted.start);
    piece
}

impl Lines {
    /// The part of a piece that belongs to wanted lines.
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
    fn lines_are_found_however_the_file_is_cut() {
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
