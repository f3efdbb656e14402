//! The system call filter: an allow list with argument checks.
//!
//! `rule.rs` defines a rule. `table.rs` lists the rule of each call, `allowed.rs` and `refused.rs` the calls
//! without conditions. `compile.rs` turns it into a binary search, so a call
//! passes about ten instructions.

mod allowed;
mod compile;
mod refused;
mod rule;
mod table;

use libc::sock_filter;

pub use rule::{Rule, Verdict};
pub use table::rules;

use refused::CLOSING;
use rule::number;

/// The filter of a box's init and all its descendants.
///
/// It still allows the calls that complete a box; `closing_program` denies them afterwards. The
/// kernel takes 0.2 ms to load this large part, which happens before the plan arrives.
pub(crate) fn program() -> Vec<sock_filter> {
    let mut rules = rules();
    for rule in &mut rules {
        if CLOSING.iter().any(|call| number(*call) == rule.number) {
            rule.otherwise = Verdict::Allow;
        }
    }
    compile::program(&rules)
}

/// Denies the calls that complete a box.
pub(crate) fn closing_program() -> Vec<sock_filter> {
    let numbers: Vec<u32> = CLOSING.iter().map(|call| number(*call)).collect();
    compile::refuse(&numbers, libc::EPERM)
}

/// A second, small filter for commands only.
///
/// Init needs `openat2` to serve files safely. Its mode is in memory, which a filter cannot read,
/// so a guest could create set-id files with it.
///
/// If init and guest share a user id, a command could also set the CPU affinity of init's threads,
/// whose ids are not known in advance. It can therefore set only that of the calling thread; for
/// other threads the call succeeds without effect.
pub(crate) fn guest_program(two_uids: bool) -> Vec<sock_filter> {
    let absent = [number(libc::SYS_openat2)];
    if two_uids {
        return compile::refuse(&absent, libc::ENOSYS);
    }
    let affinity = number(libc::SYS_sched_setaffinity);
    compile::refuse_and_check(&absent, libc::ENOSYS, affinity, &[table::OTHERS_UNCHANGED])
}

/// Whether the kernel supports seccomp filters.
pub(crate) fn available() -> bool {
    crate::raw::seccomp_action_available(libc::SECCOMP_RET_KILL_PROCESS)
        && crate::raw::seccomp_action_available(libc::SECCOMP_RET_ERRNO)
}
