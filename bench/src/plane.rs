//! Output, files and ended commands of a box, over a Unix socket.
//!
//! Minimal programs that move the same bytes are measured beside them.

mod peers;

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use box_protocol::actions::{
    BoxCreate, CommandChunk, CommandGet, CommandStart, FileRead, FileRemove, FileWrite,
    FileWriteParams, ShellCreate, ShellRun,
};
use box_protocol::{Blob, UploadId};
use box_rpc::{Action, Caller, Options, Peer, Router, Session};
use box_runtime::native::{NativeBackend, NativeConfig};
use box_runtime::{BoxRuntime, RuntimeConfig};
use box_transports::server::Server;
use box_transports::{ConnectOptions, Endpoint, ListenOptions};
use futures::StreamExt as _;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::boxes::{bar, rate_bar};
use crate::process::{self, Process};
use crate::rounds::Plan;
use crate::statistics::median;

/// The bytes of streamed output, and of a transferred file.
const STREAMED: usize = 256 << 20;
const FILE: usize = 256 << 20;
/// The bytes of a file per message, and the number of messages without an answer.
const PIECE: usize = 512 << 10;
const PIECES_AHEAD: usize = 4;
/// The number of ended commands that are kept.
const ENDED: usize = 10_000;
/// How long an agent is idle before its memory is measured.
const REST: Duration = Duration::from_millis(500);
/// The number of runs of a short operation per round.
const RUNS: usize = 100;

/// Runs all measurements and prints the bars.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    let rounds = plan.rounds;
    let parts = plan.only.as_deref();
    let parts = parts.unwrap_or("streams,first-byte,builtins,files,ended");
    process::runtime()?.block_on(async {
        let bench = Bench::start().await?;
        crate::report::heading();
        for part in parts.split(',') {
            match part {
                "streams" => bench.streams(rounds).await?,
                "first-byte" => bench.first_byte(rounds).await?,
                "builtins" => bench.builtins(rounds).await?,
                "files" => bench.files(rounds).await?,
                "ended" => bench.ended().await?,
                _ => bail!("no part called {part}"),
            }
        }
        Ok(())
    })
}

struct Bench {
    peer: Peer,
    /// A directory in memory that both sides of a comparison read from.
    place: tempfile::TempDir,
    _client: Session,
}

/// Serves a runtime on a separate thread, and signals when it listens.
fn serve(endpoint: &Endpoint, ready: &mpsc::Sender<()>) -> Result<()> {
    process::runtime()?.block_on(async {
        let mut config = NativeConfig::this_program()?;
        config.cgroup_parent = format!("box-bench-{}", std::process::id());
        let runtime = BoxRuntime::start(RuntimeConfig::with(NativeBackend::new(config)));
        let listener = endpoint.listen(&ListenOptions::default()).await?;
        let _server = Server::start(listener, runtime.router(), |_| Options::new(Caller::Local));
        ready.send(())?;
        std::future::pending().await
    })
}

/// Creates a file of these bytes on the disk that `cp` copies to.
fn source(directory: &Path, bytes: &[u8]) -> Result<std::path::PathBuf> {
    let source = directory.join("source");
    std::fs::write(&source, bytes)?;
    std::fs::File::open(&source)?.sync_all()?;
    Ok(source)
}

