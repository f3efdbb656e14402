//! The record of a box, and which calls its state allows.

use serde::{Deserialize, Serialize};

use super::fields::*;
use super::spec::BoxSpec;
use crate::error::Code;
use crate::ids::BoxId;
use crate::time::UnixMs;

/// The state of a box. A deleted box has none: it is `not_found`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum BoxState {
    /// Being created or started.
    Starting,
    /// Ready.
    Running,
    /// All processes are frozen.
    Paused,
    /// All processes have ended; the files are kept.
    Stopped,
    /// The box did not start, or its agent died.
    Failed,
    /// The server that adopted the box cannot reach its agent. The box may recover, fail, or be
    /// deleted with `force`.
    Unreachable,
}

/// How the state of a box affects a call to `command.*`, `shell.*`, `file.*` or `port.*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The call proceeds.
    Now,
    /// The call waits for the box, up to its deadline.
    Wait,
    /// The runtime first resumes or starts the box.
    WakeFirst,
    /// The runtime refuses the call with this code.
    Refused(Code),
}

impl BoxState {
    /// Returns the effect on a call that needs the agent; `wake` is the setting of the box.
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

/// The files of a box at one moment, which the box keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Checkpoint {
    /// The name, unique in the box.
    pub name: Name,
    /// When it was made.
    pub created_at: UnixMs,
    /// Bytes that its layers occupy on disk.
    pub size_bytes: u64,
    /// Number of files, directories and links in its layers.
    pub entries: u64,
    /// How long the processes of the box were paused, in milliseconds.
    #[serde(default)]
    pub paused_ms: u64,
}

/// Whether an exec runs in the box.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ExecStatus {
    /// No exec runs.
    #[default]
    Idle,
    /// An exec runs.
    Running,
    /// The box is ending.
    Closing,
}

macro_rules! declare {
    ($($name:ident: $type:tt = $default:tt, $shown:ident;)*) => {
        /// The record of a box.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub struct BoxInfo {
            /// The id of the box.
            pub box_id: BoxId,
            /// The backend that runs the box.
            pub backend_name: String,
            /// The id of the box in its backend. It changes with each start, and is empty until the first.
            pub backend_id: String,
            /// The id that no other box of this server has. A box has the same one until it is deleted.
            #[serde(default)]
            pub unique_id: String,
            $(
                /// The requested value.
                pub $name: held!($type, $default),
            )*
            /// The image that the requested name resolved to; absent if it is the same.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub image_resolved: Option<String>,
            /// Where the system directories come from: `host` or `image`.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub rootfs: Option<String>,
            /// When the box was created.
            pub created_at: UnixMs,
            /// When the box last had activity.
            pub last_used_at: UnixMs,
            /// The state.
            pub state: BoxState,
            /// The pool that the box was taken from; absent if it was started for its caller.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub pool: Option<Name>,
            /// Why the box could not be taken from a pool; absent if it was, or if none was asked.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub pool_missed: Option<String>,
            /// When the box entered its state.
            #[serde(default)]
            pub since: UnixMs,
            /// Why the box failed or is unreachable; absent otherwise.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub reason: Option<String>,
            /// Whether an exec runs.
            #[serde(default)]
            pub status: ExecStatus,
            /// The gateway through which the box was created.
            #[serde(default)]
            pub gateway: GatewayName,
            /// The name, which the owner can change; absent if the box has none.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub name: Option<Name>,
            /// The labels.
            #[serde(default)]
            pub labels: Labels,
            /// Data of the gateway, returned unchanged.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub note: Option<Note>,
            /// When the server ends the box.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub lifetime: Option<Lifetime>,
            /// The command that starts with the box; absent if the box has none.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub main: Option<Main>,
            /// Defaults of every command. Absent in lists.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub defaults: Option<Defaults>,
            /// The hosts that the box may connect to. Absent in lists.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub network_policy: Option<Box<NetworkPolicy>>,
            /// The checkpoints, oldest first. Absent in lists.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            pub checkpoints: Vec<Checkpoint>,
            /// Protections that this machine does not provide; see the security model.
            #[serde(default)]
            pub missing: Vec<String>,
            /// Primitives of `best_effort` that the box lacks.
            #[serde(default)]
            pub degraded: Vec<String>,
        }

        impl BoxInfo {
            /// The record of a box that is being created from this spec.
            pub fn starting(
                spec: &BoxSpec,
                backend_name: impl Into<String>,
                backend_id: impl Into<String>,
                now: UnixMs,
            ) -> Self {
                Self {
                    box_id: spec.box_id.clone(),
                    backend_name: backend_name.into(),
                    backend_id: backend_id.into(),
                    unique_id: String::new(),
                    $($name: spec.$name.clone(),)*
                    image_resolved: None,
                    rootfs: None,
                    created_at: now,
                    last_used_at: now,
                    state: BoxState::Starting,
                    pool: None,
                    pool_missed: None,
                    since: now,
                    reason: None,
                    status: ExecStatus::Idle,
                    gateway: spec.gateway.clone().unwrap_or_default(),
                    name: spec.name.clone(),
                    labels: spec.labels.clone().unwrap_or_default(),
                    note: spec.note.clone(),
                    lifetime: spec.lifetime.clone(),
                    main: spec.main.clone(),
                    defaults: spec.defaults.clone(),
                    network_policy: spec.network_policy.clone(),
                    checkpoints: Vec::new(),
                    missing: Vec::new(),
                    degraded: Vec::new(),
                }
            }
        }
    };
}

spec_fields!(fixed_fields declare);

impl BoxInfo {
    /// Estimates the size of the record in a list, in bytes.
    pub fn estimated_bytes(&self) -> usize {
        let labels = self
            .labels
            .iter()
            .map(|(name, value)| name.len() + value.len());
        let note = self.note.as_ref().map_or(0, |note| note.as_json().len());
        let length = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let main = self.main.iter().flat_map(|main| &main.argv);
        let words = length(&self.image)
            + self.mount_path.len()
            + length(&self.host_path)
            + main.map(String::len).sum::<usize>();
        // JSON may escape a character as six bytes.
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
        let info = BoxInfo::starting(&spec, "fake", "backend-s1", UnixMs(5));
        let json = serde_json::to_value(&info).unwrap();
        assert_eq!(json["missing"], serde_json::json!([]));
        assert_eq!(json["degraded"], serde_json::json!([]));
        assert_eq!(
            (json["created_at"].as_u64(), json["state"].as_str()),
            (Some(5), Some("starting"))
        );
        assert_eq!(serde_json::from_value::<BoxInfo>(json).unwrap(), info);
    }
}
