//! The event stream of commands, sessions and code.
//!
//! A stream is `init`, then output and results, then either `error` or `execution_complete`. Each event is a bare JSON
//! object and an empty line.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse as _, Response};
use box_protocol::actions::{CommandChunk, Displayed, StreamName};
use box_protocol::{BoxError, CommandInfo, Exit, ExitWhy, UnixMs};
use bytes::BytesMut;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::http::framing::bare_json;
use crate::http::lines::LineCutter;
use crate::http::stream::{Step, StreamedCall};

/// The interval of `ping` events on a silent stream.
const PING: Duration = Duration::from_secs(3);

/// The maximum length of a line; a longer one is sent in parts.
const MAX_LINE_BYTES: usize = 16 * 1024 * 1024;

/// How the traceback of a Python kernel begins.
const TRACEBACK: &str = "Traceback (most recent call last):\n";

/// What precedes the traceback of a group of errors.
const GROUP: &str = "  + Exception Group ";

/// How a syntax error of the run itself begins, which has no traceback.
const SYNTAX_ERROR: &str = "  File \"<run ";

/// How a line ends that the agent has cut.
const CUT: &str = " [truncated]";

/// The maximum bytes of a traceback that a stream keeps back.
const MAX_HELD_BYTES: usize = 1024 * 1024;

/// How output becomes events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    /// An event for each line, without its end; a blank line is `"\n"`.
    Lines,
    /// As lines, without blank ones, as sessions do.
    NonBlankLines,
    /// An event for each piece, as kernels do.
    Pieces,
}

/// The result of a call that streams a command.
pub(super) trait Ended {
    /// Returns the command at its end.
    fn into_info(self) -> CommandInfo;
}

impl Ended for box_protocol::actions::CommandStartResult {
    fn into_info(self) -> CommandInfo {
        self.info
    }
}

impl Ended for box_protocol::actions::CommandAttachResult {
    fn into_info(self) -> CommandInfo {
        self.info
    }
}

/// An event with output; written without an intermediate value, because there are many.
#[derive(Serialize)]
struct OutputEvent<'a> {
    r#type: &'static str,
    timestamp: u64,
    text: &'a str,
    eid: u64,
}

/// The lines of a stream.
#[derive(Debug)]
struct Lines {
    cutter: LineCutter,
    /// The position after the last piece of the stream in the combined output.
    end: u64,
}

/// Writes the steps of a call as events.
///
/// The id of an event with output is the position after it in the combined output, so ids grow with each event.
#[derive(Debug)]
pub(super) struct Events {
    output: Output,
    /// The number of the execution in its context.
    count: Option<u64>,
    stdout: Lines,
    stderr: Lines,
    /// The id of the last event that the reader has. Events up to it are not repeated.
    after: u64,
    started: Option<UnixMs>,
    has_count: bool,
    /// The output of a kernel that may be its traceback, which belongs to the `error` event.
    held: String,
}

impl Events {
    pub(super) fn new(output: Output, count: Option<u64>) -> Self {
        let lines = || Lines {
            cutter: LineCutter::new(MAX_LINE_BYTES).at_returns(),
            end: 0,
        };
        Self {
            output,
            count,
            stdout: lines(),
            stderr: lines(),
            after: 0,
            started: None,
            has_count: false,
            held: String::new(),
        }
    }

    /// Leaves out the events up to this id.
    ///
    /// The call must read the output from its beginning, because a line may begin before the event and end after it.
    pub(super) fn after(mut self, eid: u64) -> Self {
        self.after = eid;
        self
    }

