//! The agent: the first process of a box.
//!
//! The agent starts commands as the guest, keeps their output, reports how they ended, and kills them with their
//! process trees. It applies no policy and resolves no names. One thread answers all calls; a small pool of threads
//! touches files.
//!
//! # Reading order
//! 1. `serve`: from the fork to the first call: inherited descriptors, connections, reaping.
//! 2. `calls`: handlers of the calls about commands; `agent`: the agent's state.
//! 3. `command`: the shared state of one command; `start`: from its parameters to a process; `supervise`: from there to
//!    its end.
//! 4. `log`: the output of a command, addressed by bytes; `log_file`: the file behind it; `read`: streaming it to a
//!    reader.
//! 5. `files`: the files of the box, accessed as the guest.
//! 6. `shells`: interpreters, in which a command can be a run.
//! 7. `watch`: commands that watch files and have no process.
//! 8. `stop_all`: ends everything except the files; `exit_queue`: exits that the runtime has yet to acknowledge;
//!    `disk`: disk usage of the box.
//! 9. `ports`: connections to listeners in the box.
//! 10. `head_buffer`: the first bytes of the output, for an exec; `shm`: memory shared with the runtime; `pipe`,
//!     `input`: the agent's ends of a command's output and input.
//!
//! # Inherited descriptors
//! In this order: the runtime's connection; optionally a Unix socket that the runtime has bound but does not listen on,
//! for later runtimes; shared memory for slots; a file for logs.

mod agent;
mod calls;
mod command;
mod disk;
mod exit_queue;
mod files;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod head_buffer;
mod input;
mod log;
mod log_file;
mod pipe;
mod ports;
mod read;
mod serve;
mod shells;
mod shm;
mod start;
mod stop_all;
mod supervise;
mod watch;

use box_sys::Init;

/// The version of the `agent.*` contract that this agent speaks.
pub const CONTRACT: u32 = 2;

/// Prepares an agent before its box exists, and returns the function that runs it.
///
/// The box ends when that function returns.
pub fn prepare() -> Box<dyn FnOnce(Init)> {
    let prepared = serve::PreparedAgent::new();
    Box::new(|init| {
        // The agent has no channel for this error: the runtime sees the connection and the box end.
        let _ = prepared.and_then(|prepared| prepared.serve(init));
    })
}
