//! The network of a box beside loopback: connections, bulk data and box start.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use box_protocol::actions::BoxExecParams;
use box_protocol::{HostName, Network, SpecDraft};
use box_runtime::native::{NativeBackend, NativeConfig};
use box_runtime::{BoxRuntime, Caller, RuntimeConfig};
use rustix::pipe::SpliceFlags;
use serde_json::json;

use crate::boxes::{bar, rate_bar};
use crate::statistics::median;

/// The number of connections per client and round.
const CONNECTS: usize = 500;
/// The bytes transferred per round.
const BULK: usize = 1 << 30;
/// The number of boxes started per round.
const STARTS: usize = 30;
/// The path of this program in a box.
const PLACE: &str = "/mnt/bench";
/// The host name of the machine's loopback inside the box.
const NAME: &str = "peer.test";

/// Runs all measurements and prints the bars.
pub(crate) fn run(rounds: u32) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let bench = Bench::start("network")?;
        crate::report::heading();
        bench.connecting(rounds).await?;
        bench.bulk(rounds).await?;
        starting(rounds).await
    })
}

/// Runs the client, inside a box or outside; it prints microseconds.
pub(crate) fn client(what: &str, to: &str) -> Result<()> {
    let mut times = Vec::new();
    if what == "connect" {
        // Resolve the name only once, as for loopback.
        let to: Vec<SocketAddr> = std::net::ToSocketAddrs::to_socket_addrs(to)?.collect();
        for _ in 0..CONNECTS {
            let since = Instant::now();
            let mut stream = TcpStream::connect(&to[..])?;
            stream.read_exact(&mut [0])?;
            times.push(since.elapsed().as_secs_f64() * 1e6);
        }
    } else {
        let mut stream = TcpStream::connect(to)?;
        let mut buffer = vec![0; 256 << 10];
        let (since, mut moved) = (Instant::now(), 0);
        while moved < BULK {
            let read = stream.read(&mut buffer)?;
            ensure!(read > 0, "cut after {moved} bytes");
            moved += read;
        }
        times.push(since.elapsed().as_secs_f64() * 1e6);
    }
    println!("{}", median(&mut times));
    Ok(())
}

/// Serves each connection in a separate thread; returns the port.
fn serve(work: impl Fn(TcpStream) + Send + Sync + Copy + 'static) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || work(stream));
        }
    });
    Ok(port)
}

fn one_byte(mut stream: TcpStream) {
    let _ = stream.write_all(b"!");
}

fn much(mut stream: TcpStream) {
    let piece = vec![7; 256 << 10];
    while stream.write_all(&piece).is_ok() {}
}

/// Runs a minimal relay: one thread, one pipe, splice.
fn splicing(far: u16) -> Result<u16> {
    serve(move |near| {
        let Ok(from) = TcpStream::connect(("127.0.0.1", far)) else {
            return;
        };
        let Ok((output, input)) = rustix::pipe::pipe() else {
            return;
        };
        let _ = rustix::pipe::fcntl_setpipe_size(&input, 1 << 20);
        let flags = SpliceFlags::MOVE;
        while let Ok(mut held @ 1..) =
            rustix::pipe::splice(&from, None, &input, None, 1 << 20, flags)
        {
            while held > 0 {
                match rustix::pipe::splice(&output, None, &near, None, held, flags) {
                    Ok(moved @ 1..) => held -= moved,
                    _ => return,
                }
            }
        }
    })
}

struct Bench {
    runtime: BoxRuntime,
}

impl Bench {
    fn start(name: &str) -> Result<Self> {
        let mut config = NativeConfig::this_program()?;
        config.cgroup_parent = format!("box-bench-{}-{name}", std::process::id());
        let loopback: IpAddr = "127.0.0.1".parse()?;
        config.egress.policy = serde_json::from_value(json!({"allow": [NAME, loopback]}))?;
        config
            .egress
            .hosts
            .insert(HostName::new(NAME)?, vec![loopback]);
        // Remove the rate limit of a box, because the benchmark measures the network path.
        config.egress.connections_per_sec = 0;
        let runtime = BoxRuntime::start(RuntimeConfig::with(NativeBackend::new(config)));
        Ok(Self { runtime })
    }

