//! Giving memory back while nothing happens. Every page that a box's first process has written is its own, times the number
//! of boxes; most of them were used for a moment, while it was made or while it started a command.

use rustix::mm::{Advice, madvise};

/// A page, and how far below the current end of the stack nothing of it can be in use: what is called here needs a little.
const PAGE: usize = 4096;
const NEAR: usize = PAGE;

/// The part of the stack below that. Deeper is written by nothing init does; the kernel keeps a gap of a megabyte below a
/// stack, so that nobody else has these addresses.
const DEEP: usize = 256 * 1024;

/// Gives back memory that this process has written and does not use. To be called when nothing is going on: what is needed
/// again costs a page fault each.
pub fn release_memory() {
    // SAFETY: any thread may call it at any time.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
    // Another thread's stack is smaller, and what is below it somebody else's.
    if rustix::thread::gettid() == rustix::process::getpid() {
        trim_stack();
    }
}

#[inline(never)]
fn trim_stack() {
    let here = 0_u8;
    let end = (std::ptr::from_ref(&here).addr() & !(PAGE - 1)) - NEAR;
    let begin = std::ptr::without_provenance_mut(end - DEEP);
    // SAFETY: the main thread's stack grows down, and this is all below what is in use of it. Where it ends earlier, the rest is
    // not mapped, which is all the error says.
    let _ = unsafe { madvise(begin, DEEP, Advice::LinuxDontNeed) };
}
