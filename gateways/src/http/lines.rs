//! Output that arrives in pieces, cut into lines.

/// Cuts a text into lines.
///
/// It keeps the end of an incomplete line until the rest arrives. A line longer than the limit is cut there.
#[derive(Debug)]
pub struct LineCutter {
    rest: String,
    max_bytes: usize,
    /// Whether `\r` ends a line, too.
    at_returns: bool,
    /// Whether the last line ended with `\r`.
    after_return: bool,
}

impl LineCutter {
    /// Creates a cutter with a maximum length of a line in bytes.
    pub fn new(max_bytes: usize) -> Self {
        Self {
            rest: String::new(),
            max_bytes: max_bytes.max(4),
            at_returns: false,
            after_return: false,
        }
    }

    /// Ends a line also at `\r` and `\r\n`, as progress bars write them.
    #[must_use]
    pub fn at_returns(mut self) -> Self {
        self.at_returns = true;
        self
    }

    /// Adds a piece, and calls `line` with each line that is complete, without its end.
    pub fn push(&mut self, piece: &str, mut line: impl FnMut(&str)) {
        self.push_at(piece, |text, _| line(text));
    }

    /// As [`push`](Self::push); `line` also gets the number of bytes of the piece up to and with the end of the line.
    pub fn push_at(&mut self, piece: &str, mut line: impl FnMut(&str, usize)) {
        let whole = piece.len();
        let mut piece = piece;
        let ends: &[char] = if self.at_returns {
            &['\n', '\r']
        } else {
            &['\n']
        };
        while let Some(end) = piece.find(ends) {
            let (head, tail) = (&piece[..end], &piece[end + 1..]);
            let at = whole - tail.len();
            let is_return = piece.as_bytes()[end] == b'\r';
            if !self.rest.is_empty() {
                self.rest.push_str(head);
                line(&self.rest, at);
                self.rest.clear();
            } else if is_return || !head.is_empty() || !self.after_return {
                // Else it is the second half of `\r\n`.
                line(head, at);
            }
            self.after_return = is_return;
            piece = tail;
        }
        self.after_return &= piece.is_empty();
        self.rest.push_str(piece);
        while self.rest.len() > self.max_bytes {
            let cut = self.rest.floor_char_boundary(self.max_bytes);
            let left = self.rest.len() - cut;
            line(&self.rest[..cut], whole.saturating_sub(left));
            self.rest.drain(..cut);
        }
    }

    /// Returns the last line if it has no end, and begins anew.
    pub fn finish(&mut self) -> Option<String> {
        Some(std::mem::take(&mut self.rest)).filter(|rest| !rest.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(cutter: &mut LineCutter, piece: &str) -> Vec<String> {
        let mut lines = Vec::new();
        cutter.push(piece, |line| lines.push(line.to_owned()));
        lines
    }

    #[test]
    fn lines_are_cut_at_any_split_of_the_text() {
        let text = "one\n\ntwo\r\nthr\u{fc}e\nlast";
        for at in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
            let mut cutter = LineCutter::new(100);
            let mut lines = cut(&mut cutter, &text[..at]);
            lines.extend(cut(&mut cutter, &text[at..]));
            assert_eq!(lines, ["one", "", "two\r", "thr\u{fc}e"], "{at}");
            assert_eq!(cutter.finish().as_deref(), Some("last"));
            assert_eq!(cutter.finish(), None);
        }
    }

    #[test]
    fn a_line_may_end_at_a_return() {
        let text = "a\rb\r\n\n\r\nc\n";
        for at in 0..=text.len() {
            let mut cutter = LineCutter::new(100).at_returns();
            let mut lines = cut(&mut cutter, &text[..at]);
            lines.extend(cut(&mut cutter, &text[at..]));
            assert_eq!(lines, ["a", "b", "", "", "c"], "{at}");
        }
    }

    #[test]
    fn a_line_is_reported_with_its_end_in_the_piece() {
        let mut cutter = LineCutter::new(5).at_returns();
        let mut ends = Vec::new();
        for piece in ["a\nb", "c\r\n\nd", "efghi"] {
            cutter.push_at(piece, |line, end| ends.push((line.to_owned(), end)));
        }
        let expected = [("a", 2), ("bc", 2), ("", 4), ("defgh", 4)];
        assert_eq!(ends, expected.map(|(line, end)| (line.to_owned(), end)));
    }

    #[test]
    fn a_long_line_is_cut_at_a_character() {
        let mut cutter = LineCutter::new(4);
        assert_eq!(cut(&mut cutter, "abc\u{fc}de"), ["abc", "\u{fc}de"][..1]);
        assert_eq!(cutter.finish().as_deref(), Some("\u{fc}de"));
    }
}
