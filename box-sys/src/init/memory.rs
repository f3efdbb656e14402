//! Returns unused memory to the kernel.
//!
//! Every page that init has written is private to the box. Most were used only briefly, during
//! creation or the start of a command.

use rustix::mm::{Advice, madvise};

/// Page size, and the part below the stack pointer that this code may use.
const PAGE: usize = 4096;
const NEAR: usize = PAGE;

/// Length of the released stack area.
///
/// Init never uses more stack. The kernel keeps a gap of one megabyte below a stack, so no other
/// mapping is in this range.
const DEEP: usize = 256 * 1024;

/// Returns memory to the kernel that this process has written and no longer uses.
///
/// For idle processes: each page that is needed again costs a page fault.
pub fn release_memory() {
    // SAFETY: any thread may call it at any time.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
    // The stacks of other threads are smaller, with other mappings below them.
    if rustix::thread::gettid() == rustix::process::getpid() {
        trim_stack();
    }
}

#[inline(never)]
fn trim_stack() {
    let here = 0_u8;
    let end = (std::ptr::from_ref(&here).addr() & !(PAGE - 1)) - NEAR;
    let begin = std::ptr::without_provenance_mut(end - DEEP);
    // SAFETY: the main thread's stack grows down, and the range is below its used part. If the
    // stack ends earlier, the rest is unmapped, and the call only returns an error.
    let _ = unsafe { madvise(begin, DEEP, Advice::LinuxDontNeed) };
}
