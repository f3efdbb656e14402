//! Interprets the program as the kernel does, and compares it with the table.

use super::*;
use crate::seccomp::rule::number;
use crate::seccomp::table::rules;

/// Interprets a program as the kernel does.
fn run(program: &[sock_filter], arch: u32, nr: u32, args: [u64; 6]) -> u32 {
    let (mut at, mut acc) = (0, 0);
    let low = |value: u64| u32::try_from(value & 0xffff_ffff).unwrap();
    for _ in 0..program.len() {
        let i = program[at];
        at += 1;
        let jump = |taken: bool| usize::from(if taken { i.jt } else { i.jf });
        match i.code {
            LOAD_WORD => {
                acc = match i.k {
                    OFFSET_NUMBER => nr,
                    OFFSET_ARCH => arch,
                    k => {
                        let value = args[usize::try_from((k - 16) / 8).unwrap()];
                        low(if k % 8 == 0 { value } else { value >> 32 })
                    }
                }
            }
            JUMP => at += usize::try_from(i.k).unwrap(),
            JUMP_EQUAL => at += jump(acc == i.k),
            JUMP_AT_LEAST => at += jump(acc >= i.k),
            JUMP_ANY_BIT => at += jump(acc & i.k != 0),
            RETURN => return i.k,
            code => panic!("instruction {code:#x}"),
        }
    }
    panic!("no verdict for {nr}");
}

/// Whether a check holds, and its verdict.
fn holds(check: &Check, args: [u64; 6]) -> (bool, Verdict) {
    let word = |arg: u32| u32::try_from(args[arg as usize] & 0xffff_ffff).unwrap();
    match *check {
        Check::AnyBit { arg, mask, verdict } => (word(arg) & mask != 0, verdict),
        Check::BothAnyBit {
            arg,
            mask,
            arg2,
            mask2,
            verdict,
        } => (word(arg) & mask != 0 && word(arg2) & mask2 != 0, verdict),
        Check::OneOf {
            arg,
            values,
            verdict,
        } => (values.contains(&word(arg)), verdict),
        Check::NoneOf {
            arg,
            values,
            verdict,
        } => (!values.contains(&word(arg)), verdict),
        Check::NonNull { arg, verdict } => (args[arg as usize] != 0, verdict),
        Check::When { arg, when, then } => {
            let (then, verdict) = holds(then, args);
            (word(arg) == when && then, verdict)
        }
    }
}

/// The arguments of a rule, with all boundary values of its checks.
fn boundaries(checks: &[Check]) -> Vec<(u32, Vec<u64>)> {
    let mut all: Vec<(u32, Vec<u64>)> = Vec::new();
    let mut add = |arg: u32, values: &[u32]| {
        let place = all.iter().position(|(known, _)| *known == arg);
        let place = place.unwrap_or_else(|| {
            all.push((arg, vec![0, 1, 0xffff_ffff, 1 << 32, u64::MAX]));
            all.len() - 1
        });
        for value in values {
            let around = [value.wrapping_sub(1), *value, value.wrapping_add(1)];
            all[place].1.extend(around.map(u64::from));
        }
    };
    let bits = |mask: u32| -> Vec<u32> {
        let each = (0..32)
            .map(|bit| 1_u32 << bit)
            .filter(|bit| mask & bit != 0);
        each.chain([mask, !mask]).collect()
    };
    let mut rest: Vec<&Check> = checks.iter().collect();
    while let Some(check) = rest.pop() {
        match *check {
            Check::AnyBit { arg, mask, .. } => add(arg, &bits(mask)),
            Check::BothAnyBit {
                arg,
                mask,
                arg2,
                mask2,
                ..
            } => {
                add(arg, &bits(mask));
                add(arg2, &bits(mask2));
            }
            Check::OneOf { arg, values, .. } | Check::NoneOf { arg, values, .. } => {
                add(arg, values);
            }
            Check::NonNull { arg, .. } => add(arg, &[]),
            Check::When { arg, when, then } => {
                add(arg, &[when]);
                rest.push(then);
            }
        }
    }
    all
}

/// All combinations of the values.
fn grid(boundaries: &[(u32, Vec<u64>)]) -> Vec<[u64; 6]> {
    let mut all = vec![[0; 6]];
    for (arg, values) in boundaries {
        let with = |args: &[u64; 6]| -> Vec<[u64; 6]> {
            let one = |value: &u64| {
                let mut args = *args;
                args[*arg as usize] = *value;
                args
            };
            values.iter().map(one).collect()
        };
        all = all.iter().flat_map(with).collect();
    }
    all
}

