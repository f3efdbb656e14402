//! The last lines of the output of a command, over both streams.

use std::collections::VecDeque;

use box_client::{Chunk, Offsets, StreamName};

/// The maximum number of lines to search for; beyond it, all output is printed.
pub(crate) const MAX_LINES: usize = 1 << 20;

/// Finds the offset of the last lines in each stream, from the last chunks of the output.
#[derive(Debug)]
pub(crate) struct Tail {
    lines: usize,
    /// The last complete lines, in the order of their ends.
    complete: VecDeque<Line>,
    /// The incomplete line of each stream.
    stdout: Option<Line>,
    stderr: Option<Line>,
    ends: Offsets,
}

#[derive(Debug, Clone, Copy)]
struct Line {
    stream: StreamName,
    start: u64,
    /// Whether it may begin before the first chunk.
    partial: bool,
}

impl Tail {
    pub(crate) fn new(lines: usize) -> Self {
        Self {
            lines,
            complete: VecDeque::new(),
            stdout: None,
            stderr: None,
            ends: Offsets::default(),
        }
    }

    /// Adds the next chunk.
    pub(crate) fn push(&mut self, chunk: &Chunk) {
        match chunk {
            Chunk::Output {
                stream,
                offset,
                data,
                ..
            } => self.output(*stream, *offset, data),
            Chunk::Gap {
                stream,
                offset,
                bytes,
            } => {
                *self.incomplete(*stream) = None;
                *self.ends.of_mut(*stream) = offset.saturating_add(*bytes);
            }
            _ => {}
        }
    }

    fn incomplete(&mut self, stream: StreamName) -> &mut Option<Line> {
        match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        }
    }

    fn output(&mut self, stream: StreamName, offset: u64, data: &[u8]) {
        let mut at = offset;
        for line_bytes in data.split_inclusive(|byte| *byte == b'\n') {
            // A line after a known line begins at its offset; the first line of a stream may begin earlier.
            let follows = at > 0 && self.ends.of(stream) == at;
            let line = *self.incomplete(stream).get_or_insert(Line {
                stream,
                start: at,
                partial: at > 0 && !follows,
            });
            at = at.saturating_add(line_bytes.len() as u64);
            *self.ends.of_mut(stream) = at;
            if line_bytes.ends_with(b"\n") {
                *self.incomplete(stream) = None;
                self.complete.push_back(line);
                if self.complete.len() > self.lines {
                    self.complete.pop_front();
                }
            }
        }
    }

    /// The offsets of the last lines; `None` if more output is needed.
    pub(crate) fn start(&self, all_seen: bool) -> Option<Offsets> {
        let incomplete = self.stdout.iter().chain(&self.stderr);
        let unended = incomplete.clone().count().min(self.lines);
        let skipped = (self.complete.len() + unended).saturating_sub(self.lines);
        let kept = self
            .complete
            .iter()
            .skip(skipped)
            .chain(incomplete.take(unended));
        let mut start = self.ends;
        let (mut seen, mut partial) = (0, false);
        for line in kept {
            let begin = start.of_mut(line.stream);
            *begin = (*begin).min(line.start);
            seen += 1;
            partial |= line.partial;
        }
        (all_seen || (seen == self.lines && !partial)).then_some(start)
    }
}

#[cfg(test)]
mod tests {
    use box_protocol::UnixMs;

    use super::*;

    fn output(stream: StreamName, offset: u64, data: &'static str) -> Chunk {
        Chunk::Output {
            stream,
            offset,
            at: UnixMs::default(),
            data: data.into(),
        }
    }

    fn start(lines: usize, chunks: &[Chunk], all_seen: bool) -> Option<(u64, u64)> {
        let mut tail = Tail::new(lines);
        for chunk in chunks {
            tail.push(chunk);
        }
        tail.start(all_seen)
            .map(|start| (start.stdout, start.stderr))
    }

    #[test]
    fn tail_spans_both_streams() {
        use StreamName::{Stderr, Stdout};
        let chunks = [
            output(Stdout, 0, "one\ntw"),
            output(Stderr, 0, "bad\n"),
            output(Stdout, 6, "o\nthree\n"),
        ];
        // In the order of their ends: one, bad, two, three.
        for (lines, at) in [
            (0, (14, 4)),
            (1, (8, 4)),
            (2, (4, 4)),
            (3, (4, 0)),
            (4, (0, 0)),
        ] {
            assert_eq!(start(lines, &chunks, false), Some(at), "{lines}");
        }
        assert_eq!(start(5, &chunks, false), None, "there may be more before");
        assert_eq!(start(5, &chunks, true), Some((0, 0)));
    }

    #[test]
    fn an_incomplete_line_counts_and_a_partial_one_does_not() {
        use StreamName::Stdout;
        let incomplete = [output(Stdout, 0, "one\ntwo")];
        assert_eq!(start(1, &incomplete, false), Some((4, 0)));
        let partial = [output(Stdout, 10, "f one\ntwo\n")];
        assert_eq!(start(1, &partial, false), Some((16, 0)));
        assert_eq!(start(2, &partial, false), None);
        assert_eq!(start(2, &partial, true), Some((10, 0)));
    }

    #[test]
    fn a_line_starts_after_a_gap() {
        use StreamName::Stdout;
        let gone = Chunk::Gap {
            stream: Stdout,
            offset: 0,
            bytes: 100,
        };
        let chunks = [gone, output(Stdout, 100, "a\nb\n")];
        assert_eq!(start(2, &chunks, true), Some((100, 0)));
        assert_eq!(start(1, &chunks, false), Some((102, 0)));
    }
}
