//! The chunk stream of one call that starts or attaches to a command.

use std::fmt;

use box_protocol::CommandInfo;
use box_protocol::actions::{
    AttachOptions, CommandAttach, CommandAttachParams, CommandChunk, CommandStart,
    CommandStartParams, FileWatch, FileWatchParams, ReadEnd, ReadFrom, ShellRun, ShellRunParams,
};
use box_protocol::{Adjusted, BoxId, CommandId};
use box_rpc::{Action, CallError, Chunks, Peer};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};

use crate::chunk::Offsets;

/// The request that starts a command.
///
/// A repeated request with the same id attaches to the started command.
#[derive(Debug, Clone)]
pub(crate) enum Begin {
    Start(Box<CommandStartParams>),
    Watch(Box<FileWatchParams>),
    /// A run in a shell. The client starts it and then attaches, because a run with an open call
    /// would be killed with the call.
    Run(Box<ShellRunParams>),
}

/// Identifies a command and how the client reads it.
#[derive(Debug, Clone)]
pub(crate) struct Key {
    pub(crate) box_id: BoxId,
    pub(crate) command_id: CommandId,
    pub(crate) attach: AttachOptions,
}

/// An event of one call.
#[derive(Debug)]
pub(crate) enum Event {
    Chunk(CommandChunk),
    /// The result of the call; the last event.
    End(Box<CommandInfo>, Option<ReadEnd>),
    /// Fields of the request that the profile changed. Precedes `End`.
    Adjusted(Vec<Adjusted>),
    /// The error of the call; the last event.
    Failed(CallError),
}

/// The state of the stream.
enum State<A: Action> {
    Read(Chunks<A>),
    Emit(Event),
    Done,
}

/// The events of one call.
pub(crate) struct ChunkStream(BoxStream<'static, Event>);

impl fmt::Debug for ChunkStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChunkStream")
    }
}

/// The members of a result: the command, how reading ended, and the adjusted fields.
type End = (CommandInfo, Option<ReadEnd>, Vec<Adjusted>);

impl ChunkStream {
    pub(crate) async fn begin(peer: &Peer, key: &Key, begin: &Begin) -> Result<Self, CallError> {
        Ok(match begin {
            Begin::Start(params) => Self::of(peer.stream::<CommandStart>(params).await?, |end| {
                (end.info, end.read, end.adjusted)
            }),
            Begin::Watch(params) => Self::of(peer.stream::<FileWatch>(params).await?, |end| {
                (end.info, end.read, end.adjusted)
            }),
            Begin::Run(params) => {
                let started = peer.call::<ShellRun>(params).await?;
                let rest = Self::attach(peer, key, Offsets::default()).await?;
                let adjusted = Event::Adjusted(started.adjusted);
                let started = Event::Chunk(CommandChunk::Started(Box::new(started.info)));
                Self(stream::iter([started, adjusted]).chain(rest.0).boxed())
            }
        })
    }

    pub(crate) async fn attach(peer: &Peer, key: &Key, from: Offsets) -> Result<Self, CallError> {
        let params = CommandAttachParams {
            from: ReadFrom::Offsets(from),
            view: key.attach.view,
            until: key.attach.until,
            ..CommandAttachParams::new(key.box_id.clone(), key.command_id.clone())
        };
        let chunks = peer.stream::<CommandAttach>(&params).await?;
        Ok(Self::of(chunks, |end| {
            (end.info, Some(end.read), Vec::new())
        }))
    }

    fn of<A: Action<Chunk = CommandChunk>>(chunks: Chunks<A>, end: fn(A::Result) -> End) -> Self {
        let events = stream::unfold(State::Read(chunks), move |state| async move {
            let mut chunks = match state {
                State::Read(chunks) => chunks,
                State::Emit(last) => return Some((last, State::Done)),
                State::Done => return None,
            };
            let last = match chunks.next().await {
                Some(Ok(chunk)) => return Some((Event::Chunk(chunk), State::Read(chunks))),
                Some(Err(error)) => Event::Failed(error),
                None => match chunks.finish().await {
                    Ok(result) => {
                        let (info, read, adjusted) = end(result);
                        let last = State::Emit(Event::End(Box::new(info), read));
                        return Some((Event::Adjusted(adjusted), last));
                    }
                    Err(error) => Event::Failed(error),
                },
            };
            Some((last, State::Done))
        });
        Self(events.fuse().boxed())
    }

    /// Returns the next event; `None` after `End` or `Failed`.
    pub(crate) async fn next(&mut self) -> Option<Event> {
        self.0.next().await
    }
}
