//! Per-thread buffers: a connection borrows one while bytes pass through it.
//!
//! An idle connection owns none. A thread keeps a few, so that a busy connection does not call the allocator each
//! time.

use std::cell::RefCell;

/// Capacity of a new buffer.
const CAPACITY: usize = 64 * 1024;

/// Maximum capacity of a kept buffer.
const MAX_CAPACITY: usize = 256 * 1024;

/// Number of buffers a thread keeps.
const MAX_BUFFERS: usize = 4;

thread_local! {
    static POOL: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Returns an empty buffer.
pub(super) fn take() -> Vec<u8> {
    POOL.with_borrow_mut(Vec::pop)
        .unwrap_or_else(|| Vec::with_capacity(CAPACITY))
}

/// Returns a buffer to the thread; discards its content.
pub(super) fn give_back(mut buffer: Vec<u8>) {
    if (CAPACITY..=MAX_CAPACITY).contains(&buffer.capacity()) {
        POOL.with_borrow_mut(|pool| {
            if pool.len() < MAX_BUFFERS {
                buffer.clear();
                pool.push(buffer);
            }
        });
    }
}

/// Frees the unused buffers of this thread, at most 1 MiB.
/// Suits an idle process that shares its machine with many similar ones.
pub fn free_thread_buffers() {
    POOL.with_borrow_mut(|pool| *pool = Vec::new());
}

#[cfg(test)]
mod tests {
    use super::{POOL, free_thread_buffers, give_back, take};

    #[test]
    fn freeing_releases_all_memory() {
        give_back(take());
        assert_eq!(POOL.with_borrow(Vec::len), 1);
        free_thread_buffers();
        assert_eq!(POOL.with_borrow(Vec::capacity), 0);
    }
}
