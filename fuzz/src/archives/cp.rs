//! The sources of `boxd cp`. They belong to a program, which no other crate can use.
#![allow(dead_code, reason = "a copy of a directory needs only a part")]

#[path = "../../../boxd/src/cp/local.rs"]
mod local;
#[path = "../../../boxd/src/cp/unpack.rs"]
mod reader;
#[path = "../../../boxd/src/cp/temp_file.rs"]
mod temp_file;

/// The copied part of a mode, as in `boxd cp`.
const PERMISSION_BITS: u32 = 0o777;

use std::io::Read;
use std::os::fd::OwnedFd;

/// Unpacks an archive as `boxd cp` does.
pub(crate) fn unpack(archive: impl Read, root: &OwnedFd) -> anyhow::Result<()> {
    reader::unpack(archive, root)
}
