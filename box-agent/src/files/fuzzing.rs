//! Archives without a box: a directory of this machine in place of its root.

use std::os::fd::OwnedFd;

use box_protocol::BoxError;
use box_protocol::actions::{FilePackParams, FileTreeResult, FileUnpackParams};
use box_sys::Guest;
use serde_json::json;

use super::Pieces as _;
use super::guest_root::{GuestRoot, Step};
use super::pack::TreePacker;
use super::pool::CancelFlag;
use super::unpack;

/// Unpacks an archive into a directory, in pieces of this size.
///
/// The agent then keeps nothing of the upload.
pub fn unpack(root: OwnedFd, archive: &[u8], pieces: usize) -> Result<FileTreeResult, BoxError> {
    step(root, |step| {
        let mut offset = 0;
        loop {
            let end = archive.len().min(offset + pieces);
            let upload = json!({"id": "upload", "offset": offset, "done": end == archive.len()});
            let params = json!({"box_id": "box", "path": "/", "upload": upload, "data": ""});
            let mut params: FileUnpackParams = read(params)?;
            params.data = archive[offset..end].to_vec().into();
            let total = unpack::unpack(step, &params)?;
            if end == archive.len() {
                return Ok(total);
            }
            offset = end;
        }
    })
}

/// Packs a directory.
pub fn pack(root: OwnedFd) -> Result<Vec<u8>, BoxError> {
    step(root, |step| {
        let params: FilePackParams = read(json!({"box_id": "box", "path": "/"}))?;
        let mut packer = TreePacker::open(step, &params)?;
        let mut archive = Vec::new();
        while let Some((offset, piece)) = packer.next(step)? {
            if offset != archive.len() as u64 {
                return Err(BoxError::internal("a piece at another offset"));
            }
            archive.extend(piece);
        }
        Ok(archive)
    })
}

fn step<T>(
    root: OwnedFd,
    run: impl FnOnce(&Step<'_>) -> Result<T, BoxError>,
) -> Result<T, BoxError> {
    let guest = Guest {
        id: rustix::process::geteuid().as_raw(),
        ..Guest::default()
    };
    let (guest_root, cancel) = (&GuestRoot::new(root, guest), &CancelFlag::default());
    run(&Step { guest_root, cancel })
}

fn read<T: serde::de::DeserializeOwned>(params: serde_json::Value) -> Result<T, BoxError> {
    serde_json::from_value(params).map_err(|error| BoxError::internal(error.to_string()))
}
