//! The stream of one call, whichever call it is.

use std::fmt;

use box_protocol::CommandInfo;
use box_protocol::actions::{
    AttachOptions, CommandAttach, CommandAttachParams, CommandChunk, CommandStart,
    CommandStartParams, FileWatch, FileWatchParams, ReadEnd, ReadFrom, ShellRun, ShellRunParams,
};
use box_protocol::{Adjusted, CommandId, SessionId};
use box_rpc::{Action, CallError, Chunks, Peer};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};

use crate::chunk::Offsets;

/// How a command begins. Asking again with the same id finds it, if it has begun already.
#[derive(Debug, Clone)]
pub(crate) enum Begin {
    Start(Box<CommandStartParams>),
    Watch(Box<FileWatchParams>),
    /// A run of a shell, which would be killed with the call if that stayed open: it is started, then read.
    Run(Box<ShellRunParams>),
}

/// Which command, and how it is read.
#[derive(Debug, Clone)]
pub(crate) struct Key {
    pub(crate) session_id: SessionId,
    pub(crate) command_id: CommandId,
    pub(crate) attach: AttachOptions,
}

/// What one call tells.
#[derive(Debug)]
pub(crate) enum Told {
    Chunk(CommandChunk),
    /// The last word.
    End(Box<CommandInfo>, Option<ReadEnd>),
    /// What the server's profile changed of the request. Before the last word.
    Adjusted(Vec<Adjusted>),
    /// The last word, too.
    Failed(CallError),
}

/// What follows of a call.
enum Next<A: Action> {
    Read(Chunks<A>),
    Tell(Told),
    Nothing,
}

pub(crate) struct Feed(BoxStream<'static, Told>);

impl fmt::Debug for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Feed")
    }
}

/// What the result of a stream says: the command, how far it was read, and what policy has changed.
type End = (CommandInfo, Option<ReadEnd>, Vec<Adjusted>);

impl Feed {
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
                let adjusted = Told::Adjusted(started.adjusted);
                let started = Told::Chunk(CommandChunk::Started(Box::new(started.info)));
                Self(stream::iter([started, adjusted]).chain(rest.0).boxed())
            }
        })
    }

    pub(crate) async fn attach(peer: &Peer, key: &Key, from: Offsets) -> Result<Self, CallError> {
        let params = CommandAttachParams {
            session_id: key.session_id.clone(),
            command_id: key.command_id.clone(),
            from: ReadFrom::Offsets(from),
            view: key.attach.view,
            until: key.attach.until,
            exclusive: None,
            pty: None,
        };
        let chunks = peer.stream::<CommandAttach>(&params).await?;
        Ok(Self::of(chunks, |end| {
            (end.info, Some(end.read), Vec::new())
        }))
    }

    fn of<A: Action<Chunk = CommandChunk>>(chunks: Chunks<A>, end: fn(A::Result) -> End) -> Self {
        let told = stream::unfold(Next::Read(chunks), move |next| async move {
            let mut chunks = match next {
                Next::Read(chunks) => chunks,
                Next::Tell(last) => return Some((last, Next::Nothing)),
                Next::Nothing => return None,
            };
            let last = match chunks.next().await {
                Some(Ok(chunk)) => return Some((Told::Chunk(chunk), Next::Read(chunks))),
                Some(Err(error)) => Told::Failed(error),
                None => match chunks.finish().await {
                    Ok(result) => {
                        let (info, read, adjusted) = end(result);
                        let last = Next::Tell(Told::End(Box::new(info), read));
                        return Some((Told::Adjusted(adjusted), last));
                    }
                    Err(error) => Told::Failed(error),
                },
            };
            Some((last, Next::Nothing))
        });
        Self(told.fuse().boxed())
    }

    /// Nothing after an end or a failure.
    pub(crate) async fn next(&mut self) -> Option<Told> {
        self.0.next().await
    }
}
