//! A healthy client of `boxd serve`, with and without a thousand stalled clients.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::boxes::bar;
use crate::statistics::median;

/// The number of stalled clients per listener.
const STALLED: usize = 1000;
/// The healthy client's calls per round.
const CALLS: usize = 5000;
/// The data of stalled HTTP clients.
///
/// It is nothing, half a line, half a head, or a head without its body.
const HALF_REQUESTS: [&str; 4] = [
    "",
    "GET /hea",
    "GET /healthz HTTP/1.1\r\nHost: local",
    "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
];
/// The data of stalled RPC clients.
const HALF_MESSAGES: [&str; 4] = [
    "",
    "{",
    r#"{"jsonrpc":"2.0","id":1,"#,
    r#"{"jsonrpc":"2.0","id":1,"method":"system.hea"#,
];

/// Measures both listeners and prints their bars.
pub(crate) fn run(rounds: u32) -> Result<()> {
    // Set the limit before the server starts, because the server inherits it.
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files)?;
    let server = Server::start()?;
    crate::report::heading();
    let get = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    compare("HTTP", &server.http, rounds, &HALF_REQUESTS, |client| {
        client.write(get)?;
        client.answer()
    })?;
    let call = concat!(
        r#"{"jsonrpc":"2.0","id":1,"method":"system.health","params":{}}"#,
        "\n"
    );
    compare(
        "RPC over TCP",
        &server.tcp,
        rounds,
        &HALF_MESSAGES,
        |client| {
            client.write(call)?;
            client.line().map(drop)
        },
    )
}

/// Compares the 99th percentiles with and without stalled clients, in turn.
fn compare(
    name: &str,
    address: &str,
    rounds: u32,
    said: &[&str; 4],
    call: impl Fn(&mut Client) -> Result<()>,
) -> Result<()> {
    let (mut alone, mut among, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        alone.push(slowest(address, &call)?);
        let stalled: Vec<TcpStream> = (0..STALLED)
            .map(|number| {
                let mut stream = TcpStream::connect(address)?;
                stream.write_all(said[number % said.len()].as_bytes())?;
                Ok(stream)
            })
            .collect::<Result<_>>()?;
        among.push(slowest(address, &call)?);
        drop(stalled);
        ratios.push(among[among.len() - 1] / alone[alone.len() - 1]);
    }
    let (alone, among) = (median(&mut alone), median(&mut among));
    let title = format!("{name}, 99th percentile of a healthy client among {STALLED} stalled");
    let (ours, beside) = (format!("{among:.0} us"), format!("{alone:.0} us alone"));
    bar(&title, &ours, &beside, &mut ratios, 2.0, None);
    Ok(())
}

/// Returns the 99th percentile of a client's calls, in microseconds.
fn slowest(address: &str, call: &impl Fn(&mut Client) -> Result<()>) -> Result<f64> {
    let mut client = Client::to(address)?;
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let since = Instant::now();
        call(&mut client)?;
        times.push(since.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[CALLS * 99 / 100])
}

struct Client(BufReader<TcpStream>);

impl Client {
    fn to(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    fn write(&mut self, text: &str) -> Result<()> {
        Ok(self.0.get_mut().write_all(text.as_bytes())?)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.0.read_line(&mut line)? > 0, "the server hung up");
        Ok(line)
    }

    /// Reads one HTTP answer with a content length.
    fn answer(&mut self) -> Result<()> {
        ensure!(self.line()?.contains(" 200 "), "the server is not well");
        let mut length = 0;
        loop {
            let line = self.line()?.to_ascii_lowercase();
            if line == "\r\n" {
                break;
            }
            if let Some(said) = line.strip_prefix("content-length:") {
                length = said.trim().parse()?;
            }
        }
        let mut body = vec![0; length];
        Ok(self.0.read_exact(&mut body)?)
    }
}

/// The real program with both listeners.
struct Server {
    child: Child,
    http: String,
    tcp: String,
    _state: tempfile::TempDir,
}

impl Server {
    fn start() -> Result<Self> {
        let program = program()?;
        let state = tempfile::tempdir()?;
        let mut command = Command::new(program);
        command.args([
            "serve",
            "--http",
            "127.0.0.1:0",
            "--listen",
            "tcp://127.0.0.1:0",
            "--state-dir",
        ]);
        command
            .arg(state.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn()?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("no output")?;
        BufReader::new(stdout).read_line(&mut line)?;
        let address = |scheme| {
            let found = line
                .split_whitespace()
                .find_map(|word| word.strip_prefix(scheme));
            found.map(str::to_owned).context("the server is not ready")
        };
        let (http, tcp) = (address("http://")?, address("tcp://")?);
        Ok(Self {
            child,
            http,
            tcp,
            _state: state,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the path of the program beside this one.
fn program() -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name("boxd");
    if !path.exists() {
        bail!("boxd is not beside this program; cargo build --profile measured --package boxd");
    }
    Ok(path)
}
