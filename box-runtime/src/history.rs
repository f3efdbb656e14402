//! Commands of a box before its last stop: their records and their output, on disk.
//!
//! A stopped box has no agent. The runtime therefore asks the agent for all ended commands before
//! it ends, and answers later calls about them itself, also after the box has started again.
//!
//! # Layout
//! ```text
//! commands.json   the records, replaced as a whole
//! NUMBER.json     the output of one command: a chunk of the agent in each line
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, BufWriter, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{
    AgentChunk, AgentList, AgentListParams, AgentOutput, AgentOutputParams, CommandChunk,
    CommandKey, Displayed, ListCursor, ReadBegin, ReadEnd, ReadFrom, ReadWhy, StreamName, Until,
    View,
};
use box_protocol::{BoxError, BoxId, CommandId, CommandInfo, PerStream, Role, TextDecoder};
use box_rpc::Peer;
use futures::StreamExt as _;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::box_actor::agents_error;
use crate::output::{Converted, OutputView};

/// Most commands that the history of a box keeps.
const MAX_COMMANDS: usize = 1000;

/// Bytes of output that one stop keeps. Beyond, the output of the oldest commands is dropped.
const OUTPUT_BYTES: usize = 16 << 20;

/// Bytes of displayed values that a history keeps. Beyond, those of the oldest commands are dropped.
const SHOWN_BYTES: usize = 16 << 20;

/// Name of the records, and of records that are being written.
const RECORDS: &str = "commands.json";
const UNFINISHED: &str = "commands.new";

/// The commands of a box before its last stop. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct History(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    directory: PathBuf,
    commands: Mutex<Vec<EndedCommand>>,
}

/// A command that has ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct EndedCommand {
    info: CommandInfo,
    #[serde(default)]
    shown: Vec<Displayed>,
    /// Number of the file with the output, if it was kept.
    #[serde(default)]
    output: Option<u64>,
}

/// A command with its output, as its agent sent them.
pub(crate) struct Ended {
    info: CommandInfo,
    shown: Vec<Displayed>,
    chunks: Vec<AgentChunk>,
}

