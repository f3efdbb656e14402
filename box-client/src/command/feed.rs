//! The stream of one call, whichever call it is.

use std::fmt;

use box_protocol::CommandInfo;
use box_protocol::actions::{
    AttachOptions, CommandAttach, CommandAttachParams, CommandChunk, CommandStart,
    CommandStartParams, FileWatch, FileWatchParams, ReadEnd, ReadFrom, ShellRun, ShellRunParams,
};
use box_protocol::{CommandId, SessionId};
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
    /// The last word, too.
    Failed(CallError),
}

pub(crate) struct Feed(BoxStream<'static, Told>);

impl fmt::Debug for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Feed")
    }
}

impl Feed {
    pub(crate) async fn begin(peer: &Peer, key: &Key, begin: &Begin) -> Result<Self, CallError> {
        Ok(match begin {
            Begin::Start(params) => Self::of(peer.stream::<CommandStart>(params).await?, |end| {
                (end.info, end.read)
            }),
            Begin::Watch(params) => Self::of(peer.stream::<FileWatch>(params).await?, |end| {
                (end.info, end.read)
            }),
            Begin::Run(params) => {
                let started = peer.call::<ShellRun>(params).await?;
                let rest = Self::attach(peer, key, Offsets::default()).await?;
                let started = Told::Chunk(CommandChunk::Started(Box::new(started.info)));
                Self(stream::iter([started]).chain(rest.0).boxed())
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
        Ok(Self::of(chunks, |end| (end.info, Some(end.read))))
    }

    fn of<A: Action<Chunk = CommandChunk>>(
        chunks: Chunks<A>,
        end: fn(A::Result) -> (CommandInfo, Option<ReadEnd>),
    ) -> Self {
        let told = stream::unfold(Some(chunks), move |chunks| async move {
            let mut chunks = chunks?;
            let last = match chunks.next().await {
                Some(Ok(chunk)) => return Some((Told::Chunk(chunk), Some(chunks))),
                Some(Err(error)) => Told::Failed(error),
                None => match chunks.finish().await {
                    Ok(result) => {
                        let (info, read) = end(result);
                        Told::End(Box::new(info), read)
                    }
                    Err(error) => Told::Failed(error),
                },
            };
            Some((last, None))
        });
        Self(told.fuse().boxed())
    }

    /// Nothing after an end or a failure.
    pub(crate) async fn next(&mut self) -> Option<Told> {
        self.0.next().await
    }
}
