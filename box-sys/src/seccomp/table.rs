//! The result of each system call in a box. Unlisted numbers return `ENOSYS`.

use super::refused::{ABSENT, CLOSING, REFUSED, REFUSED_HERE};
use super::rule::{Check, Rule, Verdict, number};

const EPERM: Verdict = Verdict::Errno(libc::EPERM);
const ENOSYS: Verdict = Verdict::Errno(libc::ENOSYS);

/// Set-user-id and set-group-id bits.
///
/// `nosuid` protects only the box's mounts. A set-id file in a workspace would also be one on the
/// host.
const SET_ID: u32 = 0o6000;
/// `O_CREAT`, and the bit that only `O_TMPFILE` has.
const O_MAKES_FILE: u32 = 0o100 | 0o20_000_000;
/// All `CLONE_NEW…` flags: cgroup, uts, ipc, user, pid, net, mount.
const NEW_NAMESPACE: u32 = 0x7e02_0000;
/// `CLONE_NEWTIME`.
///
/// It is part of the exit signal for `clone`, but a flag for `unshare`.
const NEW_TIME: u32 = 0x80;

const fn mode_in(arg: u32) -> Check {
    Check::AnyBit {
        arg,
        mask: SET_ID,
        verdict: EPERM,
    }
}

const fn mode_of_open(flags: u32, mode: u32) -> Check {
    Check::BothAnyBit {
        arg: flags,
        mask: O_MAKES_FILE,
        arg2: mode,
        mask2: SET_ID,
        verdict: EPERM,
    }
}

/// Only for the calling thread; the call has no effect on others.
///
/// Programs that pin threads by their ids continue to work. The main filter denies the call for pid
/// 1.
pub(super) const OTHERS_UNCHANGED: Check = Check::NoneOf {
    arg: 0,
    values: &[0, 1],
    verdict: UNCHANGED,
};

/// Only for the calling process.
///
/// With a shared user id, a guest could otherwise change the limits of init.
pub(super) const SELF_ONLY: Check = Check::NoneOf {
    arg: 0,
    values: &[0],
    verdict: EPERM,
};

/// The same for calls whose first argument is a type of target.
///
/// `process` lists the values of the type for a process. Groups and users could include others.
const fn self_only(process: &'static [u32]) -> [Check; 2] {
    [
        Check::NoneOf {
            arg: 0,
            values: process,
            verdict: EPERM,
        },
        Check::NoneOf {
            arg: 1,
            values: &[0],
            verdict: EPERM,
        },
    ]
}

/// Denies huge pages, which the host reserves and which no memory limit counts.
const fn huge_pages(arg: u32, mask: u32) -> [Check; 1] {
    [Check::AnyBit {
        arg,
        mask,
        verdict: EPERM,
    }]
}

/// `RLIMIT_CORE`.
///
/// Box sets the only value with which the kernel starts no crash handler.
///
/// That value also disables core files, so a change returns success without effect.
const CORE: u32 = 4;
const UNCHANGED: Verdict = Verdict::Errno(0);

/// `SECCOMP_FILTER_FLAG_NEW_LISTENER`.
const NEW_LISTENER: u32 = 8;

const SOL_SOCKET: u32 = 1;
/// Size of a receive buffer.
///
/// No memory limit counts data in netlink sockets and in connections that are not accepted yet, so
/// their buffers keep the default size. The call succeeds without effect, as the kernel also does
/// above its maximum.
const SO_RCVBUF: u32 = 8;
/// Socket filters: `SO_ATTACH_FILTER`, `SO_ATTACH_BPF` and the reuseport variants.
///
/// The kernel compiles them into a memory area that the whole host shares. If it is full, no box
/// can load its filter.
const SO_ATTACH: &[u32] = &[26, 50, 51, 52];

