//! The first of a command's output, for an answer that holds it.

use box_protocol::PerStream;
use box_protocol::actions::{Collected, SPOOL_RING, StreamName};

use crate::log::Log;
use crate::slot::Lease;

/// Up to here a stream's output travels in the answer: less work on both ends than a look into the slot.
pub(crate) const INLINE: usize = 4096;

/// The most of each stream that is kept without a slot.
const FIRST_MAX: u64 = 1 << 20;

/// The first of both streams.
#[derive(Debug)]
pub(crate) struct Firsts {
    stdout: First,
    stderr: First,
    slot: Option<Lease>,
}

impl Firsts {
    pub(crate) fn new(bytes: u64, slot: Option<Lease>) -> Self {
        let first = || First::new(bytes, slot.is_some());
        Self {
            stdout: first(),
            stderr: first(),
            slot,
        }
    }

    pub(crate) fn take(&mut self, stream: StreamName, bytes: &[u8]) {
        let first = match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        };
        first.take(stream, bytes, self.slot.as_ref());
    }
}

/// The first of a stream: in memory while it is little, in the slot otherwise.
#[derive(Debug)]
struct First {
    bytes: Vec<u8>,
    spooled: u64,
    limit: u64,
    seen: u64,
}

impl First {
    fn new(limit: u64, has_slot: bool) -> Self {
        let most = if has_slot { SPOOL_RING } else { FIRST_MAX };
        Self {
            bytes: Vec::new(),
            spooled: 0,
            limit: limit.min(most),
            seen: 0,
        }
    }

    fn kept(&self) -> u64 {
        self.spooled + self.bytes.len() as u64
    }

    fn take(&mut self, stream: StreamName, piece: &[u8], slot: Option<&Lease>) {
        self.seen += piece.len() as u64;
        let room = usize::try_from(self.limit - self.kept()).unwrap_or(usize::MAX);
        let piece = &piece[..piece.len().min(room)];
        let Some(slot) = slot else {
            return self.bytes.extend_from_slice(piece);
        };
        if self.spooled == 0 && self.bytes.len() + piece.len() <= INLINE {
            return self.bytes.extend_from_slice(piece);
        }
        for part in [&*std::mem::take(&mut self.bytes), piece] {
            if slot.write(stream, self.spooled, part).is_err() {
                // No memory left for it. What is there stays; the rest is counted.
                self.limit = self.spooled;
                return;
            }
            self.spooled += part.len() as u64;
        }
    }
}

/// What the output came to.
pub(crate) struct Sum {
    pub(crate) size: PerStream,
    pub(crate) dropped: PerStream,
    pub(crate) spooled: PerStream,
    pub(crate) collected: Option<Collected>,
}

impl Sum {
    /// The output is in the log.
    pub(crate) fn of(log: &Log) -> Self {
        Self {
            size: log.size(),
            dropped: log.kept_from(),
            spooled: PerStream::default(),
            collected: None,
        }
    }

    pub(crate) fn of_firsts(firsts: Firsts) -> Self {
        let Firsts { stdout, stderr, .. } = firsts;
        let both = |of: fn(&First) -> u64| PerStream {
            stdout: of(&stdout),
            stderr: of(&stderr),
        };
        Self {
            size: both(|first| first.seen),
            dropped: both(|first| first.seen - first.kept()),
            spooled: both(|first| first.spooled),
            collected: Some(Collected {
                stdout: stdout.bytes.into(),
                stderr: stderr.bytes.into(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::slot::Slots;

    #[test]
    fn the_first_of_a_stream_is_kept_and_the_rest_counted() {
        let mut firsts = Firsts::new(5, None);
        firsts.take(StreamName::Stdout, b"abc");
        firsts.take(StreamName::Stdout, b"defg");
        let sum = Sum::of_firsts(firsts);
        assert_eq!((sum.size.stdout, sum.dropped.stdout), (7, 2));
        assert_eq!(&*sum.collected.unwrap().stdout, b"abcde");
    }

    #[test]
    fn much_goes_to_the_slot_from_its_first_byte_on() {
        let file = tempfile::tempfile().unwrap();
        let slots = Slots::new(Some(file.try_clone().unwrap().into()));
        let mut firsts = Firsts::new(u64::MAX, slots.lease(0));
        firsts.take(StreamName::Stderr, b"begin");
        assert_eq!((firsts.stderr.spooled, firsts.stderr.bytes.len()), (0, 5));
        firsts.take(StreamName::Stderr, &[b'x'; INLINE]);
        let sum = Sum::of_firsts(firsts);
        assert_eq!(sum.spooled.stderr, 5 + INLINE as u64);
        assert!(sum.collected.unwrap().stderr.is_empty());
        let mut begin = [0; 6];
        file.read_exact_at(&mut begin, SPOOL_RING).unwrap();
        assert_eq!(&begin, b"beginx");
    }
}
