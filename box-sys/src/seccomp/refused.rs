//! System calls that a box never gets, whatever their arguments.

/// Calls that return `ENOSYS` on purpose.
///
/// `clone3` has its flags in memory, which a filter cannot read. With `EPERM` the C library would
/// fail to create threads; with `ENOSYS` it falls back to `clone`. The host limits asynchronous I/O
/// requests in total, and one program could take all of them; without it, programs use threads.
/// Secret memory is removed from the kernel's page map page by page, which slows down the host. It
/// also stays with its descriptor, beyond the limit of locked memory.
pub(super) const ABSENT: &[libc::c_long] = &[
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
pub(super) const REFUSED: &[libc::c_long] = &[
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
pub(super) const REFUSED_HERE: &[libc::c_long] = &[
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_modify_ldt,
    libc::SYS_uselib,
    libc::SYS_ustat,
    libc::SYS_sysfs,
];
#[cfg(target_arch = "aarch64")]
pub(super) const REFUSED_HERE: &[libc::c_long] = &[];