    async fn exec(&self, network: Network, cmd: &str) -> Result<String> {
        let program = std::env::current_exe()?.canonicalize()?;
        let directory = program.parent().context("no directory")?;
        let name = program.file_name().context("no name")?.to_string_lossy();
        let spec = json!({"box_id": "bench", "network": network, "cmd": format!("{PLACE}/{name} {cmd}"), "timeout_sec": 120,
            "cpus": 4.0, "extra_mounts": [{"host_path": directory, "mount_path": PLACE, "mode": "ro"}]});
        let asked: BoxExecParams = serde_json::from_value(json!({ "spec": spec }))?;
        let ran = self.runtime.exec(&Caller::Local, asked).await?;
        ensure!(ran.exit_code == Some(0), "{ran:?}");
        Ok(ran.stdout)
    }

    /// Returns the results of a client in a box and of the same client outside.
    async fn both(&self, what: &str, inside: u16, outside: u16) -> Result<(f64, f64)> {
        let ours = self
            .exec(
                Network::On,
                &format!("network-client {what} {NAME}:{inside}"),
            )
            .await?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["network-client", what, &format!("127.0.0.1:{outside}")]);
        let beside = tokio::task::spawn_blocking(move || command.output()).await??;
        let beside = String::from_utf8(beside.stdout)?;
        Ok((ours.trim().parse()?, beside.trim().parse()?))
    }

    async fn connecting(&self, rounds: u32) -> Result<()> {
        let port = serve(one_byte)?;
        let (mut ours, mut beside, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let (one, other) = self.both("connect", port, port).await?;
            ours.push(one);
            beside.push(other);
            ratios.push(one / other);
        }
        let (ours, beside) = (median(&mut ours), median(&mut beside));
        let (ours, beside) = (format!("{ours:.0} us"), format!("loopback, {beside:.0} us"));
        bar(
            "connect and first byte",
            &ours,
            &beside,
            &mut ratios,
            3.0,
            None,
        );
        Ok(())
    }

    async fn bulk(&self, rounds: u32) -> Result<()> {
        let far = serve(much)?;
        let relay = splicing(far)?;
        let (mut ours, mut beside, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        #[expect(clippy::cast_precision_loss, reason = "a round number")]
        let rate = |us: f64| BULK as f64 / us;
        for _ in 0..rounds {
            let (one, other) = self.both("bulk", far, relay).await?;
            ours.push(rate(one));
            beside.push(rate(other));
            ratios.push(other / one);
        }
        let (ours, beside) = (median(&mut ours), median(&mut beside));
        let (ours, beside) = (
            format!("{ours:.0} MB/s"),
            format!("a splice relay on loopback, {beside:.0} MB/s"),
        );
        rate_bar("1 GiB into a box", &ours, &beside, &mut ratios, 0.8, None);
        Ok(())
    }

    /// Returns the median time to create a box, run `true` in it and delete it.
    async fn start_one(&self, network: Network) -> Result<f64> {
        let since = Instant::now();
        let spec = SpecDraft::new("start").network(network).cmd("true");
        let asked: BoxExecParams = serde_json::from_value(json!({ "spec": spec }))?;
        let ran = self.runtime.exec(&Caller::Local, asked).await?;
        let took = since.elapsed().as_secs_f64() * 1e6;
        ensure!(ran.exit_code == Some(0), "{ran:?}");
        let delete = serde_json::from_value(json!({"box_id": "start", "force": true}))?;
        self.runtime.delete(&Caller::Local, delete).await?;
        Ok(took)
    }
}

/// Measures the start with two runtimes, so that each prepares boxes of its kind.
async fn starting(rounds: u32) -> Result<()> {
    let (on, off) = (Bench::start("on")?, Bench::start("off")?);
    let (mut ours, mut beside, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (mut one, mut other) = (Vec::new(), Vec::new());
        for _ in 0..STARTS {
            for (bench, network, times) in [
                (&on, Network::On, &mut one),
                (&off, Network::Off, &mut other),
            ] {
                times.push(bench.start_one(network).await?);
                // Wait as between two calls, so that the runtime prepares the next box.
                tokio::time::sleep(std::time::Duration::from_millis(30)).await;
            }
        }
        let (one, other) = (median(&mut one), median(&mut other));
        ours.push(one);
        beside.push(other);
        ratios.push(one / other);
    }
    let (ours, beside) = (median(&mut ours), median(&mut beside));
    let (ours, beside) = (
        format!("{ours:.0} us"),
        format!("without a network, {beside:.0} us"),
    );
    bar(
        "a box with a network, from nothing to the end of `true`",
        &ours,
        &beside,
        &mut ratios,
        1.3,
        None,
    );
    Ok(())
}
