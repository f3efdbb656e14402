//! The log on stderr.
//!
//! If stderr cannot be written, lines are lost and counted; the server is not blocked.

use std::io::{self, IsTerminal as _, Write};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::config::{LogFormat, LogSection};
use crate::output;

/// The size that a writable pipe accepts at once.
const PIPE_CHUNK: usize = 4096;

/// How long a line waits for a blocked reader. Later lines do not wait until the reader accepts one.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// The filter of levels and targets.
pub(crate) fn filter(section: &LogSection) -> Result<EnvFilter> {
    // rmcp logs every request; a level for it in the setting wins.
    let directives = format!("rmcp=warn,{}", section.level);
    EnvFilter::try_new(directives).with_context(|| format!("log.level: {:?}", section.level))
}

/// Installs the log for the rest of the process.
pub(crate) fn start(section: &LogSection) -> Result<()> {
    let filter = filter(section)?;
    let json = section.format == LogFormat::Json;
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let coloured = !json && !plain && io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // Internal errors would go to stderr, which failed.
        .log_internal_errors(false)
        .with_writer(Log {
            sink: Mutex::new(Sink::new(io::stderr())),
            json,
            coloured,
        });
    if json {
        lines.json().init();
    } else {
        lines.with_ansi(coloured).init();
    }
    Ok(())
}

/// The writer that `tracing` uses.
struct Log<T> {
    sink: Mutex<Sink<T>>,
    json: bool,
    coloured: bool,
}

impl<'a, T: Write + AsFd + 'a> MakeWriter<'a> for Log<T> {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

impl<T: Write + AsFd> Write for &Log<T> {
    /// Writes a line, or counts it as lost. It never fails, because the caller cannot handle the error.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let text = text.strip_suffix('\n').unwrap_or(&text);
        let safe = if self.json {
            output::visible_json(text)
        } else if self.coloured {
            // Escape characters are colours of `tracing`, which escapes them in values.
            text.split('\x1b')
                .map(output::visible)
                .collect::<Vec<_>>()
                .join("\x1b")
                .into()
        } else {
            output::visible(text)
        };
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        sink.line(&safe, self.json);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The destination of the log.
struct Sink<T> {
    writer: T,
    lost: u64,
}

impl<T: Write + AsFd> Sink<T> {
    fn new(writer: T) -> Self {
        Self { writer, lost: 0 }
    }

    fn line(&mut self, text: &str, json: bool) {
        if self.lost > 0 {
            let message = format!("{} lines of the log were not written", self.lost);
            let notice = if json {
                serde_json::json!({"level": "WARN", "target": "boxd::log", "fields": {"message": message}})
                    .to_string()
            } else {
                format!("WARN boxd::log: {message}")
            };
            if self.write(&notice, Duration::ZERO) {
                self.lost = 0;
            }
        }
        let timeout = if self.lost == 0 {
            WRITE_TIMEOUT
        } else {
            Duration::ZERO
        };
        if !self.write(text, timeout) {
            self.lost += 1;
        }
    }

    /// Writes a line when the destination has room; returns whether it was written in time.
    fn write(&mut self, text: &str, timeout: Duration) -> bool {
        let line = format!("{text}\n");
        line.as_bytes()
            .chunks(PIPE_CHUNK)
            .all(|chunk| self.has_room(timeout) && self.writer.write_all(chunk).is_ok())
    }

    fn has_room(&self, timeout: Duration) -> bool {
        let Ok(timeout) = Timespec::try_from(timeout) else {
            return false;
        };
        let mut waited = [PollFd::new(&self.writer, PollFlags::OUT)];
        let polled = rustix::io::retry_on_intr(|| poll(&mut waited, Some(&timeout)));
        // A regular file always polls as writable.
        matches!(polled, Ok(1..))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::os::fd::OwnedFd;

    use super::*;

    fn pipe() -> (File, File) {
        let (read, write): (OwnedFd, OwnedFd) = rustix::pipe::pipe().unwrap();
        (read.into(), write.into())
    }

    #[test]
    fn a_blocked_or_closed_reader_loses_lines_only() {
        let (read, write) = pipe();
        let mut sink = Sink::new(write);
        sink.line("first", false);
        let fill = "x".repeat(PIPE_CHUNK);
        // One of these lines waits for room; the others do not.
        for _ in 0..64 {
            sink.line(&fill, false);
        }
        assert!(sink.lost > 0);
        let lost = sink.lost;
        let mut taken = vec![0; 1 << 20];
        let length = (&read).read(&mut taken).unwrap();
        assert!(taken[..length].starts_with(b"first\n"));
        sink.line("last", true);
        assert_eq!(sink.lost, 0);
        let length = (&read).read(&mut taken).unwrap();
        let text = String::from_utf8_lossy(&taken[..length]).into_owned();
        assert!(
            text.contains(&format!("{lost} lines")) && text.ends_with("last\n"),
            "{text}"
        );
        drop(read);
        sink.line("unread", false);
        assert_eq!(sink.lost, 1);
        let mut broken = Sink::new(File::options().write(true).open("/dev/full").unwrap());
        broken.line("nowhere", false);
        assert_eq!(broken.lost, 1);
    }

    #[test]
    fn a_log_entry_is_one_line() {
        let written = |coloured: bool, json: bool, text: &str| {
            let (mut read, write) = pipe();
            let sink = Mutex::new(Sink::new(write));
            let log = Log {
                sink,
                json,
                coloured,
            };
            (&mut &log).write_all(text.as_bytes()).unwrap();
            drop(log);
            let mut text = String::new();
            read.read_to_string(&mut text).unwrap();
            text
        };
        assert_eq!(
            written(false, false, "a\nb\u{9b}\x1b\n"),
            "a\\u{a}b\\u{9b}\\u{1b}\n"
        );
        assert_eq!(
            written(true, false, "\x1b[2ma\u{202e}\n"),
            "\x1b[2ma\\u{202e}\n"
        );
        assert_eq!(
            written(false, true, "{\"a\":\"\u{9b}\"}\n"),
            "{\"a\":\"\\u009b\"}\n"
        );
    }
}
