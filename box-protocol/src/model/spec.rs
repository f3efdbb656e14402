//! `BoxSpec`: what a box is asked to be and, for an exec, what to run in it.

use serde::{Deserialize, Deserializer, Serialize};

use super::bounds::{self, check_mounts};
use super::draft::{self, SpecDraft};
use super::extras::SpecExtras;
use super::mount::{BoxMountSpec, HostPathMode};
use crate::env::Env;
use crate::ids::SessionId;
use crate::invalid::Invalid;
use crate::paths;

/// The image of a spec that names none.
pub const DEFAULT_IMAGE: &str = "python:3.11-slim";
/// Where the workspace appears unless the spec says otherwise.
pub const DEFAULT_MOUNT_PATH: &str = "/workspace";

pub(crate) const DEFAULT_TIMEOUT_SEC: u64 = 30;
pub(crate) const DEFAULT_CPUS: f64 = 1.0;
pub(crate) const DEFAULT_MEMORY_MB: u64 = 512;
pub(crate) const DEFAULT_PIDS_LIMIT: u64 = 128;

pub(crate) const TIMEOUT_RULE: &str = "must be greater than 0";
pub(crate) const CPUS_RULE: &str = "must be greater than 0";
pub(crate) const MEMORY_RULE: &str = "must be at least 32";
pub(crate) const PIDS_RULE: &str = "must be at least 1";
pub(crate) const QUOTA_RULE: &str = "must be greater than or equal to 0";

/// Whether a box reaches a network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// Nothing but itself.
    #[default]
    Off,
    /// Outwards.
    On,
}

impl Network {
    /// The word as it is written.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
        }
    }
}

/// What a box is asked to be and, for an exec, what to run in it. Every value keeps its rule.
///
/// Made by [`SpecDraft::build`] or decoded, which is the same thing; to change one, turn it back into
/// a draft. Compared on reuse are the fields of [`Fixed`](super::Fixed); `cmd`, `env`, `workdir` and
/// `timeout_sec` may differ from call to call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(try_from = "SpecDraft")]
#[non_exhaustive]
pub struct BoxSpec {
    /// The box.
    pub session_id: SessionId,
    /// The text to run, trimmed; empty only where nothing is run.
    pub cmd: String,
    /// Where it runs. Under `mount_path` if a host directory is mounted there.
    pub workdir: String,
    /// How long it may run. Greater than 0.
    pub timeout_sec: u64,
    /// Whether the box reaches a network.
    pub network: Network,
    /// What the box's files come from.
    pub image: String,
    /// Variables for the command.
    pub env: Env,
    /// The host directory that is the workspace.
    pub host_path: Option<String>,
    /// How it is mounted.
    pub host_path_mode: HostPathMode,
    /// Where the workspace appears.
    pub mount_path: String,
    /// More host directories.
    pub extra_mounts: Vec<BoxMountSpec>,
    /// Idleness does not end the box.
    pub persistent: bool,
    /// Processors' worth of time. Greater than 0.
    pub cpus: f64,
    /// At least 32.
    pub memory_mb: u64,
    /// Processes and threads. At least 1.
    pub pids_limit: u64,
    /// The system's directories cannot be written.
    pub read_only_rootfs: bool,
    /// How much may be in the workspace and every other mount that can be written to; 0 for no limit.
    pub workspace_quota_mb: u64,
    /// What LangBot's spec does not have.
    #[serde(flatten)]
    pub extras: SpecExtras,
}

impl BoxSpec {
    /// Reads a spec from JSON in memory, keeping the name of the field at fault.
    pub fn from_value(value: serde_json::Value) -> Result<Self, Invalid> {
        serde_json::from_value::<SpecDraft>(value)?.build()
    }

