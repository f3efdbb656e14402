//! Signals: blocked, received by descriptor, reset.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use super::check;

/// Blocks signals and returns a descriptor that reports them.
pub fn signal_fd(signals: &[libc::c_int]) -> io::Result<OwnedFd> {
    let set = signal_set(signals);
    // SAFETY: `set` is initialised. The old mask is not requested.
    let blocked =
        unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    check(blocked.into())?;
    // SAFETY: `set` is initialised. -1 requests a new descriptor.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    let fd = check(fd.into())?;
    let fd = RawFd::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: the kernel has just created this descriptor. It has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Runs `work` with signals blocked in this thread and in those it starts.
pub(crate) fn with_signals_blocked<T>(work: impl FnOnce() -> T) -> T {
    let mut old = signal_set(&[]);
    let mut all = signal_set(&[]);
    // SAFETY: writes an initialised set.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: both sets are initialised.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old) };
    let done = work();
    // SAFETY: the call above has written `old`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    done
}

/// Resets every signal handler of this process to the default.
///
/// This includes the handlers of the standard library and those that the C library installs with
/// the first thread. The C library does not let programs change the latter, hence the raw calls.
/// Ignored signals stay ignored.
pub(crate) fn reset_signal_handlers() {
    // Kernel layout: the handler and three more words. Zeroes mean the default.
    let default = [0_u64; 4];
    for signal in 1..=64 {
        let mut now = default;
        // SAFETY: writes `now`. The last argument is the size of the kernel's signal set.
        let result = unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                std::ptr::null::<u64>(),
                &raw mut now,
                8,
            )
        };
        let ignored = now[0] == libc::SIG_IGN as u64;
        if result == 0 && now[0] != default[0] && !ignored {
            // SAFETY: reads `default` and sets a disposition of this process.
            unsafe {
                libc::syscall(
                    libc::SYS_rt_sigaction,
                    signal,
                    &raw const default,
                    std::ptr::null::<u64>(),
                    8,
                )
            };
        }
    }
}

/// Builds a signal set.
pub(crate) fn signal_set(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: initialises the target of the pointer.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the call above has initialised it.
    let mut set = unsafe { set.assume_init() };
    for &signal in signals {
        // SAFETY: `set` is initialised. An invalid number is only an error.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
}