    /// Returns the response with the events of a call, after its first chunk.
    pub(super) fn response<R: Ended + Send + 'static>(
        mut self,
        call: StreamedCall<CommandChunk, R>,
    ) -> Response {
        stream_response(call.into_body(Some(PING), move |step| self.frame(step)))
    }

    fn frame<R: Ended>(&mut self, step: Step<CommandChunk, R>) -> Bytes {
        match step {
            Step::Chunk(CommandChunk::Started(info)) => {
                self.started = info.started_at.or(Some(info.created_at));
                init(info.command_id.as_str())
            }
            Step::Chunk(CommandChunk::Text(piece)) => {
                self.text(piece.stream, piece.at, piece.pos, &piece.data)
            }
            Step::Chunk(CommandChunk::Display(shown)) => self.result(shown),
            Step::Chunk(CommandChunk::Bytes(_) | CommandChunk::Gap(_)) => Bytes::new(),
            Step::Idle => event("ping", json!({"text": "pong"})),
            Step::End(Ok(ended)) => {
                let info = ended.into_info();
                if let Some(error) = &info.error {
                    let begin = traceback_in(&self.held, &error.traceback);
                    self.held.truncate(begin);
                }
                let mut frames = self.rest();
                frames.extend_from_slice(&self.end(&info));
                frames.freeze()
            }
            Step::End(Err(error)) => {
                let mut frames = self.rest();
                frames.extend_from_slice(&failure(&error));
                frames.freeze()
            }
        }
    }

    fn text(&mut self, stream: StreamName, at: UnixMs, pos: u64, text: &str) -> Bytes {
        let (name, lines) = match stream {
            StreamName::Stdout => ("stdout", &mut self.stdout),
            StreamName::Stderr => ("stderr", &mut self.stderr),
        };
        lines.end = pos + text.len() as u64;
        let (timestamp, after) = (at.0, self.after);
        let write = |text: &str, end: usize| {
            let eid = pos + end as u64;
            if eid <= after {
                return Bytes::new();
            }
            bare_json(&OutputEvent {
                r#type: name,
                timestamp,
                text,
                eid,
            })
        };
        if self.output == Output::Pieces {
            let begin = match stream {
                StreamName::Stderr if !self.held.is_empty() => Some(0),
                StreamName::Stderr => error_in(text),
                StreamName::Stdout => None,
            };
            let (shown, held) = text.split_at(begin.unwrap_or(text.len()));
            self.held.push_str(held);
            if self.held.len() > MAX_HELD_BYTES {
                return write(&std::mem::take(&mut self.held), text.len());
            }
            if shown.is_empty() {
                return Bytes::new();
            }
            return write(shown, shown.len());
        }
        let skips_blank = self.output == Output::NonBlankLines;
        let mut frames = BytesMut::new();
        lines.cutter.push_at(text, |line, end| match line {
            "" if skips_blank => {}
            "" => frames.extend_from_slice(&write("\n", end)),
            line => frames.extend_from_slice(&write(line, end)),
        });
        frames.freeze()
    }

    /// Returns the last lines, which have no end.
    fn rest(&mut self) -> BytesMut {
        let mut frames = BytesMut::new();
        let held = Some(std::mem::take(&mut self.held)).filter(|held| !held.is_empty());
        let mut rest = [
            ("stdout", self.stdout.end, self.stdout.cutter.finish()),
            (
                "stderr",
                self.stderr.end,
                self.stderr.cutter.finish().or(held),
            ),
        ];
        rest.sort_by_key(|(_, eid, _)| *eid);
        for (name, eid, line) in rest {
            if let Some(text) = line.filter(|_| eid > self.after) {
                let frame = event(name, json!({"text": text, "eid": eid}));
                frames.extend_from_slice(&frame);
            }
        }
        frames
    }

    fn result(&mut self, shown: Displayed) -> Bytes {
        let mut frames = BytesMut::new();
        if let Some(count) = self.count.filter(|_| !self.has_count) {
            self.has_count = true;
            let frame = event("execution_count", json!({"execution_count": count}));
            frames.extend_from_slice(&frame);
        }
        let mut results = Map::new();
        for (kind, data) in shown.data {
            let name = if kind == "text/plain" {
                "text".to_owned()
            } else {
                kind
            };
            results.insert(name, data.into());
        }
        frames.extend_from_slice(&event("result", json!({"results": results})));
        frames.freeze()
    }

    fn end(&self, info: &CommandInfo) -> Bytes {
        if let Some(error) = &info.error {
            return error_event(&error.name, &error.value, &error.traceback);
        }
        let exit = info.exit.unwrap_or(Exit::by_signal(9, ExitWhy::Lost));
        let code = exit_code(&exit);
        if code == 0 {
            let began = self.started.unwrap_or(info.created_at);
            let ended = info.ended_at.unwrap_or_else(UnixMs::now);
            let time = u64::try_from(ended.since(began).as_millis()).unwrap_or(u64::MAX);
            return event("execution_complete", json!({"execution_time": time}));
        }
        error_event("CommandExecError", &code.to_string(), &[reason(&exit)])
    }
}

