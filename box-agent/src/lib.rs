//! What runs inside a box as its first process. It starts commands as the guest, keeps their output, tells how they ended and
//! ends them with everything they have started. It decides nothing: no policy, no name lookups, one thread.
//!
//! # Reading order
//! 1. `serve`: from the fork to the first call: the descriptors it was handed, connections, the dead.
//! 2. `agent`: what it knows, and the calls it answers.
//! 3. `start`: from the parameters of a command to a process.
//! 4. `life`: one command from its start to its end.
//! 5. `keep`: what is kept of its output, and where; `slot`: memory shared with the runtime; `pipe`: where output comes from.
//!
//! # What it is handed
//! In this order: the runtime's connection; optionally a Unix socket that the runtime has bound and not listened on, for
//! runtimes to come; slots for output.

mod agent;
mod keep;
mod life;
mod pipe;
mod serve;
mod slot;
mod start;

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
