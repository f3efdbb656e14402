//! A minimal client: one connection, written and read by blocking calls.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, ensure};

/// A connection to a server.
#[derive(Debug)]
pub(crate) struct Client(BufReader<TcpStream>);

/// An answer to an HTTP request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

impl Client {
    pub(crate) fn to(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.0.get_mut().write_all(bytes)?)
    }

    pub(crate) fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.0.read_line(&mut line)? > 0, "the server hung up");
        Ok(line)
    }

    /// Reads one HTTP answer.
    pub(crate) fn answer(&mut self) -> Result<Answer> {
        let line = self.line()?;
        let status = line.split(' ').nth(1).and_then(|word| word.parse().ok());
        let status = status.with_context(|| format!("not an answer: {line:?}"))?;
        let (mut length, mut is_chunked) = (0, false);
        loop {
            let line = self.line()?.to_ascii_lowercase();
            if line == "\r\n" {
                break;
            }
            if let Some(said) = line.strip_prefix("content-length:") {
                length = said.trim().parse()?;
            }
            is_chunked |= line.starts_with("transfer-encoding:") && line.contains("chunked");
        }
        let mut body = Vec::new();
        if is_chunked {
            while self.chunk(&mut body)? {}
        } else {
            self.take(length, &mut body)?;
        }
        Ok(Answer { status, body })
    }

    /// Reads a chunk of a body; returns whether more follow.
    fn chunk(&mut self, body: &mut Vec<u8>) -> Result<bool> {
        let line = self.line()?;
        let length = usize::from_str_radix(line.trim(), 16).context("the length of a chunk")?;
        self.take(length, body)?;
        ensure!(self.line()? == "\r\n", "a chunk without an end");
        Ok(length > 0)
    }

    fn take(&mut self, length: usize, body: &mut Vec<u8>) -> Result<()> {
        let begin = body.len();
        body.resize(begin + length, 0);
        Ok(self.0.read_exact(&mut body[begin..])?)
    }
}
