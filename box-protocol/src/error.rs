//! Errors: the twelve words, what programs read beside them, and the one table that maps them to
//! every wire we speak.

use serde::{Deserialize, Serialize};

pub use box_rpc::{Code, Fault, RpcError as BoxError};

/// What an error carries for programs. Every member is optional; readers ignore what they do not
/// know.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Detail {
    /// The field at fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// What the error is about, where one word serves several nouns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<Subject>,
    /// An `unavailable` that will not pass: a primitive this machine does not have.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub lasting: bool,
    /// A `not_found` for something that did exist, and was forgotten.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub expired: bool,
    /// The limit that is reached, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// That limit's value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
    /// The name of the system's error, as in `ENOENT`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    /// The value that stands, in a conflict. Never a host path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub existing: Option<String>,
    /// The value that was asked for, in a conflict. Never a host path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
    /// Why the box of the call has ended. The call is not worth repeating.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
}

impl Detail {
    /// Details that only name a subject.
    pub fn about(subject: Subject) -> Self {
        Self {
            subject: Some(subject),
            ..Self::default()
        }
    }

    /// Details that only name the field at fault.
    pub fn of_field(field: &str) -> Self {
        Self {
            field: Some(field.to_owned()),
            ..Self::default()
        }
    }

    /// The same, about a subject.
    pub fn of(mut self, subject: Subject) -> Self {
        self.subject = Some(subject);
        self
    }

    /// Details of a permanent `unavailable`.
    pub fn lasting() -> Self {
        Self {
            lasting: true,
            ..Self::default()
        }
    }
}

/// Why a box has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(transform = crate::schema::open_list))]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// Its files exceeded `workspace_quota_mb`.
    Quota,
    /// Its processes exceeded `memory_mb`, and the kernel killed its agent.
    Memory,
    /// Its `expires_at` has passed.
    Expired,
    /// No caller used it for its idle time.
    Idle,
    /// A caller deleted it.
    Deleted,
    /// Its main command has ended.
    Main,
    /// The runtime shut down.
    Shutdown,
    /// Its agent is gone, and the runtime does not know why.
    Failed,
    /// A reason newer than this build.
    #[serde(other)]
    Other,
}

/// Adds why the box of a call has ended to what an error says.
pub fn with_end(error: BoxError, why: Ended) -> BoxError {
    let detail = Detail {
        ended: Some(why),
        ..detail(&error)
    };
    error.with_detail(&detail)
}

/// The error of a workspace that holds more than its quota.
pub fn quota_exceeded(megabytes: u64, more: &str) -> BoxError {
    let message = format!("quota exceeded: {megabytes} MiB{more}");
    BoxError::capacity(message).with_detail(&Detail {
        field: Some("workspace_quota_mb".to_owned()),
        limit: Some("workspace_quota_mb".to_owned()),
        max: Some(megabytes),
        ..Detail::about(Subject::Disk)
    })
}

/// What an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(transform = crate::schema::open_list))]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// A box (LangBot: a session). Assumed where nothing is said.
    Box,
    /// A managed process.
    Process,
    /// A shell.
    Shell,
    /// A tenant's grant.
    Grant,
    /// Room on a disk.
    Disk,
    /// Whether the place is fit to be used at all.
    Readiness,
    /// A subject newer than this build.
    #[serde(other)]
    Other,
}

/// One word on every wire.
#[derive(Debug)]
pub struct Mapping {
    /// The word.
    pub code: Code,
    /// The JSON-RPC number; a [`Fault`] has its own, see [`json_rpc_number`].
    pub json_rpc: i32,
    /// LangBot's class, where the subject does not say otherwise.
    pub langbot: &'static str,
    /// LangBot's class for some subjects.
    pub langbot_by_subject: &'static [(Subject, &'static str)],
    /// OpenSandbox's HTTP status.
    pub opensandbox: Status,
    /// LangSmith's HTTP status.
    pub langsmith: Status,
    /// The HTTP status of AIO and deer-flow.
    pub aio: Status,
}

/// An HTTP status, and what it depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The same every time.
    Always(u16),
    /// Another one if the error is [`Detail::lasting`].
    ByLasting {
        /// May work later.
        passing: u16,
        /// Never will.
        lasting: u16,
    },
    /// Another one if the request was written wrongly.
    ByShape {
        /// Wrong shape.
        shape: u16,
        /// Right shape, refused value.
        value: u16,
    },
    /// Another one while creating a box.
    ByCreate {
        /// In a create call.
        create: u16,
        /// In any other.
        other: u16,
    },
    /// Another one if the subject is [`Subject::Disk`].
    ByDisk {
        /// No room on a disk.
        disk: u16,
        /// Anything else is used up.
        other: u16,
    },
    /// Another one once something has run: these clients run a 409 again.
    ByBegun {
        /// Nothing ran.
        before: u16,
        /// Something did.
        after: u16,
    },
    /// Nobody is there to be answered.
    NoAnswer,
}

use Status::{Always, ByBegun, ByCreate, ByDisk, ByLasting, ByShape, NoAnswer};

/// The client worlds that speak HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HttpWorld {
    /// OpenSandbox.
    OpenSandbox,
    /// LangSmith sandboxes.
    LangSmith,
    /// AIO and deer-flow.
    Aio,
}

