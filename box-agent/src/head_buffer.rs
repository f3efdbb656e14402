//! The first bytes of a command's output, which its log keeps for a reply that contains them.

use box_protocol::PerStream;
use box_protocol::actions::{Collected, SLOT_RING, StreamName};

use crate::log::Log;
use crate::shm::ShmSlot;

/// Up to this size the output of a stream travels in the reply.
///
/// That costs both sides less than the shared memory.
pub(crate) const INLINE: usize = 4096;

/// Maximum bytes of each stream without a shared memory slot.
const HEAD_MAX: u64 = 1 << 20;

/// The first bytes of both streams.
#[derive(Debug)]
pub(crate) struct HeadBuffers {
    stdout: HeadBuffer,
    stderr: HeadBuffer,
    slot: Option<ShmSlot>,
}

impl HeadBuffers {
    pub(crate) fn new(bytes: u64, slot: Option<ShmSlot>) -> Self {
        let head = || HeadBuffer::new(bytes, slot.is_some());
        Self {
            stdout: head(),
            stderr: head(),
            slot,
        }
    }

    pub(crate) fn append(&mut self, stream: StreamName, bytes: &[u8]) {
        let head = match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        };
        head.append(stream, bytes, self.slot.as_ref());
    }

    /// What is missing of an output of this size, and what the slot holds.
    fn dropped_and_in_slot(&self, size: PerStream) -> (PerStream, PerStream) {
        let dropped = PerStream {
            stdout: size.stdout - self.stdout.kept(),
            stderr: size.stderr - self.stderr.kept(),
        };
        let in_slot = PerStream {
            stdout: self.stdout.in_slot,
            stderr: self.stderr.in_slot,
        };
        (dropped, in_slot)
    }
}

/// The first bytes of one stream: in memory while few, otherwise in the slot.
#[derive(Debug)]
struct HeadBuffer {
    bytes: Vec<u8>,
    in_slot: u64,
    limit: u64,
}

impl HeadBuffer {
    fn new(limit: u64, has_slot: bool) -> Self {
        let max = if has_slot { SLOT_RING } else { HEAD_MAX };
        Self {
            bytes: Vec::new(),
            in_slot: 0,
            limit: limit.min(max),
        }
    }

    fn kept(&self) -> u64 {
        self.in_slot + self.bytes.len() as u64
    }

    fn append(&mut self, stream: StreamName, piece: &[u8], slot: Option<&ShmSlot>) {
        let room = usize::try_from(self.limit - self.kept()).unwrap_or(usize::MAX);
        let piece = &piece[..piece.len().min(room)];
        let Some(slot) = slot else {
            return self.bytes.extend_from_slice(piece);
        };
        if self.in_slot == 0 && self.bytes.len() + piece.len() <= INLINE {
            return self.bytes.extend_from_slice(piece);
        }
        for part in [&*std::mem::take(&mut self.bytes), piece] {
            if slot.write(stream, self.in_slot, part).is_err() {
                // The shared memory is full. The slot keeps what it has; the rest is only counted.
                self.limit = self.in_slot;
                return;
            }
            self.in_slot += part.len() as u64;
        }
    }
}

/// Sizes of the output, and the part that the reply contains.
pub(crate) struct OutputTotals {
    pub(crate) size: PerStream,
    pub(crate) dropped: PerStream,
    pub(crate) in_slot: PerStream,
    pub(crate) collected: Option<Collected>,
}

impl OutputTotals {
    /// The totals of a command until now.
    pub(crate) fn of_log(log: &Log) -> Self {
        let size = log.size();
        let (dropped, in_slot) = match log.head() {
            Some(head) => head.dropped_and_in_slot(size),
            None => (log.kept_from(), PerStream::default()),
        };
        Self {
            size,
            dropped,
            in_slot,
            collected: None,
        }
    }

    /// The totals of a command that has ended, with the output for its reply.
    pub(crate) fn of_ended(log: &mut Log) -> Self {
        let totals = Self::of_log(log);
        let collected = log.take_head().map(|head| Collected {
            stdout: head.stdout.bytes.into(),
            stderr: head.stderr.bytes.into(),
        });
        Self {
            collected,
            ..totals
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::shm::ShmPool;

    #[test]
    fn the_head_of_a_stream_is_kept_and_the_rest_counted() {
        let mut log = Log::new(None, None);
        log.keep_head(HeadBuffers::new(5, None));
        log.append(StreamName::Stdout, b"abc");
        log.append(StreamName::Stdout, b"defg");
        let running = OutputTotals::of_log(&log);
        assert_eq!((running.size.stdout, running.dropped.stdout), (7, 2));
        assert!(running.collected.is_none());
        let totals = OutputTotals::of_ended(&mut log);
        assert_eq!((totals.size.stdout, totals.dropped.stdout), (7, 2));
        assert_eq!(&*totals.collected.unwrap().stdout, b"abcde");
    }

    #[test]
    fn large_output_goes_to_the_slot_from_its_first_byte() {
        let file = tempfile::tempfile().unwrap();
        let shm = ShmPool::new(Some(file.try_clone().unwrap().into()));
        let mut log = Log::new(None, None);
        log.keep_head(HeadBuffers::new(u64::MAX, shm.lease(0)));
        log.append(StreamName::Stderr, b"begin");
        assert_eq!(OutputTotals::of_log(&log).in_slot.stderr, 0);
        log.append(StreamName::Stderr, &[b'x'; INLINE]);
        let totals = OutputTotals::of_ended(&mut log);
        assert_eq!(totals.in_slot.stderr, 5 + INLINE as u64);
        assert!(totals.collected.unwrap().stderr.is_empty());
        let mut begin = [0; 6];
        file.read_exact_at(&mut begin, SLOT_RING).unwrap();
        assert_eq!(&begin, b"beginx");
    }
}
