//! `box.*`: boxes from create to delete.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{AttachOptions, CommandChunk, OnDisconnect, actions, is_default};
use crate::ids::{Name, SessionId};
use crate::model::{
    Adjusted, BoxExecutionResult, BoxMountSpec, BoxSessionInfo, BoxState, DefaultsChange, Labels,
    LifetimeChange, NetworkPolicy, SpecDraft, World,
};
use crate::note::Note;
use crate::time::UnixMs;

actions! {
    /// Makes a box, or finds the one that fits. Errors: `conflict` (a fixed field differs, the name is
    /// taken, or it exists and `if_exists` is `fail`), `capacity`, `unavailable` naming the missing
    /// primitive, `unsupported`.
    BoxCreate = "box.create": BoxCreateParams => BoxCreateResult;

    /// What is known of a box, in any state. `not_found`.
    BoxGet = "box.get": BoxGetParams => BoxGetResult;

    /// The caller's boxes, in any state.
    BoxList = "box.list": BoxListParams => BoxListResult;

    /// Changes what may change, in any state but `failed`: all of it or nothing, kept before it is answered.
    /// `not_found`, `conflict` (name taken).
    BoxUpdate = "box.update": BoxUpdateParams => BoxSessionInfo;

    /// Pauses, resumes, stops or starts a box that is `running`, `paused` or `stopped`. `not_found`,
    /// `conflict` (any other state), `unsupported`.
    BoxTransition = "box.transition": BoxTransitionParams => BoxTransitionResult;

    /// Deletes a box in any state and answers once it is gone. Without `force` it waits for a running
    /// exec. `not_found`.
    BoxDelete = "box.delete": BoxDeleteParams => BoxDeleteResult;

    /// Runs `spec.cmd` in the box, which is made first if need be. Execs of one box run one at a time.
    /// A timeout is a result, not an error. Errors as for `box.create`, and `validation` for an empty
    /// `cmd`. Streams if `attach` is given.
    BoxExec = "box.exec": BoxExecParams => BoxExecutionResult | CommandChunk;

    /// What a running box uses; with `every_ms`, again and again until cancelled. Does not count as
    /// use. `not_found`, `conflict` (state).
    BoxStats = "box.stats": BoxStatsParams => BoxStatsResult | BoxStatsResult;

    /// What happened to a box, or to all of the caller's, oldest first; with `follow`, until cancelled.
    BoxEvents = "box.events": BoxEventsParams => BoxEventsResult | BoxEvent;
}

/// What to do about a box that exists.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum IfExists {
    /// Use it, if it fits.
    #[default]
    Reuse,
    /// Refuse.
    Fail,
}

/// Parameters of `box.create`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxCreateParams {
    /// As asked for: the policy layer fills it up, whoever makes the box builds it.
    pub spec: SpecDraft,
    /// What to do about one that exists.
    #[serde(default)]
    pub if_exists: IfExists,
}

/// Answer to `box.create`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxCreateResult {
    /// The box.
    pub info: BoxSessionInfo,
    /// It was there before.
    pub existed: bool,
    /// What the profile changed of the request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adjusted: Vec<Adjusted>,
    /// How the box ended that the caller had under this id before, if the box is new and the caller did not delete the
    /// earlier one. A runtime remembers the last 1024 such ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier: Option<EarlierBox>,
}

/// How a box ended that was not deleted on request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EarlierBox {
    /// When.
    pub ended_at: UnixMs,
    /// Why, for people.
    pub why: String,
}

/// Parameters of `box.get`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxGetParams {
    /// The box.
    pub session_id: SessionId,
    /// Tell about its inside, too, as `command.list` does it: no wake, no use.
    #[serde(default)]
    pub guest: bool,
}

/// Answer to `box.get`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxGetResult {
    /// The box.
    pub info: BoxSessionInfo,
    /// Its inside, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<GuestFacts>,
}

/// What the agent sees inside a box.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct GuestFacts {
    /// The system's name.
    pub os: String,
    /// The machine's kind.
    pub arch: String,
    /// The guest's name.
    pub user: String,
    /// The guest's home.
    pub home: String,
    /// The time zone.
    pub zone: String,
    /// Ports somebody listens on.
    pub ports: Vec<u16>,
    /// Interpreters, by language.
    pub interpreters: BTreeMap<String, String>,
    /// Other programs clients ask for.
    pub tools: Vec<String>,
}

/// Parameters of `box.list`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct BoxListParams {
    /// Made through this protocol; without it, through any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world: Option<World>,
    /// With this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// In one of these states; empty for any.
    pub state: Vec<BoxState>,
    /// With all of these labels.
    pub labels: Labels,
    /// After this box.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<SessionId>,
    /// At most so many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
}

/// Answer to `box.list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxListResult {
    /// The boxes, by id, without their `defaults` and `network_policy`; no more than a message holds.
    pub items: Vec<BoxSessionInfo>,
    /// How many there are in all.
    pub total: u64,
    /// Give this as `after` for more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<SessionId>,
}

