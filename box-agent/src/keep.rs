//! What is kept of a command's output, and where.

use std::collections::VecDeque;

use box_protocol::actions::{Collected, SPOOL_RING, StreamName};
use box_protocol::{MAX_CHUNK_BYTES, PerStream};
use tokio::sync::mpsc;

use crate::slot::Lease;

/// Up to here a stream's output travels in the answer: less work on both ends than a look into the slot.
pub(crate) const INLINE: usize = 4096;

/// Bytes of each stream that a log keeps, unless its command says otherwise, and the most it may say.
pub(crate) const LOG_BYTES: u64 = 64 << 10;
pub(crate) const LOG_BYTES_MAX: u64 = 1 << 20;

/// What is kept.
#[derive(Debug)]
pub(crate) enum Keep {
    /// The first of it, for the answer.
    First {
        stdout: First,
        stderr: First,
        slot: Option<Lease>,
    },
    /// The last of it, in the command's log.
    Log,
    /// Nothing: it goes to a reader, who holds the command up if need be.
    Pass {
        to: mpsc::Sender<Piece>,
        slot: Option<Lease>,
        offsets: PerStream,
    },
}

/// A piece of output on its way to a reader.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) stream: StreamName,
    pub(crate) offset: u64,
    pub(crate) what: What,
}

#[derive(Debug)]
pub(crate) enum What {
    Bytes(Vec<u8>),
    /// So many bytes, in the slot.
    Spooled(u64),
    /// So many bytes that could not be kept.
    Lost(u64),
}

impl Keep {
    pub(crate) fn first(bytes: u64, slot: Option<Lease>) -> Self {
        let first = || First::new(bytes, slot.is_some());
        Self::First {
            stdout: first(),
            stderr: first(),
            slot,
        }
    }

    pub(crate) fn pass(to: mpsc::Sender<Piece>, slot: Option<Lease>) -> Self {
        Self::Pass {
            to,
            slot,
            offsets: PerStream::default(),
        }
    }
}

/// The first of a stream: in memory while it is little, in the slot otherwise.
#[derive(Debug)]
pub(crate) struct First {
    bytes: Vec<u8>,
    spooled: u64,
    limit: u64,
    seen: u64,
}

