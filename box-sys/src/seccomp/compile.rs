//! Compiles the table to BPF instructions.

use libc::sock_filter;

use super::rule::{Check, Rule, Verdict};

const LOAD_WORD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const JUMP: u16 = 0x05; // BPF_JMP | BPF_JA
const JUMP_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const JUMP_AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const JUMP_ANY_BIT: u16 = 0x45; // BPF_JMP | BPF_JSET | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K

const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCH: u32 = 4;
/// Offset of the low half of argument `n`. Both architectures are little endian.
const fn offset_argument(n: u32) -> u32 {
    16 + 8 * n
}

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

/// First number of x32 on x86-64, which has the same architecture value.
#[cfg(target_arch = "x86_64")]
const X32_BIT: u32 = 0x4000_0000;

const fn op(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

const fn ret(verdict: Verdict) -> sock_filter {
    let k = match verdict {
        Verdict::Allow => libc::SECCOMP_RET_ALLOW,
        #[expect(clippy::cast_sign_loss, reason = "error numbers are positive")]
        Verdict::Errno(errno) => libc::SECCOMP_RET_ERRNO | errno as u32,
        Verdict::Kill => libc::SECCOMP_RET_KILL_PROCESS,
    };
    op(RETURN, k, 0, 0)
}

/// Result for unknown numbers.
///
/// They are newer than the table, so act like an older kernel.
const UNKNOWN: Verdict = Verdict::Errno(libc::ENOSYS);

/// The complete program for a table that is sorted by number.
pub(super) fn program(rules: &[Rule]) -> Vec<sock_filter> {
    let mut program = vec![
        op(LOAD_WORD, OFFSET_ARCH, 0, 0),
        op(JUMP_EQUAL, ARCH, 1, 0),
        ret(Verdict::Kill),
        op(LOAD_WORD, OFFSET_NUMBER, 0, 0),
    ];
    #[cfg(target_arch = "x86_64")]
    program.extend([op(JUMP_AT_LEAST, X32_BIT, 0, 1), ret(Verdict::Kill)]);
    program.extend(tree(&runs(rules)));
    program
}

/// A program that refuses some calls and allows all others.
///
/// It complements a complete one.
pub(super) fn refuse(numbers: &[u32], errno: i32) -> Vec<sock_filter> {
    let mut program = vec![op(LOAD_WORD, OFFSET_NUMBER, 0, 0)];
    one_of(&mut program, numbers, Verdict::Errno(errno));
    program.push(ret(Verdict::Allow));
    program
}

/// The same, with checks of the arguments of one more call.
pub(super) fn refuse_and_check(
    numbers: &[u32],
    errno: i32,
    number: u32,
    checks: &[Check],
) -> Vec<sock_filter> {
    let mut program = refuse(numbers, errno);
    program.pop();
    let call = leaf(&Run {
        first: number,
        checks,
        verdict: Verdict::Allow,
    });
    let past = u8::try_from(call.len()).unwrap_or(u8::MAX);
    program.push(op(JUMP_EQUAL, number, 0, past));
    program.extend(call);
    program.push(ret(Verdict::Allow));
    program
}

/// All numbers from `first` to the next run have the same result.
struct Run<'a> {
    first: u32,
    checks: &'a [Check],
    verdict: Verdict,
}

/// Merges adjacent rules and fills the gaps between known numbers.
fn runs(rules: &[Rule]) -> Vec<Run<'_>> {
    let mut runs: Vec<Run<'_>> = Vec::new();
    let mut push = |first: u32, checks, verdict| {
        let plain = |run: &Run<'_>| run.checks.is_empty() && run.verdict == verdict;
        if !(<[Check]>::is_empty(checks) && runs.last().is_some_and(plain)) {
            runs.push(Run {
                first,
                checks,
                verdict,
            });
        }
    };
    let mut next = 0;
    for rule in rules {
        if rule.number > next {
            push(next, &[], UNKNOWN);
        }
        push(rule.number, rule.checks, rule.otherwise);
        next = rule.number + 1;
    }
    push(next, &[], UNKNOWN);
    runs
}

