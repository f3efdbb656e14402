//! Creates the backend that the configuration chooses. All other modules use it as a [`Backend`].

use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use box_runtime::Backend;
use box_runtime::native::{NativeBackend, NativeConfig};

use crate::config::{BackendChoice, Config};

/// Runs the fork server of the native backend, or an archiver of images, if this process was started as one. Call it before
/// anything else.
pub(crate) fn run_as_asked() {
    box_sys::serve_if_asked(box_agent::prepare);
    box_runtime::archive_if_asked();
}

/// The backend of this configuration. With a state directory its boxes outlive this process.
pub(crate) fn from_config(config: &Config, state: Option<&Path>) -> Result<Arc<dyn Backend>> {
    match config.runtime.backend {
        BackendChoice::Auto | BackendChoice::Native => native(config, state),
    }
}

fn native(config: &Config, state: Option<&Path>) -> Result<Arc<dyn Backend>> {
    let section = &config.runtime;
    let mut native = NativeConfig::this_program().context("cannot find the boxd executable")?;
    native.state_dir = state.map(Path::to_owned);
    native.outlive = state.is_some();
    native.strict_images = config.images.strict;
    native.cgroup_parent.clone_from(&section.cgroup_parent);
    native.spares = section.spares;
    let bytes = |limit: Option<NonZeroU64>| limit.map(|mb| mb.get().saturating_mul(1 << 20));
    native.disk.read = bytes(section.disk_read_mb_per_s);
    native.disk.write = bytes(section.disk_write_mb_per_s);
    native.egress = config.network.egress(|name| std::env::var(name).ok())?;
    Ok(Arc::new(NativeBackend::new(native)))
}
