//! Minimal programs that move the same bytes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use base64_simd::STANDARD;
use box_protocol::actions::{CommandChunk, FileChunk, OutputPiece, StreamName};
use box_protocol::{MAX_CHUNK_BYTES, UnixMs};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Reads a file through two `cat` processes.
pub(super) fn two_pipes(file: &str) -> Result<()> {
    let mut first = Command::new("cat")
        .arg(file)
        .stdout(Stdio::piped())
        .spawn()?;
    let input = first.stdout.take().context("a pipe")?;
    let mut second = Command::new("cat")
        .stdin(input)
        .stdout(Stdio::piped())
        .spawn()?;
    let mut out = second.stdout.take().context("a pipe")?;
    let mut buffer = vec![0; 64 << 10];
    while out.read(&mut buffer)? > 0 {}
    first.wait()?;
    second.wait()?;
    Ok(())
}

/// Sends a program's output as frames of a number, a length and bytes.
///
/// The other end parses the frames.
pub(super) fn raw_frames(file: &str) -> Result<()> {
    let (mut near, mut far) = UnixStream::pair()?;
    let file = file.to_owned();
    let sender = std::thread::spawn(move || -> Result<()> {
        let mut child = Command::new("cat")
            .arg(file)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut out = child.stdout.take().context("a pipe")?;
        let mut buffer = vec![0; 8 + MAX_CHUNK_BYTES];
        loop {
            let length = out.read(&mut buffer[8..])?;
            buffer[..4].copy_from_slice(&1_u32.to_le_bytes());
            buffer[4..8].copy_from_slice(&u32::try_from(length)?.to_le_bytes());
            near.write_all(&buffer[..8 + length])?;
            if length == 0 {
                child.wait()?;
                return Ok(());
            }
        }
    });
    let mut head = [0; 8];
    loop {
        far.read_exact(&mut head)?;
        let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        if length == 0 {
            break;
        }
        let mut frame = vec![0; length];
        far.read_exact(&mut frame)?;
    }
    sender
        .join()
        .map_err(|_| anyhow::anyhow!("the sender failed"))?
}

/// A chunk in its wire format.
#[derive(Serialize, Deserialize)]
struct Message<T> {
    jsonrpc: String,
    method: String,
    params: Params<T>,
}

#[derive(Serialize, Deserialize)]
struct Params<T> {
    id: i64,
    chunk: T,
}

/// Output as text, written by `serde_json` alone.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Plain {
    Text(OutputPiece<String>),
}

/// Sends a program's output as the JSON that a reader of text gets from Box.
///
/// The other end parses it into the same types. The programs have no agent, log, flow control or replay, and each end
/// waits only for its socket.
pub(super) fn json_frames(file: &str) -> Result<()> {
    let file = file.to_owned();
    let bytes = messages::<Plain, CommandChunk>(
        move |send| {
            let mut child = Command::new("cat")
                .arg(file)
                .stdout(Stdio::piped())
                .spawn()?;
            let mut out = child.stdout.take().context("a pipe")?;
            let mut buffer = vec![0; MAX_CHUNK_BYTES];
            let mut pos = 0;
            loop {
                let length = out.read(&mut buffer)?;
                if length == 0 {
                    child.wait()?;
                    return Ok(());
                }
                let data = std::str::from_utf8(&buffer[..length])?.to_owned();
                send(&Plain::Text(OutputPiece {
                    stream: StreamName::Stdout,
                    offset: pos,
                    pos,
                    at: UnixMs::now(),
                    data,
                }))?;
                pos += length as u64;
            }
        },
        |chunk| match chunk {
            CommandChunk::Text(piece) => piece.data.len(),
            _ => 0,
        },
    )?;
    ensure!(bytes > 0, "nothing came");
    Ok(())
}

/// Sends a file from memory as the JSON of a download.
pub(super) fn json_file(bytes: Vec<u8>) -> Result<()> {
    let all = bytes.len();
    let came = messages::<FileChunk, FileChunk>(
        move |send| {
            for (number, part) in bytes.chunks(MAX_CHUNK_BYTES).enumerate() {
                let offset = (number * MAX_CHUNK_BYTES) as u64;
                let data = part.to_vec().into();
                send(&FileChunk { offset, data })?;
            }
            Ok(())
        },
        |chunk| chunk.data.len(),
    )?;
    ensure!(came == all, "{came} bytes came");
    Ok(())
}

/// Encodes and decodes base64 in pieces.
pub(super) fn base64(bytes: &[u8]) -> Result<()> {
    for part in bytes.chunks(MAX_CHUNK_BYTES) {
        let text = STANDARD.encode_to_string(part);
        ensure!(STANDARD.decode_to_vec(&text)?.len() == part.len());
    }
    Ok(())
}

type Send<'a, T> = &'a mut dyn FnMut(&T) -> Result<()>;

/// Sends messages from a thread over a Unix socket; returns their summed counts.
fn messages<S: Serialize, T: DeserializeOwned>(
    give: impl FnOnce(Send<'_, S>) -> Result<()> + std::marker::Send + 'static,
    count: impl Fn(T) -> usize,
) -> Result<usize> {
    let (mut near, mut far) = UnixStream::pair()?;
    let sender = std::thread::spawn(move || -> Result<()> {
        let mut text = Vec::new();
        give(&mut |chunk| {
            #[derive(Serialize)]
            struct Borrowed<'a, T> {
                jsonrpc: &'static str,
                method: &'static str,
                params: About<'a, T>,
            }
            #[derive(Serialize)]
            struct About<'a, T> {
                id: i64,
                chunk: &'a T,
            }
            let message = Borrowed {
                jsonrpc: "2.0",
                method: "$/chunk",
                params: About { id: 7, chunk },
            };
            text.clear();
            serde_json::to_writer(&mut text, &message)?;
            text.push(b'\n');
            Ok(near.write_all(&text)?)
        })
    });
    let (mut buffer, mut length, mut total) = (vec![0; 256 << 10], 0, 0);
    loop {
        let read = far.read(&mut buffer[length..])?;
        if read == 0 {
            break;
        }
        length += read;
        let mut begin = 0;
        while let Some(end) = memchr::memchr(b'\n', &buffer[begin..length]) {
            let message: Message<T> = serde_json::from_slice(&buffer[begin..begin + end])?;
            ensure!(message.jsonrpc == "2.0" && message.method == "$/chunk");
            total += count(message.params.chunk);
            begin += end + 1;
        }
        buffer.copy_within(begin..length, 0);
        length -= begin;
    }
    let sent = sender.join();
    sent.map_err(|_| anyhow::anyhow!("the sender failed"))??;
    Ok(total)
}
