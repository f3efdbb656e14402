//! Any bytes as an archive: unpacked beneath its directory or refused, and the same after a copy.
//!
//! An agent and `boxd cp` unpack the bytes. What the agent has unpacked, it packs again, `boxd cp`
//! unpacks that, and the trees are equal.
#![no_main]

#[path = "archives/cp.rs"]
mod cp;
mod memory;
#[path = "archives/tree.rs"]
mod tree;

use std::io::Read as _;

use self::tree::{Tree, Trees};

/// More than the memory of this process: a guest may send as much as it likes.
const REST: u64 = 10 << 20;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((pieces, archive)) = bytes.split_first() else {
        return;
    };
    let trees = Trees::new();
    // `boxd cp` holds no part of the archive, even if a name or an attribute is endless.
    let rest = std::io::repeat(*pieces).take(REST);
    let endless = cp::unpack(archive.chain(rest), &trees.open("endless"));
    assert!(!needs_memory(&endless), "{endless:?}");

    let pieces = 1 + usize::from(*pieces) * 16;
    let total = box_agent::fuzzing::unpack(trees.open("agent"), archive, pieces);
    let whole = box_agent::fuzzing::unpack(trees.open("whole"), archive, usize::MAX >> 1);
    assert_eq!(total.is_ok(), whole.is_ok(), "{total:?} {whole:?}");
    let unpacked = Tree::read(&trees.path("agent"));
    assert_eq!(unpacked, Tree::read(&trees.path("whole")), "in pieces of {pieces}");
    trees.check();

    if total.is_ok()
        && unpacked.is_readable()
        && let Ok(packed) = box_agent::fuzzing::pack(trees.open("agent")) {
        let copied = cp::unpack(packed.as_slice(), &trees.open("copy"));
        assert!(copied.is_ok(), "{copied:?}");
        assert_eq!(unpacked.plain(), Tree::read(&trees.path("copy")), "copied");
        trees.check();
    }
});

/// Whether an error is about memory. The standard library reports it where it reads to an end.
fn needs_memory(outcome: &anyhow::Result<()>) -> bool {
    let causes = outcome.as_ref().err().into_iter().flat_map(|error| error.chain());
    let mut errors = causes.filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    errors.any(|error| error.kind() == std::io::ErrorKind::OutOfMemory)
}