impl Bench {
    async fn start() -> Result<Self> {
        let place = tempfile::tempdir_in("/dev/shm")?;
        let endpoint: Endpoint = format!("unix:{}/socket", place.path().display()).parse()?;
        let (ready, listens) = mpsc::channel();
        let served = endpoint.clone();
        std::thread::spawn(move || serve(&served, &ready));
        listens.recv().context("the runtime did not start")?;
        let connection = endpoint.connect(&ConnectOptions::default()).await?;
        let client = Session::start_boxed(connection, Router::empty(), Options::client());
        let bench = Self {
            peer: client.peer(),
            place,
            _client: client,
        };
        let spec = json!({"spec": {"box_id": "b", "memory_mb": 4096, "persistent": true}});
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

    /// Runs a program and reads its output.
    ///
    /// Returns the number of bytes, and when the first one arrived.
    async fn read(&self, argv: &[&str], view: &str) -> Result<(usize, Option<Instant>)> {
        let params = json!({"box_id": "b", "program": {"argv": argv}, "cwd": "/tmp", "retain_ms": 0,
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
        let (mut ours, mut bytes) = (Vec::new(), Vec::new());
        let (mut pipes, mut mux, mut raw) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            pipes.push(rate(STREAMED, || peers::two_pipes(file))?);
            raw.push(rate(STREAMED, || peers::raw_frames(file))?);
            mux.push(rate(STREAMED, || peers::json_frames(file))?);
            for (view, rates) in [("text", &mut ours), ("bytes", &mut bytes)] {
                let begun = Instant::now();
                let (came, _) = self.read(&["cat", "/tmp/text"], view).await?;
                ensure!(came == STREAMED, "{came} bytes came");
                rates.push(megabytes(STREAMED, begun));
            }
        }
        self.remove("/tmp/text").await?;
        let text = "output as text over a Unix socket";
        show(text, &ours, "cat through two pipes", &pipes, Some(0.25));
        let json = "a multiplexer of the same JSON";
        show(text, &ours, json, &mux, Some(0.8));
        show(text, &ours, "a multiplexer of raw frames", &raw, None);
        show("output as bytes", &bytes, json, &mux, None);
        Ok(())
    }

    /// Measures a builtin in a persistent shell, beside a process for it.
    async fn builtins(&self, rounds: u32) -> Result<()> {
        for language in ["bash", "sh"] {
            let create =
                json!({"box_id": "b", "shell_id": language, "language": language, "cwd": "/tmp"});
            self.call::<ShellCreate>(create).await?;
            let run = json!({"box_id": "b", "shell_id": language, "text": "true",
                "attach": {"view": "text"}});
            let run = serde_json::from_value(run)?;
            let (mut ours, mut bare) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                let (mut round, mut floor) = (Vec::new(), Vec::new());
                for _ in 0..RUNS {
                    let begun = Instant::now();
                    ensure!(Command::new("/bin/true").status()?.success());
                    floor.push(begun.elapsed().as_secs_f64() * 1e6);
                    let begun = Instant::now();
                    let chunks = self.peer.stream::<ShellRun>(&run).await?;
                    let info = chunks.finish().await?.info;
                    round.push(begun.elapsed().as_secs_f64() * 1e6);
                    ensure!(info.exit.and_then(|exit| exit.code) == Some(0), "{info:?}");
                }
                ours.push(median(&mut round));
                bare.push(median(&mut floor));
            }
            let name = format!("run of a builtin in {language}");
            times(&name, &mut ours, "a spawn of /bin/true", &mut bare, 0.3);
        }
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
        let name = "first byte of a warm command";
        times(name, &mut ours, "a plain spawn", &mut bare, 1.5);
        Ok(())
    }

    async fn remove(&self, path: &str) -> Result<()> {
        let params = json!({"box_id": "b", "paths": [path]});
        self.call::<FileRemove>(params).await?;
        Ok(())
    }

    /// Writes a file in pieces.
    async fn put(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let id = UploadId::new("bench")?;
        let pieces = bytes.len().div_ceil(PIECE);
        let send = |(number, piece): (usize, &[u8])| {
            let params = json!({"box_id": "b", "path": path, "data": "",
                "upload": {"id": id, "offset": number * PIECE, "done": number + 1 == pieces}});
            let data = Blob::from(piece.to_vec());
            async move {
                let mut params: FileWriteParams = serde_json::from_value(params)?;
                params.data = data;
                self.peer.call::<FileWrite>(&params).await?;
                Ok::<_, anyhow::Error>(())
            }
        };
        let answers = futures::stream::iter(bytes.chunks(PIECE).enumerate().map(send));
        let mut answers = answers.buffered(PIECES_AHEAD);
        while let Some(answered) = answers.next().await {
            answered?;
        }
        Ok(())
    }

    async fn files(&self, rounds: u32) -> Result<()> {
        let bytes: Vec<u8> = (0..=250_u8).cycle().take(FILE).collect();
        let directory = tempfile::tempdir()?;
        let source = source(directory.path(), &bytes)?;
        let (mut up, mut down, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        let (mut floor, mut codec) = (Vec::new(), Vec::new());
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
            let params = serde_json::from_value(json!({"box_id": "b", "path": "/tmp/file"}))?;
            let mut chunks = self.peer.stream::<FileRead>(&params).await?;
            let mut read = 0;
            while let Some(chunk) = chunks.next().await {
                read += chunk?.data.len();
            }
            chunks.finish().await?;
            ensure!(read == FILE, "{read} bytes came");
            down.push(megabytes(FILE, begun));
            self.remove("/tmp/file").await?;
            let same = bytes.clone();
            floor.push(rate(FILE, || peers::json_file(same))?);
            codec.push(rate(FILE, || peers::base64(&bytes))?);
        }
        let copy = "cp and a sync";
        show("upload of a file", &up, copy, &copies, Some(0.3));
        show("download of a file", &down, copy, &copies, Some(0.3));
        let json = "the same JSON from memory over a Unix socket";
        show("upload of a file", &up, json, &floor, None);
        show("download of a file", &down, json, &floor, None);
        show("the same JSON", &floor, copy, &copies, None);
        show("base64 there and back", &codec, copy, &copies, None);
        Ok(())
    }

    /// Measures ended commands in the memory of their agent and of the runtime.
    async fn ended(&self) -> Result<()> {
        let agent = self.agent().await?;
        // Exclude the one-time cost of the first commands.
        self.end_some("first", ENDED / 10).await?;
        let before = (agent.resident_bytes()?, Process::own().resident_bytes()?);
        self.end_some("ended", ENDED).await?;
        let after = (agent.resident_bytes()?, Process::own().resident_bytes()?);
        #[expect(clippy::cast_precision_loss, reason = "a size in bytes")]
        let each = |before: u64, after: u64| after.saturating_sub(before) as f64 / ENDED as f64;
        let (inside, outside) = (each(before.0, after.0), each(before.1, after.1));
        let both = inside + outside;
        let name = format!("a command that has ended ({ENDED} kept), 2 kB = 1");
        bar(
            &name,
            &format!("{both:.0} B"),
            &format!("of it in the agent: {inside:.0} B"),
            &mut [both / 2048.0],
            1.0,
            None,
        );
        Ok(())
    }

    /// Runs commands to their end, and asks for each by its name.
    ///
    /// A list of all commands would take megabytes at both ends, which are not a cost of a command.
    async fn end_some(&self, name: &str, count: usize) -> Result<()> {
        for number in 0..count {
            let params = json!({"box_id": "b", "command_id": format!("{name}-{number}"),
                "program": {"argv": ["/bin/echo", "done"]}, "cwd": "/tmp", "retain_ms": -1});
            self.call::<CommandStart>(params).await?;
        }
        for number in 0..count {
            let one = json!({"box_id": "b", "command_id": format!("{name}-{number}")});
            while self.call::<CommandGet>(one.clone()).await?.exit.is_none() {}
        }
        // An idle agent returns unused memory to the system.
        tokio::time::sleep(REST).await;
        Ok(())
    }

    /// Returns the agent of the box, which is the parent of a command in it.
    ///
    /// All other agents wait for boxes.
    async fn agent(&self) -> Result<Process> {
        let seconds = format!("86400.{}", std::process::id());
        let params = json!({"box_id": "b", "command_id": "asleep", "cwd": "/tmp", "retain_ms": 0,
            "program": {"argv": ["sleep", seconds]}});
        self.call::<CommandStart>(params).await?;
        for entry in std::fs::read_dir("/proc")?.flatten() {
            let path = entry.path();
            let words = std::fs::read_to_string(path.join("cmdline")).unwrap_or_default();
            if words == format!("sleep\0{seconds}\0") {
                let status = std::fs::read_to_string(path.join("status"))?;
                let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
                let parent = parent.context("no parent")?.trim().parse()?;
                return Ok(Process::with_pid(parent));
            }
        }
        bail!("the box has no agent")
    }
}

fn rate(bytes: usize, run: impl FnOnce() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    run()?;
    Ok(megabytes(bytes, begun))
}

#[expect(clippy::cast_precision_loss, reason = "a number of bytes")]
fn megabytes(bytes: usize, begun: Instant) -> f64 {
    bytes as f64 / 1e6 / begun.elapsed().as_secs_f64()
}

fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    let pairs = ours.iter().zip(theirs);
    pairs.map(|(ours, theirs)| ours / theirs).collect()
}

/// Prints two rates; without a bar they are only for comparison.
fn show(name: &str, ours: &[f64], peer: &str, theirs: &[f64], least: Option<f64>) {
    let of = |rates: &[f64]| format!("{:.0} MB/s", median(&mut rates.to_vec()));
    let beside = format!("{peer}: {}", of(theirs));
    let mut ratios = ratios(ours, theirs);
    match least {
        Some(least) => rate_bar(name, &of(ours), &beside, &mut ratios, least, None),
        None => println!(
            "| {name} | {} | {beside} | {:.2} | - | - |",
            of(ours),
            median(&mut ratios)
        ),
    }
}

/// Prints two times.
fn times(name: &str, ours: &mut [f64], peer: &str, theirs: &mut [f64], most: f64) {
    let mut ratios = ratios(ours, theirs);
    let of = |times: &mut [f64]| format!("{:.0} us", median(times));
    let beside = format!("{peer}: {}", of(theirs));
    bar(name, &of(ours), &beside, &mut ratios, most, None);
}
