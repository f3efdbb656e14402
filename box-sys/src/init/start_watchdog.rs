//! Watches the start of a command from a second thread.
//!
//! Init's main thread is suspended until the program runs. The new process already belongs to the
//! guest, who can stop it. Only another thread can then resume or kill it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::raw;

/// Interval of the checks in nanoseconds.
const TICK: i64 = 20_000_000;
/// Number of times that the watchdog resumes a stopped process before it kills it.
const STOPS_MAX: u32 = 10;
/// Number of checks after which the watchdog kills a process that is not stopped.
///
/// This is ten seconds, for example for a file system that does not respond.
const TICKS_MAX: u32 = 500;

/// Stack of the thread, which calls few functions.
const STACK: usize = 32 << 10;

/// The watching thread.
///
/// It sleeps unless a start takes longer than a check interval.
#[derive(Debug)]
pub(super) struct StartWatchdog {
    timer: Arc<OwnedFd>,
    /// Pid of the starting process, or 0.
    child: Arc<AtomicI32>,
}

impl StartWatchdog {
    pub(super) fn start() -> io::Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
        let watchdog = Self {
            timer: Arc::new(timer),
            child: Arc::default(),
        };
        let (timer, child) = (Arc::clone(&watchdog.timer), Arc::clone(&watchdog.child));
        let thread = std::thread::Builder::new().stack_size(STACK);
        // Signals are for the main thread.
        raw::with_signals_blocked(|| thread.spawn(move || watch_child(&timer, &child)))?;
        raw::reset_signal_handlers();
        Ok(watchdog)
    }

    /// Starts watching. Returns the variable for the pid of the child.
    pub(super) fn begin(&self) -> &AtomicI32 {
        self.set(TICK);
        &self.child
    }

    pub(super) fn end(&self) {
        self.set(0);
        self.child.store(0, Relaxed);
    }

    fn set(&self, tv_nsec: i64) {
        let every = Timespec { tv_sec: 0, tv_nsec };
        let every = Itimerspec {
            it_interval: every,
            it_value: every,
        };
        // The call cannot fail with this descriptor and these times.
        let _ = timerfd_settime(&*self.timer, TimerfdTimerFlags::empty(), &every);
    }
}

fn watch_child(timer: &OwnedFd, child: &AtomicI32) {
    let mut at = (0, 0, 0);
    while rustix::io::read(timer, &mut [0_u8; 8]).is_ok() {
        let Some(pid) = Pid::from_raw(child.load(Relaxed)) else {
            continue;
        };
        let (last, mut ticks, mut stops) = at;
        if last != pid.as_raw_pid() {
            (ticks, stops) = (0, 0);
        }
        ticks += 1;
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if matches!(waitid(WaitId::Pid(pid), options), Ok(Some(_))) {
            stops += 1;
            let _ = kill_process(pid, Signal::CONT);
        }
        if stops > STOPS_MAX || ticks > TICKS_MAX {
            let _ = kill_process(pid, Signal::KILL);
        }
        at = (pid.as_raw_pid(), ticks, stops);
    }
}
