//! Files with holes: GNU's own format, and that of pax in version 1.0.

use std::io::BufRead;

use tar::{GnuExtSparseHeader, Header};

use super::pax::number;
use super::{Archive, BLOCK, Kind, bad};
use crate::error::{Error, Result};

/// Maximum number of segments, which are held in memory.
const SEGMENTS: u64 = 16_384;

/// Part of a file that the archive contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// A sparse file in an extended header.
#[derive(Debug)]
pub(super) struct PaxSparse {
    pub(super) size: u64,
    pub(super) name: Option<Vec<u8>>,
}

impl<R: BufRead> Archive<R> {
    /// Reads the segments of GNU's format: in the header, then in blocks of their own.
    pub(super) fn gnu_sparse(&mut self, header: &Header, stored: u64) -> Result<Kind> {
        let invalid = || bad("has an invalid sparse file");
        let gnu = header.as_gnu().ok_or_else(invalid)?;
        let mut segments = Vec::new();
        let mut add = |sparse: &tar::GnuSparseHeader| {
            if !sparse.is_empty() {
                let offset = sparse.offset().map_err(|_| invalid())?;
                let length = sparse.length().map_err(|_| invalid())?;
                segments.push(Segment { offset, length });
            }
            if segments.len() as u64 > SEGMENTS {
                return Err(Error::too_large("layer", "segments", SEGMENTS));
            }
            Ok(())
        };
        gnu.sparse.iter().try_for_each(&mut add)?;
        let mut more = gnu.is_extended();
        while more {
            let mut block = GnuExtSparseHeader::new();
            if !self.block(block.as_mut_bytes())? {
                return Err(invalid());
            }
            block.sparse().iter().try_for_each(&mut add)?;
            more = block.is_extended();
        }
        let size = gnu.real_size().map_err(|_| invalid())?;
        checked(segments, size, stored)
    }

    /// Reads the segments of pax 1.0: decimal lines before the contents.
    pub(super) fn pax_sparse(&mut self, size: u64) -> Result<Kind> {
        let stored = self.left;
        let count = self.line()?;
        if count > SEGMENTS {
            return Err(Error::too_large("layer", "segments", SEGMENTS));
        }
        let mut segments = Vec::new();
        for _ in 0..count {
            let (offset, length) = (self.line()?, self.line()?);
            segments.push(Segment { offset, length });
        }
        let used = stored - self.left;
        let padding = used.next_multiple_of(BLOCK as u64) - used;
        let rest = self.left.checked_sub(padding);
        let rest = rest.ok_or_else(|| bad("has an invalid sparse file"))?;
        self.skip(padding)?;
        self.left = rest;
        checked(segments, size, rest)
    }

    fn line(&mut self) -> Result<u64> {
        let mut digits = Vec::new();
        loop {
            let piece = self.contents().map_err(|e| Error::io("layer", &e))?;
            let byte = *piece
                .first()
                .ok_or_else(|| bad("has an invalid sparse file"))?;
            self.consume(1);
            if byte == b'\n' && !digits.is_empty() {
                return number(&digits);
            }
            digits.push(byte);
            if digits.len() > 20 {
                return Err(bad("has an invalid sparse file"));
            }
        }
    }
}

/// Checks that the segments follow each other and fill the stored bytes.
fn checked(segments: Vec<Segment>, size: u64, stored: u64) -> Result<Kind> {
    let mut end = 0_u64;
    let mut total = 0_u64;
    for segment in &segments {
        let after = segment.offset.checked_add(segment.length);
        match after {
            Some(after) if segment.offset >= end && after <= size => end = after,
            _ => return Err(bad("has a sparse file whose parts overlap")),
        }
        total += segment.length;
    }
    if total != stored || size > i64::MAX as u64 {
        return Err(bad("has a sparse file of two sizes"));
    }
    Ok(Kind::File(size, Some(segments)))
}
