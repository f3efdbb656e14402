//! Any lines as messages of an agent: refused, or in order and independent of how they are split.
#![no_main]

mod memory;

use std::sync::LazyLock;

use box_protocol::actions::{SLOT_BYTES, SLOTS};
use box_runtime::ShmPool;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

static POOL: LazyLock<ShmPool> = LazyLock::new(|| {
    let memory = memfd_create("slots", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&memory, u64::from(SLOTS) * SLOT_BYTES).expect("memory");
    ShmPool::new(memory.into())
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        box_runtime::fuzzing::agent(text, &POOL);
    }
});
