//! Profiles: defaults, locks and limits of a caller.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::adjusted::Adjusted;
use super::fields::*;
use super::spec::SpecDraft;
use crate::invalid::Invalid;

/// Maximum run time of an exec if a profile sets none, in seconds.
const DEFAULT_MAX_TIMEOUT_SEC: u64 = 120;

macro_rules! declare {
    ($($name:ident: $type:tt = $default:tt, $rule:expr, $lock:ident;)*) => {
        /// A field of a spec that a profile can lock. The value of the profile then replaces that
        /// of the caller, and the result lists the field as adjusted.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(rename_all = "snake_case")]
        pub enum Lockable {
            $(
                #[doc = concat!("`", stringify!($name), "`")]
                $lock,
            )*
        }

        /// Defaults, locks and limits of a caller's specs.
        ///
        /// Built in or read from the configuration. The decoder rejects a value that violates a
        /// rule of the spec.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(try_from = "Fields")]
        #[non_exhaustive]
        pub struct BoxProfile {
            /// The name of the profile in the configuration.
            pub name: Name,
            $(
                #[doc = concat!("The default of [`BoxSpec::", stringify!($name), "`](super::BoxSpec::", stringify!($name), ").")]
                pub $name: held!($type, $default),
            )*
            /// Maximum run time of an exec in seconds; longer ones are reduced to it. [`u64::MAX`]
            /// means no limit.
            pub max_timeout_sec: u64,
            /// Maximum run time of `command.start` and `shell.run` in seconds, also for requests
            /// without a timeout; 0 for no limit.
            pub max_command_sec: u64,
            /// Fields that the caller cannot set.
            pub locked: BTreeSet<Lockable>,
            /// Whether to refuse a box that lacks a protection, instead of listing it under
            /// `missing`.
            pub strict: bool,
        }

        #[derive(Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[cfg_attr(feature = "schema", schemars(extend("required" = ["name"]), transform = bound))]
        #[serde(default, deny_unknown_fields)]
        struct Fields {
            #[cfg_attr(feature = "schema", schemars(with = "Name"))]
            name: String,
            $($name: held!($type, $default),)*
            #[cfg_attr(feature = "schema", schemars(with = "u64", range(min = 1)))]
            max_timeout_sec: Option<u64>,
            /// `max_timeout_sec` if absent and that is set; otherwise no limit.
            #[cfg_attr(feature = "schema", schemars(with = "u64"))]
            max_command_sec: Option<u64>,
            locked: BTreeSet<Lockable>,
            strict: bool,
        }

        /// The profile `default`.
        impl Default for Fields {
            fn default() -> Self {
                Self {
                    name: String::new(),
                    $($name: $default,)*
                    max_timeout_sec: None,
                    max_command_sec: None,
                    locked: BTreeSet::new(),
                    strict: false,
                }
            }
        }

        impl TryFrom<Fields> for BoxProfile {
            type Error = Invalid;

            fn try_from(fields: Fields) -> Result<Self, Invalid> {
                let profile = Self {
                    name: Name::new(fields.name)?,
                    $($name: {
                        let given: Option<$type> = fields.$name.into();
                        let kept = given.map(|given| checked(&$rule, stringify!($name), given));
                        or_default!(kept.transpose()?, $default)
                    },)*
                    max_timeout_sec: fields.max_timeout_sec.unwrap_or(DEFAULT_MAX_TIMEOUT_SEC),
                    max_command_sec: fields.max_command_sec.or(fields.max_timeout_sec).unwrap_or(0),
                    locked: fields.locked,
                    strict: fields.strict,
                };
                AtLeast(1).check("max_timeout_sec", profile.max_timeout_sec)?;
                if profile.timeout_sec > profile.max_timeout_sec {
                    let rule = "must not be greater than max_timeout_sec";
                    return Err(Invalid::new("timeout_sec", rule));
                }
                Ok(profile)
            }
        }

        impl BoxProfile {
            /// Fills unset fields, overrides locked fields, and returns the overridden ones.
            pub fn apply(&self, draft: &mut SpecDraft) -> Vec<Adjusted> {
                let mut adjusted = Vec::new();
                $(
                    let asked = draft.$name.take();
                    // A blank text counts as absent.
                    let is_absent = |asked: &$type| matches!($rule.check("", asked.clone()), Ok(None));
                    let asked = asked.filter(|asked| !is_absent(asked));
                    let own: Option<$type> = self.$name.clone().into();
                    let locked = self.locks(Lockable::$lock);
                    if locked && asked.is_some() && asked != own {
                        adjusted.push(Adjusted::new(stringify!($name), &asked, &own));
                    }
                    draft.$name = if locked { own } else { asked.or(own) };
                )*
                adjusted
            }
        }

        /// Adds the limits of the rules to the schema of a profile.
        #[cfg(feature = "schema")]
        fn bound(schema: &mut schemars::Schema) {
            $(
                let field = format!("/properties/{}", stringify!($name));
                if let Some(field) = schema.pointer_mut(&field)
                    && let Ok(field) = <&mut schemars::Schema>::try_from(field)
                {
                    Rule::<$type>::bound(&$rule, field);
                }
            )*
        }
    };
}

