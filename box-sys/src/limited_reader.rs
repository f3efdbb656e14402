//! A reader that stops after a number of bytes, for the names in an archive.

use std::cell::Cell;
use std::io::{self, Read, Seek, SeekFrom};

/// Maximum bytes of the names, attributes and headers of one archive entry.
pub const ENTRY_NAMES_BYTES: u64 = 64 << 10;

/// Reads an archive, and limits the bytes that a library reads to find the next entry.
///
/// The library holds names and attributes in memory, and the archive states their size. The caller
/// sets the limit to [`ENTRY_NAMES_BYTES`] before each entry, and lifts it for the contents.
#[derive(Debug)]
pub struct LimitedReader<'a, R> {
    reader: R,
    room: &'a Cell<u64>,
}

impl<'a, R> LimitedReader<'a, R> {
    /// Reads as many bytes as `room` states, which each read lowers.
    pub fn new(reader: R, room: &'a Cell<u64>) -> Self {
        Self { reader, room }
    }
}

impl<R: Read> Read for LimitedReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = usize::try_from(self.room.get()).unwrap_or(usize::MAX);
        if room == 0 {
            return Err(io::Error::other("a name or attribute is too long"));
        }
        let max = buffer.len().min(room);
        let read = self.reader.read(&mut buffer[..max])?;
        self.room.set(self.room.get() - read as u64);
        Ok(read)
    }
}

impl<R: Seek> Seek for LimitedReader<'_, R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.reader.seek(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_stops_at_its_limit_and_continues_after_it_is_lifted() {
        let room = Cell::new(5);
        let mut reader = LimitedReader::new(&b"0123456789"[..], &room);
        let mut text = String::new();
        assert!(reader.read_to_string(&mut text).is_err());
        room.set(u64::MAX);
        reader.read_to_string(&mut text).unwrap();
        assert!(text.ends_with("56789"), "{text}");
    }
}