/// Calls with argument checks.
const CHECKED: &[(libc::c_long, &[Check])] = &[
    (
        libc::SYS_clone,
        &[Check::AnyBit {
            arg: 0,
            mask: NEW_NAMESPACE,
            verdict: EPERM,
        }],
    ),
    (
        libc::SYS_unshare,
        &[Check::AnyBit {
            arg: 0,
            mask: NEW_NAMESPACE | NEW_TIME,
            verdict: EPERM,
        }],
    ),
    (libc::SYS_fchmod, &[mode_in(1)]),
    (libc::SYS_fchmodat, &[mode_in(2)]),
    (libc::SYS_fchmodat2, &[mode_in(2)]),
    (libc::SYS_mkdirat, &[mode_in(2)]),
    (libc::SYS_mknodat, &[mode_in(2)]),
    (libc::SYS_openat, &[mode_of_open(2, 3)]),
    // An allocation takes disk space in one call. It bypasses a limit per file (with KEEP_SIZE) and
    // can finish between two quota checks. Punching holes (bit 1) frees space. The C library falls
    // back to writes.
    (
        libc::SYS_fallocate,
        &[
            Check::AnyBit {
                arg: 1,
                mask: 2,
                verdict: Verdict::Allow,
            },
            Check::NoneOf {
                arg: 1,
                values: &[],
                verdict: Verdict::Errno(libc::EOPNOTSUPP),
            },
        ],
    ),
    (
        libc::SYS_ioctl,
        &[Check::OneOf {
            arg: 1,
            values: IOCTLS_REFUSED,
            verdict: EPERM,
        }],
    ),
    (
        libc::SYS_socket,
        &[
            Check::NoneOf {
                arg: 0,
                values: FAMILIES,
                verdict: Verdict::Errno(libc::EAFNOSUPPORT),
            },
            // NETLINK: routes and addresses only. Other protocols reach other kernel subsystems.
            Check::When {
                arg: 0,
                when: 16,
                then: &Check::NoneOf {
                    arg: 2,
                    values: &[0],
                    verdict: PROTOCOL,
                },
            },
            Check::When {
                arg: 0,
                when: 2,
                then: &Check::NoneOf {
                    arg: 2,
                    values: INET_PROTOCOLS,
                    verdict: PROTOCOL,
                },
            },
            Check::When {
                arg: 0,
                when: 10,
                then: &Check::NoneOf {
                    arg: 2,
                    values: INET_PROTOCOLS,
                    verdict: PROTOCOL,
                },
            },
        ],
    ),
    (
        libc::SYS_socketpair,
        &[Check::NoneOf {
            arg: 0,
            values: &[1],
            verdict: Verdict::Errno(libc::EAFNOSUPPORT),
        }],
    ),
    (
        libc::SYS_personality,
        &[Check::NoneOf {
            arg: 0,
            values: &[0, 0xffff_ffff],
            verdict: EPERM,
        }],
    ),
    (
        libc::SYS_prlimit64,
        &[
            SELF_ONLY,
            Check::When {
                arg: 1,
                when: CORE,
                then: &Check::NonNull {
                    arg: 2,
                    verdict: UNCHANGED,
                },
            },
        ],
    ),
    (
        libc::SYS_setrlimit,
        &[Check::OneOf {
            arg: 0,
            values: &[CORE],
            verdict: UNCHANGED,
        }],
    ),
    (libc::SYS_sched_setscheduler, &[SELF_ONLY]),
    (libc::SYS_sched_setparam, &[SELF_ONLY]),
    (libc::SYS_sched_setattr, &[SELF_ONLY]),
    (libc::SYS_setpriority, &self_only(&[0])),
    (libc::SYS_ioprio_set, &self_only(&[1])),
    // Not those of init. A thread can set others by id, so that stays allowed if init has another
    // user id; otherwise `guest_program` denies it.
    (
        libc::SYS_sched_setaffinity,
        &[Check::OneOf {
            arg: 0,
            values: &[1],
            verdict: EPERM,
        }],
    ),
    // A listener is a descriptor that keeps the filters of ended processes. Act like a kernel
    // without it.
    (
        libc::SYS_seccomp,
        &[Check::AnyBit {
            arg: 1,
            mask: NEW_LISTENER,
            verdict: Verdict::Errno(libc::EINVAL),
        }],
    ),
    (
        libc::SYS_setsockopt,
        &[
            Check::When {
                arg: 1,
                when: SOL_SOCKET,
                then: &Check::OneOf {
                    arg: 2,
                    values: &[SO_RCVBUF],
                    verdict: UNCHANGED,
                },
            },
            Check::When {
                arg: 1,
                when: SOL_SOCKET,
                then: &Check::OneOf {
                    arg: 2,
                    values: SO_ATTACH,
                    verdict: EPERM,
                },
            },
        ],
    ),
    (libc::SYS_mmap, &huge_pages(3, 0x40000)),
    (libc::SYS_memfd_create, &huge_pages(1, 4)),
    (libc::SYS_shmget, &huge_pages(2, 0o4000)),
    // RENAME_WHITEOUT creates a device node, which an overlay on the host would treat as a deleted
    // file.
    (
        libc::SYS_renameat2,
        &[Check::AnyBit {
            arg: 4,
            mask: 4,
            verdict: Verdict::Errno(libc::EINVAL),
        }],
    ),
];

