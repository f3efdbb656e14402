//! LangBot's file transfer: small requests before the call that needs the file.
//!
//! No action of this gateway needs a file. The gateway checks and counts the chunks as LangBot's own runtime does, and
//! does not keep them.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use box_rpc::{Code, Fault, RpcError};
use serde_json::{Map, Value};

use super::errors::{of_class, value_error};

/// The maximum number of files per connection.
const MAX_FILES: usize = 128;
/// The maximum length of a chunk.
const CHUNK_BYTES: usize = 16 * 1024;
/// The maximum length of a key.
const KEY_BYTES: usize = 255;

#[derive(Debug, Default)]
pub(super) struct Files {
    files: HashMap<String, File>,
    bytes: usize,
}

#[derive(Debug)]
struct File {
    bytes: usize,
    next: u64,
    amount: u64,
}

struct FileChunk {
    key: String,
    bytes: usize,
    index: u64,
    amount: u64,
}

impl FileChunk {
    /// Parses a chunk; errors have the order and the texts of LangBot's own server.
    fn read(text: &str) -> Result<Self, RpcError> {
        let members: Map<String, Value> = serde_json::from_str(text)
            .map_err(|error| RpcError::fault(Fault::InvalidMessage, error.to_string()))?;
        let member = |name: &str| {
            let missing =
                || RpcError::fault(Fault::InvalidParams, format!("missing field `{name}`"));
            members.get(name).ok_or_else(missing)
        };
        let (data, index, amount) = (
            member("chunk_base64")?,
            member("chunk_index")?,
            member("chunk_amount")?,
        );
        let too_large = || value_error("File transfer chunk exceeds the protocol limit");
        let max_encoded = CHUNK_BYTES.div_ceil(3) * 4;
        let data = data.as_str().filter(|text| text.len() <= max_encoded);
        let data = data.ok_or_else(too_large)?;
        let position = index.as_u64().zip(amount.as_u64());
        let (index, amount) = position
            .filter(|(index, amount)| index < amount)
            .ok_or_else(|| value_error("Invalid file chunk position"))?;
        let data = STANDARD
            .decode(data)
            .map_err(|_| value_error("chunk_base64 is not base64"))?;
        if data.len() > CHUNK_BYTES {
            return Err(too_large());
        }
        let key = member("file_key")?.as_str().filter(|key| is_key(key));
        let key = key.ok_or_else(|| value_error("Invalid file transfer key"))?;
        Ok(Self {
            key: key.to_owned(),
            bytes: data.len(),
            index,
            amount,
        })
    }
}

impl Files {
    /// Adds a chunk.
    ///
    /// Chunks arrive in order from 0, as many as the first one announced. All files together have at most `limit` bytes.
    pub(super) fn add(&mut self, chunk: &str, limit: usize) -> Result<(), RpcError> {
        let chunk = FileChunk::read(chunk)?;
        let known = self.files.get(&chunk.key);
        if chunk.index == 0 {
            if known.is_some() {
                return Err(invalid_position());
            }
            if self.files.len() >= MAX_FILES {
                let message = "Active file transfer capacity reached";
                return Err(of_class("ValueError", Code::Capacity, message));
            }
            let file = File {
                bytes: 0,
                next: 0,
                amount: chunk.amount,
            };
            self.files.insert(chunk.key.clone(), file);
        }
        if self.bytes + chunk.bytes > limit {
            self.forget(&chunk.key);
            let message = "File transfer exceeds the configured size limit";
            return Err(of_class("ValueError", Code::TooLarge, message));
        }
        let fits = |file: &&mut File| file.next == chunk.index && file.amount == chunk.amount;
        let Some(file) = self.files.get_mut(&chunk.key).filter(fits) else {
            self.forget(&chunk.key);
            return Err(invalid_position());
        };
        self.bytes += chunk.bytes;
        file.bytes += chunk.bytes;
        file.next += 1;
        Ok(())
    }

    fn forget(&mut self, key: &str) {
        if let Some(file) = self.files.remove(key) {
            self.bytes -= file.bytes;
        }
    }
}

fn invalid_position() -> RpcError {
    value_error("Invalid file transfer capability")
}

/// Returns whether a key is a letter or digit, then those and `._-`, and no path.
fn is_key(key: &str) -> bool {
    let first = key
        .bytes()
        .next()
        .is_some_and(|byte| byte.is_ascii_alphanumeric());
    first
        && key.len() <= KEY_BYTES
        && !key.contains("..")
        && key
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 1 << 20;

    fn chunk(key: &str, index: u64, amount: u64, data: &[u8]) -> String {
        serde_json::json!({
            "file_key": key, "file_length": 0, "chunk_base64": STANDARD.encode(data),
            "chunk_index": index, "chunk_amount": amount, "chunk_size": data.len(),
        })
        .to_string()
    }

    fn key() -> String {
        format!("ft1_{}.zip", "a".repeat(64))
    }

    #[test]
    fn chunks_in_order_form_a_file_that_cannot_restart() {
        let mut files = Files::default();
        files.add(&chunk(&key(), 0, 2, b"hello "), LIMIT).unwrap();
        files.add(&chunk(&key(), 1, 2, b"world"), LIMIT).unwrap();
        assert_eq!(files.bytes, 11);
        assert!(files.add(&chunk(&key(), 0, 2, b"hello "), LIMIT).is_err());
        assert_eq!(files.bytes, 11);
    }

    #[test]
    fn a_chunk_out_of_order_ends_the_transfer() {
        let mut files = Files::default();
        files.add(&chunk(&key(), 0, 3, b"a"), LIMIT).unwrap();
        assert_eq!(
            files
                .add(&chunk(&key(), 2, 3, b"c"), LIMIT)
                .unwrap_err()
                .code(),
            Code::Validation
        );
        assert!(files.add(&chunk(&key(), 1, 3, b"b"), LIMIT).is_err());
        assert_eq!(files.bytes, 0);
    }

    #[test]
    fn file_keys_that_are_paths_are_refused() {
        let mut files = Files::default();
        for bad in [
            "../x",
            "",
            ".hidden",
            "a..b",
            &format!("ft1_{}/..", "a".repeat(64)),
            &format!("ft1_{}.a/b", "a".repeat(64)),
            &"a".repeat(256),
        ] {
            assert_eq!(
                files.add(&chunk(bad, 0, 1, b""), LIMIT).unwrap_err().code(),
                Code::Validation,
                "{bad}"
            );
        }
    }

    #[test]
    fn bytes_and_files_are_bounded() {
        let mut files = Files::default();
        for number in 0..MAX_FILES {
            files
                .add(&chunk(&format!("ft1_{number:064x}"), 0, 2, b"x"), LIMIT)
                .unwrap();
        }
        assert_eq!(
            files
                .add(&chunk(&key(), 0, 1, b"x"), LIMIT)
                .unwrap_err()
                .code(),
            Code::Capacity
        );
        let mut files = Files::default();
        let full = vec![0; CHUNK_BYTES];
        let amount = (LIMIT / CHUNK_BYTES + 1) as u64;
        let refused = (0..amount)
            .find_map(|index| files.add(&chunk(&key(), index, amount, &full), LIMIT).err());
        assert_eq!(refused.unwrap().code(), Code::TooLarge);
        assert_eq!(files.bytes, 0);
    }
}
