//! The input of a command that a client sends over a websocket.
//!
//! A command may not read its input for as long as it runs. A task writes it, so the connection stays free for output and
//! for messages that must not wait, such as a signal.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use box_protocol::actions::{CommandInputParams, CommandKey};
use box_protocol::{BoxError, Code, MAX_CHUNK_BYTES};
use futures::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::context::Context;

/// How long a request waits until a command reads its input, in milliseconds.
///
/// The error after it says how much of the input is written, so a client can send the rest.
pub const READ_MS: u64 = 5000;

/// The input that may wait for its command, in bytes; one message may be longer.
pub const MAX_WAITING_BYTES: u32 = 4 * 1024 * 1024;

/// What a message counts beside its bytes, so that the number of messages has a limit: 4096.
const MESSAGE_BYTES: u32 = 1024;

/// How long a message waits for room: a command that reads makes some.
const ROOM_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the input of a client that has left is still written.
const LAST_INPUT: Duration = Duration::from_secs(5);

/// The number of failed writes that wait for the client.
const WAITING_FAILURES: usize = 8;

/// A message with input.
#[derive(Debug)]
pub enum Input {
    /// Bytes for stdin.
    Data(Bytes),
    /// The end of stdin.
    Close,
}

impl Input {
    /// Returns the room that it takes while it waits, in bytes.
    pub fn room(&self) -> u32 {
        let bytes = match self {
            Self::Data(data) => u32::try_from(data.len()).unwrap_or(u32::MAX),
            Self::Close => 0,
        };
        bytes.saturating_add(MESSAGE_BYTES)
    }
}

/// Writes the input of one client to one command, in order.
///
/// The input of a dropped writer is written for a moment more.
#[derive(Debug)]
pub struct InputWriter {
    queue: mpsc::UnboundedSender<Queued>,
    room: Arc<Semaphore>,
    /// Whether a message was refused. Later ones are refused as well: the input must have no gap.
    is_full: bool,
    task: AbortHandle,
}

type Queued = (Input, OwnedSemaphorePermit);

/// Writes one part of the input.
type Write = Box<dyn Fn(CommandInputParams) -> BoxFuture<'static, Result<(), BoxError>> + Send>;

impl InputWriter {
    /// Starts to write; the receiver gets the failed writes.
    pub fn new(context: Context, key: CommandKey) -> (Self, mpsc::Receiver<BoxError>) {
        Self::with(
            key,
            Box::new(move |params| {
                let context = context.clone();
                Box::pin(async move {
                    let runtime = context.runtime();
                    let written = runtime.input_command(&context.caller, params).await;
                    written.map(drop)
                })
            }),
        )
    }

    fn with(key: CommandKey, write: Write) -> (Self, mpsc::Receiver<BoxError>) {
        // `room` bounds it.
        let (queue, queued) = mpsc::unbounded_channel();
        let (failures, failed) = mpsc::channel(WAITING_FAILURES);
        let task = tokio::spawn(write_all(key, write, queued, failures));
        let writer = Self {
            queue,
            room: Arc::new(Semaphore::new(MAX_WAITING_BYTES as usize)),
            is_full: false,
            task: task.abort_handle(),
        };
        (writer, failed)
    }

    /// Queues input. Errors: the command does not read, so neither this message nor a later one is written.
    pub async fn write(&mut self, input: Input) -> Result<(), BoxError> {
        let bytes = input.room().min(MAX_WAITING_BYTES);
        if !self.is_full {
            let room = Arc::clone(&self.room).acquire_many_owned(bytes);
            if let Ok(Ok(room)) = timeout(ROOM_TIMEOUT, room).await {
                // The task ends with this writer.
                let _ = self.queue.send((input, room));
                return Ok(());
            }
            self.is_full = true;
        }
        let message = format!(
            "input: the command does not read its input, and the limit of {MAX_WAITING_BYTES} waiting bytes or {} messages \
             is reached; reconnect when it reads (this message and later ones are lost)",
            MAX_WAITING_BYTES / MESSAGE_BYTES
        );
        Err(BoxError::new(Code::Overloaded, message))
    }
}

impl Drop for InputWriter {
    fn drop(&mut self) {
        let task = self.task.clone();
        tokio::spawn(async move {
            sleep(LAST_INPUT).await;
            task.abort();
        });
    }
}

