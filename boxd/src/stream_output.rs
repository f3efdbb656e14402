//! Output of a command on the streams of this process: unchanged, or one line of JSON per chunk.

use std::io::{self, Write};

use box_client::StreamName;
use box_protocol::UnixMs;
use serde_json::{Value, json};

use crate::output;

/// A chunk of output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutputChunk<'a> {
    pub(crate) stream: StreamName,
    pub(crate) offset: u64,
    pub(crate) at: UnixMs,
    pub(crate) data: &'a [u8],
}

/// Prints a chunk on its stream.
pub(crate) fn print_chunk(json: bool, chunk: OutputChunk<'_>) -> io::Result<()> {
    if json {
        return print_json_line(&json!({
            "stream": chunk.stream,
            "offset": chunk.offset,
            "at": chunk.at,
            "text": String::from_utf8_lossy(chunk.data),
        }));
    }
    match chunk.stream {
        StreamName::Stderr => write_all(&mut io::stderr().lock(), chunk.data),
        StreamName::Stdout => write_all(&mut io::stdout().lock(), chunk.data),
    }
}

/// Reports how many bytes were discarded.
pub(crate) fn print_gap(json: bool, stream: StreamName, offset: u64, bytes: u64) -> io::Result<()> {
    if json {
        return print_json_line(&json!({"stream": stream, "offset": offset, "gap": bytes}));
    }
    let name = match stream {
        StreamName::Stderr => "standard error",
        StreamName::Stdout => "standard output",
    };
    writeln!(
        io::stderr().lock(),
        "boxd: {bytes} bytes of {name} were discarded"
    )
}

/// Prints a value as a line of JSON.
pub(crate) fn print_json_line(value: &Value) -> io::Result<()> {
    output::print(&format!("{}\n", output::visible_json(&value.to_string())))
}

fn write_all(to: &mut impl Write, data: &[u8]) -> io::Result<()> {
    to.write_all(data)?;
    to.flush()
}
