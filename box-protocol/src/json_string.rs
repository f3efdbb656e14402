//! JSON strings that are escaped before `serde_json` writes them.
//!
//! `serde_json` checks a string byte by byte for characters to escape, which dominates the cost of
//! writing a long one. This module checks eight bytes at a time.

use base64_simd::STANDARD;
use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

/// The name by which `serde_json` recognizes its `RawValue`.
///
/// `RawValue::from_string` would parse the whole string first.
const RAW: &str = "$serde_json::private::RawValue";

const ONES: u64 = u64::MAX / 255;
const HIGH_BITS: u64 = ONES << 7;

/// A JSON string, including its quotes.
pub(crate) struct JsonString(String);

impl JsonString {
    /// Encodes bytes as base64, which needs no escaping.
    pub(crate) fn base64(bytes: &[u8]) -> Self {
        let mut json = String::with_capacity(STANDARD.encoded_length(bytes.len()) + 2);
        json.push('"');
        STANDARD.encode_append(bytes, &mut json);
        json.push('"');
        Self(json)
    }

    /// Escapes text as `serde_json` does.
    pub(crate) fn text(text: &str) -> Self {
        // Reserves space for some escaped line breaks.
        let mut json = String::with_capacity(text.len() + text.len() / 16 + 2);
        json.push('"');
        let mut rest = text;
        while let Some(at) = find_escape(rest.as_bytes()) {
            json.push_str(&rest[..at]);
            match rest.as_bytes()[at] {
                b'\n' => json.push_str("\\n"),
                b'\t' => json.push_str("\\t"),
                b'\r' => json.push_str("\\r"),
                0x08 => json.push_str("\\b"),
                0x0c => json.push_str("\\f"),
                control @ 0..0x20 => {
                    let digit = |four: u8| char::from(b"0123456789abcdef"[usize::from(four)]);
                    json.push_str("\\u00");
                    json.extend([digit(control >> 4), digit(control & 15)]);
                }
                other => json.extend(['\\', char::from(other)]),
            }
            rest = &rest[at + 1..];
        }
        json.push_str(rest);
        json.push('"');
        Self(json)
    }
}

impl Serialize for JsonString {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut raw = serializer.serialize_struct(RAW, 1)?;
        raw.serialize_field(RAW, &self.0)?;
        raw.end()
    }
}

/// Finds the first control character, quote or backslash.
fn find_escape(bytes: &[u8]) -> Option<usize> {
    let (words, rest) = bytes.as_chunks::<8>();
    for (number, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        // Sets the high bit of each byte below the limit. A borrow affects later bytes only, so the first one is exact.
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
    fn every_character_is_escaped_as_serde_json_does() {
        for character in (0..=0x2100).filter_map(char::from_u32) {
            for before in 0..9 {
                let text = format!("{}{character}\u{80}after it", "a".repeat(before));
                let written = serde_json::to_string(&JsonString::text(&text)).unwrap();
                assert_eq!(written, serde_json::to_string(&text).unwrap());
            }
        }
    }

    proptest! {
        #[test]
        fn text_is_escaped_as_serde_json_does(text in "[\\x00-\\x7f\u{80}-\u{90}\u{ff00}😀]{0,64}") {
            let written = serde_json::to_string(&JsonString::text(&text)).unwrap();
            prop_assert_eq!(&written, &serde_json::to_string(&text).unwrap());
            prop_assert_eq!(serde_json::to_value(JsonString::text(&text)).unwrap(), text);
        }
    }
}
