//! What a box of AIO has.

use box_protocol::{BoxError, BoxId, Lifetime, Name, Network, SpecDraft};

use crate::http::preset::Preset;

/// The box of the routes without a box in their path. No sandbox has this id, because theirs have the prefix.
const DEFAULT_ID: &str = "aio";

/// The start of the ids of provisioned boxes.
const ID_PREFIX: &str = "aio-";

/// The maximum number of processes of a box, so that sessions do not run out of them.
const PROCESSES: u64 = 2048;

/// The memory of a box in MiB, as deer-flow's provisioner gives it.
const MEMORY_MB: u64 = 1024;

/// What clients expect: the user of the reference, and the directories of deer-flow.
const PRESET: Preset = Preset {
    guest: Some(("gem", "/home/gem")),
    dirs: &[
        "/mnt/user-data/workspace",
        "/mnt/user-data/uploads",
        "/mnt/user-data/outputs",
        "/mnt/acp-workspace",
        "/mnt/skills",
    ],
    env: &[],
    env_file: None,
    cwd: Some("/home/gem"),
};

/// Returns the id of the default box.
pub(super) fn default_id() -> Result<BoxId, BoxError> {
    Ok(BoxId::new(DEFAULT_ID)?)
}

/// Returns the id of the box of a sandbox.
pub(super) fn id_of(sandbox: &Name) -> Result<BoxId, BoxError> {
    Ok(BoxId::new(format!("{ID_PREFIX}{sandbox}"))?)
}

/// Returns the spec of a box. It does not end by idleness, and a call starts it if an operator has stopped it.
pub(super) fn of(id: &BoxId) -> SpecDraft {
    let mut spec = SpecDraft::new(id.as_str());
    spec.persistent = Some(true);
    spec.lifetime = Some(Lifetime {
        wake: true,
        ..Lifetime::default()
    });
    spec.pids_limit = Some(PROCESSES);
    spec.memory_mb = Some(MEMORY_MB);
    spec.read_only_rootfs = Some(false);
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    spec.cpus = Some(f64::from(u32::try_from(cores).unwrap_or(u32::MAX)));
    // A sandbox of the reference has a network; the record of a box says if the machine cannot give one.
    spec.network = Some(Network::On);
    spec.best_effort = Some(vec!["network".to_owned()]);
    PRESET.apply(&mut spec);
    spec
}