/// Returns where the text of an error may begin in a piece of output.
///
/// The program may have left its last line without an end, except before a syntax error: nothing has run by then.
fn error_in(piece: &str) -> Option<usize> {
    let group = |at: usize| piece[..at].strip_suffix(GROUP).map_or(at, str::len);
    let traceback = piece.find(TRACEBACK).map(group);
    let starts_line = |at: &usize| *at == 0 || piece[..*at].ends_with('\n');
    let mut syntax_errors = piece.match_indices(SYNTAX_ERROR).map(|(at, _)| at);
    let syntax_error = syntax_errors.find(starts_line);
    traceback.into_iter().chain(syntax_error).min()
}

/// Returns where the traceback of an error begins in the output before it; the end if it is not there.
///
/// The agent cuts long lines of the error, and leaves out the first ones of many.
fn traceback_in(output: &str, traceback: &[String]) -> usize {
    let mut begin = output.len();
    for (left, line) in traceback.iter().enumerate().rev() {
        let before = &output[..begin];
        let stem = line.strip_suffix(CUT);
        begin = if let Some(rest) = before.strip_suffix(line.as_str()) {
            rest.len()
        } else if let Some(found) = stem.and_then(|stem| before.rfind(stem)) {
            found
        } else if left == 0 && traceback.len() > 1 {
            return before.rfind(TRACEBACK).unwrap_or(begin);
        } else {
            return output.len();
        };
    }
    begin
}

/// Returns the exit code of a command: -1 for an end by a signal or a limit, as the reference has it.
pub(super) fn exit_code(exit: &Exit) -> i32 {
    match exit.why {
        ExitWhy::Exit | ExitWhy::Killed => exit.code.unwrap_or(-1),
        _ => -1,
    }
}

/// Returns why a command ended, as text.
pub(super) fn reason(exit: &Exit) -> String {
    match (exit.why, exit.code, exit.signal) {
        (ExitWhy::Timeout, ..) => "the time limit was reached".to_owned(),
        (ExitWhy::Oom, ..) => "the sandbox was out of memory".to_owned(),
        (ExitWhy::BoxEnded, ..) => "the sandbox ended".to_owned(),
        (ExitWhy::Lost, ..) => "the end of the command was not observed".to_owned(),
        (_, Some(code), _) => format!("exit status {code}"),
        (_, None, Some(signal)) => format!("signal {signal}"),
        (_, None, None) => "ended".to_owned(),
    }
}

/// Returns the `init` event of an execution.
pub(super) fn init(id: &str) -> Bytes {
    event("init", json!({"text": id, "eid": 0}))
}

/// Returns the `error` event of a call that failed.
pub(super) fn failure(error: &BoxError) -> Bytes {
    error_event(
        "CommandExecError",
        error.message(),
        &[error.message().to_owned()],
    )
}

fn error_event(name: &str, value: &str, traceback: &[String]) -> Bytes {
    let error = json!({"ename": name, "evalue": value, "traceback": traceback});
    event("error", json!({"error": error}))
}

/// Returns an event with the current time.
pub(super) fn event(name: &str, mut members: Value) -> Bytes {
    members["type"] = name.into();
    members["timestamp"] = UnixMs::now().0.into();
    bare_json(&members)
}

/// Returns a response with these events.
pub(super) fn stream_response(body: impl Into<Body>) -> Response {
    let headers = [
        (CONTENT_TYPE.as_str(), "text/event-stream"),
        (CACHE_CONTROL.as_str(), "no-cache"),
        ("x-accel-buffering", "no"),
    ];
    (headers, body.into()).into_response()
}

#[cfg(test)]
mod tests {
    use box_protocol::actions::{CommandAttachResult, OutputPiece};

    use super::*;

    fn piece(stream: StreamName, pos: u64, data: &str) -> Step<CommandChunk, CommandAttachResult> {
        Step::Chunk(CommandChunk::Text(OutputPiece {
            stream,
            offset: 0,
            pos,
            at: UnixMs(1),
            data: data.to_owned(),
        }))
    }