impl History {
    /// The history in this directory, without commands.
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self(Arc::new(Inner {
            directory,
            commands: Mutex::default(),
        }))
    }

    /// Reads a history. Without records it is empty. Blocks.
    pub(crate) fn load(directory: PathBuf) -> Self {
        let history = Self::new(directory);
        let read = fs::read(history.0.directory.join(RECORDS));
        match read.and_then(|text| Ok(serde_json::from_slice::<Vec<EndedCommand>>(&text)?)) {
            Ok(commands) => *history.commands() = commands,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(kind = %error.kind(), "cannot read the commands of a stopped box");
            }
        }
        history
    }

    /// Returns the name of the directory, which the record of its box has.
    pub(crate) fn name(&self) -> Option<String> {
        Some(self.0.directory.file_name()?.to_str()?.to_owned())
    }

    /// Only assignments run under this lock.
    fn commands(&self) -> MutexGuard<'_, Vec<EndedCommand>> {
        self.0
            .commands
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds a command. The agent did not know the id that callers use for the box.
    fn find(&self, key: &CommandKey) -> Option<EndedCommand> {
        let commands = self.commands();
        let mut all = commands.iter();
        let mut found = all
            .find(|kept| kept.info.command_id == key.command_id)?
            .clone();
        found.info.box_id = key.box_id.clone();
        Some(found)
    }

    /// Returns the record of a command.
    pub(crate) fn get(&self, key: &CommandKey) -> Option<CommandInfo> {
        let commands = self.commands();
        let mut all = commands.iter();
        let found = all.find(|kept| kept.info.command_id == key.command_id)?;
        Some(CommandInfo {
            box_id: key.box_id.clone(),
            ..found.info.clone()
        })
    }

    /// Returns the records of all commands of this box, oldest first.
    pub(crate) fn list(&self, box_id: &BoxId) -> Vec<CommandInfo> {
        let commands = self.commands();
        let of_box = |kept: &EndedCommand| CommandInfo {
            box_id: box_id.clone(),
            ..kept.info.clone()
        };
        commands.iter().map(of_box).collect()
    }

    /// Forgets a command.
    pub(crate) fn forget(&self, id: &CommandId) {
        let mut commands = self.commands();
        commands.retain(|kept| kept.info.command_id != *id);
    }

    /// Adds commands, and replaces those with the same ids. Blocks.
    pub(crate) fn add(&self, ended: Vec<Ended>) -> io::Result<()> {
        let mut builder = DirBuilder::new();
        builder
            .recursive(true)
            .mode(0o700)
            .create(&self.0.directory)?;
        let mut commands = self.commands().clone();
        let mut number = commands.iter().filter_map(|kept| kept.output).max();
        for Ended {
            info,
            shown,
            chunks,
        } in ended
        {
            let mut output = None;
            if !chunks.is_empty() {
                let next = number.map_or(0, |number| number + 1);
                write_chunks(&self.output(next), &chunks)?;
                (number, output) = (Some(next), Some(next));
            }
            commands.retain(|kept| kept.info.command_id != info.command_id);
            commands.push(EndedCommand {
                info,
                shown,
                output,
            });
        }
        commands.sort_by(|a, b| ListCursor::from(&a.info).cmp(&ListCursor::from(&b.info)));
        let extra = commands.len().saturating_sub(MAX_COMMANDS);
        commands.drain(..extra);
        let mut room = SHOWN_BYTES;
        for kept in commands.iter_mut().rev() {
            limit_shown(&mut kept.shown, &mut room);
        }
        self.write(&commands)?;
        *self.commands() = commands;
        self.sweep();
        Ok(())
    }

    fn write(&self, commands: &[EndedCommand]) -> io::Result<()> {
        let unfinished = self.0.directory.join(UNFINISHED);
        let mut file = create(&unfinished)?;
        file.write_all(&serde_json::to_vec(commands)?)?;
        file.sync_all()?;
        fs::rename(&unfinished, self.0.directory.join(RECORDS))
    }

    /// Removes the output of commands that the history does not have.
    fn sweep(&self) {
        let kept: Vec<_> = self
            .commands()
            .iter()
            .filter_map(|kept| kept.output)
            .collect();
        for entry in fs::read_dir(&self.0.directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name();
            let number = name.to_str().and_then(|name| name.strip_suffix(".json"));
            if let Some(Ok(number)) = number.map(str::parse::<u64>)
                && !kept.contains(&number)
            {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn output(&self, number: u64) -> PathBuf {
        self.0.directory.join(format!("{number}.json"))
    }

    /// Removes the history from the disk. Blocks.
    pub(crate) fn remove(&self) {
        let _ = fs::remove_dir_all(&self.0.directory);
    }

    /// Sends the output of a command to a reader.
    pub(crate) async fn read(
        &self,
        key: &CommandKey,
        (view, from, bytes): (View, ReadFrom, Option<u64>),
        to: &mpsc::Sender<CommandChunk>,
    ) -> Result<Option<(CommandInfo, ReadEnd)>, BoxError> {
        let Some(kept) = self.find(key) else {
            return Ok(None);
        };
        let mut output = OutputView::new(view, from, bytes, None);
        if view == View::None {
            return Ok(Some((kept.info, output.end(ReadWhy::Exit))));
        }
        let chunks = self.chunks(&kept).await?;
        for chunk in chunks {
            let converted = output.convert(chunk).map_err(BoxError::unavailable)?;
            let (chunks, enough) = match converted {
                Converted::Started(_) => continue,
                Converted::Output(chunks) => (chunks, false),
                Converted::Enough(chunks) => (chunks, true),
            };
            send(to, chunks).await?;
            if enough {
                return Ok(Some((kept.info, output.end(ReadWhy::Bytes))));
            }
        }
        send(to, output.finish()).await?;
        send(to, kept.shown.into_iter().map(CommandChunk::Display)).await?;
        Ok(Some((kept.info, output.end(ReadWhy::Exit))))
    }

    /// Returns the output of a command, which begins with its limits.
    async fn chunks(&self, kept: &EndedCommand) -> Result<Vec<AgentChunk>, BoxError> {
        let size = kept.info.size;
        let Some(path) = kept.output.map(|number| self.output(number)) else {
            // Everything is dropped.
            let begin = ReadBegin {
                raw: size,
                text: size,
                raw_end: size,
                text_end: size,
                ..ReadBegin::default()
            };
            return Ok(vec![AgentChunk::Begin(begin)]);
        };
        let reading = tokio::task::spawn_blocking(move || read_chunks(&path)).await;
        let chunks = reading.map_err(|_| BoxError::internal("history task failed"))?;
        let mut chunks = chunks.map_err(|error| {
            BoxError::internal(format!("the output cannot be read: {}", error.kind()))
        })?;
        if !matches!(chunks.first(), Some(AgentChunk::Begin(_))) {
            let begin = ReadBegin {
                raw_end: size,
                text_end: text_size(&chunks),
                ..ReadBegin::default()
            };
            chunks.insert(0, AgentChunk::Begin(begin));
        }
        Ok(chunks)
    }
}

/// Asks an agent for its ended commands and their output.
pub(crate) async fn ended_commands(agent: &Peer) -> Result<Vec<Ended>, BoxError> {
    let mut infos = Vec::new();
    let mut page = AgentListParams::default();
    loop {
        let listed = agent.call::<AgentList>(&page).await.map_err(agents_error)?;
        let last = listed.items.last().map(ListCursor::from);
        infos.extend(listed.items);
        if !listed.more || infos.len() >= MAX_COMMANDS || last <= page.after {
            break;
        }
        page.after = last;
    }
    let (mut room, mut shown_room) = (OUTPUT_BYTES, SHOWN_BYTES);
    let mut ended = Vec::with_capacity(infos.len());
    // The newest output is the most useful.
    for info in infos.into_iter().rev() {
        if info.exit.is_none() || info.role == Role::Exec {
            continue;
        }
        let size = usize::try_from(info.size.sum()).unwrap_or(usize::MAX);
        let read = if size <= room {
            output_of(agent, &info.command_id, room).await?
        } else {
            None
        };
        let (chunks, mut shown) = read.unwrap_or_default();
        limit_shown(&mut shown, &mut shown_room);
        room = room.saturating_sub(size);
        ended.push(Ended {
            info,
            shown,
            chunks,
        });
    }
    ended.reverse();
    Ok(ended)
}

/// Replaces displayed values that do not fit.
fn limit_shown(shown: &mut Vec<Displayed>, room: &mut usize) {
    let bytes = shown.iter().map(Displayed::bytes).sum();
    if let Some(left) = room.checked_sub(bytes) {
        *room = left;
        return;
    }
    let note = "[displayed values no longer available]".to_owned();
    *shown = vec![Displayed {
        data: [("text/plain".to_owned(), note)].into(),
        main: false,
    }];
}

/// Reads the output of an ended command, unless it is longer than `room`.
async fn output_of(
    agent: &Peer,
    id: &CommandId,
    mut room: usize,
) -> Result<Option<(Vec<AgentChunk>, Vec<Displayed>)>, BoxError> {
    let params = AgentOutputParams {
        command_id: id.clone(),
        from: ReadFrom::default(),
        view: View::Bytes,
        until: Until {
            ms: Some(0),
            ..Until::default()
        },
        exclusive: None,
        pty: None,
        slot: None,
    };
    let stream = agent.stream::<AgentOutput>(&params).await;
    let mut stream = stream.map_err(agents_error)?;
    let mut chunks = Vec::new();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(agents_error)?;
        if let AgentChunk::Bytes(piece) = &chunk {
            let Some(left) = room.checked_sub(piece.data.len()) else {
                return Ok(None);
            };
            room = left;
        }
        chunks.push(chunk);
    }
    let end = stream.finish().await.map_err(agents_error)?;
    Ok(Some((chunks, end.shown)))
}

async fn send(
    to: &mpsc::Sender<CommandChunk>,
    chunks: impl IntoIterator<Item = CommandChunk>,
) -> Result<(), BoxError> {
    for chunk in chunks {
        let left = |_| BoxError::cancelled("the client has disconnected");
        to.send(chunk).await.map_err(left)?;
    }
    Ok(())
}

/// Counts the bytes of the text of each stream.
fn text_size(chunks: &[AgentChunk]) -> PerStream {
    let (mut size, mut decoders) = (
        PerStream::default(),
        [TextDecoder::default(), TextDecoder::default()],
    );
    for chunk in chunks {
        if let AgentChunk::Bytes(piece) = chunk {
            let decoder = match piece.stream {
                StreamName::Stdout => &mut decoders[0],
                StreamName::Stderr => &mut decoders[1],
            };
            let text = decoder.decode_owned(piece.data.0.to_vec());
            *size.of_mut(piece.stream) += text.len() as u64;
        }
    }
    size
}

fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path)
}

fn write_chunks(path: &Path, chunks: &[AgentChunk]) -> io::Result<()> {
    let mut file = BufWriter::new(create(path)?);
    for chunk in chunks {
        serde_json::to_writer(&mut file, chunk)?;
        file.write_all(b"\n")?;
    }
    file.into_inner()?.sync_all()
}

fn read_chunks(path: &Path) -> io::Result<Vec<AgentChunk>> {
    let lines = BufReader::new(File::open(path)?).lines();
    lines
        .map(|line| Ok(serde_json::from_str(&line?)?))
        .collect()
}
