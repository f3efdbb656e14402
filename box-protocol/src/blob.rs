//! Bytes that are base64 in JSON.

use std::fmt;
use std::ops::Deref;

use base64_simd::STANDARD;
use bytes::Bytes;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::json_string::JsonString;

/// Maximum number of bytes of output in one chunk.
pub const MAX_CHUNK_BYTES: usize = 32 * 1024;

/// Bytes in parameters, results and chunks.
///
/// Clones share the memory. [`Debug`](fmt::Debug) shows the length only.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Blob(pub Bytes);

impl Deref for Blob {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl<T: Into<Bytes>> From<T> for Blob {
    fn from(bytes: T) -> Self {
        Self(bytes.into())
    }
}

impl fmt::Debug for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Blob({} bytes)", self.0.len())
    }
}

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            JsonString::base64(&self.0).serialize(serializer)
        } else {
            serializer.serialize_bytes(&self.0)
        }
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            deserializer.deserialize_str(FromBase64)
        } else {
            deserializer.deserialize_byte_buf(FromBase64)
        }
    }
}

struct FromBase64;

impl Visitor<'_> for FromBase64 {
    type Value = Blob;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes in base64")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Blob, E> {
        // The error leaves the text out because it may be long or secret.
        let bytes = STANDARD.decode_to_vec(text);
        let bytes = bytes.map_err(|_| E::custom("not base64"))?;
        Ok(bytes.into())
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Blob, E> {
        Ok(bytes.to_vec().into())
    }

    fn visit_byte_buf<E: de::Error>(self, bytes: Vec<u8>) -> Result<Blob, E> {
        Ok(bytes.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_base64_in_json() {
        let blob = Blob::from(vec![0, 159, 146, 150]);
        assert_eq!(serde_json::to_string(&blob).unwrap(), r#""AJ+Slg==""#);
        assert_eq!(serde_json::from_str::<Blob>(r#""AJ+Slg==""#).unwrap(), blob);
        assert_eq!(
            serde_json::from_str::<Blob>(r#""""#).unwrap(),
            Blob::default()
        );
    }

    #[test]
    fn an_error_does_not_contain_the_invalid_base64() {
        let error = serde_json::from_str::<Blob>(r#""hunter2!""#)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("not base64") && !error.contains("hunter2"),
            "{error}"
        );
    }

    #[test]
    fn only_canonical_base64_is_accepted() {
        for odd in [
            "AJ-S",
            "AJ+Slg",
            "AJ+Slg=",
            "AJ+Slh==",
            "AJ+S lg==",
            "AJ+S\\n",
            "=",
            "A",
            "AJ+Slg==AAAA",
        ] {
            let text = format!("\"{odd}\"");
            assert!(serde_json::from_str::<Blob>(&text).is_err(), "{odd}");
        }
        for length in 0..200_u8 {
            let bytes: Vec<u8> = (0..length).map(|byte| byte.wrapping_mul(83)).collect();
            let text = serde_json::to_string(&Blob::from(bytes.clone())).unwrap();
            assert_eq!(*serde_json::from_str::<Blob>(&text).unwrap(), *bytes);
        }
    }

    #[test]
    fn debug_shows_the_length_only() {
        assert_eq!(format!("{:?}", Blob::from("secret")), "Blob(6 bytes)");
    }
}
