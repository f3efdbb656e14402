//! A spec as it was asked for, before defaults and rules.

use std::fmt;

use serde::Serialize;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::bounds::check_mounts;
use super::extras::SpecExtras;
use super::mount::{BoxMountSpec, HostPathMode};
use super::spec::{self, BoxSpec, Network};
use crate::decode::{put, put_decimal, put_whole};
use crate::env::Env;
use crate::invalid::Invalid;

/// A [`BoxSpec`] as it was asked for: what is absent stays absent, so that a policy can tell it from
/// a value that happens to be the default. [`build`](Self::build) makes the spec, and is the only way
/// to one.
///
/// Decoding refuses unknown members and wrong types, and takes numbers written as `"999"` or
/// `999.0`; `null` counts as absent.
///
/// ```
/// use box_protocol::{Network, SpecDraft};
///
/// let spec = SpecDraft::new("job-1").cmd("make test").network(Network::On).build()?;
/// assert_eq!(spec.workdir, "/workspace");
///
/// let refused = SpecDraft::new("job-2").cpus(0.0).build().unwrap_err();
/// assert_eq!(refused.to_string(), "cpus must be greater than 0");
/// # Ok::<(), box_protocol::Invalid>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct SpecDraft {
    /// See [`BoxSpec::session_id`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// See [`BoxSpec::cmd`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cmd: Option<String>,
    /// See [`BoxSpec::workdir`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// See [`BoxSpec::timeout_sec`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_sec: Option<u64>,
    /// See [`BoxSpec::network`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// See [`BoxSpec::image`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// See [`BoxSpec::env`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<Env>,
    /// See [`BoxSpec::host_path`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// See [`BoxSpec::host_path_mode`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path_mode: Option<HostPathMode>,
    /// See [`BoxSpec::mount_path`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mount_path: Option<String>,
    /// See [`BoxSpec::extra_mounts`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extra_mounts: Option<Vec<BoxMountSpec>>,
    /// See [`BoxSpec::persistent`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    /// See [`BoxSpec::cpus`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// See [`BoxSpec::memory_mb`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// See [`BoxSpec::pids_limit`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pids_limit: Option<u64>,
    /// See [`BoxSpec::read_only_rootfs`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only_rootfs: Option<bool>,
    /// See [`BoxSpec::workspace_quota_mb`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workspace_quota_mb: Option<u64>,
    /// What LangBot's spec does not have.
    #[serde(flatten)]
    pub extras: SpecExtras,
}

macro_rules! setters {
    ($($field:ident: $kind:ty;)*) => {$(
        #[doc = concat!("Asks for this [`", stringify!($field), "`](BoxSpec::", stringify!($field), ").")]
        pub fn $field(mut self, $field: impl Into<$kind>) -> Self {
            self.$field = Some($field.into());
            self
        }
    )*};
}

impl SpecDraft {
    /// Asks for a box with this id and nothing else.
    pub fn new(session_id: impl Into<String>) -> Self {
        Self {
            session_id: Some(session_id.into()),
            ..Self::default()
        }
    }

    setters! {
        cmd: String;
        workdir: String;
        timeout_sec: u64;
        network: Network;
        image: String;
        env: Env;
        host_path: String;
        host_path_mode: HostPathMode;
        mount_path: String;
        extra_mounts: Vec<BoxMountSpec>;
        persistent: bool;
        cpus: f64;
        memory_mb: u64;
        pids_limit: u64;
        read_only_rootfs: bool;
        workspace_quota_mb: u64;
    }

    /// The same spec in fewer words: what [`build`](Self::build) would fill in by itself is left out.
    pub fn brief(mut self) -> Self {
        fn drop_default<T: PartialEq>(value: &mut Option<T>, default: impl Into<T>) {
            if value.as_ref() == Some(&default.into()) {
                *value = None;
            }
        }
        if self.workdir.as_deref()
            == self
                .mount_path
                .as_deref()
                .or(Some(spec::DEFAULT_MOUNT_PATH))
        {
            self.workdir = None;
        }
        drop_default(&mut self.timeout_sec, spec::DEFAULT_TIMEOUT_SEC);
        drop_default(&mut self.network, Network::default());
        if self.image.as_deref() == Some(spec::DEFAULT_IMAGE) {
            self.image = None;
        }
        drop_default(&mut self.env, Env::default());
        drop_default(&mut self.host_path_mode, HostPathMode::default());
        if self.mount_path.as_deref() == Some(spec::DEFAULT_MOUNT_PATH) {
            self.mount_path = None;
        }
        drop_default(&mut self.extra_mounts, Vec::new());
        drop_default(&mut self.persistent, false);
        drop_default(&mut self.cpus, spec::DEFAULT_CPUS);
        drop_default(&mut self.memory_mb, spec::DEFAULT_MEMORY_MB);
        drop_default(&mut self.pids_limit, spec::DEFAULT_PIDS_LIMIT);
        drop_default(&mut self.read_only_rootfs, true);
        drop_default(&mut self.workspace_quota_mb, 0_u64);
        self
    }

