//! Checks of messages from an agent, which runs next to an untrusted guest.

use box_protocol::actions::{AgentCommand, StreamName};
use box_protocol::error::Detail;
use box_protocol::{Blob, BoxError, Code, CommandId, Exit, is_invisible};
use box_rpc::{CallError, RpcError};

use crate::shm::ShmSlot;

/// Longest error message of an agent that the runtime passes on.
const MESSAGE_CHARS: usize = 512;

/// Longest errno name that the runtime passes on.
const ERRNO_CHARS: usize = 16;

/// Longest field name that the runtime passes on.
const FIELD_CHARS: usize = 32;

/// Highest signal number.
const LAST_SIGNAL: i32 = 64;

/// Returns the exit of a command as reported by its agent, if it is plausible.
pub(crate) fn checked_exit(answer: &AgentCommand, command_id: &CommandId) -> Result<Exit, String> {
    if answer.command_id != *command_id {
        return Err(agent_violation("answered for another command"));
    }
    let Some(exit) = answer.exit else {
        return Err(agent_violation("answered before the command's end"));
    };
    if exit.code.is_some_and(|code| !(0..=255).contains(&code)) {
        return Err(agent_violation("reported an invalid exit code"));
    }
    if exit
        .signal
        .is_some_and(|signal| !(1..=LAST_SIGNAL).contains(&signal))
    {
        return Err(agent_violation("reported an invalid signal"));
    }
    Ok(exit)
}

/// Reason why a command has no result.
pub(crate) enum Failure {
    /// The agent refused the call, or the connection is lost.
    Call(CallError),
    /// The agent sent an invalid message.
    Violation(String),
    /// The command has timed out, and the agent has not reported it.
    Silent,
    /// The runtime gave up for another reason.
    Other(BoxError),
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        Self::Call(error)
    }
}

impl From<BoxError> for Failure {
    fn from(error: BoxError) -> Self {
        Self::Other(error)
    }
}

impl From<Failure> for BoxError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Call(error) => agents_error(error),
            Failure::Violation(reason) => Self::unavailable(reason),
            Failure::Silent => {
                Self::timeout("the command reached its timeout, and the box's agent did not end it")
            }
            Failure::Other(error) => error,
        }
    }
}

/// Consequence of a failed agent call for an exec.
pub(crate) enum CallConsequence {
    /// The agent refused the command; the box is intact.
    Refused(BoxError),
    /// The box is unusable.
    Broken(String),
}

impl CallConsequence {
    pub(crate) fn of(error: CallError) -> Self {
        match error {
            CallError::Refused(refused) => match refused.code() {
                Code::Validation | Code::Denied | Code::Capacity | Code::Conflict => {
                    Self::Refused(cleaned_message(&refused))
                }
                code => Self::Broken(format!("the box's agent failed: {code}")),
            },
            CallError::TooLarge { .. } => Self::Refused(error.into()),
            CallError::Lost(_) | CallError::NotSent(_) => {
                Self::Broken("the box's agent has disconnected".to_owned())
            }
            CallError::Shape(_) => Self::Broken(agent_violation("sent an invalid answer")),
            _ => Self::Broken("the box's agent did not answer".to_owned()),
        }
    }
}

/// Reads output that the agent reports to be in its slot.
pub(crate) fn read_slot(
    slot: Option<&ShmSlot>,
    stream: StreamName,
    offset: u64,
    bytes: u64,
) -> Result<Blob, String> {
    let Some(slot) = slot else {
        return Err(agent_violation("referred to a slot it does not have"));
    };
    let read = slot.read(stream, offset, bytes);
    read.map(Blob::from)
        .map_err(|_| agent_violation("referred to output outside its slot"))
}

pub(crate) fn agent_violation(what: &str) -> String {
    format!("the box's agent {what}")
}

/// Converts an agent's error for the caller.
///
/// It keeps the code, the message, the subject and the count of accepted bytes, and a field and errno if their names are
/// valid.
pub(crate) fn agents_error(error: CallError) -> BoxError {
    match error {
        CallError::Refused(refused) => {
            let detail = refused.detail::<Detail>().unwrap_or_default();
            let kept = Detail {
                accepted: detail.accepted,
                errno: detail.errno.filter(|errno| is_errno(errno)),
                expired: detail.expired,
                field: detail.field.filter(|field| is_field(field)),
                subject: detail.subject,
                ..Detail::default()
            };
            let error = cleaned_message(&refused);
            if kept == Detail::default() {
                return error;
            }
            error.with_detail(&kept)
        }
        CallError::TooLarge { .. } => error.into(),
        CallError::Lost(_) | CallError::NotSent(_) => {
            BoxError::unavailable("the box's agent has disconnected")
        }
        CallError::Shape(_) => BoxError::unavailable(agent_violation("sent an invalid answer")),
        _ => BoxError::unavailable("the box's agent did not answer"),
    }
}

fn is_errno(name: &str) -> bool {
    name.len() <= ERRNO_CHARS
        && name.starts_with('E')
        && name
            .bytes()
            .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit())
}

fn is_field(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
    (1..=FIELD_CHARS).contains(&name.len()) && name.bytes().all(is_letter)
}

/// Returns the agent's message, shortened to one line and without its details.
fn cleaned_message(error: &RpcError) -> BoxError {
    let message: String = error
        .message()
        .chars()
        .map(|char| if is_invisible(char) { ' ' } else { char })
        .take(MESSAGE_CHARS)
        .collect();
    BoxError::new(error.code(), message)
}
