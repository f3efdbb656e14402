//! Memory shared with an agent: created for a new box, verified for an adopted one.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use box_protocol::actions::{SLOT_BYTES, SLOTS};
use rustix::fs::{FileType, MemfdFlags, OFlags, SealFlags};

use crate::shm::ShmPool;

const BYTES: u64 = SLOTS as u64 * SLOT_BYTES;

/// Seals that fix the size, so that every access stays within the memory.
const SEALS: SealFlags = SealFlags::GROW
    .union(SealFlags::SHRINK)
    .union(SealFlags::SEAL);

/// Creates the shared memory, and the agent's descriptor of it.
///
/// The kernel accounts their memory to the box.
pub(super) fn create() -> io::Result<(ShmPool, OwnedFd)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("box-slot", flags)?;
    rustix::fs::ftruncate(&file, BYTES)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    let ours = file.try_clone()?;
    Ok((ShmPool::new(File::from(ours)), file))
}

/// Returns the shared memory of an agent, if the runtime created it.
///
/// The agent runs next to the guest, so the descriptor is untrusted. A FIFO could block this
/// process, and another file could shrink or be shared with other processes.
pub(super) fn verify(file: OwnedFd) -> Option<ShmPool> {
    // Only a memfd has seals, and this exact combination is specific to the runtime.
    let seals = rustix::fs::fcntl_get_seals(&file).ok()?;
    let status = rustix::fs::fstat(&file).ok()?;
    let mode = rustix::fs::fcntl_getfl(&file).ok()?;
    let is_whole = u64::try_from(status.st_size) == Ok(BYTES);
    let is_file = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile;
    let is_unnamed = status.st_nlink == 0;
    let is_read_write = mode & OFlags::RWMODE == OFlags::RDWR;
    let is_ours = seals == SEALS && is_whole && is_file && is_unnamed && is_read_write;
    is_ours.then(|| ShmPool::new(File::from(file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(bytes: u64, seals: SealFlags) -> OwnedFd {
        let file = rustix::fs::memfd_create("other", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        file
    }

    #[test]
    fn only_memory_created_by_the_runtime_is_accepted() {
        let (_, theirs) = create().unwrap();
        assert!(verify(theirs).is_some());
        assert!(verify(memory(BYTES - 1, SEALS)).is_none(), "too small");
        assert!(verify(memory(2 * BYTES, SEALS)).is_none(), "too large");
        let shrinks = SealFlags::GROW | SealFlags::SEAL;
        assert!(verify(memory(BYTES, shrinks)).is_none(), "can shrink");
        let read_only = SEALS | SealFlags::WRITE;
        assert!(
            verify(memory(BYTES, read_only)).is_none(),
            "cannot be written"
        );
        let file = tempfile::tempfile().unwrap();
        file.set_len(BYTES).unwrap();
        assert!(verify(file.into()).is_none(), "a file of a disk");
        let (pipe, _) = std::io::pipe().unwrap();
        assert!(verify(pipe.into()).is_none(), "a pipe");
    }
}
