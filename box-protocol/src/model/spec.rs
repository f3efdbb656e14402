//! The requested spec of a box, `SpecDraft`, and the validated one, `BoxSpec`.
//!
//! Both have the fields that [`fields`](super::fields) declares. `SpecDraft::build` validates a
//! draft.

use std::borrow::Cow;
use std::fmt;

use serde::Serialize;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::fields::*;
use super::rules::filled;
use crate::ids::BoxId;
use crate::invalid::Invalid;
use crate::paths;

/// Where the workspace is mounted if the spec does not set it.
pub const DEFAULT_MOUNT_PATH: &str = "/workspace";

/// Name of the default image: the system directories of the machine.
pub const HOST_IMAGE: &str = "host";

/// Whether a box has network access.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// Only loopback.
    #[default]
    Off,
    /// Outgoing connections.
    On,
}

impl Network {
    /// Returns the name on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
        }
    }
}

macro_rules! declare {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident: $type:tt = $default:tt, $rule:expr $(, fixed $shown:ident)? $(, lockable $lock:ident)?;
    )*) => {
        /// The validated spec of a box and, for an exec, the text to run.
        ///
        /// Created by [`SpecDraft::build`] or a decoder, which apply the same rules. To change a
        /// spec, convert it into a draft. The fields of [`Fixed`](super::Fixed) must match on
        /// reuse; `cmd`, `env`, `workdir` and `timeout_sec` may differ between calls.
        #[derive(Debug, Clone, PartialEq, Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(try_from = "SpecDraft", into = "SpecDraft")]
        #[non_exhaustive]
        pub struct BoxSpec {
            /// The id of the box.
            pub box_id: BoxId,
            $(
                $(#[doc = $doc])*
                #[doc = concat!("\nDefault: `", stringify!($default), "`. Rule: `", stringify!($rule), "`.")]
                pub $name: held!($type, $default),
            )*
        }

        /// The requested spec of a box.
        ///
        /// Absent values stay absent, so that a policy can distinguish them from defaults.
        /// [`build`](Self::build) creates the [`BoxSpec`]. The decoder rejects unknown members and wrong
        /// types, and accepts numbers written as `"999"` or `999.0`; `null` counts as absent.
        ///
        /// ```
        /// use box_protocol::{Network, SpecDraft};
        ///
        /// let spec = SpecDraft::new("job-1").cmd("make test").memory_mb(256).network(Network::On).build()?;
        /// assert_eq!(spec.workdir, "/workspace");
        ///
        /// let refused = SpecDraft::new("job-2").cpus(0.0).build().unwrap_err();
        /// assert_eq!(refused.to_string(), "cpus: must be greater than 0");
        /// # Ok::<(), box_protocol::Invalid>(())
        /// ```
        #[derive(Debug, Clone, Default, PartialEq, Serialize)]
        pub struct SpecDraft {
            /// See [`BoxSpec::box_id`].
            #[serde(skip_serializing_if = "Option::is_none")]
            pub box_id: Option<String>,
            $(
                #[doc = concat!("See [`BoxSpec::", stringify!($name), "`].")]
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $name: Option<$type>,
            )*
        }

        impl SpecDraft {
            $(
                #[doc = concat!("Sets [`", stringify!($name), "`](BoxSpec::", stringify!($name), ").")]
                pub fn $name(mut self, $name: setter!($type)) -> Self {
                    self.$name = Some(setter!($type, $name));
                    self
                }
            )*

            /// Removes the values that [`build`](Self::build) would fill in.
            pub fn brief(mut self) -> Self {
                fn forget<T: PartialEq>(asked: &mut Option<T>, default: Option<T>) {
                    if *asked == default {
                        *asked = None;
                    }
                }
                let mount_path = self.mount_path.as_deref().unwrap_or(DEFAULT_MOUNT_PATH);
                if self.workdir.as_deref() == Some(mount_path) {
                    self.workdir = None;
                }
                $(forget(&mut self.$name, default_of!($default));)*
                self
            }
        }

        impl From<BoxSpec> for SpecDraft {
            fn from(spec: BoxSpec) -> Self {
                Self {
                    box_id: Some(spec.box_id.as_str().to_owned()),
                    $($name: spec.$name.into(),)*
                }
            }
        }

        impl BoxSpec {
            /// Decodes the persisted spec of an existing box, also of another version.
            ///
            /// The decoder ignores unknown members and does not apply the rules again.
            pub fn written_before<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let draft = deserializer.deserialize_map(DraftVisitor {
                    passes_over_unknown: true,
                })?;
                let box_id = BoxId::new(draft.box_id.unwrap_or_default());
                let mut spec = Self {
                    box_id: box_id.map_err(serde::de::Error::custom)?,
                    $($name: or_default!(draft.$name, $default),)*
                };
                spec.fill_in();
                Ok(spec)
            }
        }

        impl TryFrom<SpecDraft> for BoxSpec {
            type Error = Invalid;

            fn try_from(draft: SpecDraft) -> Result<Self, Invalid> {
                let box_id = draft.box_id.and_then(filled);
                let mut spec = Self {
                    box_id: BoxId::new(box_id.unwrap_or_default())?,
                    $($name: {
                        let asked = draft.$name.map(|asked| $rule.check(stringify!($name), asked));
                        or_default!(asked.transpose()?.flatten(), $default)
                    },)*
                };
                spec.fill_in();
                if spec.snapshot.is_some() && spec.image.is_some() {
                    let rule = "a snapshot has its own image; omit it";
                    return Err(Invalid::new("image", rule));
                }
                if spec.mounts_host_path() && !paths::is_under(&spec.workdir, &spec.mount_path) {
                    let rule = "must stay under mount_path when host_path is provided";
                    return Err(Invalid::new("workdir", rule));
                }
                Ok(spec)
            }
        }

        impl<'de> Visitor<'de> for DraftVisitor {
            type Value = SpecDraft;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a spec")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SpecDraft, A::Error> {
                let mut draft = SpecDraft::default();
                while let Some(Key(name)) = map.next_key()? {
                    match name.as_ref() {
                        "box_id" => put(&mut draft.box_id, &mut map, "box_id", &Any)?,
                        $(stringify!($name) => put(&mut draft.$name, &mut map, stringify!($name), &$rule)?,)*
                        _ if self.passes_over_unknown => {
                            map.next_value::<IgnoredAny>()?;
                        }
                        other => {
                            let rule = "not a field of a spec";
                            return Err(Invalid::new(other.to_owned(), rule).decoding());
                        }
                    }
                }
                Ok(draft)
            }
        }

        #[cfg(feature = "schema")]
        impl schemars::JsonSchema for SpecDraft {
            fn schema_name() -> Cow<'static, str> {
                "SpecDraft".into()
            }

            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                let mut properties = serde_json::Map::new();
                properties.insert("box_id".to_owned(), crate::schema::asked_id());
                $(
                    let mut schema = Rule::<$type>::schema(&$rule, generator);
                    Rule::<$type>::bound(&$rule, &mut schema);
                    let default: Option<$type> = default_of!($default);
                    let schema = crate::schema::described(schema, concat!($($doc, "\n"),*), &default);
                    properties.insert(stringify!($name).to_owned(), schema);
                )*
                schemars::json_schema!({
                    "type": "object",
                    "description": "A spec as it is asked for: all may be absent or `null`, which is the same. A `default` \
                        holds where the server's profile has no other.",
                    "properties": properties,
                    "additionalProperties": false,
                })
            }
        }
    };
}

