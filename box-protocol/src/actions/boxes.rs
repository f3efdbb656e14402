//! `box.*`: the life of a box, from create to delete.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{AttachOptions, CommandChunk, OnDisconnect, actions, is_default};
use crate::ids::{BoxId, Name};
use crate::model::{
    Adjusted, BoxExecutionResult, BoxInfo, BoxMountSpec, BoxState, DefaultsChange, GatewayName,
    Labels, LifetimeChange, NetworkPolicy, Program, SpecDraft,
};
use crate::note::Note;
use crate::time::UnixMs;

actions! {
    /// Creates a box, or returns the existing box with this id if its spec matches. Errors:
    /// `conflict` (a fixed field differs, the name is taken, or the box exists and `if_exists` is
    /// `fail`), `capacity`, `unavailable` (names the missing primitive), `unsupported`.
    BoxCreate = "box.create": BoxCreateParams => BoxCreateResult;

    /// Returns the record of a box in any state, by its id or by its name. Errors: `not_found`.
    BoxGet = "box.get": BoxGetParams => BoxGetResult;

    /// Lists the caller's boxes in any state.
    BoxList = "box.list": BoxListParams => BoxListResult;

    /// Changes a box in any state but `failed`. The runtime applies all changes or none, and
    /// persists them before it answers. Errors: `not_found`, `conflict` (the name is taken).
    BoxUpdate = "box.update": BoxUpdateParams => BoxInfo;

    /// Pauses, resumes, stops or starts a box that is `running`, `paused` or `stopped`. Errors:
    /// `not_found`, `conflict` (any other state), `unsupported`.
    BoxTransition = "box.transition": BoxTransitionParams => BoxTransitionResult;

    /// Deletes a box in any state and answers when it is gone. Without `force` the runtime first
    /// waits for a running exec. Errors: `not_found`.
    BoxDelete = "box.delete": BoxDeleteParams => BoxDeleteResult;

    /// Finds or creates a box, starts `spec.cmd` or `program` as `command.start` does, and answers
    /// with its end. The runtime runs the execs of one box one at a time. A timeout is a result, not
    /// an error. Errors: those of `box.create`, and `validation` for an empty `cmd` or for both `cmd`
    /// and `program`. Streams the output if `attach` is given.
    BoxExec = "box.exec": BoxExecParams => BoxExecutionResult | CommandChunk;

    /// Returns the resource usage of a running box; with `every_ms`, streams it until cancelled.
    /// The call does not count as activity. Errors: `not_found`, `conflict` (the box is not
    /// running).
    BoxStats = "box.stats": BoxStatsParams => BoxStatsResult | BoxStatsResult;

    /// Streams the events of one box or of all the caller's boxes, oldest first; with `follow`,
    /// until cancelled.
    BoxEvents = "box.events": BoxEventsParams => BoxEventsResult | BoxEvent;
}

/// How `box.create` treats an existing box with the same id.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum IfExists {
    /// Return the existing box if its spec matches.
    #[default]
    Reuse,
    /// Refuse with `conflict`.
    Fail,
}

/// Parameters of `box.create`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxCreateParams {
    /// The requested spec. The service adds the defaults of the profile, and the runtime validates
    /// the result.
    pub spec: SpecDraft,
    /// How to treat an existing box with this id; `reuse` if absent.
    #[serde(default)]
    pub if_exists: IfExists,
    /// Whether the policy layer has filled in the template of the spec; `false` if absent. The
    /// service sets it, whatever a caller sends.
    #[serde(default, skip_serializing_if = "is_default")]
    pub template_applied: bool,
    /// Whether a box that cannot start stays, with the state `failed` and the reason; `false` if
    /// absent. The call gets the error in either case. The runtime deletes such a box after its
    /// idle time, at the latest after an hour.
    ///
    /// Once a call has shown the box, it also survives a restart of the server before it has
    /// started: the next server starts it again. If the box has directories of the host, or three
    /// servers have ended during its start, it is `failed` instead.
    #[serde(default, skip_serializing_if = "is_default")]
    pub keep_failed: bool,
}

impl BoxCreateParams {
    /// Creates this box, or returns the existing one.
    pub fn new(spec: SpecDraft) -> Self {
        Self {
            spec,
            if_exists: IfExists::default(),
            template_applied: false,
            keep_failed: false,
        }
    }
}

/// Result of `box.create`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxCreateResult {
    /// The box.
    pub info: BoxInfo,
    /// Whether the box existed before the call.
    pub existed: bool,
    /// Fields of the request that the profile changed; absent if none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adjusted: Vec<Adjusted>,
    /// How the caller's previous box with this id ended. Present only if the box is new and the
    /// caller did not delete the previous one. A runtime remembers the last 1024 such boxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier: Option<EarlierBox>,
}

