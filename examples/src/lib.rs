//! What the examples share: a runtime whose boxes are made by the example's own program.

use std::io;

use box_runtime::native::{NativeBackend, NativeConfig};
use box_runtime::{BoxRuntime, RuntimeConfig};

/// A runtime with boxes of this machine. They end with the process.
///
/// The program is its own fork server: its `main` begins with
/// `box_sys::serve_if_asked(box_agent::prepare)`.
pub fn runtime() -> io::Result<BoxRuntime> {
    let mut config = NativeConfig::new(std::env::current_exe()?);
    config.cgroup_parent = format!("box-example-{}", std::process::id());
    Ok(BoxRuntime::start(RuntimeConfig::with(NativeBackend::new(
        config,
    ))))
}
