//! Reuse of the memory of large messages.
//!
//! The kernel provides fresh memory of this size page by page, and zeroes each page first. That and the release cost a
//! third of the time of an echo of 15 MiB. The buffer of a finished large message is therefore kept for the next one.

use std::io;
use std::sync::{Mutex, PoisonError};

/// Minimum capacity of a buffer that is kept.
pub const MIN_POOLED: usize = 256 * 1024;

/// Maximum capacity of a buffer that is kept.
const MAX_POOLED: usize = 32 * 1024 * 1024;

/// Number of buffers kept per process: one for reading, one for writing.
const MAX_BUFFERS: usize = 2;

static POOL: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Reserves `more` bytes; a large buffer reuses kept memory.
pub fn reserve(buffer: &mut Vec<u8>, more: usize) {
    let needed = buffer.len().saturating_add(more);
    if needed <= buffer.capacity() {
        return;
    }
    if needed >= MIN_POOLED && buffer.capacity() < MIN_POOLED {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut large) = pool.pop() {
            drop(pool);
            large.extend_from_slice(buffer);
            *buffer = large;
        }
    }
    buffer.reserve(more);
}

/// Keeps the memory of a finished message, if it is large enough.
pub fn recycle(message: impl Into<Vec<u8>>) {
    let mut buffer = message.into();
    if (MIN_POOLED..=MAX_POOLED).contains(&buffer.capacity()) {
        buffer.clear();
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        pool.push(buffer);
        if pool.len() > MAX_BUFFERS {
            let smallest = (0..pool.len()).min_by_key(|at| pool[*at].capacity());
            smallest.map(|at| pool.swap_remove(at));
        }
    }
}

/// Releases the kept memory. Suits a process that becomes idle.
pub fn clear() {
    POOL.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// Writer that appends to a buffer.
pub(crate) struct PooledWriter<'a>(pub(crate) &'a mut Vec<u8>);

impl io::Write for PooledWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes).map(|()| bytes.len())
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() > self.0.capacity() - self.0.len() {
            reserve(self.0, bytes.len());
        }
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn only_large_buffers_are_reused() {
        recycle(vec![7; 4096]);
        let mut small = Vec::new();
        PooledWriter(&mut small).write_all(b"small").unwrap();
        assert!(small.capacity() < 4096, "a small buffer was kept");

        let used = vec![1; 3 * MIN_POOLED];
        let memory = used.as_ptr();
        recycle(used);
        let mut large = b"begin".to_vec();
        PooledWriter(&mut large)
            .write_all(&vec![2; MIN_POOLED])
            .unwrap();
        assert_eq!(large.as_ptr(), memory);
        assert_eq!(
            (&large[..5], large[5], large.len()),
            (&b"begin"[..], 2, MIN_POOLED + 5)
        );

        for size in [2, 9, 5] {
            recycle(vec![0; size * MIN_POOLED]);
        }
        let kept = || {
            POOL.lock()
                .unwrap()
                .iter()
                .map(Vec::capacity)
                .sum::<usize>()
        };
        assert_eq!(kept(), 14 * MIN_POOLED, "the largest");
        clear();
        assert_eq!(kept(), 0);
    }
}
