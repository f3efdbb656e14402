//! Buffers that change hands: a connection borrows one while bytes pass through it, and an idle one
//! owns none. A thread keeps a few, so that a busy connection does not ask the allocator each time.

use std::cell::RefCell;

/// The capacity of a fresh buffer.
const SIZE: usize = 64 * 1024;

/// Larger ones are not kept.
const LARGEST: usize = 256 * 1024;

/// How many a thread keeps.
const KEPT: usize = 4;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// An empty buffer.
pub(super) fn take() -> Vec<u8> {
    SPARE
        .with_borrow_mut(Vec::pop)
        .unwrap_or_else(|| Vec::with_capacity(SIZE))
}

/// Gives a buffer back; what is in it is forgotten.
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

/// Frees what this thread keeps for busy connections, 1 MiB at most. For a process that has a while of nothing to do and
/// shares its machine with many others like it.
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
