//! What is known of a box, and what its state allows.

use serde::{Deserialize, Serialize};

use super::fields::*;
use super::spec::BoxSpec;
use crate::error::Code;
use crate::ids::SessionId;
use crate::time::UnixMs;

/// Where a box is in its life. One that was deleted has no state: it is `not_found`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum BoxState {
    /// Being made or started.
    Starting,
    /// Ready.
    Running,
    /// Frozen: processes stand still.
    Paused,
    /// Processes are gone, files stay.
    Stopped,
    /// It did not start, or its agent died.
    Failed,
    /// The server that adopted it cannot reach its agent. It may live: it is reached later, fails, or is deleted with `force`.
    Unreachable,
}

/// What a call to `command.*`, `shell.*`, `file.*` or `port.*` meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// It goes ahead.
    Now,
    /// It waits for the box, up to its own deadline.
    Wait,
    /// The box is resumed or started first.
    WakeFirst,
    /// It is refused with this word.
    Refused(Code),
}

impl BoxState {
    /// What a call that needs the box's inside meets; `wake` is the box's own setting.
    pub const fn access(self, wake: bool) -> Access {
        match self {
            Self::Starting => Access::Wait,
            Self::Running => Access::Now,
            Self::Paused | Self::Stopped if wake => Access::WakeFirst,
            Self::Paused | Self::Stopped => Access::Refused(Code::Conflict),
            Self::Failed | Self::Unreachable => Access::Refused(Code::Unavailable),
        }
    }
}

/// What the exec lane of a box is doing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum LaneStatus {
    /// Nothing.
    #[default]
    Idle,
    /// An exec.
    Running,
    /// The box is on its way out.
    Closing,
}

macro_rules! declare {
    ($($name:ident: $type:tt = $default:tt, $shown:ident;)*) => {
        /// What is known of a box.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub struct BoxSessionInfo {
            /// The box.
            pub session_id: SessionId,
            /// The backend that runs it.
            pub backend_name: String,
            /// What the backend calls it.
            pub backend_session_id: String,
            $(
                /// As asked for.
                pub $name: held!($type, $default),
            )*
            /// What the image's name led to, where that is something else.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub image_resolved: Option<String>,
            /// What its system directories are: `host` for the machine's own, `image` for those of an image.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub rootfs: Option<String>,
            /// When it was made.
            pub created_at: UnixMs,
            /// When it last had work.
            pub last_used_at: UnixMs,
            /// Where it is in its life.
            pub state: BoxState,
            /// Why, if it failed or cannot be reached.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub reason: Option<String>,
            /// What its exec lane is doing.
            #[serde(default)]
            pub status: LaneStatus,
            /// The protocol it was made through.
            #[serde(default)]
            pub world: World,
            /// Its changeable name.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub name: Option<Name>,
            /// Its labels.
            #[serde(default)]
            pub labels: Labels,
            /// What a gateway keeps with it.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub note: Option<Note>,
            /// When it ends by itself.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub lifetime: Option<Lifetime>,
            /// What every command of it gets. Lists leave it out.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub defaults: Option<Defaults>,
            /// The hosts that it may connect to. Lists leave it out.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub network_policy: Option<Box<NetworkPolicy>>,
            /// Protections this machine does not grant; see the security model.
            #[serde(default)]
            pub missing: Vec<String>,
            /// What was asked for at best effort and could not be given.
            #[serde(default)]
            pub degraded: Vec<String>,
        }

        impl BoxSessionInfo {
            /// A box that is being made to this spec.
            pub fn starting(
                spec: &BoxSpec,
                backend_name: impl Into<String>,
                backend_session_id: impl Into<String>,
                now: UnixMs,
            ) -> Self {
                Self {
                    session_id: spec.session_id.clone(),
                    backend_name: backend_name.into(),
                    backend_session_id: backend_session_id.into(),
                    $($name: spec.$name.clone(),)*
                    image_resolved: None,
                    rootfs: None,
                    created_at: now,
                    last_used_at: now,
                    state: BoxState::Starting,
                    reason: None,
                    status: LaneStatus::Idle,
                    world: spec.world.clone().unwrap_or_default(),
                    name: spec.name.clone(),
                    labels: spec.labels.clone().unwrap_or_default(),
                    note: spec.note.clone(),
                    lifetime: spec.lifetime.clone(),
                    defaults: spec.defaults.clone(),
                    network_policy: spec.network_policy.clone(),
                    missing: Vec::new(),
                    degraded: Vec::new(),
                }
            }
        }
    };
}

spec_fields!(fixed_fields declare);

impl BoxSessionInfo {
    /// About how many bytes of a message it is, as a list tells it.
    pub fn about_bytes(&self) -> usize {
        let labels = self
            .labels
            .iter()
            .map(|(name, value)| name.len() + value.len());
        let note = self.note.as_ref().map_or(0, |note| note.as_json().len());
        let length = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let words = length(&self.image) + self.mount_path.len() + length(&self.host_path);
        // A character may be written as six.
        2048 + note + 6 * (labels.sum::<usize>() + words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SpecDraft;

    #[test]
    fn each_state_allows_what_the_contract_says() {
        use BoxState::{Failed, Paused, Running, Starting, Stopped};
        for wake in [false, true] {
            assert_eq!(Starting.access(wake), Access::Wait);
            assert_eq!(Running.access(wake), Access::Now);
            assert_eq!(Failed.access(wake), Access::Refused(Code::Unavailable));
        }
        for state in [Paused, Stopped] {
            assert_eq!(state.access(true), Access::WakeFirst);
            assert_eq!(state.access(false), Access::Refused(Code::Conflict));
        }
    }

    #[test]
    fn answers_always_carry_missing_and_degraded() {
        let spec = SpecDraft::new("s1").build().unwrap();
        let info = BoxSessionInfo::starting(&spec, "fake", "backend-s1", UnixMs(5));
        let json = serde_json::to_value(&info).unwrap();
        assert_eq!(json["missing"], serde_json::json!([]));
        assert_eq!(json["degraded"], serde_json::json!([]));
        assert_eq!(
            (json["created_at"].as_u64(), json["state"].as_str()),
            (Some(5), Some("starting"))
        );
        assert_eq!(
            serde_json::from_value::<BoxSessionInfo>(json).unwrap(),
            info
        );
    }
}
