//! Settings of the native backend.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::backend::ImageRoot;
use crate::egress::EgressConfig;

/// Settings of the native backend.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NativeConfig {
    /// Program to run as the fork server.
    ///
    /// Its `main` begins with `box_sys::serve_if_asked(box_agent::prepare)`.
    pub program: PathBuf,
    /// User and group of the fork server, if this program runs as root.
    ///
    /// Its boxes are then those of an ordinary user.
    pub run_as: Option<(u32, u32)>,
    /// Private directory with a subdirectory per box, which holds the agent's socket.
    ///
    /// Without it, the backend stores nothing on disk and cannot reconnect to an agent.
    pub state_dir: Option<PathBuf>,
    /// Whether boxes outlive this process.
    ///
    /// The next process with the same state directory [adopts](crate::BoxRuntime::adopt) them.
    /// Otherwise they end with this process, even if it is killed.
    pub outlive: bool,
    /// Images by name.
    pub images: BTreeMap<String, ImageRoot>,
    /// Whether to refuse unlisted images.
    ///
    /// Otherwise such boxes use the host's system directories.
    pub strict_images: bool,
    /// Parent cgroup of the boxes in each hierarchy.
    ///
    /// Backends that start and stop concurrently should use different parents.
    pub cgroup_parent: String,
    /// Number of boxes prepared in advance.
    pub spares: usize,
    /// Disk bandwidth limits per box.
    pub disk: box_sys::DiskLimits,
    /// Settings for the outgoing connections of boxes.
    pub egress: EgressConfig,
}

impl NativeConfig {
    /// Creates the default settings with this program as the fork server.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            run_as: None,
            state_dir: None,
            outlive: false,
            images: BTreeMap::new(),
            strict_images: false,
            cgroup_parent: "box".to_owned(),
            spares: 2,
            disk: box_sys::DiskLimits::default(),
            egress: EgressConfig::default(),
        }
    }

    /// Creates the default settings with the current program as the fork server.
    ///
    /// The `main` of the current program must begin as [`Self::program`] says.
    pub fn this_program() -> std::io::Result<Self> {
        Ok(Self::new(std::env::current_exe()?))
    }
}
