//! A simulated network that cuts connections at random bytes.
//!
//! No call is lost, and no call with a key runs twice.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use box_rpc::{
    Action, Call, Caller, Connection, Handle, Limits, Never, Options, Router, RpcError, Session,
};
use box_transports::line::Line;
use box_transports::reconnecting::{Connector, ReconnectOptions, Reconnecting};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use turmoil::net::{TcpListener, TcpStream};

const CALLS: u64 = 20_000;
const CALLERS: u64 = 50;
const PORT: u16 = 7000;

/// A job that must run once.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Job {
    number: u64,
    filling: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct JobResult {
    number: u64,
    run: u64,
}

struct RunJob;

impl Action for RunJob {
    const NAME: &'static str = "do";
    type Params = Job;
    type Result = JobResult;
    type Chunk = Never;
}

#[derive(Default)]
struct Worker {
    runs: Mutex<HashMap<u64, u64>>,
}

impl Handle<RunJob> for Worker {
    async fn handle(&self, job: Job, _: Call<RunJob>) -> Result<JobResult, RpcError> {
        let run = {
            let mut runs = self.runs.lock().unwrap();
            let run = runs.entry(job.number).or_default();
            *run += 1;
            *run
        };
        tokio::time::sleep(Duration::from_millis(job.number % 5)).await;
        Ok(JobResult {
            number: job.number,
            run,
        })
    }
}

/// Pseudo-random numbers that are the same in each run.
#[derive(Clone)]
struct Random(Arc<AtomicU64>);

impl Random {
    fn below(&self, limit: u64) -> u64 {
        let seed = self.0.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        let mut mixed = seed ^ (seed >> 30);
        mixed = mixed.wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed ^= mixed >> 27;
        (mixed.wrapping_mul(0x94D0_49BB_1331_11EB) >> 16) % limit
    }
}

/// A stream that breaks after this many bytes, read or written, in the middle of a message.
struct BreakingStream {
    stream: TcpStream,
    left: u64,
    /// Whether the stream ends with an error, or as if the peer had closed it.
    rude: bool,
}

impl BreakingStream {
    fn broken(&self) -> io::Result<()> {
        if self.rude {
            Err(io::ErrorKind::ConnectionReset.into())
        } else {
            Ok(())
        }
    }
}

impl AsyncRead for BreakingStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.left == 0 {
            return Poll::Ready(self.broken());
        }
        let most = usize::try_from(self.left)
            .unwrap_or(usize::MAX)
            .min(buf.remaining())
            .min(8192);
        let mut space = [0; 8192];
        let mut part = ReadBuf::new(&mut space[..most]);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut part))?;
        buf.put_slice(part.filled());
        self.left -= part.filled().len() as u64;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for BreakingStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.left == 0 {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let most = usize::try_from(self.left)
            .unwrap_or(usize::MAX)
            .min(bytes.len());
        let count = ready!(Pin::new(&mut self.stream).poll_write(cx, &bytes[..most]))?;
        self.left -= count as u64;
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

fn connection(stream: impl AsyncRead + AsyncWrite + Send + 'static) -> Box<dyn Connection> {
    let (read, write) = tokio::io::split(stream);
    Box::new(Line::new(read, write, &Limits::default()))
}

async fn serve(router: Router) -> turmoil::Result {
    let listener = TcpListener::bind(("0.0.0.0", PORT)).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        let session = Session::start_boxed(
            connection(stream),
            router.clone(),
            Options::new(Caller::Local),
        );
        tokio::spawn(async move { session.closed().await });
    }
}

fn fragile_connector(random: Random, cuts: Arc<AtomicU64>) -> Connector {
    Box::new(move || {
        let (random, cuts) = (random.clone(), Arc::clone(&cuts));
        Box::pin(async move {
            let stream = TcpStream::connect(("server", PORT)).await?;
            cuts.fetch_add(1, Ordering::Relaxed);
            let (left, rude) = (200 + random.below(60_000), random.below(2) == 0);
            Ok(connection(BreakingStream { stream, left, rude }))
        })
    })
}

fn run_network(seed: u64) {
    let worker = Arc::new(Worker::default());
    let router = Router::builder(Arc::clone(&worker)).on::<RunJob>().build();
    let mut network = turmoil::Builder::new()
        .rng_seed(seed)
        .simulation_duration(Duration::from_hours(1))
        .max_message_latency(Duration::from_millis(5))
        .build();
    network.host("server", move || serve(router.clone()));
    let random = Random(Arc::new(AtomicU64::new(seed)));
    let (cuts, tries) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let counted = (Arc::clone(&cuts), Arc::clone(&tries));
    network.client("client", async move {
        let options = ReconnectOptions {
            first_wait: Duration::from_millis(2),
            longest_wait: Duration::from_millis(20),
            ..ReconnectOptions::default()
        };
        let link = Arc::new(Reconnecting::with_connector(
            fragile_connector(random.clone(), cuts),
            options,
        ));
        let callers = (0..CALLERS).map(|caller| {
            let (link, random, tries) = (Arc::clone(&link), random.clone(), Arc::clone(&tries));
            tokio::spawn(async move {
                for number in (0..CALLS).filter(|number| number % CALLERS == caller) {
                    let size = usize::try_from(random.below(300)).unwrap();
                    let job = Job {
                        number,
                        filling: "·".repeat(size),
                    };
                    let done = loop {
                        let peer = link.connected().await.unwrap();
                        tries.fetch_add(1, Ordering::Relaxed);
                        let request = peer.request::<RunJob>(&job).key(format!("job-{number}"));
                        match request.call().await {
                            Ok(done) => break done,
                            Err(error) => {
                                assert_eq!(error.code(), box_rpc::Code::Unavailable, "{error}");
                            }
                        }
                    };
                    assert_eq!(done, JobResult { number, run: 1 });
                }
            })
        });
        for caller in futures::future::join_all(callers).await {
            caller?;
        }
        Ok(())
    });
    network.run().unwrap();
    let runs = worker.runs.lock().unwrap();
    assert_eq!(runs.len() as u64, CALLS, "none lost");
    assert!(runs.values().all(|run| *run == 1), "none run twice");
    let (cuts, tries) = (
        counted.0.load(Ordering::Relaxed),
        counted.1.load(Ordering::Relaxed),
    );
    assert!(
        cuts > 100 && tries > CALLS,
        "{cuts} cuts, {tries} tries: too few to test anything"
    );
}

#[test]
fn twenty_thousand_calls_over_cut_connections_run_exactly_once() {
    let seed = std::env::var("BOX_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(20_261_116);
    run_network(seed);
}