/// How a box ended that its owner did not delete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EarlierBox {
    /// When the box ended.
    pub ended_at: UnixMs,
    /// The reason, as text for people.
    pub why: String,
}

/// Parameters of `box.get`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxGetParams {
    /// The id of the box; absent with `name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub box_id: Option<BoxId>,
    /// The name of a box of the caller; absent with `box_id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// The gateway that the name belongs to; `native` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<GatewayName>,
    /// Whether to include information from inside the box; `false` if absent. The call does not
    /// wake the box and does not count as activity.
    #[serde(default)]
    pub guest: bool,
}

impl BoxGetParams {
    /// The box with this id.
    pub fn new(box_id: BoxId) -> Self {
        Self {
            box_id: Some(box_id),
            name: None,
            gateway: None,
            guest: false,
        }
    }

    /// The caller's box with this name.
    pub fn named(gateway: GatewayName, name: Name) -> Self {
        Self {
            box_id: None,
            name: Some(name),
            gateway: Some(gateway),
            guest: false,
        }
    }
}

/// Result of `box.get`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxGetResult {
    /// The box.
    pub info: BoxInfo,
    /// Information from inside the box; absent unless requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<GuestInfo>,
}

/// The system as the agent sees it inside a box.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct GuestInfo {
    /// Name of the operating system, for example `Debian GNU/Linux 12`.
    pub os: String,
    /// The machine architecture, for example `x86_64`.
    pub arch: String,
    /// The name of the guest user.
    pub user: String,
    /// The home directory of the guest user.
    pub home: String,
    /// The time zone.
    pub zone: String,
    /// TCP ports on which a process listens.
    pub ports: Vec<u16>,
    /// Paths of the installed interpreters, by language.
    pub interpreters: BTreeMap<String, String>,
    /// Names of other installed programs that clients commonly use.
    pub tools: Vec<String>,
}

/// Parameters of `box.list`. A box must match all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct BoxListParams {
    /// Only boxes created through this gateway; any if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<GatewayName>,
    /// Only the box with this name; any if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Only boxes in one of these states; any if empty.
    pub state: Vec<BoxState>,
    /// Only boxes that have all these labels.
    pub labels: Labels,
    /// Start after this id; the `next` of the previous result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<BoxId>,
    /// Maximum number of boxes in the result; as many as fit into one message if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
}

/// Result of `box.list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxListResult {
    /// The boxes, sorted by id, without `defaults` and `network_policy`.
    pub items: Vec<BoxInfo>,
    /// Number of boxes that match.
    pub total: u64,
    /// The value of `after` for the next page; absent on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<BoxId>,
}

/// Parameters of `box.update`. Absent members stay unchanged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxUpdateParams {
    /// The box.
    pub box_id: BoxId,
    /// The new name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Labels to set; `null` removes a label.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
    /// The new note.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// Changes of the lifetime.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifetime: Option<LifetimeChange>,
    /// Read-only mounts to add to the running box, if the backend supports it. A mount that already
    /// exists is not an error; another one at the same path is a `conflict`. The added mounts end
    /// with this instance: a recreated box has only those of its spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_mounts: Option<Vec<BoxMountSpec>>,
    /// Changes of the defaults, which apply to later commands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defaults: Option<DefaultsChange>,
    /// The new network policy. The runtime closes open connections that it forbids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkPolicy>,
}

impl BoxUpdateParams {
    /// Parameters that change nothing yet.
    pub fn of(box_id: BoxId) -> Self {
        Self {
            box_id,
            name: None,
            labels: BTreeMap::new(),
            note: None,
            lifetime: None,
            extra_mounts: None,
            defaults: None,
            network_policy: None,
        }
    }
}

/// A state that a client can request for a box.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum TargetState {
    /// Resumed, or started.
    Running,
    /// All processes are frozen.
    Paused,
    /// All processes have ended; the files are kept.
    Stopped,
}

/// Parameters of `box.transition`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxTransitionParams {
    /// The box.
    pub box_id: BoxId,
    /// The requested state.
    pub to: TargetState,
}

/// Result of `box.transition`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxTransitionResult {
    /// The box.
    pub info: BoxInfo,
    /// Whether the state was different before.
    pub changed: bool,
}

/// Parameters of `box.delete`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxDeleteParams {
    /// The box.
    pub box_id: BoxId,
    /// Do not wait for a running exec or for an agent that does not answer; `false` if absent. The
    /// runtime refuses the calls that are waiting for the box.
    #[serde(default)]
    pub force: bool,
}

/// Result of `box.delete`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxDeleteResult {
    /// The id of the deleted box.
    pub deleted: BoxId,
}

/// What the runtime ends when an exec times out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// The command and its process tree. The box stays.
    #[default]
    Kill,
    /// The whole box, before the runtime answers.
    DropBox,
}

