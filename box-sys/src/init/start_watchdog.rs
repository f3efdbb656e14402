//! A second look at whoever is being started. Init's own thread is held until the program runs, and the process that is to run
//! it is the guest's by then, who may stop it: nobody but another thread could let it go on, or end it.

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

/// How often it looks, once a start takes longer than that.
const TICK: i64 = 20_000_000;
/// How often it lets a process go on that was stopped, before it ends it.
const STOPS_MAX: u32 = 10;
/// After how many looks it ends a process that was not stopped: ten seconds, for instance for a file system that does not answer.
const TICKS_MAX: u32 = 500;

/// The thread does little.
const STACK: usize = 32 << 10;

/// The watching thread, which sleeps for as long as starts take no time.
#[derive(Debug)]
pub(super) struct StartWatchdog {
    timer: Arc<OwnedFd>,
    /// Who is being started, or 0.
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
        // Signals are for init's own thread.
        raw::with_signals_blocked(|| thread.spawn(move || watch_child(&timer, &child)))?;
        raw::reset_signal_handlers();
        Ok(watchdog)
    }

    /// From now on; gives where the number of the one to look at goes.
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
        // Cannot fail with a descriptor of this kind and a time like these.
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
