//! LangBot's file transfer: small requests before the call that needs the file.
//!
//! No action of this gateway needs a file. The gateway checks and counts the pieces as LangBot's own runtime does, and
//! does not keep them.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use box_rpc::{Code, Fault, RpcError};
use serde_json::{Map, Value};

use super::errors::{of_class, value_error};

/// The maximum number of files per connection.
const OPEN_FILES: usize = 128;
/// The maximum length of a piece.
const PIECE_BYTES: usize = 16 * 1024;
/// The maximum length of a key.
const KEY_BYTES: usize = 255;

#[derive(Debug, Default)]
pub(super) struct Files {
    open: HashMap<String, File>,
    bytes: usize,
}

#[derive(Debug)]
struct File {
    bytes: usize,
    next: u64,
    amount: u64,
}

struct Piece {
    key: String,
    bytes: usize,
    index: u64,
    amount: u64,
}

impl Piece {
    /// Parses a piece; errors have the order and the texts of LangBot's own server.
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
        let longest = PIECE_BYTES.div_ceil(3) * 4;
        let data = data.as_str().filter(|text| text.len() <= longest);
        let data = data.ok_or_else(too_large)?;
        let position = index.as_u64().zip(amount.as_u64());
        let (index, amount) = position
            .filter(|(index, amount)| index < amount)
            .ok_or_else(|| value_error("Invalid file chunk position"))?;
        let data = STANDARD
            .decode(data)
            .map_err(|_| value_error("chunk_base64 is not base64"))?;
        if data.len() > PIECE_BYTES {
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
    /// Adds a piece.
    ///
    /// Pieces arrive in order from 0, as many as the first one announced. All files together have at most `most` bytes.
    pub(super) fn add(&mut self, piece: &str, most: usize) -> Result<(), RpcError> {
        let piece = Piece::read(piece)?;
        let known = self.open.get(&piece.key);
        if piece.index == 0 {
            if known.is_some() {
                return Err(out_of_order());
            }
            if self.open.len() >= OPEN_FILES {
                let message = "Active file transfer capacity reached";
                return Err(of_class("ValueError", Code::Capacity, message));
            }
            let file = File {
                bytes: 0,
                next: 0,
                amount: piece.amount,
            };
            self.open.insert(piece.key.clone(), file);
        }
        if self.bytes + piece.bytes > most {
            self.forget(&piece.key);
            let message = "File transfer exceeds the configured size limit";
            return Err(of_class("ValueError", Code::TooLarge, message));
        }
        let fits = |file: &&mut File| file.next == piece.index && file.amount == piece.amount;
        let Some(file) = self.open.get_mut(&piece.key).filter(fits) else {
            self.forget(&piece.key);
            return Err(out_of_order());
        };
        self.bytes += piece.bytes;
        file.bytes += piece.bytes;
        file.next += 1;
        Ok(())
    }

    fn forget(&mut self, key: &str) {
        if let Some(file) = self.open.remove(key) {
            self.bytes -= file.bytes;
        }
    }
}

fn out_of_order() -> RpcError {
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

    const MOST: usize = 1 << 20;

    fn piece(key: &str, index: u64, amount: u64, data: &[u8]) -> String {
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
    fn pieces_in_order_make_a_file_that_cannot_be_begun_again() {
        let mut files = Files::default();
        files.add(&piece(&key(), 0, 2, b"hello "), MOST).unwrap();
        files.add(&piece(&key(), 1, 2, b"world"), MOST).unwrap();
        assert_eq!(files.bytes, 11);
        assert!(files.add(&piece(&key(), 0, 2, b"hello "), MOST).is_err());
        assert_eq!(files.bytes, 11);
    }

    #[test]
    fn a_piece_out_of_order_ends_the_transfer() {
        let mut files = Files::default();
        files.add(&piece(&key(), 0, 3, b"a"), MOST).unwrap();
        assert_eq!(
            files
                .add(&piece(&key(), 2, 3, b"c"), MOST)
                .unwrap_err()
                .code(),
            Code::Validation
        );
        assert!(files.add(&piece(&key(), 1, 3, b"b"), MOST).is_err());
        assert_eq!(files.bytes, 0);
    }

    #[test]
    fn keys_that_could_be_paths_are_refused() {
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
                files.add(&piece(bad, 0, 1, b""), MOST).unwrap_err().code(),
                Code::Validation,
                "{bad}"
            );
        }
    }

    #[test]
    fn bytes_and_files_are_bounded() {
        let mut files = Files::default();
        for number in 0..OPEN_FILES {
            files
                .add(&piece(&format!("ft1_{number:064x}"), 0, 2, b"x"), MOST)
                .unwrap();
        }
        assert_eq!(
            files
                .add(&piece(&key(), 0, 1, b"x"), MOST)
                .unwrap_err()
                .code(),
            Code::Capacity
        );
        let mut files = Files::default();
        let full = vec![0; PIECE_BYTES];
        let amount = (MOST / PIECE_BYTES + 1) as u64;
        let refused = (0..amount)
            .find_map(|index| files.add(&piece(&key(), index, amount, &full), MOST).err());
        assert_eq!(refused.unwrap().code(), Code::TooLarge);
        assert_eq!(files.bytes, 0);
    }
}
