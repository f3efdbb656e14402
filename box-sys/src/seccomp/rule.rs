//! The rule of a system call: conditions on its arguments, and verdicts.

/// Result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The kernel executes the call.
    Allow,
    /// The call returns this error.
    Errno(i32),
    /// The kernel kills the process with `SIGSYS`.
    Kill,
}

/// A condition on arguments, with the verdict if it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// Any bit of the mask is set in the argument.
    AnyBit {
        arg: u32,
        mask: u32,
        verdict: Verdict,
    },
    /// Any bit of each mask is set in its argument.
    BothAnyBit {
        arg: u32,
        mask: u32,
        arg2: u32,
        mask2: u32,
        verdict: Verdict,
    },
    /// The argument is one of these values.
    OneOf {
        arg: u32,
        values: &'static [u32],
        verdict: Verdict,
    },
    /// The argument is none of these values.
    NoneOf {
        arg: u32,
        values: &'static [u32],
        verdict: Verdict,
    },
    /// The argument is a non-null pointer.
    NonNull { arg: u32, verdict: Verdict },
    /// The argument is `when`, and the other check holds.
    When {
        arg: u32,
        when: u32,
        then: &'static Check,
    },
}

/// The rule of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// Number of the call on this architecture.
    pub number: u32,
    /// Conditions, in order.
    pub checks: &'static [Check],
    /// Verdict if no condition holds.
    pub otherwise: Verdict,
}

/// Number of a call as the filter sees it.
pub(super) fn number(call: libc::c_long) -> u32 {
    u32::try_from(call).unwrap_or(u32::MAX)
}