/// Parameters of `box.update`; what is absent stays.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxUpdateParams {
    /// The box.
    pub session_id: SessionId,
    /// A new name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Labels to set, or to delete with `null`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
    /// A new note.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// What changes of its lifetime.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifetime: Option<LifetimeChange>,
    /// Mounts to add to the box that is there, for reading, where the backend can. One it has already is no
    /// error, another one in the same place is a conflict. They go with that box: one that is made again has
    /// those of its spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_mounts: Option<Vec<BoxMountSpec>>,
    /// What changes of the defaults, for later commands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defaults: Option<DefaultsChange>,
    /// To whom the box may connect from now on; what it may not any more is broken off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkPolicy>,
}

impl BoxUpdateParams {
    /// A change of nothing yet.
    pub fn of(session_id: SessionId) -> Self {
        Self {
            session_id,
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

/// A state a box can be asked into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum TargetState {
    /// Resumed, or started.
    Running,
    /// Frozen.
    Paused,
    /// Processes ended, files kept.
    Stopped,
}

/// Parameters of `box.transition`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxTransitionParams {
    /// The box.
    pub session_id: SessionId,
    /// Where it shall be.
    pub to: TargetState,
}

/// Answer to `box.transition`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxTransitionResult {
    /// The box.
    pub info: BoxSessionInfo,
    /// It was somewhere else before.
    pub changed: bool,
}

/// Parameters of `box.delete`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxDeleteParams {
    /// The box.
    pub session_id: SessionId,
    /// Do not wait for a running exec, nor for an agent that does not answer. Calls that wait for the box are refused.
    #[serde(default)]
    pub force: bool,
}

/// Answer to `box.delete`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxDeleteResult {
    /// The box that is gone.
    pub deleted: SessionId,
}

/// What the timeout of an exec ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// The command with everything it has started. The box stays.
    #[default]
    Kill,
    /// The whole box, before the answer.
    DropBox,
}

/// Parameters of `box.exec`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxExecParams {
    /// As asked for: the policy layer fills it up, whoever runs it builds it.
    pub spec: SpecDraft,
    /// What a timeout ends.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_timeout: OnTimeout,
    /// What becomes of it when the caller is gone.
    #[serde(default, skip_serializing_if = "is_default")]
    pub on_disconnect: OnDisconnect,
    /// Stream the output while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach: Option<AttachOptions>,
}

/// Parameters of `box.stats`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxStatsParams {
    /// The box.
    pub session_id: SessionId,
    /// Tell again after so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_ms: Option<u64>,
}

/// What a box uses; `null` where the machine does not tell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct BoxStatsResult {
    /// When this was so.
    pub at: UnixMs,
    /// Processor time since it was made, in microseconds.
    pub cpu_us: Option<u64>,
    /// Memory in use.
    pub memory_bytes: Option<u64>,
    /// Memory it may use.
    pub memory_limit_bytes: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
    /// Bytes of its files: those that only it has, which are kept in memory and count there, too, and its workspace. `null` if
    /// that is a directory it may write to without a quota, which nobody measures.
    pub disk_bytes: Option<u64>,
    /// Bytes that came into it, over its ports and over its own connections, since this runtime has it.
    pub network_received_bytes: Option<u64>,
    /// Bytes that left it, likewise.
    pub network_sent_bytes: Option<u64>,
    /// Its own connections that are open now, if it has a network.
    pub network_connections: Option<u64>,
    /// Its connections that were not made and names that were not looked for: not allowed, or not possible.
    pub network_refused: Option<u64>,
    /// Destinations that the runtime did not connect the box to, because a policy forbids it or the box has reached a limit:
    /// the last 64, each once, the newest at the end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub network_refused_to: Vec<RefusedConnection>,
}

/// A destination that a box was not connected to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RefusedConnection {
    /// The host and its port; a name alone if the box asked for its address and was given none.
    pub to: String,
    /// The word for it that a server's log has, too.
    pub why: String,
    /// How often.
    pub count: u64,
    /// When last.
    pub at: UnixMs,
}

/// Parameters of `box.events`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct BoxEventsParams {
    /// Of this box only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// After this number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// Go on until cancelled.
    pub follow: bool,
}

/// Answer to `box.events`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxEventsResult {
    /// Give this as `after` for what comes later.
    pub next: u64,
    /// So many after the last that was told were gone before they could be.
    #[serde(default, skip_serializing_if = "is_default")]
    pub lost: u64,
}

/// Something that happened to a box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxEvent {
    /// Its number, rising.
    pub seq: u64,
    /// When.
    pub at: UnixMs,
    /// The box.
    pub session_id: SessionId,
    /// What: `started`, `degraded`, `paused`, `resumed`, `stopped`, `oom`, `timeout`, `failed`, `adopted`, `unreachable`,
    /// `expired`, `deleted`, `unstopped`, and more to come.
    pub kind: String,
    /// For people.
    #[serde(default)]
    pub message: String,
    /// So many events of the caller's boxes, whichever they were about, were gone before they could be
    /// told, between the one before and this one: the reader was slow. One that comes back with `after`
    /// is told at most so many.
    #[serde(default, skip_serializing_if = "is_default")]
    pub lost: u64,
}
