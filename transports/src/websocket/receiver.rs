//! Receiving half: joins frames to messages, in constant memory beyond the limit.

use std::sync::{Arc, atomic::Ordering};

use async_trait::async_trait;
use box_rpc::{ConnectionError, ReceiveHalf, buffer_pool};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{
    Role,
    frame::{Header, Opcode, Violation, apply_mask},
    sender::Writer,
};
use crate::{
    bytes::{HEAD_BYTES, ReadBuffer, text_of},
    line::extend_head,
};

/// Maximum number of frames of one message.
const FRAGMENTS: usize = 4096;

/// Maximum memory reserved for a message before its bytes have arrived.
const MAX_PREALLOCATION: u64 = 64 * 1024;

/// Receiving half.
#[derive(Debug)]
pub(super) struct WebSocketReceive<R, W> {
    read_buffer: ReadBuffer<R>,
    role: Role,
    limit: usize,
    /// The incomplete message.
    message: Option<Partial>,
    /// Its frame that is arriving.
    frame: Option<Frame>,
    /// Event that could not be returned where only a message is possible.
    pending: Option<Found>,
    /// Whether the peer has closed, or this end has stopped reading.
    ended: bool,
    writer: Arc<Writer<W>>,
}

/// An incomplete message.
#[derive(Debug)]
struct Partial {
    /// Its text so far, or only the beginning once it is too large.
    text: Vec<u8>,
    too_large: bool,
    /// Number of frames so far.
    fragments: usize,
}

/// A data frame with a payload that is arriving.
#[derive(Debug)]
struct Frame {
    last: bool,
    mask: Option<[u8; 4]>,
    /// Bytes that have arrived.
    done: usize,
    /// Bytes that are missing.
    missing: u64,
}

/// Result of searching the buffered bytes.
#[derive(Debug)]
enum Found {
    /// A whole message.
    Message(String),
    /// Beginning of a message that was skipped.
    TooLarge(Vec<u8>),
    /// The peer has closed its sending side.
    Close,
    /// The peer violated the protocol.
    Broken(Violation),
    /// More bytes are needed.
    Nothing,
}