/// The argument type of a setter: `impl Into<String>` for a text, otherwise the type of the field.
macro_rules! setter {
    (String) => { impl Into<String> };
    ($type:tt) => { $type };
    (String, $value:ident) => { $value.into() };
    ($type:tt, $value:ident) => { $value };
}

spec_fields!(declare);

impl SpecDraft {
    /// Creates a draft with this id only.
    pub fn new(box_id: impl Into<String>) -> Self {
        Self {
            box_id: Some(box_id.into()),
            ..Self::default()
        }
    }

    /// Fills in the defaults and validates the draft.
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

struct DraftVisitor {
    passes_over_unknown: bool,
}

/// The name of a member, borrowed if possible.
#[derive(serde::Deserialize)]
#[serde(transparent)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// Decodes the value of a member and rejects a second one.
fn put<'de, A: MapAccess<'de>, T: Deserialize<'de>>(
    asked: &mut Option<T>,
    map: &mut A,
    name: &'static str,
    rule: &impl Rule<T>,
) -> Result<(), A::Error> {
    if asked.is_some() {
        return Err(Invalid::new(name, "given twice").decoding());
    }
    *asked = rule.read(name, map)?;
    Ok(())
}

impl BoxSpec {
    /// Decodes a spec from JSON; an error names the field.
    pub fn from_value(value: serde_json::Value) -> Result<Self, Invalid> {
        serde_json::from_value::<SpecDraft>(value)?.build()
    }

    /// Completes fields that depend on others, and removes a value that means the default.
    fn fill_in(&mut self) {
        if self.image.as_deref() == Some(HOST_IMAGE) {
            self.image = None;
        }
        if self.workdir.is_empty() {
            self.workdir.clone_from(&self.mount_path);
        }
    }

    /// Returns the text to run; an error if there is none.
    pub fn require_cmd(&self) -> Result<&str, Invalid> {
        if self.cmd.is_empty() {
            return Err(Invalid::new("cmd", "must not be empty"));
        }
        Ok(&self.cmd)
    }

    /// Returns the maximum size of one file of a command: the quota, which covers the workspace and all
    /// other writable mounts.
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

#[cfg(test)]
mod tests;