    /// Reads back a spec that was written down when its box was made, by this version or another: members that this one does not
    /// know are passed over, and its rules are not applied again, because the box is what it is.
    pub fn written_before<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let draft = draft::written_before(deserializer)?;
        let session_id = SessionId::new(draft.session_id.unwrap_or_default());
        let mount_path = draft
            .mount_path
            .unwrap_or_else(|| DEFAULT_MOUNT_PATH.to_owned());
        Ok(Self {
            session_id: session_id.map_err(serde::de::Error::custom)?,
            cmd: draft.cmd.unwrap_or_default(),
            workdir: draft.workdir.unwrap_or_else(|| mount_path.clone()),
            timeout_sec: draft.timeout_sec.unwrap_or(DEFAULT_TIMEOUT_SEC),
            network: draft.network.unwrap_or_default(),
            image: draft.image.unwrap_or_else(|| DEFAULT_IMAGE.to_owned()),
            env: draft.env.unwrap_or_default(),
            host_path: draft.host_path,
            host_path_mode: draft.host_path_mode.unwrap_or_default(),
            mount_path,
            extra_mounts: draft.extra_mounts.unwrap_or_default(),
            persistent: draft.persistent.unwrap_or(false),
            cpus: draft.cpus.unwrap_or(DEFAULT_CPUS),
            memory_mb: draft.memory_mb.unwrap_or(DEFAULT_MEMORY_MB),
            pids_limit: draft.pids_limit.unwrap_or(DEFAULT_PIDS_LIMIT),
            read_only_rootfs: draft.read_only_rootfs.unwrap_or(true),
            workspace_quota_mb: draft.workspace_quota_mb.unwrap_or(0),
            extras: draft.extras,
        })
    }

    /// The text to run; an exec without one is refused.
    pub fn require_cmd(&self) -> Result<&str, Invalid> {
        if self.cmd.is_empty() {
            return Err(Invalid::new("cmd", "must not be empty"));
        }
        Ok(&self.cmd)
    }

    /// The most bytes that one file of a command may have: all of the quota, where there is one. It is over the workspace and
    /// every other mount that can be written to.
    pub fn file_bytes(&self) -> Option<u64> {
        let is_writable = |mount: &BoxMountSpec| mount.mode == HostPathMode::Rw;
        let limited = (self.host_path.is_some() && self.host_path_mode == HostPathMode::Rw)
            || self.extra_mounts.iter().any(is_writable);
        let quota = self.workspace_quota_mb.saturating_mul(1 << 20);
        (limited && quota > 0).then_some(quota)
    }

    /// Whether a host directory is mounted as the workspace.
    pub fn mounts_host_path(&self) -> bool {
        self.host_path.is_some() && self.host_path_mode != HostPathMode::None
    }
}

fn at_least(
    field: &'static str,
    value: u64,
    least: u64,
    rule: &'static str,
) -> Result<u64, Invalid> {
    if value < least {
        Err(Invalid::new(field, rule))
    } else {
        Ok(value)
    }
}

/// Trimmed, and `None` if nothing is left.
fn filled(text: Option<String>) -> Option<String> {
    let text = text?;
    let trimmed = text.trim();
    match trimmed.len() {
        0 => None,
        all if all == text.len() => Some(text),
        _ => Some(trimmed.to_owned()),
    }
}

impl TryFrom<SpecDraft> for BoxSpec {
    type Error = Invalid;

    fn try_from(draft: SpecDraft) -> Result<Self, Invalid> {
        let session_id = SessionId::new(filled(draft.session_id).unwrap_or_default())?;
        let cmd = filled(draft.cmd).unwrap_or_default();
        if cmd.contains('\0') {
            return Err(Invalid::new("cmd", "must not contain NUL"));
        }
        let mount_path = draft.mount_path.as_deref().unwrap_or(DEFAULT_MOUNT_PATH);
        let mount_path = paths::inside("mount_path", mount_path)?;
        let workdir = match filled(draft.workdir) {
            Some(workdir) => paths::inside("workdir", &workdir)?,
            None => mount_path.clone(),
        };
        let host_path = filled(draft.host_path)
            .map(|path| paths::of_host("host_path", &path))
            .transpose()?;
        let cpus = draft.cpus.unwrap_or(DEFAULT_CPUS);
        if !(cpus.is_finite() && cpus > 0.0) {
            return Err(Invalid::new("cpus", CPUS_RULE));
        }
        draft.extras.check()?;
        let image = filled(draft.image).unwrap_or_else(|| DEFAULT_IMAGE.to_owned());
        bounds::short("image", &image)?;
        let extra_mounts = draft.extra_mounts.unwrap_or_default();
        check_mounts(&extra_mounts)?;
        let spec = Self {
            session_id,
            cmd,
            workdir,
            timeout_sec: at_least(
                "timeout_sec",
                draft.timeout_sec.unwrap_or(DEFAULT_TIMEOUT_SEC),
                1,
                TIMEOUT_RULE,
            )?,
            network: draft.network.unwrap_or_default(),
            image,
            env: draft.env.unwrap_or_default(),
            host_path,
            host_path_mode: draft.host_path_mode.unwrap_or_default(),
            mount_path,
            extra_mounts,
            persistent: draft.persistent.unwrap_or(false),
            cpus,
            memory_mb: at_least(
                "memory_mb",
                draft.memory_mb.unwrap_or(DEFAULT_MEMORY_MB),
                32,
                MEMORY_RULE,
            )?,
            pids_limit: at_least(
                "pids_limit",
                draft.pids_limit.unwrap_or(DEFAULT_PIDS_LIMIT),
                1,
                PIDS_RULE,
            )?,
            read_only_rootfs: draft.read_only_rootfs.unwrap_or(true),
            workspace_quota_mb: draft.workspace_quota_mb.unwrap_or(0),
            extras: draft.extras,
        };
        if spec.mounts_host_path() && !paths::is_under(&spec.workdir, &spec.mount_path) {
            return Err(Invalid::new(
                "workdir",
                "must stay under mount_path when host_path is provided",
            ));
        }
        Ok(spec)
    }
}

#[cfg(test)]
mod tests;
