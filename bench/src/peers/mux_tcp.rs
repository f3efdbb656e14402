//! The handwritten multiplexer over TCP, with one message per line.
//!
//! Both ends batch writes: all data written while the socket was busy goes out in one call. The server answers in its
//! reader, after all requests of one read.

use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::Notify,
};

use super::{
    MAX_MESSAGE,
    mux::{self, Waiting, lock},
};
use crate::{contestant, payload::Payload, process};

/// The initial size of a read buffer, and the size up to which it grows.
const BUFFER: (usize, usize) = (8 * 1024, 64 * 1024);

pub(crate) async fn serve() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    process::announce(listener.local_addr()?)?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(serve_one(stream));
    }
}

async fn serve_one(mut stream: TcpStream) -> Result<()> {
    let (mut read, mut write) = stream.split();
    let mut lines = Lines::default();
    let mut out = Vec::new();
    while lines.fill(&mut read).await? {
        while let Some(line) = lines.next()? {
            mux::answer(line, &mut out)?;
            out.push(b'\n');
        }
        write.write_all(&out).await?;
        out.clear();
    }
    Ok(())
}

pub(crate) async fn connect(address: &str) -> Result<Client> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (read, write) = stream.into_split();
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            waiting: Waiting::new(),
            out: Vec::new(),
        }),
        written: Notify::new(),
    });
    let reader = tokio::spawn(read_answers(Arc::clone(&shared), read));
    let writer = tokio::spawn(write_requests(Arc::clone(&shared), write));
    Ok(Client(Arc::new(Connected {
        shared,
        tasks: [reader.abort_handle(), writer.abort_handle()],
    })))
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    written: Notify,
}

#[derive(Debug)]
struct State {
    waiting: Waiting,
    /// Requests that are not written to the socket yet.
    out: Vec<u8>,
}

#[derive(Debug)]
struct Connected {
    shared: Arc<Shared>,
    tasks: [tokio::task::AbortHandle; 2],
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

/// The calling end.
#[derive(Clone, Debug)]
pub(crate) struct Client(Arc<Connected>);

impl contestant::Client for Client {
    async fn echo(&self, payload: Payload) -> Result<Payload> {
        let shared = &self.0.shared;
        let answer = {
            let mut state = lock(&shared.state);
            let (id, answer) = state.waiting.register()?;
            mux::write_request(&mut state.out, id, &payload)?;
            state.out.push(b'\n');
            answer
        };
        shared.written.notify_one();
        answer.await.context("the connection is over")
    }
}

async fn write_requests(shared: Arc<Shared>, mut write: OwnedWriteHalf) -> Result<()> {
    let mut batch = Vec::new();
    loop {
        shared.written.notified().await;
        std::mem::swap(&mut batch, &mut lock(&shared.state).out);
        write.write_all(&batch).await?;
        batch.clear();
    }
}

async fn read_answers(shared: Arc<Shared>, mut read: OwnedReadHalf) -> Result<()> {
    let mut lines = Lines::default();
    let result = async {
        while lines.fill(&mut read).await? {
            let mut state = lock(&shared.state);
            while let Some(line) = lines.next()? {
                state.waiting.complete(line)?;
            }
        }
        Ok(())
    };
    let result = result.await;
    lock(&shared.state).waiting.close();
    result
}

/// Splits input into lines without copying them.
#[derive(Debug, Default)]
struct Lines {
    buffer: Vec<u8>,
    /// The start of the next line.
    start: usize,
    /// The position up to which the buffer has no further line end.
    searched: usize,
    /// Whether the last read filled the buffer.
    filled: bool,
}

impl Lines {
    /// Reads once; returns false at the end of input.
    async fn fill(&mut self, read: &mut (impl AsyncReadExt + Unpin)) -> Result<bool> {
        self.buffer.drain(..self.start);
        self.searched -= self.start;
        self.start = 0;
        let (first, enough) = BUFFER;
        let capacity = self.buffer.capacity();
        let crowded = self.buffer.len() > capacity / 2;
        if capacity == 0 {
            self.buffer.reserve_exact(first);
        } else if crowded || (self.filled && capacity < enough) {
            self.buffer.reserve(2 * capacity - self.buffer.len());
        }
        let count = read.read_buf(&mut self.buffer).await?;
        self.filled = self.buffer.len() == self.buffer.capacity();
        Ok(count > 0)
    }

    /// Returns the next whole line, without its line end.
    fn next(&mut self) -> Result<Option<&[u8]>> {
        if let Some(found) = memchr::memchr(b'\n', &self.buffer[self.searched..]) {
            let line = self.start..self.searched + found;
            self.start = line.end + 1;
            self.searched = self.start;
            return Ok(Some(&self.buffer[line]));
        }
        self.searched = self.buffer.len();
        let length = self.searched - self.start;
        ensure!(
            length <= MAX_MESSAGE as usize,
            "a line of more than {MAX_MESSAGE} bytes"
        );
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::{BUFFER, Lines};

    async fn all_lines(mut input: &[u8]) -> Vec<String> {
        let (mut lines, mut found) = (Lines::default(), Vec::new());
        while lines.fill(&mut input).await.unwrap() {
            while let Some(line) = lines.next().unwrap() {
                found.push(String::from_utf8(line.to_vec()).unwrap());
            }
        }
        found
    }

    #[tokio::test]
    async fn lines_of_every_length_survive_the_cutting() {
        let expected: Vec<String> = [0, 1, 220, BUFFER.0, 3, 3 * BUFFER.1, 7]
            .iter()
            .map(|length| "x".repeat(*length))
            .collect();
        let input = expected.join("\n") + "\n";
        assert_eq!(all_lines(input.as_bytes()).await, expected);
    }
}
