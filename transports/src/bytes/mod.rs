//! Parts of every framing over a byte stream.
//!
//! These are a buffering reader, a batching writer and the timeout of one message.

mod deadline;
mod read_buffer;
mod thread_buffers;
mod write_buffer;

use std::io;

use box_rpc::ConnectionError;

pub use self::thread_buffers::free_thread_buffers;
pub(crate) use self::{
    deadline::Deadline,
    read_buffer::ReadBuffer,
    write_buffer::{DIRECT_WRITE_BYTES, Probe, WriteBuffer},
};

/// Bytes kept of an oversize message, so that its id can be found and answered.
pub(crate) const HEAD_BYTES: usize = 512;

/// Maps an I/O error; all errors of a vanished peer become `Closed`.
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

/// Converts bytes from the wire to text.
/// Bytes that are not UTF-8 become replacement characters. The engine then counts the message as unparsable and keeps
/// the connection.
pub(crate) fn text_of(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}
