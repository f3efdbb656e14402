//! Incremental UTF-8 decoding.

/// Decodes a stream of bytes that may be split anywhere.
///
/// Invalid UTF-8 becomes U+FFFD, one for each maximal subpart. The result does not depend on where
/// the stream is split: an incomplete character waits for its remaining bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TextDecoder {
    pending: [u8; 3],
    length: u8,
}

impl TextDecoder {
    /// Continues after a decoder that had these pending bytes.
    ///
    /// `None` if they are not an incomplete character.
    pub fn resume(pending: &[u8]) -> Option<Self> {
        let mut decoder = Self::default();
        (pending.is_empty() || is_incomplete(pending)).then(|| decoder.store(pending))?;
        Some(decoder)
    }

    /// Returns the bytes of an incomplete character.
    pub fn pending(&self) -> &[u8] {
        &self.pending[..usize::from(self.length)]
    }

    /// Decodes bytes, except an incomplete character at their end.
    pub fn decode(&mut self, bytes: &[u8]) -> String {
        let mut text = String::with_capacity(bytes.len() + 3);
        self.decode_with(bytes, |piece| text.push_str(piece));
        text
    }

    /// Decodes owned bytes, without a copy if they are valid UTF-8.
    pub fn decode_owned(&mut self, bytes: Vec<u8>) -> String {
        if self.length > 0 {
            return self.decode(&bytes);
        }
        String::from_utf8(bytes).unwrap_or_else(|error| self.decode(error.as_bytes()))
    }

    /// Returns the length of the text that [`decode`](Self::decode) would return.
    pub fn measure(&mut self, bytes: &[u8]) -> u64 {
        let mut length = 0;
        self.decode_with(bytes, |piece| length += piece.len() as u64);
        length
    }

    /// Ends the stream; returns U+FFFD if a character is incomplete.
    pub fn finish(&mut self) -> Option<char> {
        let left = std::mem::take(&mut self.length) > 0;
        left.then_some(char::REPLACEMENT_CHARACTER)
    }

    fn decode_with(&mut self, bytes: &[u8], mut take: impl FnMut(&str)) {
        let joined;
        let bytes = if self.length == 0 {
            bytes
        } else {
            joined = [self.pending(), bytes].concat();
            &joined
        };
        self.length = 0;
        // Most output is valid UTF-8, which `from_utf8` checks quickly. Only the rest needs the slow path.
        let valid = match std::str::from_utf8(bytes) {
            Ok(text) => return take(text),
            Err(error) => error.valid_up_to(),
        };
        let (text, bytes) = bytes.split_at(valid);
        if let Ok(text) = std::str::from_utf8(text) {
            take(text);
        }
        let mut consumed = 0;
        for chunk in bytes.utf8_chunks() {
            take(chunk.valid());
            consumed += chunk.valid().len() + chunk.invalid().len();
            let invalid = chunk.invalid();
            if consumed == bytes.len() && is_incomplete(invalid) {
                return self.store(invalid);
            }
            if !invalid.is_empty() {
                take("\u{fffd}");
            }
        }
    }

    /// Stores an incomplete character, which has at most three bytes.
    fn store(&mut self, start: &[u8]) {
        for (slot, byte) in self.pending.iter_mut().zip(start) {
            *slot = *byte;
            self.length += 1;
        }
    }
}

/// Whether these bytes are an incomplete character.
fn is_incomplete(bytes: &[u8]) -> bool {
    matches!(std::str::from_utf8(bytes), Err(error) if error.error_len().is_none() && error.valid_up_to() == 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn text_does_not_depend_on_where_it_is_split(
            bytes in proptest::collection::vec(prop_oneof![any::<u8>(), Just(0xf0), Just(0x9f)], 0..64),
            cuts in proptest::collection::vec(1_usize..5, 0..64),
        ) {
            let (mut decoder, mut measurer) = (TextDecoder::default(), TextDecoder::default());
            let (mut text, mut measured) = (String::new(), 0);
            let mut rest = &bytes[..];
            for cut in cuts.into_iter().chain([64]) {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                decoder = TextDecoder::resume(decoder.pending()).unwrap();
                let mut other = decoder;
                let decoded = decoder.decode(piece);
                prop_assert_eq!(&other.decode_owned(piece.to_vec()), &decoded);
                prop_assert_eq!(other, decoder);
                text.push_str(&decoded);
                measured += measurer.measure(piece);
                prop_assert_eq!(measured, text.len() as u64);
                rest = after;
            }
            text.extend(decoder.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn only_an_incomplete_character_can_be_resumed() {
        assert!(TextDecoder::resume(b"").is_some());
        assert!(TextDecoder::resume(b"\xf0\x9f\x98").is_some());
        for odd in [&b"a"[..], b"a\xf0", b"\xff", b"\xf0\x9f\x98\x80"] {
            assert!(TextDecoder::resume(odd).is_none(), "{odd:?}");
        }
    }
}
