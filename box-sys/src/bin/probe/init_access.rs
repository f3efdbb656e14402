//! Tries to reach the first process of a box with signals and CPU affinity.

use std::io;

use libc::c_long;

use super::{call, long};

/// CPU mask of a thread.
type Processors = [u8; 128];

/// Restricts a thread to one of its CPUs. Returns its number of CPUs then.
pub(super) fn affinity(thread: &str) -> io::Result<c_long> {
    let thread = thread.parse().map_err(io::Error::other)?;
    let before = processors(thread)?;
    let mut one: Processors = [0; 128];
    if let Some(place) = before.iter().position(|byte| *byte != 0) {
        one[place] = 1 << before[place].trailing_zeros();
    }
    let chosen = one.as_mut_ptr() as c_long;
    call(libc::SYS_sched_setaffinity, [thread, 128, chosen, 0, 0, 0])?;
    Ok(processors(thread)?
        .iter()
        .map(|byte| c_long::from(byte.count_ones()))
        .sum())
}

fn processors(thread: c_long) -> io::Result<Processors> {
    let mut processors: Processors = [0; 128];
    let place = processors.as_mut_ptr() as c_long;
    call(libc::SYS_sched_getaffinity, [thread, 128, place, 0, 0, 0])?;
    Ok(processors)
}

/// Sends signals to init and its threads from three processes at once.
pub(super) fn signal_init(rounds: u32) -> io::Result<c_long> {
    // Signals that the Rust and C libraries handle by default.
    const SIGNALS: [libc::c_int; 3] = [libc::SIGSEGV, libc::SIGBUS, 33];
    let threads: Vec<c_long> = std::fs::read_dir("/proc/1/task")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    let mut children = Vec::new();
    for signal in SIGNALS {
        let pid = call(libc::SYS_clone, [long(libc::SIGCHLD), 0, 0, 0, 0, 0])?;
        if pid == 0 {
            for _ in 0..rounds {
                let _ = call(libc::SYS_kill, [1, long(signal), 0, 0, 0, 0]);
                for thread in &threads {
                    let _ = call(libc::SYS_tgkill, [1, *thread, long(signal), 0, 0, 0]);
                }
            }
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(0) }
        }
        children.push(pid);
    }
    for child in children {
        call(libc::SYS_wait4, [child, 0, 0, 0, 0, 0])?;
    }
    c_long::try_from(threads.len()).map_err(io::Error::other)
}
