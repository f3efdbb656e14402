//! LangBot's file transfer: a file arrives as a series of small requests before the call that needs
//! it, and is taken by its key.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::error::{Code, Fault, RpcError};

/// Bytes of all files of one connection that have not been taken.
const FILE_BYTES: usize = 20 * 1024 * 1024;
/// Files of one connection that have not been taken.
const OPEN_FILES: usize = 128;
/// Bytes of one piece.
const PIECE_BYTES: usize = 16 * 1024;

#[derive(Debug, Default)]
pub(crate) struct Files {
    open: HashMap<String, File>,
    bytes: usize,
}

#[derive(Debug)]
struct File {
    data: Vec<u8>,
    next: u64,
    amount: u64,
}

#[derive(Deserialize)]
struct Piece {
    file_key: String,
    chunk_base64: String,
    chunk_index: u64,
    chunk_amount: u64,
}

impl Files {
    /// Adds a piece: in order, from 0, as many as the first one announced.
    pub(crate) fn add(&mut self, piece: &str) -> Result<(), RpcError> {
        let piece: Piece = serde_json::from_str(piece)
            .map_err(|error| RpcError::fault(Fault::InvalidParams, error.to_string()))?;
        if !is_key(&piece.file_key) {
            return Err(RpcError::validation(
                "file_key must be ft1_ and 64 hex digits, then perhaps an extension",
            ));
        }
        let data = STANDARD
            .decode(&piece.chunk_base64)
            .map_err(|_| RpcError::validation("chunk_base64 is not base64"))?;
        if data.len() > PIECE_BYTES {
            return Err(RpcError::limit(
                Code::TooLarge,
                "file piece",
                "piece_bytes",
                PIECE_BYTES,
            ));
        }
        if self.bytes + data.len() > FILE_BYTES {
            self.forget(&piece.file_key);
            return Err(RpcError::limit(
                Code::TooLarge,
                "file transfer",
                "file_bytes",
                FILE_BYTES,
            ));
        }
        if piece.chunk_index == 0 {
            self.forget(&piece.file_key);
            if self.open.len() >= OPEN_FILES {
                return Err(RpcError::limit(
                    Code::Capacity,
                    "file transfers",
                    "open_files",
                    OPEN_FILES,
                ));
            }
            let file = File {
                data: Vec::new(),
                next: 0,
                amount: piece.chunk_amount,
            };
            self.open.insert(piece.file_key.clone(), file);
        }
        let fits = |file: &&mut File| {
            file.next == piece.chunk_index
                && file.amount == piece.chunk_amount
                && file.next < file.amount
        };
        let Some(file) = self.open.get_mut(&piece.file_key).filter(fits) else {
            self.forget(&piece.file_key);
            return Err(RpcError::validation("chunk_index is out of order"));
        };
        self.bytes += data.len();
        file.data.extend_from_slice(&data);
        file.next += 1;
        Ok(())
    }

    /// Takes a file that has arrived whole.
    pub(crate) fn take(&mut self, key: &str) -> Option<Vec<u8>> {
        let whole = self
            .open
            .get(key)
            .is_some_and(|file| file.next == file.amount);
        whole.then(|| self.forget(key)).flatten()
    }

    fn forget(&mut self, key: &str) -> Option<Vec<u8>> {
        let file = self.open.remove(key)?;
        self.bytes -= file.data.len();
        Some(file.data)
    }
}

fn is_key(key: &str) -> bool {
    let Some(rest) = key.strip_prefix("ft1_") else {
        return false;
    };
    let (hex, extension) = rest.split_once('.').unwrap_or((rest, "x"));
    let is_word =
        |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    hex.len() == 64
        && hex.bytes().all(|byte| byte.is_ascii_hexdigit())
        && is_word(extension)
        && extension.len() <= 16
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn pieces_in_order_make_a_file_that_is_taken_once() {
        let mut files = Files::default();
        files.add(&piece(&key(), 0, 2, b"hello ")).unwrap();
        assert_eq!(files.take(&key()), None, "not whole yet");
        files.add(&piece(&key(), 1, 2, b"world")).unwrap();
        assert_eq!(files.take(&key()).unwrap(), b"hello world");
        assert_eq!(files.take(&key()), None);
        assert_eq!(files.bytes, 0);
    }

    #[test]
    fn a_piece_out_of_order_ends_the_transfer() {
        let mut files = Files::default();
        files.add(&piece(&key(), 0, 3, b"a")).unwrap();
        assert_eq!(
            files.add(&piece(&key(), 2, 3, b"c")).unwrap_err().code(),
            Code::Validation
        );
        assert!(files.add(&piece(&key(), 1, 3, b"b")).is_err());
        assert_eq!(files.bytes, 0);
    }

    #[test]
    fn keys_that_could_be_paths_are_refused() {
        let mut files = Files::default();
        for bad in [
            "../x",
            "ft1_",
            &format!("ft1_{}/..", "a".repeat(64)),
            &format!("ft1_{}.a/b", "a".repeat(64)),
        ] {
            assert_eq!(
                files.add(&piece(bad, 0, 1, b"")).unwrap_err().code(),
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
                .add(&piece(&format!("ft1_{number:064x}"), 0, 2, b"x"))
                .unwrap();
        }
        assert_eq!(
            files.add(&piece(&key(), 0, 1, b"x")).unwrap_err().code(),
            Code::Capacity
        );
        let mut files = Files::default();
        let full = vec![0; PIECE_BYTES];
        let amount = (FILE_BYTES / PIECE_BYTES + 1) as u64;
        let refused =
            (0..amount).find_map(|index| files.add(&piece(&key(), index, amount, &full)).err());
        assert_eq!(refused.unwrap().code(), Code::TooLarge);
        assert_eq!(files.bytes, 0);
    }
}