impl First {
    fn new(limit: u64, has_slot: bool) -> Self {
        let most = if has_slot { SPOOL_RING } else { LOG_BYTES_MAX };
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

    pub(crate) fn take(&mut self, stream: StreamName, piece: &[u8], slot: Option<&Lease>) {
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

/// What a stream came to.
pub(crate) struct Sum {
    pub(crate) size: PerStream,
    pub(crate) dropped: PerStream,
    pub(crate) spooled: PerStream,
    pub(crate) collected: Option<Collected>,
}

impl Sum {
    pub(crate) fn of_first(stdout: First, stderr: First) -> Self {
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

/// The pieces that this output is passed on in, none of them too large or over the end of the slot's ring.
pub(crate) fn pieces(
    stream: StreamName,
    mut offset: u64,
    mut bytes: Vec<u8>,
    slot: Option<&Lease>,
) -> VecDeque<Piece> {
    let mut pieces = VecDeque::new();
    while !bytes.is_empty() {
        let most = slot.map_or(MAX_CHUNK_BYTES, |_| {
            MAX_CHUNK_BYTES.min(Lease::room(offset))
        });
        let rest = bytes.split_off(bytes.len().min(most));
        let length = bytes.len() as u64;
        let what = match slot {
            Some(slot) if bytes.len() > INLINE => match slot.write(stream, offset, &bytes) {
                Ok(()) => What::Spooled(length),
                Err(_) => What::Lost(length),
            },
            _ => What::Bytes(bytes),
        };
        pieces.push_back(Piece {
            stream,
            offset,
            what,
        });
        offset += length;
        bytes = rest;
    }
    pieces
}

/// The last of both streams.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) stdout: Last,
    pub(crate) stderr: Last,
}

/// The last of a stream.
#[derive(Debug, Default)]
pub(crate) struct Last {
    bytes: VecDeque<u8>,
    /// The offset of the first byte that is kept.
    start: u64,
    limit: usize,
}

impl Log {
    pub(crate) fn new(bytes: Option<u64>) -> Self {
        let limit = bytes.unwrap_or(LOG_BYTES).min(LOG_BYTES_MAX);
        let last = || Last {
            limit: usize::try_from(limit).unwrap_or(usize::MAX),
            ..Last::default()
        };
        Self {
            stdout: last(),
            stderr: last(),
        }
    }

    pub(crate) fn of(&mut self, stream: StreamName) -> &mut Last {
        match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        }
    }

    pub(crate) fn sum(&self) -> Sum {
        let both = |of: fn(&Last) -> u64| PerStream {
            stdout: of(&self.stdout),
            stderr: of(&self.stderr),
        };
        Sum {
            size: both(Last::end),
            dropped: both(|last| last.start),
            spooled: PerStream::default(),
            collected: None,
        }
    }
}

impl Last {
    /// The offset of the next byte.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    pub(crate) fn take(&mut self, piece: &[u8]) {
        self.bytes.extend(piece);
        let over = self.bytes.len().saturating_sub(self.limit);
        self.bytes.drain(..over);
        self.start += over as u64;
    }

    /// What there is from an offset on, at most one chunk, and the offset where that begins: later, if the oldest is gone.
    pub(crate) fn read(&self, from: u64) -> (u64, Vec<u8>) {
        let from = from.max(self.start);
        let skip = usize::try_from(from - self.start).unwrap_or(usize::MAX);
        let bytes = self.bytes.iter().skip(skip).take(MAX_CHUNK_BYTES);
        (from, bytes.copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::slot::Slot;

    #[test]
    fn the_first_of_a_stream_is_kept_and_the_rest_counted() {
        let mut first = First::new(5, false);
        first.take(StreamName::Stdout, b"abc", None);
        first.take(StreamName::Stdout, b"defg", None);
        let sum = Sum::of_first(first, First::new(5, false));
        assert_eq!((sum.size.stdout, sum.dropped.stdout), (7, 2));
        assert_eq!(&*sum.collected.unwrap().stdout, b"abcde");
    }

    #[test]
    fn much_goes_to_the_slot_from_its_first_byte_on() {
        let file = tempfile::tempfile().unwrap();
        let slot = Slot::new(file.try_clone().unwrap().into());
        let lease = slot.lease().unwrap();
        let mut first = First::new(u64::MAX, true);
        first.take(StreamName::Stderr, b"begin", Some(&lease));
        assert_eq!((first.spooled, first.bytes.len()), (0, 5));
        first.take(StreamName::Stderr, &[b'x'; INLINE], Some(&lease));
        let sum = Sum::of_first(First::new(0, true), first);
        assert_eq!(sum.spooled.stderr, 5 + INLINE as u64);
        assert!(sum.collected.unwrap().stderr.is_empty());
        let mut begin = [0; 6];
        file.read_exact_at(&mut begin, SPOOL_RING).unwrap();
        assert_eq!(&begin, b"beginx");
    }

    #[test]
    fn pieces_stay_within_the_ring_and_say_where_they_are() {
        let slot = Slot::new(tempfile::tempfile().unwrap().into());
        let lease = slot.lease().unwrap();
        let offset = SPOOL_RING - 5000;
        let pieces = pieces(StreamName::Stdout, offset, vec![7; 60_000], Some(&lease));
        let told: Vec<_> = pieces
            .iter()
            .map(|piece| match &piece.what {
                What::Spooled(bytes) => (piece.offset, *bytes),
                other => panic!("{other:?}"),
            })
            .collect();
        let chunk = MAX_CHUNK_BYTES as u64;
        assert_eq!(
            told,
            [
                (offset, 5000),
                (SPOOL_RING, chunk),
                (SPOOL_RING + chunk, 60_000 - 5000 - chunk)
            ]
        );
    }

    #[test]
    fn a_log_forgets_its_oldest_bytes_and_says_so() {
        let mut log = Log::new(Some(4));
        log.stdout.take(b"abc");
        log.stdout.take(b"def");
        assert_eq!(log.stdout.read(0), (2, b"cdef".to_vec()));
        assert_eq!(log.stdout.read(5), (5, b"f".to_vec()));
        assert_eq!(log.stdout.read(6), (6, Vec::new()));
        assert_eq!((log.sum().size.stdout, log.sum().dropped.stdout), (6, 2));
    }
}