/// How far the request had come when it failed; only its gateway knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// It was to create a box.
    Creating,
    /// Nothing of it has run.
    Before,
    /// Some of it has run.
    Begun,
}

const fn row(
    code: Code,
    json_rpc: i32,
    langbot: &'static str,
    langbot_by_subject: &'static [(Subject, &'static str)],
    [opensandbox, langsmith, aio]: [Status; 3],
) -> Mapping {
    Mapping {
        code,
        json_rpc,
        langbot,
        langbot_by_subject,
        opensandbox,
        langsmith,
        aio,
    }
}

/// The table, in the order of [`Code::ALL`]. HTTP columns: OpenSandbox, LangSmith, AIO.
#[rustfmt::skip]
pub static MAPPINGS: [Mapping; 12] = [
    row(Code::Conflict, -32001, "BoxSessionConflictError",
        &[(Subject::Process, "BoxManagedProcessConflictError")],
        [Always(409), Always(409), ByBegun { before: 409, after: 400 }]),
    row(Code::NotFound, -32002, "BoxSessionNotFoundError",
        &[(Subject::Process, "BoxManagedProcessNotFoundError")],
        [Always(404), Always(404), Always(404)]),
    row(Code::Validation, -32003, "BoxValidationError", &[],
        [Always(400), Always(422), ByShape { shape: 422, value: 400 }]),
    row(Code::Unavailable, -32004, "BoxBackendUnavailableError",
        &[(Subject::Readiness, "BoxReadinessError")],
        [ByLasting { passing: 503, lasting: 501 },
         ByLasting { passing: 503, lasting: 422 },
         ByLasting { passing: 502, lasting: 501 }]),
    row(Code::Unsupported, -32011, "BoxBackendUnavailableError", &[],
        [Always(501), ByCreate { create: 422, other: 501 }, Always(501)]),
    row(Code::Denied, -32005, "PermissionError",
        &[(Subject::Grant, "BoxAdmissionError")],
        [Always(403), Always(403), Always(403)]),
    row(Code::Capacity, -32006, "BoxCapacityExceededError", &[],
        [Always(429), Always(429), ByDisk { disk: 507, other: 503 }]),
    // LangBot hears of a command's timeout as a result; this is for the rest (a start that hangs).
    row(Code::Timeout, -32007, "TimeoutError", &[],
        [Always(504), ByCreate { create: 408, other: 504 }, Always(504)]),
    row(Code::Cancelled, -32008, "CancelledError", &[],
        [NoAnswer, NoAnswer, NoAnswer]),
    row(Code::TooLarge, -32009, "ValueError", &[],
        [Always(413), Always(413), Always(413)]),
    row(Code::Overloaded, -32010, "ValueError", &[],
        [Always(429), Always(429), Always(503)]),
    row(Code::Internal, -32603, "RuntimeError", &[],
        [Always(500), Always(500), Always(500)]),
];

// The index is the word: proved here, so that `mapping` cannot miss.
const _: () = {
    let mut at = 0;
    while at < MAPPINGS.len() {
        assert!(MAPPINGS[at].code as usize == at && Code::ALL[at] as usize == at);
        at += 1;
    }
};

/// The row of a word.
pub fn mapping(code: Code) -> &'static Mapping {
    &MAPPINGS[code as usize]
}

fn detail(error: &BoxError) -> Detail {
    error.detail().unwrap_or_default()
}

/// The number JSON-RPC has for this error.
pub fn json_rpc_number(error: &BoxError) -> i32 {
    match error.written_wrongly() {
        Some(Fault::Parse) => -32700,
        Some(Fault::InvalidMessage) => -32600,
        Some(Fault::UnknownAction) => -32601,
        Some(Fault::InvalidParams) => -32602,
        None => mapping(error.code()).json_rpc,
    }
}

/// The class LangBot has for this error. The engine writes the same one before the text.
pub fn langbot_class(error: &BoxError) -> &'static str {
    if error.written_wrongly() == Some(Fault::UnknownAction) {
        return "ValueError";
    }
    let row = mapping(error.code());
    let subject = detail(error).subject;
    let by_subject = row
        .langbot_by_subject
        .iter()
        .find(|(of, _)| Some(*of) == subject);
    by_subject.map_or(row.langbot, |(_, class)| *class)
}

/// The HTTP status a world gets for this error; `None` if the connection just ends.
pub fn http_status(error: &BoxError, world: HttpWorld, stage: Stage) -> Option<u16> {
    let row = mapping(error.code());
    let status = match world {
        HttpWorld::OpenSandbox => row.opensandbox,
        HttpWorld::LangSmith => row.langsmith,
        HttpWorld::Aio => row.aio,
    };
    let pick = |first: bool, yes: u16, no: u16| Some(if first { yes } else { no });
    match status {
        Always(status) => Some(status),
        ByLasting { passing, lasting } => pick(detail(error).lasting, lasting, passing),
        ByShape { shape, value } => pick(error.written_wrongly().is_some(), shape, value),
        ByCreate { create, other } => pick(stage == Stage::Creating, create, other),
        ByDisk { disk, other } => pick(detail(error).subject == Some(Subject::Disk), disk, other),
        ByBegun { before, after } => pick(stage == Stage::Begun, after, before),
        NoAnswer => None,
    }
}

#[cfg(test)]
mod tests;
