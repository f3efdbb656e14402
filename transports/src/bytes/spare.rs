//! Shared buffers: a connection borrows one while bytes pass through it.
//!
//! An idle connection owns none. A thread keeps a few, so that a busy connection does not call the allocator each
//! time.

use std::cell::RefCell;

/// Capacity of a new buffer.
const SIZE: usize = 64 * 1024;

/// Maximum capacity of a kept buffer.
const LARGEST: usize = 256 * 1024;

/// Number of buffers a thread keeps.
const KEPT: usize = 4;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Returns an empty buffer.
pub(super) fn take() -> Vec<u8> {
    SPARE
        .with_borrow_mut(Vec::pop)
        .unwrap_or_else(|| Vec::with_capacity(SIZE))
}

/// Returns a buffer to the thread; discards its content.
pub(super) fn give_back(mut buffer: Vec<u8>) {
    if (SIZE..=LARGEST).contains(&buffer.capacity()) {
        SPARE.with_borrow_mut(|spare| {
            if spare.len() < KEPT {
                buffer.clear();
                spare.push(buffer);
            }
        });
    }
}

/// Frees the spare buffers of this thread, at most 1 MiB.
/// Suits an idle process that shares its machine with many similar ones.
pub fn free_spare_buffers() {
    SPARE.with_borrow_mut(|spare| *spare = Vec::new());
}

#[cfg(test)]
mod tests {
    use super::{SPARE, free_spare_buffers, give_back, take};

    #[test]
    fn nothing_is_kept_of_what_is_freed() {
        give_back(take());
        assert_eq!(SPARE.with_borrow(Vec::len), 1);
        free_spare_buffers();
        assert_eq!(SPARE.with_borrow(Vec::capacity), 0);
    }
}