    /// Returns the texts and ids of events, with the lines that have no end.
    fn read(mut events: Events, pieces: &[(StreamName, &str)]) -> Vec<(String, u64)> {
        let (mut frames, mut pos) = (BytesMut::new(), 0);
        for (stream, data) in pieces {
            frames.extend_from_slice(&events.frame(piece(*stream, pos, data)));
            pos += data.len() as u64;
        }
        frames.extend_from_slice(&events.rest());
        let text = String::from_utf8(frames.to_vec()).unwrap();
        let events = text.split("\n\n").filter(|event| !event.is_empty());
        let event = |event: &str| {
            let event: Value = serde_json::from_str(event).unwrap();
            let text = event["text"].as_str().unwrap().to_owned();
            (text, event["eid"].as_u64().unwrap())
        };
        events.map(event).collect()
    }

    #[test]
    fn a_reader_continues_after_any_event_without_loss() {
        use StreamName::{Stderr, Stdout};
        let pieces = [
            (Stdout, "one\ntw"),
            (Stderr, "a\nb\n\nla"),
            (Stdout, "o\r\nthree"),
            (Stderr, "st"),
        ];
        let new = || Events::new(Output::Lines, None);
        let all = read(new(), &pieces);
        let texts: Vec<_> = all.iter().map(|(text, _)| text.as_str()).collect();
        assert_eq!(texts, ["one", "a", "b", "\n", "two", "three", "last"]);
        assert!(all.is_sorted_by(|one, next| one.1 < next.1), "{all:?}");
        for at in 0..all.len() {
            assert_eq!(read(new().after(all[at].1), &pieces), all[at + 1..]);
        }
    }

    #[test]
    fn the_traceback_of_an_error_is_found_also_if_it_is_cut() {
        let long = "x".repeat(5000);
        let lines = [
            TRACEBACK.to_owned(),
            "  File\n".to_owned(),
            format!("E: {long}\n"),
        ];
        let text = lines.concat();
        let mut cut = lines.to_vec();
        cut[2] = format!("{}{CUT}", &cut[2][..2000]);
        assert_eq!(traceback_in(&text, &lines), 0);
        assert_eq!(traceback_in(&text, &cut), 0);
        cut[0] = "[earlier lines omitted]".to_owned();
        assert_eq!(traceback_in(&text, &cut), 0);
        assert_eq!(traceback_in(&format!("mine\n{text}"), &lines), 5);
        assert_eq!(traceback_in("other\n", &lines), 6);
    }

    #[test]
    fn the_text_of_every_error_is_kept_back() {
        let group = concat!(
            "  + Exception Group Traceback (most recent call last):\n",
            "  |   File \"<run 1>\", line 1, in <module>\n",
            "  |     raise ExceptionGroup(\"g\", [ValueError(1)])\n",
            "  | ExceptionGroup: g (1 sub-exception)\n",
            "  +-+---------------- 1 ----------------\n",
            "    | ValueError: 1\n",
            "    +------------------------------------\n",
        );
        let syntax = concat!(
            "  File \"<run 1>\", line 1\n",
            "    x = = 1\n",
            "        ^\n",
            "SyntaxError: invalid syntax\n",
        );
        let tabs = concat!(
            "  File \"<run 1>\", line 3\n",
            "    \ty\n",
            "    ^\n",
            "TabError: inconsistent use of tabs and spaces in indentation\n",
        );
        let plain = concat!(
            "Traceback (most recent call last):\n",
            "  File \"<run 1>\", line 1, in <module>\n",
            "    1/0\n",
            "    ~^~\n",
            "ZeroDivisionError: division by zero\n",
        );
        let cases = [
            ("", group),
            ("mine\n", group),
            ("mine", group),
            ("", syntax),
            ("mine\n", syntax),
            ("", tabs),
            ("", plain),
            ("mine", plain),
            ("see  File \"<run 1>\"\n", ""),
            ("  + Exception Group of mine\n", ""),
        ];
        for (mine, error) in cases {
            let mut events = Events::new(Output::Pieces, None);
            let text = format!("{mine}{error}");
            let frame = events.frame(piece(StreamName::Stderr, 0, &text));
            assert_eq!(events.held, error, "{text}");
            let event: Option<Value> = serde_json::from_slice(&frame).ok();
            let shown = event.map_or(Value::from(""), |event| event["text"].clone());
            assert_eq!(shown, mine, "{text}");
            let lines: Vec<_> = error.split_inclusive('\n').map(str::to_owned).collect();
            assert_eq!(traceback_in(&events.held, &lines), 0, "{text}");
        }
    }
}
