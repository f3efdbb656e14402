//! Receiving half: gives the decoder one frame at a time, and skips messages beyond the limit.

use std::{
    io::{Cursor, ErrorKind},
    sync::Arc,
};

use async_trait::async_trait;
use box_rpc::{ConnectionError, ReceiveHalf};
use tokio::io::{AsyncRead, AsyncWrite};
use tungstenite::{
    Bytes, Error, Message, Utf8Bytes,
    protocol::{
        Role, WebSocketContext,
        frame::{
            FrameHeader,
            coding::{CloseCode, Data, OpCode},
        },
    },
};

use super::{
    decoder::{self, Frame, FrameSource, Violation},
    sender::Writer,
};
use crate::bytes::{ReadBuffer, text_of};

/// Maximum number of frames of one message.
const FRAGMENTS: usize = 4096;

/// Maximum payload of a control frame.
const CONTROL_BYTES: u64 = 125;

/// Minimum size of a message that takes over the decoder's memory.
const MIN_WITHOUT_COPY: usize = 128 * 1024;

/// Receiving half.
///
/// It reads each header before the decoder does. It therefore knows where a frame ends, and gives the decoder no frame
/// that exceeds the limit. Between two frames the decoder holds nothing but an incomplete message.
#[derive(Debug)]
pub(super) struct WebSocketReceive<R, W> {
    read_buffer: ReadBuffer<R>,
    role: Role,
    limit: usize,
    /// Unmasks and joins frames, and checks them and the text. An idle connection has none.
    decoder: Option<WebSocketContext>,
    /// The incomplete message.
    message: Option<Partial>,
    /// The frame that is arriving.
    frame: Option<Frame>,
    /// Event that could not be returned where only a message is possible.
    pending: Option<Found>,
    /// Whether the peer has closed, or this end has stopped reading.
    ended: bool,
    writer: Arc<Writer<W>>,
}

/// An incomplete message.
#[derive(Debug, Default)]
struct Partial {
    /// Payload of its frames so far.
    bytes: u64,
    /// Number of frames so far.
    fragments: usize,
    /// Its beginning, if it has several frames or is too large.
    head: Vec<u8>,
    too_large: bool,
}

