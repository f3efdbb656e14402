//! What runs inside a box as its first process. It starts commands as the guest, keeps their output, tells how they ended and
//! ends them with everything they have started. It decides nothing: no policy, no name lookups. One thread answers the calls; few others touch files.
//!
//! # Reading order
//! 1. `serve`: from the fork to the first call: the descriptors it was handed, connections, the dead.
//! 2. `calls`: the calls about commands it answers; `agent`: what it knows.
//! 3. `command`: what everybody may know of one; `start`: from its parameters to a process; `life`: from there to its end.
//! 4. `log`: its output, addressed by bytes; `store`: where that is beyond memory; `read`: how it gets to a reader.
//! 5. `files`: the files of the box, touched as the guest.
//! 6. `shells`: interpreters, in which a command can be a run.
//! 7. `watch`: commands that are no process but a watch on files.
//! 8. `clear`: the end of everything but the files; `ends`: telling of the ends of commands; `disk`: counting what the box's own files take.
//! 9. `ports`: connections to whoever listens in the box.
//! 10. `keep`: the first of its output, for an exec; `slot`: memory shared with the runtime; `pipe`, `input`: what it writes
//!     to and reads from.
//!
//! # What it is handed
//! In this order: the runtime's connection; optionally a Unix socket that the runtime has bound and not listened on, for
//! runtimes to come; memory for slots; a file for logs.

mod agent;
mod calls;
mod clear;
mod command;
mod disk;
mod ends;
mod files;
mod input;
mod keep;
mod life;
mod log;
mod pipe;
mod ports;
mod read;
mod serve;
mod shells;
mod slot;
mod start;
mod store;
mod watch;

use box_sys::Init;

/// The version of `agent.*` that is spoken here.
pub const CONTRACT: u32 = 1;

/// Makes ready what an agent needs whatever its box will be, and gives the agent. The box ends with it.
pub fn prepare() -> Box<dyn FnOnce(Init)> {
    let ready = serve::Ready::new();
    Box::new(|init| {
        // There is nobody to tell: the runtime sees the connection end, and the box with it.
        let _ = ready.and_then(|ready| ready.serve(init));
    })
}
