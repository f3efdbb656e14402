//! Frames of RFC 6455: reading and writing headers, masking.

use rustix::rand::{GetRandomFlags, getrandom};

/// Maximum payload of a control frame.
pub(super) const CONTROL_BYTES: usize = 125;

/// Type of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opcode {
    Continuation = 0,
    Text = 1,
    Binary = 2,
    Close = 8,
    Ping = 9,
    Pong = 10,
}

/// Protocol violation of the peer, with the close status to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Violation {
    /// Status of the close frame.
    pub(super) status: u16,
    /// Description of the fault; contains no data of the peer.
    pub(super) reason: &'static str,
}

impl Violation {
    /// Creates a protocol error.
    pub(super) const fn protocol(reason: &'static str) -> Self {
        Self {
            status: 1002,
            reason,
        }
    }
}

/// Header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Whether this is the last frame of its message.
    pub(super) last: bool,
    pub(super) opcode: Opcode,
    pub(super) mask: Option<[u8; 4]>,
    /// Payload length in bytes.
    pub(super) length: u64,
}

impl Header {
    /// Reads a header from the beginning of `bytes`, and returns its length.
    /// Returns `None` if the header is incomplete.
    pub(super) fn read(bytes: &[u8]) -> Result<Option<(Self, usize)>, Violation> {
        let &[first, second, ref rest @ ..] = bytes else {
            return Ok(None);
        };
        if first & 0x70 != 0 {
            return Err(Violation::protocol("reserved bits without an extension"));
        }
        let opcode = match first & 0x0f {
            0 => Opcode::Continuation,
            1 => Opcode::Text,
            2 => Opcode::Binary,
            8 => Opcode::Close,
            9 => Opcode::Ping,
            10 => Opcode::Pong,
            _ => return Err(Violation::protocol("reserved opcode")),
        };
        let (length, rest, mut size) = match second & 0x7f {
            126 => match rest.split_first_chunk() {
                Some((length, rest)) => (u64::from(u16::from_be_bytes(*length)), rest, 4),
                None => return Ok(None),
            },
            127 => match rest.split_first_chunk() {
                Some((length, rest)) => (u64::from_be_bytes(*length), rest, 10),
                None => return Ok(None),
            },
            short => (u64::from(short), rest, 2),
        };
        let mask = if second & 0x80 == 0 {
            None
        } else {
            match rest.first_chunk() {
                Some(mask) => {
                    size += 4;
                    Some(*mask)
                }
                None => return Ok(None),
            }
        };
        let last = first & 0x80 != 0;
        let control = matches!(opcode, Opcode::Close | Opcode::Ping | Opcode::Pong);
        if control && (!last || length > CONTROL_BYTES as u64) {
            return Err(Violation::protocol(
                "control frame is fragmented or exceeds 125 bytes",
            ));
        }
        let header = Self {
            last,
            opcode,
            mask,
            length,
        };
        Ok(Some((header, size)))
    }

    /// Creates the header of an unfragmented message or control frame.
    pub(super) fn whole(opcode: Opcode, length: usize, mask: Option<[u8; 4]>) -> Self {
        Self {
            last: true,
            opcode,
            mask,
            length: length as u64,
        }
    }

    /// Appends the header to `out`.
    pub(super) fn write(self, out: &mut Vec<u8>) {
        let masked = if self.mask.is_some() { 0x80 } else { 0 };
        out.push((if self.last { 0x80 } else { 0 }) | self.opcode as u8);
        match (u8::try_from(self.length), u16::try_from(self.length)) {
            (Ok(short), _) if short < 126 => out.push(masked | short),
            (_, Ok(medium)) => {
                out.push(masked | 0x7e);
                out.extend_from_slice(&medium.to_be_bytes());
            }
            _ => {
                out.push(masked | 0x7f);
                out.extend_from_slice(&self.length.to_be_bytes());
            }
        }
        out.extend_from_slice(self.mask.as_ref().map_or(&[], |mask| mask));
    }
}

/// Masks or unmasks `bytes`, starting at payload offset `at`.
pub(super) fn apply_mask(bytes: &mut [u8], mut mask: [u8; 4], at: usize) {
    mask.rotate_left(at % 4);
    let [a, b, c, d] = mask;
    let wide = u64::from_ne_bytes([a, b, c, d, a, b, c, d]);
    let (words, rest) = bytes.as_chunks_mut::<8>();
    for word in words {
        *word = (u64::from_ne_bytes(*word) ^ wide).to_ne_bytes();
    }
    for (byte, key) in rest.iter_mut().zip([a, b, c, d, a, b, c]) {
        *byte ^= key;
    }
}

/// Random masks for the frames of a client.
/// It fetches many at a time from the kernel. An attacker who chooses the payload must not be able to guess them.
#[derive(Debug, Default)]
pub(super) struct Masks {
    pool: Vec<[u8; 4]>,
}

impl Masks {
    /// Returns an unused mask.
    pub(super) fn next(&mut self) -> std::io::Result<[u8; 4]> {
        if let Some(mask) = self.pool.pop() {
            return Ok(mask);
        }
        let mut random = [0; 512];
        fill_random(&mut random)?;
        let (masks, _) = random.as_chunks::<4>();
        self.pool.extend_from_slice(masks);
        self.pool
            .pop()
            .ok_or_else(|| std::io::ErrorKind::Other.into())
    }
}

/// Fills `bytes` with random bytes of the kernel.
pub(crate) fn fill_random(bytes: &mut [u8]) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_round_trip_and_wait_for_every_byte() {
        for length in [0, 1, 125, 126, 65_535, 65_536, 1 << 40] {
            for mask in [None, Some([1, 2, 3, 4])] {
                let header = Header {
                    last: length % 2 == 0,
                    opcode: Opcode::Text,
                    mask,
                    length,
                };
                let mut bytes = Vec::new();
                header.write(&mut bytes);
                assert_eq!(Header::read(&bytes).unwrap(), Some((header, bytes.len())));
                for part in 0..bytes.len() {
                    assert_eq!(Header::read(&bytes[..part]).unwrap(), None);
                }
            }
        }
    }

    #[test]
    fn masking_in_parts_equals_masking_at_once() {
        let mask = [9, 80, 200, 7];
        let plain: Vec<u8> = (0..=255).cycle().take(1000).collect();
        let one_by_one: Vec<u8> = plain
            .iter()
            .enumerate()
            .map(|(at, byte)| byte ^ mask[at % 4])
            .collect();
        for split in 0..40 {
            let mut bytes = plain.clone();
            let (head, tail) = bytes.split_at_mut(split);
            apply_mask(head, mask, 0);
            apply_mask(tail, mask, split);
            assert_eq!(bytes, one_by_one, "split at {split}");
        }
    }

    #[test]
    fn invalid_headers_are_refused() {
        for bytes in [&[0xc1, 0][..], &[0x83, 0], &[0x09, 0], &[0x89, 126, 0, 126]] {
            assert!(Header::read(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn masks_differ() {
        let mut masks = Masks::default();
        let some: std::collections::HashSet<_> = (0..300).map(|_| masks.next().unwrap()).collect();
        assert!(some.len() > 290);
    }
}
