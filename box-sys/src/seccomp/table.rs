//! The result of each system call in a box. Unlisted numbers return `ENOSYS`.

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

/// Calls that return `ENOSYS` on purpose.
///
/// `clone3` has its flags in memory, which a filter cannot read. With `EPERM` the C library would
/// fail to create threads; with `ENOSYS` it falls back to `clone`. The host limits asynchronous I/O
/// requests in total, and one program could take all of them; without it, programs use threads.
/// Secret memory is removed from the kernel's page map page by page, which slows down the host. It
/// also stays with its descriptor, beyond the limit of locked memory.
const ABSENT: &[libc::c_long] = &[
    libc::SYS_clone3,
    libc::SYS_io_cancel,
    libc::SYS_io_destroy,
    libc::SYS_io_getevents,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_memfd_secret,
];

/// Calls that return `EPERM`, as in other sandboxes.
///
/// `sync` and `syncfs` write data of other programs; `fsync` stays allowed.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_adjtimex,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    libc::SYS_finit_module,
    libc::SYS_fspick,
    libc::SYS_get_mempolicy,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kcmp,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_mbind,
    libc::SYS_migrate_pages,
    libc::SYS_mount,
    libc::SYS_move_pages,
    libc::SYS_name_to_handle_at,
    libc::SYS_nfsservctl,
    libc::SYS_open_by_handle_at,
    libc::SYS_perf_event_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pivot_root,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_set_mempolicy,
    libc::SYS_set_mempolicy_home_node,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_sync,
    libc::SYS_syncfs,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_userfaultfd,
    libc::SYS_vhangup,
];

/// Calls that complete a box after the main filter is loaded. Denied afterwards.
pub(super) const CLOSING: &[libc::c_long] = &[
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_sethostname,
    libc::SYS_setns,
];

/// Denied as well; only on x86-64.
#[cfg(target_arch = "x86_64")]
const REFUSED_HERE: &[libc::c_long] = &[
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_modify_ldt,
    libc::SYS_uselib,
    libc::SYS_ustat,
    libc::SYS_sysfs,
];
#[cfg(target_arch = "aarch64")]
const REFUSED_HERE: &[libc::c_long] = &[];

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