/// Writes queued input in pieces that fit into a message of the agent.
async fn write_all(
    key: CommandKey,
    write: Write,
    mut queued: mpsc::UnboundedReceiver<Queued>,
    failures: mpsc::Sender<BoxError>,
) {
    let params = CommandInputParams::new(key.box_id, key.command_id);
    while let Some((input, _room)) = queued.recv().await {
        let written = match input {
            Input::Close => {
                let close = CommandInputParams {
                    close: true,
                    ..params.clone()
                };
                write(close).await
            }
            Input::Data(mut data) => loop {
                let piece = data.split_to(data.len().min(MAX_CHUNK_BYTES));
                let piece = CommandInputParams {
                    data: Some(piece.into()),
                    ..params.clone()
                };
                let written = write(piece).await;
                if written.is_err() || data.is_empty() {
                    break written;
                }
            },
        };
        if let Err(error) = written {
            tracing::debug!(%error, "a command does not take input");
            // A protocol may ignore failures.
            let _ = failures.send(error).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use box_protocol::{BoxId, CommandId};

    use super::*;

    fn key() -> CommandKey {
        CommandKey {
            box_id: BoxId::new("a").unwrap(),
            command_id: CommandId::new("b").unwrap(),
        }
    }

    /// A writer to a command that never reads.
    fn unread() -> InputWriter {
        InputWriter::with(key(), Box::new(|_| Box::pin(std::future::pending()))).0
    }

    fn data(length: usize) -> Input {
        Input::Data(vec![b'x'; length].into())
    }

    #[tokio::test(start_paused = true)]
    async fn unread_input_has_a_limit_of_bytes_and_of_messages() {
        let mut writer = unread();
        for _ in 0..3 {
            writer.write(data(1024 * 1024)).await.unwrap();
        }
        let refused = writer.write(data(1024 * 1024)).await.unwrap_err();
        assert_eq!(refused.code(), Code::Overloaded);
        assert!(
            refused
                .message()
                .contains("4194304 waiting bytes or 4096 messages")
        );

        for empty in [|| Input::Close, || data(0)] {
            let mut writer = unread();
            for _ in 0..4096 {
                writer.write(empty()).await.unwrap();
            }
            assert!(writer.write(empty()).await.is_err());
        }
        // One message may be longer.
        let mut writer = unread();
        writer.write(data(5 * 1024 * 1024)).await.unwrap();
        assert!(writer.write(Input::Close).await.is_err());
    }

    /// What a command has read, and whether its input is closed.
    type Read = Arc<Mutex<(Vec<u8>, bool)>>;

    /// A writer to a command that reads a piece in this time, and what it has read.
    fn reading(time: Duration) -> (InputWriter, Read) {
        let read = Read::default();
        let reader = Arc::clone(&read);
        let write: Write = Box::new(move |params| {
            let reader = Arc::clone(&reader);
            Box::pin(async move {
                sleep(time).await;
                let mut read = reader.lock().unwrap();
                assert!(!read.1, "closed");
                read.0.extend_from_slice(&params.data.unwrap_or_default());
                read.1 = params.close;
                Ok(())
            })
        });
        (InputWriter::with(key(), write).0, read)
    }

    #[tokio::test(start_paused = true)]
    async fn a_command_that_reads_gets_all_input_in_order() {
        let (mut writer, read) = reading(Duration::from_millis(10));
        let mut sent = Vec::new();
        for number in 0..20 {
            let data = vec![number; 1024 * 1024];
            sent.extend_from_slice(&data);
            writer.write(Input::Data(data.into())).await.unwrap();
        }
        writer.write(Input::Close).await.unwrap();
        drop(writer);
        sleep(LAST_INPUT).await;
        let read = read.lock().unwrap();
        assert!(read.0 == sent && read.1);
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_refused_message_none_is_written() {
        let (mut writer, read) = reading(Duration::from_secs(1));
        let mut accepted = 0;
        while writer.write(data(1024 * 1024)).await.is_ok() {
            accepted += 1;
        }
        sleep(Duration::from_mins(10)).await;
        assert!(writer.write(Input::Close).await.is_err(), "there is room");
        let read = read.lock().unwrap();
        assert_eq!((read.0.len(), read.1), (accepted * 1024 * 1024, false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_write_is_reported() {
        let write: Write = Box::new(|_| Box::pin(async { Err(BoxError::conflict("ended")) }));
        let (mut writer, mut failures) = InputWriter::with(key(), write);
        writer.write(data(1)).await.unwrap();
        assert_eq!(failures.recv().await.unwrap().message(), "ended");
        // A protocol that ignores failures does not stop the writer.
        drop(failures);
        for _ in 0..2 * WAITING_FAILURES {
            writer.write(data(1)).await.unwrap();
        }
        sleep(Duration::from_secs(1)).await;
        assert_eq!(writer.room.available_permits(), MAX_WAITING_BYTES as usize);
    }
}