    /// Fills in the defaults and applies the rules.
    pub fn build(self) -> Result<BoxSpec, Invalid> {
        BoxSpec::try_from(self)
    }
}

impl<'de> Deserialize<'de> for SpecDraft {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(DraftVisitor {
            passes_over_unknown: false,
        })
    }
}

/// Reads a draft that this program, or one of another version, wrote by itself: members it does not know are passed over.
pub(super) fn written_before<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<SpecDraft, D::Error> {
    deserializer.deserialize_map(DraftVisitor {
        passes_over_unknown: true,
    })
}

struct DraftVisitor {
    passes_over_unknown: bool,
}

impl<'de> Visitor<'de> for DraftVisitor {
    type Value = SpecDraft;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a spec")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SpecDraft, A::Error> {
        let mut draft = SpecDraft::default();
        let (d, m) = (&mut draft, &mut map);
        while let Some(name) = m.next_key::<Key<'_>>()? {
            match name.0.as_ref() {
                "session_id" => put(&mut d.session_id, m, "session_id")?,
                "cmd" => put(&mut d.cmd, m, "cmd")?,
                "workdir" => put(&mut d.workdir, m, "workdir")?,
                "timeout_sec" => {
                    put_whole(&mut d.timeout_sec, m, "timeout_sec", spec::TIMEOUT_RULE)?;
                }
                "network" => put(&mut d.network, m, "network")?,
                "image" => put(&mut d.image, m, "image")?,
                "env" => put(&mut d.env, m, "env")?,
                "host_path" => put(&mut d.host_path, m, "host_path")?,
                "host_path_mode" => put(&mut d.host_path_mode, m, "host_path_mode")?,
                "mount_path" => put(&mut d.mount_path, m, "mount_path")?,
                "extra_mounts" => {
                    put(&mut d.extra_mounts, m, "extra_mounts")?;
                    // Here already: whoever allows them looks each of them up.
                    let mounts = d.extra_mounts.as_deref().unwrap_or_default();
                    check_mounts(mounts).map_err(|error| error.decoding())?;
                }
                "persistent" => put(&mut d.persistent, m, "persistent")?,
                "cpus" => put_decimal(&mut d.cpus, m, "cpus")?,
                "memory_mb" => put_whole(&mut d.memory_mb, m, "memory_mb", spec::MEMORY_RULE)?,
                "pids_limit" => put_whole(&mut d.pids_limit, m, "pids_limit", spec::PIDS_RULE)?,
                "read_only_rootfs" => put(&mut d.read_only_rootfs, m, "read_only_rootfs")?,
                "workspace_quota_mb" => {
                    put_whole(
                        &mut d.workspace_quota_mb,
                        m,
                        "workspace_quota_mb",
                        spec::QUOTA_RULE,
                    )?;
                }
                other => {
                    if d.extras.take(other, m)? {
                        continue;
                    }
                    if self.passes_over_unknown {
                        m.next_value::<IgnoredAny>()?;
                    } else {
                        return Err(
                            Invalid::new(other.to_owned(), "is not a field of a spec").decoding()
                        );
                    }
                }
            }
        }
        Ok(draft)
    }
}

/// A member's name, without a copy where the wire allows it.
#[derive(serde::Deserialize)]
#[serde(transparent)]
struct Key<'a>(#[serde(borrow)] std::borrow::Cow<'a, str>);

impl From<BoxSpec> for SpecDraft {
    fn from(spec: BoxSpec) -> Self {
        Self {
            session_id: Some(spec.session_id.as_str().to_owned()),
            cmd: Some(spec.cmd),
            workdir: Some(spec.workdir),
            timeout_sec: Some(spec.timeout_sec),
            network: Some(spec.network),
            image: Some(spec.image),
            env: Some(spec.env),
            host_path: spec.host_path,
            host_path_mode: Some(spec.host_path_mode),
            mount_path: Some(spec.mount_path),
            extra_mounts: Some(spec.extra_mounts),
            persistent: Some(spec.persistent),
            cpus: Some(spec.cpus),
            memory_mb: Some(spec.memory_mb),
            pids_limit: Some(spec.pids_limit),
            read_only_rootfs: Some(spec.read_only_rootfs),
            workspace_quota_mb: Some(spec.workspace_quota_mb),
            extras: spec.extras,
        }
    }
}
