//! The memory limit of a target.

use std::alloc::System;

use cap::Cap;

/// Every target works in this memory; an input that needs more aborts the process.
const LIMIT: usize = 8 << 20;

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, LIMIT);
