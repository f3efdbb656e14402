//! Strings of JSON that are written as they are.
//!
//! `serde_json` looks at each byte of a string for whether it is to be escaped, one after the other, and that is most of what it
//! costs to write a long one.

use base64_simd::STANDARD;
use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

/// What `serde_json` knows its `RawValue` by. One made of a string would be read from begin to end first.
const RAW: &str = "$serde_json::private::RawValue";

const ONES: u64 = u64::MAX / 255;
const HIGH_BITS: u64 = ONES << 7;

/// A string of JSON, with its quotes.
pub(crate) struct Quoted(String);

impl Quoted {
    /// Bytes in base64, in which nothing is to be escaped.
    pub(crate) fn base64(bytes: &[u8]) -> Self {
        let mut quoted = String::with_capacity(STANDARD.encoded_length(bytes.len()) + 2);
        quoted.push('"');
        STANDARD.encode_append(bytes, &mut quoted);
        quoted.push('"');
        Self(quoted)
    }

    /// Text, escaped as `serde_json` does it.
    pub(crate) fn text(text: &str) -> Self {
        // With room for a line break now and then.
        let mut quoted = String::with_capacity(text.len() + text.len() / 16 + 2);
        quoted.push('"');
        let mut rest = text;
        while let Some(at) = to_escape(rest.as_bytes()) {
            quoted.push_str(&rest[..at]);
            match rest.as_bytes()[at] {
                b'\n' => quoted.push_str("\\n"),
                b'\t' => quoted.push_str("\\t"),
                b'\r' => quoted.push_str("\\r"),
                0x08 => quoted.push_str("\\b"),
                0x0c => quoted.push_str("\\f"),
                control @ 0..0x20 => {
                    let digit = |four: u8| char::from(b"0123456789abcdef"[usize::from(four)]);
                    quoted.push_str("\\u00");
                    quoted.extend([digit(control >> 4), digit(control & 15)]);
                }
                other => quoted.extend(['\\', char::from(other)]),
            }
            rest = &rest[at + 1..];
        }
        quoted.push_str(rest);
        quoted.push('"');
        Self(quoted)
    }
}

impl Serialize for Quoted {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut raw = serializer.serialize_struct(RAW, 1)?;
        raw.serialize_field(RAW, &self.0)?;
        raw.end()
    }
}

/// The first byte that is to be escaped: a control character, a quote or a backslash. Eight are looked at together.
fn to_escape(bytes: &[u8]) -> Option<usize> {
    let (words, rest) = bytes.as_chunks::<8>();
    for (number, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        // Sets the high bit of each byte below the limit, up to the first at least: what is borrowed goes to later ones only.
        let below = |word: u64, limit: u8| word.wrapping_sub(ONES * u64::from(limit)) & !word;
        let is = |byte: u8| below(word ^ (ONES * u64::from(byte)), 1);
        let found = (below(word, 0x20) | is(b'"') | is(b'\\')) & HIGH_BITS;
        if found != 0 {
            return Some(8 * number + found.trailing_zeros() as usize / 8);
        }
    }
    let in_rest = rest
        .iter()
        .position(|byte| matches!(byte, 0..0x20 | b'"' | b'\\'));
    in_rest.map(|at| 8 * words.len() + at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_character_is_written_as_serde_json_does_it_wherever_it_is() {
        for character in (0..=0x2100).filter_map(char::from_u32) {
            for before in 0..9 {
                let text = format!("{}{character}\u{80}after it", "a".repeat(before));
                let written = serde_json::to_string(&Quoted::text(&text)).unwrap();
                assert_eq!(written, serde_json::to_string(&text).unwrap());
            }
        }
    }

    proptest! {
        #[test]
        fn text_is_what_was_written(text in "[\\x00-\\x7f\u{80}-\u{90}\u{ff00}😀]{0,64}") {
            let written = serde_json::to_string(&Quoted::text(&text)).unwrap();
            prop_assert_eq!(&written, &serde_json::to_string(&text).unwrap());
            prop_assert_eq!(serde_json::to_value(Quoted::text(&text)).unwrap(), text);
        }
    }
}
