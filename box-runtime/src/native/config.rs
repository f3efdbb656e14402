//! Every setting of the native backend.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::egress::EgressConfig;

/// How the native backend is set up.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NativeConfig {
    /// The program that is started as the fork server. Its `main` begins with `box_sys::serve_if_asked(box_agent::prepare)`.
    pub program: PathBuf,
    /// Run the fork server as this user and group, if this program is root: its boxes then are those of an ordinary user.
    pub run_as: Option<(u32, u32)>,
    /// A directory of this program's own in which each box gets one, with the socket of its agent. Without it there is nothing
    /// on disk, and an agent is spoken to by its first connection only.
    pub state_dir: Option<PathBuf>,
    /// Boxes outlive this process, and the next one with this state directory [adopts](crate::BoxRuntime::adopt) them.
    /// Otherwise they end with it, also when it is killed.
    pub outlive: bool,
    /// Root directories by the name of an image.
    pub images: BTreeMap<String, PathBuf>,
    /// Refuse images that are not in the list, instead of running on the machine's own system directories.
    pub strict_images: bool,
    /// The directory in each cgroup hierarchy under which boxes get theirs. Backends that come and go at the same time should
    /// not share one.
    pub cgroup_parent: String,
    /// How many boxes are begun before they are asked for.
    pub spares: usize,
    /// What each box may read and write per second.
    pub disk: box_sys::DiskLimits,
    /// How boxes with a network reach out.
    pub egress: EgressConfig,
}

impl NativeConfig {
    /// The defaults, with this program as the fork server.
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

    /// The defaults, with the program that runs now: only for one whose `main` begins as [`Self::program`] says.
    pub fn this_program() -> std::io::Result<Self> {
        Ok(Self::new(std::env::current_exe()?))
    }
}