impl Partial {
    /// Returns where to keep the beginning, unless the frame is the whole message.
    fn head(&mut self, last: bool) -> Option<&mut Vec<u8>> {
        (self.fragments > 1 || !last).then_some(&mut self.head)
    }
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
            decoder: None,
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
            let found = match &self.frame {
                None => {
                    if !self.begin_frame()? {
                        return Ok(Found::Nothing);
                    }
                    continue;
                }
                Some(frame) if frame.skipped => self.skip(),
                Some(_) => self.decode()?,
            };
            if let Some(found) = found {
                return Ok(found);
            }
            if self.frame.is_some() {
                return Ok(Found::Nothing);
            }
        }
    }

    /// Reads the next header; `false` if it is incomplete.
    fn begin_frame(&mut self) -> Result<bool, Violation> {
        let mut cursor = Cursor::new(self.read_buffer.buffered());
        let Some((header, length)) = FrameHeader::parse(&mut cursor)? else {
            return Ok(false);
        };
        let header_bytes = cursor.position();
        let skipped = match header.opcode {
            OpCode::Data(Data::Binary) => {
                return Err(Violation {
                    status: CloseCode::Unsupported,
                    reason: "binary messages are not supported",
                });
            }
            OpCode::Data(data) => self.begin_data(data == Data::Continue, length)?,
            OpCode::Control(_) if length > CONTROL_BYTES => {
                return Err(Violation::protocol("control frame exceeds 125 bytes"));
            }
            OpCode::Control(_) => false,
        };
        self.frame = Some(Frame {
            header,
            header_bytes: usize::try_from(header_bytes).unwrap_or_default(),
            missing: length.saturating_add(header_bytes),
            mask_at: 0,
            skipped,
        });
        Ok(true)
    }

    /// Counts a data frame; returns whether to skip it, because its message is too large.
    fn begin_data(&mut self, is_continuation: bool, length: u64) -> Result<bool, Violation> {
        let message = self.message.get_or_insert_default();
        match (is_continuation, message.fragments) {
            (true, 0) => {
                return Err(Violation::protocol("continuation frame without a message"));
            }
            (false, 1..) => {
                return Err(Violation::protocol(
                    "new message before the end of the previous one",
                ));
            }
            (_, FRAGMENTS..) => {
                return Err(Violation {
                    status: CloseCode::Policy,
                    reason: "more than 4096 frames in one message",
                });
            }
            _ => message.fragments += 1,
        }
        message.bytes = message.bytes.saturating_add(length);
        if message.bytes > self.limit as u64 && !message.too_large {
            message.too_large = true;
            // Frees the frames of this message that the decoder has.
            self.decoder = None;
        }
        Ok(message.too_large)
    }

    /// Drops the arrived bytes of a frame. Returns the beginning of its message at the end.
    fn skip(&mut self) -> Option<Found> {
        let (frame, message) = (self.frame.as_mut()?, self.message.as_mut()?);
        let bytes = self.read_buffer.buffered();
        let count = frame.length_in(bytes);
        frame.take(&bytes[..count], Some(&mut message.head));
        self.read_buffer.consume(count);
        let finished = self.frame.take_if(|frame| frame.missing == 0)?;
        let message = self.message.take_if(|_| finished.header.is_final)?;
        Some(Found::TooLarge(message.head))
    }

    /// Decodes the arrived bytes of a frame.
    fn decode(&mut self) -> Result<Option<Found>, Violation> {
        let Some(frame) = &mut self.frame else {
            return Ok(None);
        };
        let message = self.message.as_mut().filter(|_| !frame.is_control());
        let head = message.and_then(|message| message.head(frame.header.is_final));
        let decoder = self.decoder.get_or_insert_with(|| decoder::new(self.role));
        let outcome = decoder.read(&mut FrameSource {
            read_buffer: &mut self.read_buffer,
            frame,
            head,
        });
        if frame.missing == 0 {
            self.frame = None;
        }
        match outcome {
            Ok(Message::Text(text)) => {
                self.message = None;
                return Ok(Some(Found::Message(self.text(text))));
            }
            Ok(Message::Close(_)) => return Ok(Some(Found::Close)),
            Ok(Message::Ping(payload)) => self.writer.pong(Bytes::copy_from_slice(&payload)),
            Ok(_) => {}
            Err(Error::Io(error)) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        Ok(None)
    }

    /// Converts a message. A large one takes over the decoder's memory.
    fn text(&mut self, text: Utf8Bytes) -> String {
        if text.len() < MIN_WITHOUT_COPY {
            return text.as_str().to_owned();
        }
        self.decoder = None;
        text_of(Bytes::from(text).into())
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
                    let is_partial = self.message.is_some()
                        || self.frame.is_some()
                        || !self.read_buffer.buffered().is_empty();
                    if !is_partial {
                        self.read_buffer.message_ended();
                        self.decoder = None;
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::FutureExt as _;
    use tungstenite::protocol::frame;

    use super::*;
    use crate::{bytes::WriteBuffer, connection_limit::ConnectionPermit};

    #[tokio::test]
    async fn an_idle_connection_holds_no_decoder() {
        let (near, mut far) = tokio::net::UnixStream::pair().unwrap();
        let (read, write) = near.into_split();
        let (time, permit) = (Duration::from_mins(1), ConnectionPermit::default());
        let write_buffer = WriteBuffer::new(write, time, permit.clone());
        let writer = Arc::new(Writer::new(write_buffer, Role::Client));
        let read_buffer = ReadBuffer::new(read, time, permit);
        let mut receive = WebSocketReceive::new(read_buffer, Role::Client, usize::MAX, writer);
        for length in [10, MIN_WITHOUT_COPY - 1, 3 * MIN_WITHOUT_COPY] {
            let text = "x".repeat(length);
            let mut bytes = Vec::new();
            let message = frame::Frame::message(text.clone(), OpCode::Data(Data::Text), true);
            message.format(&mut bytes).unwrap();
            let write = tokio::io::AsyncWriteExt::write_all(&mut far, &bytes);
            let (received, written) = tokio::join!(receive.receive(), write);
            written.unwrap();
            let received = received.unwrap().unwrap();
            assert_eq!(received, text);
            assert!(received.capacity() <= length + 4096);
            assert!(receive.receive().now_or_never().is_none());
            assert!(receive.decoder.is_none());
        }
    }
}
