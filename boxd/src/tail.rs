//! The last lines of the output of a command, over both streams.

use std::collections::VecDeque;

use box_client::{Chunk, Offsets, StreamName};

/// The maximum number of lines to search for; beyond it, all output is printed.
pub(crate) const MOST: usize = 1 << 20;

/// Finds the offset of the last lines in each stream, from the last chunks of the output.
#[derive(Debug)]
pub(crate) struct Tail {
    lines: usize,
    /// The last complete lines, in the order of their ends.
    ended: VecDeque<Line>,
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
    cut: bool,
}

impl Tail {
    pub(crate) fn new(lines: usize) -> Self {
        Self {
            lines,
            ended: VecDeque::new(),
            stdout: None,
            stderr: None,
            ends: Offsets::default(),
        }
    }

    /// Adds the next chunk.
    pub(crate) fn take(&mut self, chunk: &Chunk) {
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
                *self.open(*stream) = None;
                *self.ends.of_mut(*stream) = offset.saturating_add(*bytes);
            }
            _ => {}
        }
    }

    fn open(&mut self, stream: StreamName) -> &mut Option<Line> {
        match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        }
    }

    fn output(&mut self, stream: StreamName, offset: u64, data: &[u8]) {
        let mut at = offset;
        for piece in data.split_inclusive(|byte| *byte == b'\n') {
            // A line after a known line begins at its offset; the first line of a stream may begin earlier.
            let follows = at > 0 && self.ends.of(stream) == at;
            let line = *self.open(stream).get_or_insert(Line {
                stream,
                start: at,
                cut: at > 0 && !follows,
            });
            at = at.saturating_add(piece.len() as u64);
            *self.ends.of_mut(stream) = at;
            if piece.ends_with(b"\n") {
                *self.open(stream) = None;
                self.ended.push_back(line);
                if self.ended.len() > self.lines {
                    self.ended.pop_front();
                }
            }
        }
    }

    /// The offsets of the last lines; `None` if more output is needed.
    pub(crate) fn start(&self, all_seen: bool) -> Option<Offsets> {
        let open = self.stdout.iter().chain(&self.stderr);
        let unended = open.clone().count().min(self.lines);
        let left_out = (self.ended.len() + unended).saturating_sub(self.lines);
        let kept = self.ended.iter().skip(left_out).chain(open.take(unended));
        let mut start = self.ends;
        let (mut seen, mut cut) = (0, false);
        for line in kept {
            let begin = start.of_mut(line.stream);
            *begin = (*begin).min(line.start);
            seen += 1;
            cut |= line.cut;
        }
        (all_seen || (seen == self.lines && !cut)).then_some(start)
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
            tail.take(chunk);
        }
        tail.start(all_seen)
            .map(|start| (start.stdout, start.stderr))
    }

    #[test]
    fn the_last_lines_are_found_over_both_streams() {
        use StreamName::{Stderr, Stdout};
        let said = [
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
            assert_eq!(start(lines, &said, false), Some(at), "{lines}");
        }
        assert_eq!(start(5, &said, false), None, "there may be more before");
        assert_eq!(start(5, &said, true), Some((0, 0)));
    }

    #[test]
    fn a_line_that_has_not_ended_is_one_and_a_cut_one_is_not() {
        use StreamName::Stdout;
        let open = [output(Stdout, 0, "one\ntwo")];
        assert_eq!(start(1, &open, false), Some((4, 0)));
        let cut = [output(Stdout, 10, "f one\ntwo\n")];
        assert_eq!(start(1, &cut, false), Some((16, 0)));
        assert_eq!(start(2, &cut, false), None);
        assert_eq!(start(2, &cut, true), Some((10, 0)));
    }

    #[test]
    fn a_line_begins_behind_a_gap() {
        use StreamName::Stdout;
        let gone = Chunk::Gap {
            stream: Stdout,
            offset: 0,
            bytes: 100,
        };
        let said = [gone, output(Stdout, 100, "a\nb\n")];
        assert_eq!(start(2, &said, true), Some((100, 0)));
        assert_eq!(start(1, &said, false), Some((102, 0)));
    }
}