/// Applies the rule of a field to a value of a profile; a blank value is an error.
fn checked<T>(rule: &impl Rule<T>, field: &'static str, value: T) -> Result<T, Invalid> {
    let value = rule.check(field, value)?;
    value.ok_or_else(|| Invalid::new(field, "must not be empty"))
}

spec_fields!(lockable_fields declare);

impl BoxProfile {
    /// The names of the built-in profiles.
    pub const BUILT_IN: [&'static str; 4] = [
        "default",
        "offline_readonly",
        "network_basic",
        "network_extended",
    ];

    /// Returns a built-in profile; `None` if the name is unknown.
    pub fn built_in(name: &str) -> Option<Self> {
        let base = Fields {
            name: name.to_owned(),
            ..Fields::default()
        };
        let fields = match name {
            "default" => base,
            "offline_readonly" => Fields {
                host_path_mode: HostPathMode::Ro,
                cpus: 0.5,
                memory_mb: 256,
                pids_limit: 64,
                max_timeout_sec: Some(60),
                locked: [
                    Lockable::Network,
                    Lockable::HostPathMode,
                    Lockable::ReadOnlyRootfs,
                ]
                .into(),
                ..base
            },
            "network_basic" => Fields {
                network: Network::On,
                ..base
            },
            "network_extended" => Fields {
                network: Network::On,
                cpus: 2.0,
                memory_mb: 1024,
                pids_limit: 256,
                read_only_rootfs: false,
                max_timeout_sec: Some(300),
                ..base
            },
            _ => return None,
        };
        Self::try_from(fields).ok()
    }

