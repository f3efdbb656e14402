//! Changes of a lifetime and of defaults. Absent members stay unchanged; `null` removes a value.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

use super::bounds;
use super::parts::{Defaults, Lifetime, LifetimeAction};
use crate::invalid::Invalid;
use crate::time::UnixMs;

/// A change of a [`Lifetime`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LifetimeChange {
    /// When `on_expiry` applies regardless of activity; `null` for never.
    #[serde(deserialize_with = "nullable", skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Option<UnixMs>>,
    /// What happens to a box at `expires_at`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_expiry: Option<LifetimeAction>,
    /// Idle time after which `on_idle` applies, in milliseconds; `null` for the server's setting.
    #[serde(deserialize_with = "nullable", skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<Option<u64>>,
    /// What happens to an idle box.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_idle: Option<LifetimeAction>,
    /// Time after a stop until the server deletes the box, in milliseconds; `null` for never.
    #[serde(deserialize_with = "nullable", skip_serializing_if = "Option::is_none")]
    pub delete_after_stop_ms: Option<Option<u64>>,
    /// Whether a call to a paused or stopped box resumes or starts it first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake: Option<bool>,
}

/// Replaces all members of a lifetime.
impl From<Lifetime> for LifetimeChange {
    fn from(lifetime: Lifetime) -> Self {
        Self {
            expires_at: Some(lifetime.expires_at),
            on_expiry: Some(lifetime.on_expiry),
            idle_ms: Some(lifetime.idle_ms),
            on_idle: Some(lifetime.on_idle),
            delete_after_stop_ms: Some(lifetime.delete_after_stop_ms),
            wake: Some(lifetime.wake),
        }
    }
}

impl Lifetime {
    /// Applies a change.
    pub fn changed(self, change: LifetimeChange) -> Self {
        Self {
            expires_at: change.expires_at.unwrap_or(self.expires_at),
            on_expiry: change.on_expiry.unwrap_or(self.on_expiry),
            idle_ms: change.idle_ms.unwrap_or(self.idle_ms),
            on_idle: change.on_idle.unwrap_or(self.on_idle),
            delete_after_stop_ms: change
                .delete_after_stop_ms
                .unwrap_or(self.delete_after_stop_ms),
            wake: change.wake.unwrap_or(self.wake),
        }
    }
}

/// A change of [`Defaults`].
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DefaultsChange {
    /// Variables to set; `null` removes a variable.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, Option<String>>,
    /// A file in the box with further variables.
    #[serde(deserialize_with = "nullable", skip_serializing_if = "Option::is_none")]
    pub env_file: Option<Option<String>>,
    /// The working directory.
    #[serde(deserialize_with = "nullable", skip_serializing_if = "Option::is_none")]
    pub cwd: Option<Option<String>>,
    /// User name or uid.
    #[serde(deserialize_with = "nullable", skip_serializing_if = "Option::is_none")]
    pub user: Option<Option<String>>,
    /// The shell that runs texts.
    #[serde(deserialize_with = "nullable", skip_serializing_if = "Option::is_none")]
    pub shell: Option<Option<String>>,
}

/// Shows only the names of variables, because values may be secret.
impl fmt::Debug for DefaultsChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DefaultsChange")
            .field("env", &self.env.keys())
            .finish_non_exhaustive()
    }
}

impl Defaults {
    /// Applies a change; `validation` if the result violates a limit.
    pub fn changed(self, change: DefaultsChange) -> Result<Self, Invalid> {
        let mut env = self.env;
        for (name, value) in change.env {
            match value {
                Some(value) => env.insert(name, value)?,
                None => env.remove(&name),
            }
        }
        let changed = Self {
            env,
            env_file: change.env_file.unwrap_or(self.env_file),
            cwd: change.cwd.unwrap_or(self.cwd),
            user: change.user.unwrap_or(self.user),
            shell: change.shell.unwrap_or(self.shell),
        };
        bounds::check_defaults(&changed)?;
        Ok(changed)
    }
}

/// Distinguishes `null` from an absent member.
#[expect(
    clippy::option_option,
    reason = "absent, null and a value are three things"
)]
fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn absent_members_stay_and_null_removes() {
        let lifetime: Lifetime =
            from_value(json!({"expires_at": 5, "on_expiry": "pause", "idle_ms": 7, "on_idle": "stop", "wake": true}))
                .unwrap();
        let change = from_value(json!({"expires_at": 9, "idle_ms": null})).unwrap();
        let changed = lifetime.clone().changed(change);
        let expected =
            json!({"expires_at": 9, "on_expiry": "pause", "on_idle": "stop", "wake": true});
        assert_eq!(changed, from_value(expected).unwrap());
        assert_eq!(changed.changed(lifetime.clone().into()), lifetime);

        let defaults: Defaults =
            from_value(json!({"env": {"A": "1", "B": "2"}, "cwd": "/a", "user": "u"})).unwrap();
        let change = json!({"env": {"B": null, "C": "3"}, "cwd": null, "shell": "/bin/sh"});
        let changed = defaults
            .clone()
            .changed(from_value(change).unwrap())
            .unwrap();
        let expected = json!({"env": {"A": "1", "C": "3"}, "user": "u", "shell": "/bin/sh"});
        assert_eq!(changed, from_value(expected).unwrap());
        for wrong in [
            json!({"cwd": "a"}),
            json!({"env": {"": "x"}}),
            json!({"shell": "x".repeat(5000)}),
        ] {
            let change = from_value(wrong).unwrap();
            assert!(defaults.clone().changed(change).is_err());
        }
        assert!(from_value::<LifetimeChange>(json!({"idle": 5})).is_err());
    }

    #[test]
    fn debug_of_a_change_omits_values_of_variables() {
        let change: DefaultsChange = from_value(json!({"env": {"TOKEN": "hush"}})).unwrap();
        let shown = format!("{change:?}");
        assert!(
            shown.contains("TOKEN") && !shown.contains("hush"),
            "{shown}"
        );
    }
}