/// Parameters of `box.exec`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxExecParams {
    /// The requested spec, with its `cmd` unless `program` is given. The service adds the defaults
    /// of the profile, and the runtime validates the result.
    pub spec: SpecDraft,
    /// The program to run instead of `spec.cmd`, which is a text for the shell of the box.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<Program>,
    /// Whether the policy layer has filled in the template of the spec; `false` if absent. The
    /// service sets it, whatever a caller sends.
    #[serde(default, skip_serializing_if = "is_default")]
    pub template_applied: bool,
    /// What a timeout ends; `kill` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_timeout: OnTimeout,
    /// What happens to the command when the caller disconnects; `kill` if absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_disconnect: OnDisconnect,
    /// How to stream the output while the command runs; no streaming if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach: Option<AttachOptions>,
}

impl BoxExecParams {
    /// Runs `spec.cmd`; everything else is the default.
    pub fn new(spec: SpecDraft) -> Self {
        Self {
            spec,
            program: None,
            template_applied: false,
            on_timeout: OnTimeout::default(),
            on_disconnect: OnDisconnect::default(),
            attach: None,
        }
    }
}

/// Parameters of `box.stats`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxStatsParams {
    /// The box.
    pub box_id: BoxId,
    /// Interval between two samples in milliseconds; one sample if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_ms: Option<u64>,
}

/// Resource usage of a box. A member is `null` if the machine does not report it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct BoxStatsResult {
    /// When the sample was taken.
    pub at: UnixMs,
    /// CPU time since the box was created, in microseconds.
    pub cpu_us: Option<u64>,
    /// CPU use since the previous sample that any caller took, in percent of one CPU. The first
    /// sample counts from the creation of the box.
    pub cpu_percent: Option<f64>,
    /// Number of CPUs that the box may use.
    pub cpus: Option<f64>,
    /// Memory in use, in bytes.
    pub memory_bytes: Option<u64>,
    /// Part of the memory in use that the kernel can free: cached files, in bytes.
    pub memory_cache_bytes: Option<u64>,
    /// Memory limit, in bytes.
    pub memory_limit_bytes: Option<u64>,
    /// Number of processes and threads.
    pub pids: Option<u64>,
    /// Size of the private files of the box and of its workspace, in bytes. Private files without
    /// a disk are in memory and also count there. `null` if the workspace is writable and has no
    /// quota.
    pub disk_bytes: Option<u64>,
    /// Limit of `disk_bytes`.
    pub disk_limit_bytes: Option<u64>,
    /// Size of the private files alone, in bytes.
    pub private_bytes: Option<u64>,
    /// Limit of the private files, in bytes.
    pub private_limit_bytes: Option<u64>,
    /// Bytes that entered the box through its ports and connections since this runtime manages it.
    pub network_received_bytes: Option<u64>,
    /// Bytes that left the box through its ports and connections since this runtime manages it.
    pub network_sent_bytes: Option<u64>,
    /// Number of open outgoing connections; `null` without a network.
    pub network_connections: Option<u64>,
    /// Number of refused or failed connections and name lookups.
    pub network_refused: Option<u64>,
    /// Destinations that a policy or a limit refused: the last 64, each once, the newest last.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub network_refused_to: Vec<RefusedConnection>,
}

/// A destination that the runtime did not connect a box to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RefusedConnection {
    /// Host and port; only the name if the runtime refused the name lookup.
    pub to: String,
    /// The reason code, the same as in the log of the server.
    pub why: String,
    /// Number of refusals.
    pub count: u64,
    /// When the runtime last refused it.
    pub at: UnixMs,
}

/// Parameters of `box.events`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct BoxEventsParams {
    /// Only events of this box; of all the caller's boxes if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub box_id: Option<BoxId>,
    /// Start after this event number; with the oldest kept event if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// Whether to keep streaming until cancelled; `false` if absent.
    pub follow: bool,
}

/// Result of `box.events`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxEventsResult {
    /// The value of `after` for later events.
    pub next: u64,
    /// Number of events that the runtime discarded after the last one it sent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub lost: u64,
}

/// An event of a box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxEvent {
    /// Event number, increasing.
    pub seq: u64,
    /// When the event occurred.
    pub at: UnixMs,
    /// The box.
    pub box_id: BoxId,
    /// One of `started`, `degraded`, `paused`, `resumed`, `stopped`, `rolled_back`, `oom`,
    /// `timeout`, `failed`, `adopted`, `unreachable`, `expired`, `deleted`, `unstopped`. Later
    /// versions may add kinds.
    pub kind: String,
    /// Description for people.
    #[serde(default)]
    pub message: String,
    /// Number of events of the caller's boxes that the runtime discarded before this one because
    /// the reader was slow. For a reader that resumes with `after` it is an upper bound.
    #[serde(default, skip_serializing_if = "is_default")]
    pub lost: u64,
}
