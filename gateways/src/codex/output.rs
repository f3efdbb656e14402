//! The output of a process in numbered chunks, whose bytes are in the log of the command.

use std::collections::VecDeque;

use box_protocol::actions::{
    CommandAttachParams, CommandChunk, CommandKey, ReadFrom, StreamName, Until, View,
};
use box_protocol::{BoxError, CommandInfo, Exit};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::wire::encoded;
use crate::target::Target;

/// The number of chunks that can be read again.
const MAX_CHUNKS: usize = 50_000;

/// What is known of the output and the end of a process.
#[derive(Debug)]
pub(super) struct Output {
    chunks: VecDeque<Chunk>,
    next_seq: u64,
    pub(super) exit_code: Option<i32>,
    pub(super) closed: bool,
    failure: Option<String>,
}

/// A chunk of output.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk {
    pub(super) seq: u64,
    stream: &'static str,
    /// Its position in the log.
    pos: u64,
    bytes: usize,
}

impl Default for Output {
    fn default() -> Self {
        Self {
            chunks: VecDeque::new(),
            next_seq: 1,
            exit_code: None,
            closed: false,
            failure: None,
        }
    }
}

impl Output {
    fn take_seq(&mut self) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        seq
    }

    /// Adds a chunk, and returns the members of its notification.
    pub(super) fn push(&mut self, tty: bool, stream: StreamName, pos: u64, data: &[u8]) -> Value {
        let chunk = Chunk {
            seq: self.take_seq(),
            stream: match (tty, stream) {
                (true, _) => "pty",
                (false, StreamName::Stdout) => "stdout",
                (false, StreamName::Stderr) => "stderr",
            },
            pos,
            bytes: data.len(),
        };
        if self.chunks.len() == MAX_CHUNKS {
            self.chunks.pop_front();
        }
        self.chunks.push_back(chunk);
        chunk.with(data)
    }

    /// Sets the exit code, and returns the number of the event.
    pub(super) fn exit(&mut self, ended: Result<CommandInfo, BoxError>) -> (u64, i32) {
        let code = match ended {
            Ok(info) => info.exit.as_ref().and_then(Exit::shell_code),
            Err(error) => {
                self.failure = Some(error.message().to_owned());
                None
            }
        };
        // A client has no other way to learn that the end was not observed.
        let code = code.unwrap_or(-1);
        self.exit_code = Some(code);
        (self.take_seq(), code)
    }

    pub(super) fn close(&mut self) -> u64 {
        self.closed = true;
        self.take_seq()
    }

    /// Returns what a reader gets of the output after a chunk, and the answer without it.
    pub(super) fn after(&self, seq: u64, max_bytes: Option<usize>) -> (Vec<Chunk>, Value) {
        let (mut found, mut bytes) = (Vec::new(), 0);
        let limit = max_bytes.unwrap_or(usize::MAX);
        let begin = self.chunks.partition_point(|chunk| chunk.seq <= seq);
        for chunk in self.chunks.range(begin..) {
            if !found.is_empty() && bytes + chunk.bytes > limit {
                break;
            }
            bytes += chunk.bytes;
            found.push(*chunk);
            if bytes >= limit {
                break;
            }
        }
        let last = found.last().filter(|_| max_bytes.is_some());
        let answer = json!({
            "chunks": [], "nextSeq": last.map_or(self.next_seq, |chunk| chunk.seq + 1),
            "exited": self.exit_code.is_some(), "exitCode": self.exit_code, "closed": self.closed,
            "failure": self.failure, "sandboxDenied": false,
        });
        (found, answer)
    }

    /// Returns whether a reader that has read up to an event has nothing to wait for.
    pub(super) fn has_ended_after(&self, seq: u64) -> bool {
        self.closed || self.exit_code.is_some() && seq + 1 < self.next_seq
    }
}

impl Chunk {
    fn with(self, data: &[u8]) -> Value {
        json!({"seq": self.seq, "stream": self.stream, "chunk": encoded(data)})
    }
}

/// Reads chunks from the log, without those that the log has dropped.
pub(super) async fn read_log(
    target: &Target,
    key: &CommandKey,
    chunks: &[Chunk],
) -> Result<Vec<Value>, BoxError> {
    let Some(first) = chunks.first() else {
        return Ok(Vec::new());
    };
    let wanted: usize = chunks.iter().map(|chunk| chunk.bytes).sum();
    let params = CommandAttachParams {
        from: ReadFrom::Pos(first.pos),
        view: View::Bytes,
        until: Until {
            ms: Some(0),
            bytes: Some(wanted as u64),
            ..Until::default()
        },
        ..CommandAttachParams::new(key.box_id.clone(), key.command_id.clone())
    };
    let (sender, mut pieces) = mpsc::channel(8);
    // Pieces of the log need not be those of the chunks.
    let (mut begin, mut bytes) = (first.pos, Vec::new());
    let collect = async {
        while let Some(piece) = pieces.recv().await {
            let CommandChunk::Bytes(piece) = piece else {
                continue;
            };
            if begin + bytes.len() as u64 != piece.pos {
                begin = piece.pos;
                bytes.clear();
            }
            bytes.extend_from_slice(&piece.data);
        }
    };
    let (read, ()) = tokio::join!(target.attach_command(params, sender), collect);
    read?;
    let found = chunks.iter().filter_map(|chunk| {
        let start = usize::try_from(chunk.pos.checked_sub(begin)?).ok()?;
        let data = bytes.get(start..start + chunk.bytes)?;
        Some(chunk.with(data))
    });
    Ok(found.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_gets_whole_chunks_within_its_limit_and_at_least_one() {
        let mut output = Output::default();
        for pos in [0, 3, 6] {
            output.push(false, StreamName::Stdout, pos, b"abc");
        }
        let read = |after, max| {
            let (chunks, answer) = output.after(after, max);
            let seqs: Vec<_> = chunks.iter().map(|chunk| chunk.seq).collect();
            (seqs, answer["nextSeq"].as_u64().unwrap())
        };
        assert_eq!(read(0, None), (vec![1, 2, 3], 4));
        assert_eq!(read(0, Some(1)), (vec![1], 2));
        assert_eq!(read(1, Some(6)), (vec![2, 3], 4));
        assert_eq!(read(1, Some(5)), (vec![2], 3));
        assert_eq!(read(9, Some(5)), (vec![], 4));
    }

    #[test]
    fn the_chunks_that_can_be_read_again_are_bounded() {
        let mut output = Output::default();
        for pos in 0..=MAX_CHUNKS as u64 {
            output.push(true, StreamName::Stdout, pos, b"x");
        }
        let (chunks, _) = output.after(0, None);
        assert_eq!((chunks.len(), chunks[0].seq), (MAX_CHUNKS, 2));
        assert_eq!(chunks[0].stream, "pty");
    }
}
