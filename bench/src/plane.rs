//! What is inside a box, reached over a Unix socket: output as a stream, the first byte of it, files, and commands that have
//! ended; beside the least that could move the same bytes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use box_protocol::actions::{
    BoxCreate, CommandChunk, CommandList, CommandStart, FileRead, FileWrite, FileWriteParams,
};
use box_protocol::{Blob, UploadId};
use box_rpc::{Action, Options, Peer, Router, Session};
use box_runtime::native::{NativeBackend, NativeConfig};
use box_runtime::{BoxRuntime, RuntimeConfig};
use box_transports::server::Server;
use box_transports::{ConnectOptions, Endpoint, ListenOptions};
use futures::StreamExt as _;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::boxes::{bar, rate_bar};
use crate::process::{self, Process};
use crate::statistics::median;

/// Bytes of output that are streamed, and of a file that goes in and out.
const STREAMED: usize = 256 << 20;
const FILE: usize = 256 << 20;
/// Bytes of a file that go in one message.
const PIECE: usize = 2 << 20;
/// Commands that have ended and are kept.
const ENDED: usize = 10_000;
/// How often a short thing is done in a round.
const RUNS: usize = 100;

/// Runs everything and prints the bars.
pub(crate) fn run(rounds: u32) -> Result<()> {
    process::runtime()?.block_on(async {
        let bench = Bench::start().await?;
        println!("| bar | ours | beside | ratio (lowest to highest round) | wanted | verdict |");
        println!("|---|---|---|---|---|---|");
        bench.streams(rounds).await?;
        bench.first_byte(rounds).await?;
        bench.files(rounds).await?;
        bench.ended().await
    })
}

struct Bench {
    peer: Peer,
    /// A place in memory that both sides of a comparison read from.
    place: tempfile::TempDir,
    _client: Session,
    _server: Server,
}

impl Bench {
    async fn start() -> Result<Self> {
        let mut config = NativeConfig::this_program()?;
        config.cgroup_parent = format!("box-bench-{}", std::process::id());
        let runtime = BoxRuntime::start(RuntimeConfig::with(NativeBackend::new(config)));
        let place = tempfile::tempdir_in("/dev/shm")?;
        let endpoint: Endpoint = format!("unix:{}/socket", place.path().display()).parse()?;
        let listener = endpoint.listen(&ListenOptions::default()).await?;
        let server = Server::start(listener, runtime.router(), |_| Options::default());
        let connection = endpoint.connect(&ConnectOptions::default()).await?;
        let client = Session::start_boxed(connection, Router::empty(), Options::default());
        let bench = Self {
            peer: client.peer(),
            place,
            _client: client,
            _server: server,
        };
        let spec = json!({"spec": {"session_id": "b", "memory_mb": 4096, "persistent": true}});
        bench.call::<BoxCreate>(spec).await?;
        Ok(bench)
    }

    async fn call<A: Action>(&self, params: Value) -> Result<A::Result>
    where
        A::Params: DeserializeOwned,
    {
        let params: A::Params = serde_json::from_value(params)?;
        Ok(self.peer.call::<A>(&params).await?)
    }

    /// Runs a program to its end, reading its output; how many bytes of it came, and when the first did.
    async fn read(&self, argv: &[&str], view: &str) -> Result<(usize, Option<Instant>)> {
        let params = json!({"session_id": "b", "program": {"argv": argv}, "cwd": "/tmp", "retain_ms": 0,
            "attach": {"view": view}});
        let params = serde_json::from_value(params)?;
        let mut chunks = self.peer.stream::<CommandStart>(&params).await?;
        let (mut bytes, mut first) = (0, None);
        while let Some(chunk) = chunks.next().await {
            let length = match chunk? {
                CommandChunk::Text(piece) => piece.data.len(),
                CommandChunk::Bytes(piece) => piece.data.len(),
                _ => 0,
            };
            if length > 0 {
                first.get_or_insert_with(Instant::now);
            }
            bytes += length;
        }
        let info = chunks.finish().await?.info;
        ensure!(info.exit.and_then(|exit| exit.code) == Some(0), "{info:?}");
        Ok((bytes, first))
    }

