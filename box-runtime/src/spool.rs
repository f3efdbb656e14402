//! Memory shared with an agent, for output that is too much for messages: this end reads.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use box_protocol::actions::{SPOOL_RING, StreamName};

/// A slot that an agent was handed. What is in it is as trustworthy as what the agent says.
#[derive(Debug)]
pub struct Spool(File);

impl Spool {
    /// The slot in this file, which must have its full length and keep it: `SPOOL_BYTES`.
    pub fn new(file: File) -> Self {
        Self(file)
    }

    /// Reads a piece of a stream. One that goes over the end of its ring is refused, as no agent means that.
    pub fn read(&self, stream: StreamName, offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
        let at = offset % SPOOL_RING;
        if bytes > SPOOL_RING - at {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let ring = match stream {
            StreamName::Stdout => 0,
            StreamName::Stderr => SPOOL_RING,
        };
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        let mut piece = vec![0; length];
        self.0.read_exact_at(&mut piece, ring + at)?;
        Ok(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read_where_they_are_and_never_over_the_end() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * SPOOL_RING).unwrap();
        file.write_all_at(b"out", 5).unwrap();
        file.write_all_at(b"err", 2 * SPOOL_RING - 3).unwrap();
        let spool = Spool::new(file);
        let read = |stream, offset, bytes| spool.read(stream, offset, bytes).ok();
        assert_eq!(read(StreamName::Stdout, SPOOL_RING + 5, 3).unwrap(), b"out");
        assert_eq!(read(StreamName::Stderr, SPOOL_RING - 3, 3).unwrap(), b"err");
        assert_eq!(read(StreamName::Stderr, SPOOL_RING - 3, 4), None);
        assert_eq!(read(StreamName::Stdout, 0, u64::MAX), None);
    }
}