/// Binary search over runs. The call number is in the accumulator.
fn tree(runs: &[Run<'_>]) -> Vec<sock_filter> {
    if let [run] = runs {
        return leaf(run);
    }
    let (left, right) = runs.split_at(runs.len() / 2);
    let (pivot, left, right) = (right[0].first, tree(left), tree(right));
    let mut code = Vec::with_capacity(left.len() + right.len() + 2);
    // A conditional jump spans 255 instructions, an unconditional one any distance.
    if let Ok(distance) = u8::try_from(left.len()) {
        code.push(op(JUMP_AT_LEAST, pivot, distance, 0));
    } else {
        code.push(op(JUMP_AT_LEAST, pivot, 0, 1));
        code.push(op(JUMP, distance(left.len()), 0, 0));
    }
    code.extend(left);
    code.extend(right);
    code
}

/// Code for one call: its checks in order. The first match decides.
///
/// The checks use only the low half of an argument. The kernel treats every checked argument except
/// pointers as a 32-bit integer and ignores the upper half. A filter that compared it could be
/// circumvented. Where the kernel takes a long (the flags of `mmap`), it uses bits of the lower
/// half only.
fn leaf(run: &Run<'_>) -> Vec<sock_filter> {
    let mut code = Vec::new();
    for check in run.checks {
        code.extend(checked(check));
    }
    code.push(ret(run.verdict));
    code
}

/// Code for one check: returns its verdict on a match, otherwise continues.
fn checked(check: &Check) -> Vec<sock_filter> {
    let mut code = Vec::new();
    match *check {
        Check::AnyBit { arg, mask, verdict } => {
            code.extend(any_bit(offset_argument(arg), mask, 1));
            code.push(ret(verdict));
        }
        Check::BothAnyBit {
            arg,
            mask,
            arg2,
            mask2,
            verdict,
        } => {
            code.extend(any_bit(offset_argument(arg), mask, 3));
            code.extend(any_bit(offset_argument(arg2), mask2, 1));
            code.push(ret(verdict));
        }
        Check::OneOf {
            arg,
            values,
            verdict,
        } => {
            code.push(op(LOAD_WORD, offset_argument(arg), 0, 0));
            one_of(&mut code, values, verdict);
        }
        Check::NoneOf {
            arg,
            values,
            verdict,
        } => {
            code.push(op(LOAD_WORD, offset_argument(arg), 0, 0));
            none_of(&mut code, values, verdict);
        }
        Check::NonNull { arg, verdict } => {
            code.push(op(LOAD_WORD, offset_argument(arg), 0, 0));
            code.push(op(JUMP_ANY_BIT, u32::MAX, 2, 0));
            code.extend(any_bit(offset_argument(arg) + 4, u32::MAX, 1));
            code.push(ret(verdict));
        }
        Check::When { arg, when, then } => {
            let then = checked(then);
            let past = u8::try_from(then.len()).unwrap_or(u8::MAX);
            code.push(op(LOAD_WORD, offset_argument(arg), 0, 0));
            code.push(op(JUMP_EQUAL, when, 0, past));
            code.extend(then);
        }
    }
    code
}

/// Code that skips `past` instructions unless a bit of the mask is set in the word.
fn any_bit(word: u32, mask: u32, past: u8) -> [sock_filter; 2] {
    [op(LOAD_WORD, word, 0, 0), op(JUMP_ANY_BIT, mask, 0, past)]
}

fn one_of(code: &mut Vec<sock_filter>, values: &[u32], verdict: Verdict) {
    for value in values {
        code.push(op(JUMP_EQUAL, *value, 0, 1));
        code.push(ret(verdict));
    }
}

fn none_of(code: &mut Vec<sock_filter>, values: &[u32], verdict: Verdict) {
    for (place, value) in values.iter().enumerate() {
        let to_end = u8::try_from(values.len() - place).unwrap_or(u8::MAX);
        code.push(op(JUMP_EQUAL, *value, to_end, 0));
    }
    code.push(ret(verdict));
}

fn distance(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
