//! Text of bytes that come in pieces.

/// Makes text of a stream of bytes that may be cut anywhere. What is no UTF-8 becomes U+FFFD, one for each maximal subpart, and
/// where the cuts were makes no difference: the begin of a character waits for its rest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TextDecoder {
    pending: [u8; 3],
    length: u8,
}

impl TextDecoder {
    /// Goes on where another stopped, which left these bytes. Nothing, if no decoder leaves such.
    pub fn resume(pending: &[u8]) -> Option<Self> {
        let mut decoder = Self::default();
        (pending.is_empty() || may_go_on(pending)).then(|| decoder.keep(pending))?;
        Some(decoder)
    }

    /// The begin of a character whose rest has not come.
    pub fn pending(&self) -> &[u8] {
        &self.pending[..usize::from(self.length)]
    }

    /// The text of these bytes, as far as it is decided.
    pub fn decode(&mut self, bytes: &[u8]) -> String {
        let mut text = String::with_capacity(bytes.len() + 3);
        self.walk(bytes, |piece| text.push_str(piece));
        text
    }

    /// The same of bytes that are not needed any more: if they are text, it is made of them without a copy.
    pub fn decode_owned(&mut self, bytes: Vec<u8>) -> String {
        if self.length > 0 {
            return self.decode(&bytes);
        }
        String::from_utf8(bytes).unwrap_or_else(|error| self.decode(error.as_bytes()))
    }

    /// How many bytes of text [`decode`](Self::decode) would give for these.
    pub fn measure(&mut self, bytes: &[u8]) -> u64 {
        let mut length = 0;
        self.walk(bytes, |piece| length += piece.len() as u64);
        length
    }

    /// What is left at the end of the stream, if anything is.
    pub fn finish(&mut self) -> Option<char> {
        let left = std::mem::take(&mut self.length) > 0;
        left.then_some(char::REPLACEMENT_CHARACTER)
    }

    fn walk(&mut self, bytes: &[u8], mut take: impl FnMut(&str)) {
        let joined;
        let bytes = if self.length == 0 {
            bytes
        } else {
            joined = [self.pending(), bytes].concat();
            &joined
        };
        self.length = 0;
        // Nearly everything is text, and that is found out many bytes at a time; only what is none is walked one by one.
        let valid = match std::str::from_utf8(bytes) {
            Ok(text) => return take(text),
            Err(error) => error.valid_up_to(),
        };
        let (text, bytes) = bytes.split_at(valid);
        if let Ok(text) = std::str::from_utf8(text) {
            take(text);
        }
        let mut walked = 0;
        for chunk in bytes.utf8_chunks() {
            take(chunk.valid());
            walked += chunk.valid().len() + chunk.invalid().len();
            let invalid = chunk.invalid();
            if walked == bytes.len() && may_go_on(invalid) {
                return self.keep(invalid);
            }
            if !invalid.is_empty() {
                take("\u{fffd}");
            }
        }
    }

    /// The begin of a character is three bytes at most.
    fn keep(&mut self, begin: &[u8]) {
        for (place, byte) in self.pending.iter_mut().zip(begin) {
            *place = *byte;
            self.length += 1;
        }
    }
}

/// Whether these bytes are the begin of a character.
fn may_go_on(bytes: &[u8]) -> bool {
    matches!(std::str::from_utf8(bytes), Err(error) if error.error_len().is_none() && error.valid_up_to() == 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn text_does_not_depend_on_where_it_is_cut(
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
                let told = decoder.decode(piece);
                prop_assert_eq!(&other.decode_owned(piece.to_vec()), &told);
                prop_assert_eq!(other, decoder);
                text.push_str(&told);
                measured += measurer.measure(piece);
                prop_assert_eq!(measured, text.len() as u64);
                rest = after;
            }
            text.extend(decoder.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn only_what_a_decoder_leaves_can_be_gone_on_from() {
        assert!(TextDecoder::resume(b"").is_some());
        assert!(TextDecoder::resume(b"\xf0\x9f\x98").is_some());
        for odd in [&b"a"[..], b"a\xf0", b"\xff", b"\xf0\x9f\x98\x80"] {
            assert!(TextDecoder::resume(odd).is_none(), "{odd:?}");
        }
    }
}