#[test]
fn every_number_follows_its_rule() {
    let rules = rules();
    let program = program(&rules);
    assert!(program.len() < 1000, "{} instructions", program.len());
    for nr in 0..1024 {
        let Some(rule) = rules.iter().find(|rule| rule.number == nr) else {
            assert_eq!(run(&program, ARCH, nr, [0; 6]), ret(UNKNOWN).k, "{nr}");
            continue;
        };
        let mut decided = vec![false; rule.checks.len()];
        for args in grid(&boundaries(rule.checks)) {
            let first = rule.checks.iter().position(|check| holds(check, args).0);
            let verdict = first.map_or(rule.otherwise, |n| holds(&rule.checks[n], args).1);
            assert_eq!(
                run(&program, ARCH, nr, args),
                ret(verdict).k,
                "{nr} {args:x?}"
            );
            if let Some(first) = first {
                decided[first] = true;
            }
        }
        assert!(
            decided.iter().all(|decided| *decided),
            "{nr}: a check that decides nothing"
        );
    }
}

#[test]
fn other_architectures_are_killed() {
    let program = program(&rules());
    let kill = libc::SECCOMP_RET_KILL_PROCESS;
    assert_eq!(run(&program, 0x4000_0003, 20, [0; 6]), kill, "ia32");
    #[cfg(target_arch = "x86_64")]
    assert_eq!(run(&program, ARCH, X32_BIT + 39, [0; 6]), kill, "x32");
}

/// The purpose of each argument check, with the values that programs pass.
#[test]
fn arguments_are_checked() {
    let program = program(&rules());
    let check = |call: libc::c_long, args: &[u64], errno: Option<i32>| {
        let mut all = [0; 6];
        all[..args.len()].copy_from_slice(args);
        let wanted = errno.map_or(Verdict::Allow, Verdict::Errno);
        let verdict = run(&program, ARCH, number(call), all);
        assert_eq!(verdict, ret(wanted).k, "{call} {args:x?}");
    };
    let passes = |call, args: &[u64]| check(call, args, None);
    let refuses = |call, args: &[u64]| check(call, args, Some(libc::EPERM));
    // Modes that create or change a file, in every argument position.
    let modes: &[(libc::c_long, &[u64])] = &[
        (libc::SYS_fchmod, &[3]),
        (libc::SYS_fchmodat, &[0, 1]),
        (libc::SYS_fchmodat2, &[0, 1]),
        (libc::SYS_mkdirat, &[0, 1]),
        (libc::SYS_mknodat, &[0, 1]),
        (libc::SYS_openat, &[0, 1, 0o100]),
        (libc::SYS_openat, &[0, 1, 0o20_200_000]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_chmod, &[1]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_mkdir, &[1]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_mknod, &[1]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_creat, &[1]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_open, &[1, 0o100]),
    ];
    for (call, before) in modes {
        for mode in [0o4755, 0o2755, 0o6000, 0o104_755] {
            refuses(*call, &[*before, &[mode]].concat());
        }
        passes(*call, &[*before, &[0o1777]].concat());
    }
    // Without creation the mode is ignored.
    passes(libc::SYS_openat, &[0, 1, 0, 0o7777]);
    for new in [0x1000_0000, 0x0002_0000, 0x4000_0000, 0x0200_0000] {
        refuses(libc::SYS_clone, &[new | 0x11]);
        refuses(libc::SYS_unshare, &[new]);
    }
    refuses(libc::SYS_unshare, &[0x80]);
    passes(libc::SYS_clone, &[17]);
    passes(libc::SYS_unshare, &[0x400]);
    let family = Some(libc::EAFNOSUPPORT);
    let protocol = Some(libc::EPROTONOSUPPORT);
    passes(libc::SYS_socket, &[1, 1, 0]);
    passes(libc::SYS_socket, &[2, 1, 6]);
    passes(libc::SYS_socket, &[10, 2, 17]);
    passes(libc::SYS_socket, &[16, 3, 0]);
    check(libc::SYS_socket, &[2, 1, 132], protocol);
    check(libc::SYS_socket, &[10, 1, 132], protocol);
    check(libc::SYS_socket, &[16, 3, 12], protocol);
    check(libc::SYS_socket, &[17, 3, 0], family);
    check(libc::SYS_socket, &[38, 5, 0], family);
    check(libc::SYS_socket, &[40, 1, 0], family);
    passes(libc::SYS_socketpair, &[1, 1]);
    check(libc::SYS_socketpair, &[16, 3], family);
    passes(libc::SYS_personality, &[0xffff_ffff]);
    refuses(libc::SYS_personality, &[0x0004_0000]);
    refuses(libc::SYS_ioctl, &[0, 0x5412]);
    passes(libc::SYS_ioctl, &[0, 0x5413]);
    check(libc::SYS_fallocate, &[3, 1], Some(libc::EOPNOTSUPP));
    check(libc::SYS_fallocate, &[3, 0], Some(libc::EOPNOTSUPP));
    passes(libc::SYS_fallocate, &[3, 3]);
    // Other processes: no limits and priorities, and no CPU affinity of init.
    for call in [
        libc::SYS_prlimit64,
        libc::SYS_sched_setscheduler,
        libc::SYS_sched_setparam,
        libc::SYS_sched_setattr,
    ] {
        refuses(call, &[1, 7]);
        passes(call, &[0, 7]);
    }
    for (call, process) in [(libc::SYS_setpriority, 0), (libc::SYS_ioprio_set, 1)] {
        passes(call, &[process, 0, 10]);
        refuses(call, &[process, 1, 10]);
        refuses(call, &[process + 1, 0, 10]);
        refuses(call, &[process + 2, 0, 10]);
    }
    refuses(libc::SYS_sched_setaffinity, &[1, 8, 1]);
    passes(libc::SYS_sched_setaffinity, &[0, 8, 1]);
    passes(libc::SYS_sched_setaffinity, &[7, 8, 1]);
    // The core limit can be read and does not change.
    passes(libc::SYS_prlimit64, &[0, 4, 0, 1 << 40]);
    check(libc::SYS_prlimit64, &[0, 4, 1 << 40], Some(0));
    check(libc::SYS_prlimit64, &[0, 4, 4096], Some(0));
    check(libc::SYS_setrlimit, &[4, 4096], Some(0));
    passes(libc::SYS_setrlimit, &[7, 4096]);
    refuses(libc::SYS_mmap, &[0, 4096, 3, 0x40022]);
    passes(libc::SYS_mmap, &[0, 4096, 3, 0x22]);
    refuses(libc::SYS_memfd_create, &[1, 5]);
    passes(libc::SYS_memfd_create, &[1, 1]);
    refuses(libc::SYS_shmget, &[0, 4096, 0o5600]);
    passes(libc::SYS_shmget, &[0, 4096, 0o1600]);
    check(libc::SYS_renameat2, &[0, 1, 0, 1, 4], Some(libc::EINVAL));
    check(libc::SYS_renameat2, &[0, 1, 0, 1, 5], Some(libc::EINVAL));
    passes(libc::SYS_renameat2, &[0, 1, 0, 1, 3]);
}