    async fn streams(&self, rounds: u32) -> Result<()> {
        let file = self.place.path().join("text");
        let line = b"a line of text, as programs write it: 0123456789\n";
        let text: Vec<u8> = line.iter().copied().cycle().take(STREAMED).collect();
        std::fs::write(&file, &text)?;
        self.put("/tmp/text", &text).await?;
        let file = file.to_str().context("a path")?;
        let (mut ours, mut pipes, mut mux) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            pipes.push(rate(|| two_pipes(file))?);
            mux.push(rate(|| multiplexed(file))?);
            let begun = Instant::now();
            let (bytes, _) = self.read(&["cat", "/tmp/text"], "text").await?;
            ensure!(bytes == STREAMED, "{bytes} bytes came");
            ours.push(megabytes(STREAMED, begun));
        }
        show(
            "output as text over a Unix socket",
            &ours,
            "cat through two pipes",
            &pipes,
            0.25,
        );
        show(
            "output as text over a Unix socket",
            &ours,
            "a hand-written multiplexer",
            &mux,
            0.8,
        );
        Ok(())
    }

    async fn first_byte(&self, rounds: u32) -> Result<()> {
        let (mut ours, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let (mut round, mut floor) = (Vec::new(), Vec::new());
            for _ in 0..RUNS {
                let begun = Instant::now();
                let mut child = Command::new("/bin/echo")
                    .arg("x")
                    .stdout(Stdio::piped())
                    .spawn()?;
                let mut out = child.stdout.take().context("a pipe")?;
                out.read_exact(&mut [0])?;
                floor.push(begun.elapsed().as_secs_f64() * 1e6);
                child.wait()?;
                let begun = Instant::now();
                let (_, first) = self.read(&["/bin/echo", "x"], "text").await?;
                round.push((first.context("no output")? - begun).as_secs_f64() * 1e6);
            }
            ours.push(median(&mut round));
            bare.push(median(&mut floor));
        }
        let mut ratios: Vec<f64> = ours
            .iter()
            .zip(&bare)
            .map(|(ours, bare)| ours / bare)
            .collect();
        let of = |times: &mut [f64]| format!("{:.0} us", median(times));
        let beside = format!("a plain spawn: {}", of(&mut bare));
        bar(
            "first byte of a warm command",
            &of(&mut ours),
            &beside,
            &mut ratios,
            1.5,
            None,
        );
        Ok(())
    }

    /// Writes a file in pieces.
    async fn put(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let id = UploadId::new("bench")?;
        let pieces = bytes.len().div_ceil(PIECE);
        for (number, piece) in bytes.chunks(PIECE).enumerate() {
            let params = json!({"session_id": "b", "path": path, "data": "",
                "upload": {"id": id, "offset": number * PIECE, "done": number + 1 == pieces}});
            let mut params: FileWriteParams = serde_json::from_value(params)?;
            params.data = Blob::from(piece.to_vec());
            self.peer.call::<FileWrite>(&params).await?;
        }
        Ok(())
    }

    async fn files(&self, rounds: u32) -> Result<()> {
        let bytes: Vec<u8> = (0..=250_u8).cycle().take(FILE).collect();
        let directory = tempfile::tempdir()?;
        let source = directory.path().join("source");
        std::fs::write(&source, &bytes)?;
        let (mut up, mut down, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let begun = Instant::now();
            let copy = directory.path().join("copy");
            std::fs::copy(&source, &copy)?;
            std::fs::File::open(&copy)?.sync_all()?;
            copies.push(megabytes(FILE, begun));
            std::fs::remove_file(&copy)?;
            let begun = Instant::now();
            self.put("/tmp/file", &bytes).await?;
            up.push(megabytes(FILE, begun));
            let begun = Instant::now();
            let params = serde_json::from_value(json!({"session_id": "b", "path": "/tmp/file"}))?;
            let mut chunks = self.peer.stream::<FileRead>(&params).await?;
            let mut read = 0;
            while let Some(chunk) = chunks.next().await {
                read += chunk?.data.len();
            }
            chunks.finish().await?;
            ensure!(read == FILE, "{read} bytes came");
            down.push(megabytes(FILE, begun));
        }
        show("upload of a file", &up, "cp and a sync", &copies, 0.3);
        show("download of a file", &down, "cp and a sync", &copies, 0.3);
        Ok(())
    }

    /// Commands that have ended, in the memory of their agent and of the runtime.
    async fn ended(&self) -> Result<()> {
        let agent = agent()?;
        let before = agent.resident_bytes()? + Process::own().resident_bytes()?;
        for number in 0..ENDED {
            let params = json!({"session_id": "b", "command_id": format!("ended-{number}"),
                "program": {"argv": ["/bin/echo", "done"]}, "cwd": "/tmp", "retain_ms": -1});
            self.call::<CommandStart>(params).await?;
        }
        loop {
            let running = json!({"session_id": "b", "running": true});
            if self.call::<CommandList>(running).await?.items.is_empty() {
                break;
            }
        }
        let after = agent.resident_bytes()? + Process::own().resident_bytes()?;
        #[expect(clippy::cast_precision_loss, reason = "a size in bytes")]
        let each = after.saturating_sub(before) as f64 / ENDED as f64;
        let name = format!("a command that has ended ({ENDED} kept), 2 kB = 1");
        bar(
            &name,
            &format!("{each:.0} B"),
            "",
            &mut [each / 2048.0],
            1.0,
            None,
        );
        Ok(())
    }
}

/// The agent of the one box there is; the spares have no command.
fn agent() -> Result<Process> {
    let mut agents = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let path = entry.path();
        let comm = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        if comm.trim() == "box-init" {
            let pid = entry.file_name().to_string_lossy().parse()?;
            agents.push(Process::with_pid(pid));
        }
    }
    let size = |process: &Process| process.resident_bytes().unwrap_or_default();
    agents.into_iter().max_by_key(size).context("no box")
}

fn two_pipes(file: &str) -> Result<()> {
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

/// Reads a program's pipe and sends it on as frames: a number, a length, bytes. The other end takes them apart.
fn multiplexed(file: &str) -> Result<()> {
    let (mut near, mut far) = UnixStream::pair()?;
    let file = file.to_owned();
    let sender = std::thread::spawn(move || -> Result<()> {
        let mut child = Command::new("cat")
            .arg(file)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut out = child.stdout.take().context("a pipe")?;
        let mut buffer = vec![0; 8 + (32 << 10)];
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

fn rate(run: impl FnOnce() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    run()?;
    Ok(megabytes(STREAMED, begun))
}

#[expect(clippy::cast_precision_loss, reason = "a number of bytes")]
fn megabytes(bytes: usize, begun: Instant) -> f64 {
    bytes as f64 / 1e6 / begun.elapsed().as_secs_f64()
}

fn show(name: &str, ours: &[f64], peer: &str, theirs: &[f64], least: f64) {
    let mut ratios: Vec<f64> = ours
        .iter()
        .zip(theirs)
        .map(|(ours, theirs)| ours / theirs)
        .collect();
    let of = |rates: &[f64]| format!("{:.0} MB/s", median(&mut rates.to_vec()));
    let beside = format!("{peer}: {}", of(theirs));
    rate_bar(name, &of(ours), &beside, &mut ratios, least, None);
}
