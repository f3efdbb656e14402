//! The library's decoder: what it reads, and what its errors mean.

use std::io::{ErrorKind, Read, Result, Write};

use tokio::io::AsyncRead;
use tungstenite::{
    Error,
    error::ProtocolError,
    protocol::{
        Role, WebSocketConfig, WebSocketContext,
        frame::{
            FrameHeader,
            coding::{CloseCode, OpCode},
        },
    },
};

use crate::{bytes::ReadBuffer, line::extend_head};

/// Bytes that the decoder takes at a time. It zeroes as many for each frame.
const DECODER_READ: usize = 1024;

/// Protocol violation of the peer, with the close status to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Violation {
    /// Status of the close frame.
    pub(super) status: CloseCode,
    /// Description of the fault; contains no data of the peer.
    pub(super) reason: &'static str,
}

impl Violation {
    /// Creates a protocol error.
    pub(super) const fn protocol(reason: &'static str) -> Self {
        Self {
            status: CloseCode::Protocol,
            reason,
        }
    }
}

impl From<Error> for Violation {
    fn from(error: Error) -> Self {
        let reason = match error {
            Error::Utf8(_) => {
                return Self {
                    status: CloseCode::Invalid,
                    reason: "text message is not UTF-8",
                };
            }
            Error::Protocol(error) => match error {
                ProtocolError::UnmaskedFrameFromClient | ProtocolError::MaskedFrameFromServer => {
                    "mask: a client must mask frames, a server must not"
                }
                ProtocolError::NonZeroReservedBits => "reserved bits without an extension",
                ProtocolError::InvalidOpcode(_) => "reserved opcode",
                ProtocolError::FragmentedControlFrame => "control frame is fragmented",
                ProtocolError::InvalidCloseSequence => "close frame with a status of one byte",
                _ => "frame violates the protocol",
            },
            _ => "frame violates the protocol",
        };
        Self::protocol(reason)
    }
}

/// A frame that is arriving.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) header: FrameHeader,
    /// Bytes of the header that have not been taken.
    pub(super) header_bytes: usize,
    /// Bytes that have not been taken, with the header.
    pub(super) missing: u64,
    /// Position of the next payload byte within the mask.
    pub(super) mask_at: usize,
    /// Whether its message is too large.
    pub(super) skipped: bool,
}

impl Frame {
    pub(super) fn is_control(&self) -> bool {
        matches!(self.header.opcode, OpCode::Control(_))
    }

    /// Returns how many of `bytes` belong to the frame.
    pub(super) fn length_in(&self, bytes: &[u8]) -> usize {
        usize::try_from(self.missing).map_or(bytes.len(), |missing| missing.min(bytes.len()))
    }

    /// Counts `bytes` as taken, and adds their payload to `head`.
    pub(super) fn take(&mut self, bytes: &[u8], head: Option<&mut Vec<u8>>) {
        self.missing -= bytes.len() as u64;
        let of_header = self.header_bytes.min(bytes.len());
        self.header_bytes -= of_header;
        let payload = &bytes[of_header..];
        if let Some(head) = head {
            let start = head.len();
            extend_head(head, payload);
            if let Some(mask) = self.header.mask {
                let mask = mask.iter().cycle().skip(self.mask_at);
                for (byte, key) in head[start..].iter_mut().zip(mask) {
                    *byte ^= key;
                }
            }
            self.mask_at = (self.mask_at + payload.len()) % 4;
        }
    }
}

/// The bytes of one frame, as the stream that the decoder reads.
pub(super) struct FrameSource<'a, R> {
    pub(super) read_buffer: &'a mut ReadBuffer<R>,
    pub(super) frame: &'a mut Frame,
    pub(super) head: Option<&'a mut Vec<u8>>,
}

impl<R: AsyncRead + Unpin> Read for FrameSource<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let bytes = self.read_buffer.buffered();
        let count = self.frame.length_in(bytes).min(buffer.len());
        if count == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        buffer[..count].copy_from_slice(&bytes[..count]);
        self.frame.take(&bytes[..count], self.head.as_deref_mut());
        self.read_buffer.consume(count);
        Ok(count)
    }
}

/// Discards the decoder's answers to pings and close frames: the sending half answers.
impl<R> Write for FrameSource<'_, R> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Creates a decoder. It has no limits, because the receiver checks each header first.
pub(super) fn new(role: Role) -> WebSocketContext {
    let config = WebSocketConfig::default()
        .read_buffer_size(DECODER_READ)
        .max_message_size(None)
        .max_frame_size(None);
    WebSocketContext::new(role, Some(config))
}