    /// Whether the profile locks this field.
    pub fn locks(&self, field: Lockable) -> bool {
        self.locked.contains(&field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SpecDraft;
    use serde_json::{Value, json};

    fn profile(name: &str) -> BoxProfile {
        BoxProfile::built_in(name).unwrap()
    }

    #[test]
    fn every_listed_profile_exists_and_no_other() {
        for name in BoxProfile::BUILT_IN {
            assert_eq!(profile(name).name.as_str(), name);
        }
        assert_eq!(BoxProfile::built_in("nonexistent"), None);
        assert_eq!(BoxProfile::built_in(""), None);
    }

    #[test]
    fn default_has_the_values_of_an_empty_spec() {
        let (profile, spec) = (profile("default"), SpecDraft::new("s").build().unwrap());
        assert_eq!(profile.image, spec.image);
        assert_eq!(
            (profile.network, profile.timeout_sec),
            (spec.network, spec.timeout_sec)
        );
        assert_eq!(profile.host_path_mode, spec.host_path_mode);
        assert_eq!(profile.cpus.to_bits(), spec.cpus.to_bits());
        assert_eq!(
            (profile.memory_mb, profile.pids_limit),
            (spec.memory_mb, spec.pids_limit)
        );
        assert_eq!(profile.read_only_rootfs, spec.read_only_rootfs);
        assert_eq!(profile.workspace_quota_mb, spec.workspace_quota_mb);
        assert_eq!((profile.timeout_sec, profile.max_timeout_sec), (30, 120));
        assert_eq!(profile.max_command_sec, 0);
        assert!(profile.locked.is_empty() && !profile.strict);
    }

    #[test]
    fn offline_readonly_is_small_and_locked() {
        let offline = profile("offline_readonly");
        assert_eq!(
            (offline.network, offline.host_path_mode),
            (Network::Off, HostPathMode::Ro)
        );
        assert!(offline.read_only_rootfs);
        for field in [
            Lockable::Network,
            Lockable::HostPathMode,
            Lockable::ReadOnlyRootfs,
        ] {
            assert!(offline.locks(field));
        }
        assert!(!offline.locks(Lockable::TimeoutSec));
        assert!(offline.max_timeout_sec <= profile("default").max_timeout_sec);
        assert_eq!(offline.cpus.to_string(), "0.5");
        assert_eq!(
            (
                offline.memory_mb,
                offline.pids_limit,
                offline.max_timeout_sec
            ),
            (256, 64, 60)
        );
    }

    #[test]
    fn the_network_profiles_enable_the_network() {
        let (basic, extended) = (profile("network_basic"), profile("network_extended"));
        assert_eq!(
            (basic.network, extended.network),
            (Network::On, Network::On)
        );
        assert!(basic.read_only_rootfs && !extended.read_only_rootfs);
        assert_eq!(extended.cpus.to_string(), "2");
        assert_eq!((extended.memory_mb, extended.pids_limit), (1024, 256));
        assert_eq!(extended.max_timeout_sec, 300);
        assert!(extended.cpus > profile("default").cpus);
        assert!(extended.memory_mb > profile("default").memory_mb);
    }

    #[test]
    fn custom_profiles_follow_the_rules_of_a_spec() {
        let decode =
            |value: Value| serde_json::from_value::<BoxProfile>(value).map_err(Invalid::from);
        let custom =
            decode(json!({"name": "ci", "memory_mb": 64, "locked": ["image"], "strict": true}));
        let custom = custom.unwrap();
        assert!(custom.locks(Lockable::Image) && custom.strict);
        assert_eq!(custom.pids_limit, 128);
        for (value, text) in [
            (json!({"name": ""}), "name: must not be empty"),
            (
                json!({"name": "x", "cpus": 0}),
                "cpus: must be greater than 0",
            ),
            (
                json!({"name": "x", "memory_mb": 31}),
                "memory_mb: 31 is below the minimum of 32",
            ),
            (
                json!({"name": "x", "pids_limit": 0}),
                "pids_limit: 0 is below the minimum of 1",
            ),
            (
                json!({"name": "x", "timeout_sec": 0}),
                "timeout_sec: 0 is below the minimum of 1",
            ),
            (
                json!({"name": "x", "image": " "}),
                "image: must not be empty",
            ),
            (
                json!({"name": "x", "timeout_sec": 121}),
                "timeout_sec: must not be greater than max_timeout_sec",
            ),
            (json!({"name": "x", "lock": []}), "lock: unknown field"),
        ] {
            assert_eq!(decode(value).unwrap_err().to_string(), text);
        }
        assert!(decode(json!({"name": "x", "locked": ["cmd"]})).is_err());
    }

    #[test]
    fn profiles_round_trip_through_json() {
        for name in BoxProfile::BUILT_IN {
            let text = serde_json::to_string(&profile(name)).unwrap();
            assert_eq!(
                serde_json::from_str::<BoxProfile>(&text).unwrap(),
                profile(name)
            );
        }
    }
}
