//! The system call filter: an allow list with rules about arguments, compiled to one program.
//!
//! `table.rs` says what happens to each call and is meant to be read; `compile.rs` turns it into a balanced tree of
//! comparisons, so that a call passes about ten instructions.

mod allowed;
mod compile;
mod table;

use libc::sock_filter;

pub use table::{Rule, Verdict, rules};

/// The program for a box's init and everything started from it. The calls that finish a box still pass; `closing_program` ends
/// that. In two parts, because the kernel takes long over a large program (0.2 ms), which can be spent ahead of time.
pub(crate) fn program() -> Vec<sock_filter> {
    let mut rules = rules();
    for rule in &mut rules {
        if table::CLOSING
            .iter()
            .any(|call| table::number(*call) == rule.number)
        {
            rule.otherwise = Verdict::Allow;
        }
    }
    compile::program(&rules)
}

/// Refuses the calls that finish a box.
pub(crate) fn closing_program() -> Vec<sock_filter> {
    let numbers: Vec<u32> = table::CLOSING
        .iter()
        .map(|call| table::number(*call))
        .collect();
    compile::refuse(&numbers, libc::EPERM)
}

/// A second, tiny program for the guest's commands only: init needs `openat2` to serve files safely, but its mode is in
/// memory, out of a filter's reach, so a guest could make set-id files with it.
///
/// Without an id of init's own a command could also choose the processors of init's threads. Their numbers are not known ahead, so
/// it chooses those of the thread that calls; a choice for any other thread is answered as if it were made.
pub(crate) fn guest_program(two_uids: bool) -> Vec<sock_filter> {
    let absent = [table::number(libc::SYS_openat2)];
    if two_uids {
        return compile::refuse(&absent, libc::ENOSYS);
    }
    let affinity = table::number(libc::SYS_sched_setaffinity);
    compile::refuse_and_check(&absent, libc::ENOSYS, affinity, &[table::OTHERS_UNCHANGED])
}

/// Whether the kernel takes filters at all.
pub(crate) fn available() -> bool {
    crate::raw::seccomp_action_available(libc::SECCOMP_RET_KILL_PROCESS)
        && crate::raw::seccomp_action_available(libc::SECCOMP_RET_ERRNO)
}