/// Older forms that only x86-64 has.
#[cfg(target_arch = "x86_64")]
const CHECKED_HERE: &[(libc::c_long, &[Check])] = &[
    (libc::SYS_chmod, &[mode_in(1)]),
    (libc::SYS_mkdir, &[mode_in(1)]),
    (libc::SYS_mknod, &[mode_in(1)]),
    (libc::SYS_creat, &[mode_in(1)]),
    (libc::SYS_open, &[mode_of_open(1, 2)]),
];
#[cfg(target_arch = "aarch64")]
const CHECKED_HERE: &[(libc::c_long, &[Check])] = &[];

const PROTOCOL: Verdict = Verdict::Errno(libc::EPROTONOSUPPORT);
/// UNIX, INET, INET6, NETLINK.
const FAMILIES: &[u32] = &[1, 2, 10, 16];
/// Default, ICMP, TCP, UDP and `ICMPv6`.
const INET_PROTOCOLS: &[u32] = &[0, 1, 6, 17, 58];

/// Ioctls that control a shared terminal, and older allocation ioctls.
///
/// The latter allocate like `fallocate`, which a filter of that call alone would miss.
const IOCTLS_REFUSED: &[u32] = &[
    0x5412,      // TIOCSTI
    0x541c,      // TIOCLINUX
    0x541d,      // TIOCCONS
    0x5423,      // TIOCSETD: loads line disciplines
    0x4030_5828, // FS_IOC_RESVSP
    0x4030_582a, // FS_IOC_RESVSP64
    0x4030_5839, // FS_IOC_ZERO_RANGE
];

/// The complete table, sorted by number.
pub fn rules() -> Vec<Rule> {
    let plain = |calls: &[libc::c_long], verdict| {
        let rule = move |call: &libc::c_long| Rule {
            number: number(*call),
            checks: &[],
            otherwise: verdict,
        };
        calls.iter().map(rule).collect::<Vec<_>>()
    };
    let mut all = plain(super::allowed::EVERYWHERE, Verdict::Allow);
    all.extend(plain(super::allowed::HERE, Verdict::Allow));
    all.extend(plain(REFUSED, EPERM));
    all.extend(plain(REFUSED_HERE, EPERM));
    all.extend(plain(CLOSING, EPERM));
    all.extend(plain(ABSENT, ENOSYS));
    let rule = |(call, checks): &(libc::c_long, &'static [Check])| Rule {
        number: number(*call),
        checks,
        otherwise: Verdict::Allow,
    };
    all.extend(CHECKED.iter().chain(CHECKED_HERE).map(rule));
    all.sort_by_key(|rule| rule.number);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_in_the_table_once() {
        let rules = rules();
        for pair in rules.windows(2) {
            assert!(
                pair[0].number < pair[1].number,
                "{} is there twice",
                pair[0].number
            );
        }
        assert!(rules.last().unwrap().number < 1024);
    }
}