/// Resources that all programs of the host share.
///
/// Filters have no listeners, sockets have no programs and keep their receive buffer, and secret
/// memory is unavailable.
#[test]
fn arguments_protect_shared_resources() {
    let program = program(&rules());
    let check = |call: libc::c_long, args: [u64; 4], errno: Option<i32>| {
        let all = [args[0], args[1], args[2], args[3], 0, 0];
        let wanted = errno.map_or(Verdict::Allow, Verdict::Errno);
        let verdict = run(&program, ARCH, number(call), all);
        assert_eq!(verdict, ret(wanted).k, "{call} {args:x?}");
    };
    for (flags, errno) in [
        (8, Some(libc::EINVAL)),
        (0x28, Some(libc::EINVAL)),
        (1, None),
    ] {
        check(libc::SYS_seccomp, [1, flags, 0, 0], errno);
    }
    check(libc::SYS_setsockopt, [3, 1, 8, 4096], Some(0));
    check(libc::SYS_setsockopt, [3, 1, 7, 4096], None);
    check(libc::SYS_setsockopt, [3, 6, 8, 4096], None);
    for option in [26, 50, 51, 52] {
        check(
            libc::SYS_setsockopt,
            [3, 1, option, 4096],
            Some(libc::EPERM),
        );
        check(libc::SYS_setsockopt, [3, 0, option, 4096], None);
    }
    check(libc::SYS_memfd_secret, [0; 4], Some(libc::ENOSYS));
}

/// The filter for commands: for which threads they can set the CPU affinity.
#[test]
fn commands_with_the_id_of_init_set_only_their_own_affinity() {
    let affinity = number(libc::SYS_sched_setaffinity);
    let allow = ret(Verdict::Allow).k;
    let unchanged = ret(Verdict::Errno(0)).k;
    let absent = ret(Verdict::Errno(libc::ENOSYS)).k;
    for (two_uids, of_others) in [(true, allow), (false, unchanged)] {
        let program = crate::seccomp::guest_program(two_uids);
        let verdict_of = |nr, pid| run(&program, ARCH, nr, [pid, 8, 4096, 0, 0, 0]);
        assert_eq!(verdict_of(affinity, 0), allow);
        // The main filter denies this one.
        assert_eq!(verdict_of(affinity, 1), allow);
        assert_eq!(verdict_of(affinity, 2), of_others);
        assert_eq!(verdict_of(number(libc::SYS_openat2), 0), absent);
        assert_eq!(verdict_of(number(libc::SYS_getpid), 2), allow);
    }
}
