//! What every framing over a byte stream shares: a reader that buffers, a writer that batches, and
//! the time one message may take.

mod deadline;
mod intake;
mod outbox;
mod spare;

use std::io;

use box_rpc::ConnectionError;

pub use self::spare::free_spare_buffers;
pub(crate) use self::{
    deadline::Deadline,
    intake::Intake,
    outbox::{Outbox, Probe, WRITTEN_DIRECTLY},
};

/// How much of an oversize message is kept, so that its id can still be found and answered.
pub(crate) const HEAD_BYTES: usize = 512;

/// A peer that is gone is not a fault of the system, whichever way the system puts it.
pub(crate) fn connection_error(error: io::Error) -> ConnectionError {
    match error.kind() {
        io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::NotConnected
        | io::ErrorKind::UnexpectedEof => ConnectionError::Closed,
        _ => ConnectionError::Io(error),
    }
}

/// Text from the wire. What is not UTF-8 becomes replacement characters: the engine then counts
/// the message as unparsable instead of losing the connection.
pub(crate) fn text_of(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}