impl<R, W> WebSocketReceive<R, W>
where
    R: AsyncRead + Unpin + Send,
    W: AsyncWrite + Unpin + Send + 'static,
{
    /// Creates a receiver of frames from `read_buffer`; answers go to `writer`.
    pub(super) fn new(
        read_buffer: ReadBuffer<R>,
        role: Role,
        limit: usize,
        writer: Arc<Writer<W>>,
    ) -> Self {
        Self {
            read_buffer,
            role,
            limit,
            message: None,
            frame: None,
            pending: None,
            ended: false,
            writer,
        }
    }

    /// Searches the waiting bytes for a message, and answers pings.
    fn find(&mut self) -> Found {
        self.find_message().unwrap_or_else(Found::Broken)
    }

    fn find_message(&mut self) -> Result<Found, Violation> {
        loop {
            if let Some(message) = self.take_payload()? {
                return Ok(message);
            }
            if self.frame.is_some() {
                return Ok(Found::Nothing);
            }
            let Some((header, size)) = Header::read(self.read_buffer.buffered())? else {
                return Ok(Found::Nothing);
            };
            self.writer.frames_received.fetch_add(1, Ordering::Relaxed);
            if header.mask.is_some() != (self.role == Role::Server) {
                return Err(Violation::protocol(
                    "mask: a client must mask frames, a server must not",
                ));
            }
            match header.opcode {
                Opcode::Text | Opcode::Continuation => {
                    self.read_buffer.consume(size);
                    self.begin_frame(header)?;
                }
                Opcode::Binary => {
                    return Err(Violation {
                        status: 1003,
                        reason: "binary messages are not supported",
                    });
                }
                Opcode::Close | Opcode::Ping | Opcode::Pong => {
                    // A control frame is short, so the receiver waits for the whole frame.
                    let Some(payload) = self.control_payload(header, size) else {
                        return Ok(Found::Nothing);
                    };
                    match header.opcode {
                        Opcode::Close => return Ok(Found::Close),
                        Opcode::Ping => self.writer.pong(payload),
                        _ => {}
                    }
                }
            }
        }
    }

    /// Removes a control frame and returns its payload, if it is complete.
    fn control_payload(&mut self, header: Header, size: usize) -> Option<Vec<u8>> {
        let length = usize::try_from(header.length).ok()?;
        let mut payload = self
            .read_buffer
            .buffered()
            .get(size..size + length)?
            .to_vec();
        self.read_buffer.consume(size + length);
        if let Some(mask) = header.mask {
            apply_mask(&mut payload, mask, 0);
        }
        Some(payload)
    }

    /// Starts a data frame: the first of a message, or a further one.
    fn begin_frame(&mut self, header: Header) -> Result<(), Violation> {
        if header.opcode == Opcode::Text {
            if self.message.is_some() {
                return Err(Violation::protocol(
                    "new message before the end of the previous one",
                ));
            }
            self.message = Some(Partial {
                text: Vec::new(),
                too_large: false,
                fragments: 0,
            });
        }
        let Some(message) = &mut self.message else {
            return Err(Violation::protocol("continuation frame without a message"));
        };
        message.fragments += 1;
        if message.fragments > FRAGMENTS {
            return Err(Violation {
                status: 1008,
                reason: "more than 4096 frames in one message",
            });
        }
        let length = (message.text.len() as u64).saturating_add(header.length);
        if length > self.limit as u64 && !message.too_large {
            message.too_large = true;
            message.text.truncate(HEAD_BYTES);
            message.text.shrink_to_fit();
        }
        if !message.too_large {
            let room = header.length.min(MAX_PREALLOCATION);
            message.text.reserve(usize::try_from(room).unwrap_or(0));
        }
        self.frame = Some(Frame {
            last: header.last,
            mask: header.mask,
            done: 0,
            missing: header.length,
        });
        Ok(())
    }

    /// Moves the arrived bytes of the current frame into its message.
    /// Returns the message if it is complete.
    fn take_payload(&mut self) -> Result<Option<Found>, Violation> {
        let (Some(frame), Some(message)) = (&mut self.frame, &mut self.message) else {
            return Ok(None);
        };
        let buffered = self.read_buffer.buffered();
        let here = usize::try_from(frame.missing)
            .map_or(buffered.len(), |missing| missing.min(buffered.len()));
        let start = message.text.len();
        if message.too_large {
            extend_head(&mut message.text, &buffered[..here]);
        } else {
            buffer_pool::reserve(&mut message.text, here);
            message.text.extend_from_slice(&buffered[..here]);
        }
        if let Some(mask) = frame.mask {
            apply_mask(&mut message.text[start..], mask, frame.done);
        }
        self.read_buffer.consume(here);
        // Only the position within the mask matters, so a frame longer than memory cannot overflow.
        frame.done = (frame.done + here) % 4;
        frame.missing -= here as u64;
        if frame.missing > 0 {
            return Ok(None);
        }
        let last = frame.last;
        self.frame = None;
        if !last {
            return Ok(None);
        }
        match self.message.take() {
            Some(message) if message.too_large => Ok(Some(Found::TooLarge(message.text))),
            Some(message) => match String::from_utf8(message.text) {
                Ok(text) => Ok(Some(Found::Message(text))),
                Err(_) => Err(Violation {
                    status: 1007,
                    reason: "text message is not UTF-8",
                }),
            },
            None => Ok(None),
        }
    }
}

#[async_trait]
impl<R, W> ReceiveHalf for WebSocketReceive<R, W>
where
    R: AsyncRead + Unpin + Send,
    W: AsyncWrite + Unpin + Send + 'static,
{
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError> {
        loop {
            if self.ended {
                return Ok(None);
            }
            let found = match self.pending.take() {
                Some(found) => found,
                None => self.find(),
            };
            match found {
                Found::Message(message) => {
                    self.read_buffer.message_ended();
                    return Ok(Some(message));
                }
                Found::TooLarge(head) => {
                    self.read_buffer.message_ended();
                    return Err(ConnectionError::TooLarge {
                        head: text_of(head),
                        limit: self.limit,
                    });
                }
                Found::Close => self.ended = true,
                Found::Broken(violation) => {
                    self.ended = true;
                    self.writer.refuse(violation);
                    return Err(ConnectionError::Framing(violation.reason));
                }
                Found::Nothing => {
                    let is_partial =
                        self.message.is_some() || !self.read_buffer.buffered().is_empty();
                    if !is_partial {
                        self.read_buffer.message_ended();
                    }
                    if !self.read_buffer.fill(is_partial).await? {
                        // An end without a close frame means that the peer vanished.
                        self.ended = true;
                        return Err(ConnectionError::Closed);
                    }
                }
            }
        }
    }

    fn receive_ready(&mut self) -> Option<String> {
        if self.ended || self.pending.is_some() {
            return None;
        }
        match self.find() {
            Found::Message(message) => Some(message),
            Found::Nothing => None,
            event => {
                self.pending = Some(event);
                None
            }
        }
    }

    fn set_message_limit(&mut self, bytes: usize) {
        self.limit = bytes;
    }

    fn peer_identified(&mut self) -> bool {
        self.read_buffer.confirm_permit()
    }
}
