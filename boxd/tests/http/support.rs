//! A running `boxd serve`, and an HTTP client that sends exactly the bytes of a test.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use box_test_wait::LONG;
use box_test_wait::blocking::eventually;
use rustix::process::{Pid, Resource, Signal, getrlimit, kill_process, setrlimit};
use serde_json::Value;
use tempfile::TempDir;

/// Tokens of two callers.
pub(crate) const ANN: &str = "ann-0123456789abcdef0123456789abcdef";
pub(crate) const BOB: &str = "bob-0123456789abcdef0123456789abcdef";

/// A running server.
#[derive(Debug)]
pub(crate) struct RunningServer {
    child: Child,
    /// The addresses of its ready line.
    addresses: Vec<String>,
    log: Arc<Mutex<String>>,
    logging: Option<JoinHandle<()>>,
    /// The directory of its state.
    _directory: TempDir,
}

/// The settings of a server.
#[derive(Debug)]
pub(crate) struct Setup {
    command: Command,
    directory: TempDir,
}

impl Setup {
    /// An HTTP port on loopback, and a Unix socket.
    pub(crate) fn new() -> Self {
        Self::at("127.0.0.1:0")
    }

    /// An HTTP port at this address, and a Unix socket.
    pub(crate) fn at(http: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_boxd"));
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BOXD_")) {
            command.env_remove(name);
        }
        command
            .arg("serve")
            .args(["--http", http])
            .arg("--state-dir");
        command.arg(directory.path().join("state"));
        Self { command, directory }
    }

    /// Adds the tokens of both callers.
    pub(crate) fn with_tokens(mut self) -> Self {
        let file = self.directory.path().join("tokens");
        std::fs::write(&file, format!("ann {ANN}\nbob {BOB}\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        self.command.arg("--token-file").arg(file);
        self
    }

    /// The address of a Unix socket, for tests that name all listeners.
    pub(crate) fn unix(&self) -> String {
        let socket = self.directory.path().join("boxd.sock");
        format!("unix:{}", socket.display())
    }

    /// Adds command line arguments.
    pub(crate) fn args(mut self, arguments: &[&str]) -> Self {
        self.command.args(arguments);
        self
    }

    /// Adds an environment variable.
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs a server that must fail to start, and returns its status and output.
    pub(crate) fn fails(mut self) -> (ExitStatus, String) {
        let output = self.command.output().unwrap();
        assert!(output.stdout.is_empty());
        (output.status, String::from_utf8(output.stderr).unwrap())
    }

    /// Starts the server, and waits until it is ready.
    pub(crate) fn start(mut self) -> RunningServer {
        // Before the first of many connections: the program inherits this limit.
        let mut files = getrlimit(Resource::Nofile);
        files.current = files.maximum;
        setrlimit(Resource::Nofile, files).unwrap();
        let command = self.command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let logging = std::thread::spawn({
            let log = Arc::clone(&log);
            move || {
                for line in stderr.lines().map_while(Result::ok) {
                    log.lock().unwrap().push_str(&(line + "\n"));
                }
            }
        });
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let addresses = line.strip_prefix("boxd ready ").unwrap_or_else(|| {
            let _ = child.wait();
            panic!("not ready: {line:?} {}", log.lock().unwrap())
        });
        RunningServer {
            child,
            addresses: addresses.split_whitespace().map(str::to_owned).collect(),
            log,
            logging: Some(logging),
            _directory: self.directory,
        }
    }
}

impl RunningServer {
    /// The address with this scheme.
    pub(crate) fn address(&self, scheme: &str) -> &str {
        let found = self.addresses.iter().find(|text| text.starts_with(scheme));
        found.unwrap_or_else(|| panic!("no {scheme} in {:?}", self.addresses))
    }

    /// Host and port of the HTTP listener.
    pub(crate) fn http(&self) -> &str {
        self.address("http://").strip_prefix("http://").unwrap()
    }

    /// The URL of the RPC websocket.
    pub(crate) fn rpc(&self) -> String {
        format!("ws://{}/rpc/ws", self.http())
    }

    /// A client with one persistent connection.
    pub(crate) fn client(&self) -> Client {
        Client::to(self.http())
    }

    /// Sends one request on a new connection.
    pub(crate) fn get(&self, path: &str) -> Answer {
        self.client().get(path, &[])
    }

    /// Waits until the metrics have this line.
    pub(crate) fn wait_for(&self, line: &str) {
        eventually(&format!("the metrics have {line}"), || {
            self.get("/metrics").body.contains(line)
        });
    }

    /// Waits until the server has logged this text.
    pub(crate) fn wait_for_log(&self, text: &str) {
        let since = Instant::now();
        while !self.log().contains(text) {
            assert!(since.elapsed() < LONG, "no {text}: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The log so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits for the end of the server, and returns its status and its whole log.
    pub(crate) fn ended(&mut self) -> (ExitStatus, String) {
        let since = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(since.elapsed() < LONG, "it does not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        };
        if let Some(logging) = self.logging.take() {
            logging.join().unwrap();
        }
        (status, self.log())
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_some()) {
            return;
        }
        self.signal(Signal::TERM);
        let since = Instant::now();
        while self.child.try_wait().is_ok_and(|status| status.is_none()) {
            if since.elapsed() > LONG {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A received answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Header names are in lower case.
    headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A connection that sends exactly the given bytes.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) stream: BufReader<TcpStream>,
    host: String,
}

impl Client {
    pub(crate) fn to(host: &str) -> Self {
        let stream = TcpStream::connect(host).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            stream: BufReader::new(stream),
            host: host.to_owned(),
        }
    }

    pub(crate) fn write(&mut self, text: &str) {
        self.stream.get_mut().write_all(text.as_bytes()).unwrap();
    }

    /// Waits until the server has read everything that was written.
    pub(crate) fn wait_until_read(&self) {
        let stream = self.stream.get_ref();
        let here = stream.local_addr().unwrap().port();
        let there = stream.peer_addr().unwrap().port();
        // First all sent bytes must be acknowledged, then the server's receive queue must be empty.
        for (from, to, empty) in [(here, there, "00000000:"), (there, here, ":00000000")] {
            let (from, to) = (format!(":{from:04X}"), format!(":{to:04X}"));
            let since = Instant::now();
            loop {
                let all = std::fs::read_to_string("/proc/net/tcp").unwrap();
                let mut lines = all.lines().map(|line| line.split_whitespace().collect());
                let found = |line: &Vec<&str>| line[1].ends_with(&from) && line[2].ends_with(&to);
                if lines
                    .find(found)
                    .is_some_and(|line| line[4].contains(empty))
                {
                    break;
                }
                assert!(since.elapsed() < LONG, "not read: {all}");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// Requests a path with these headers, and with `Host` unless it is among them.
    pub(crate) fn get(&mut self, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.request("GET", path, headers)
    }

    pub(crate) fn request(&mut self, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
        let mut text = format!("{method} {path} HTTP/1.1\r\n");
        if !headers.iter().any(|(name, _)| *name == "Host") {
            text.extend(["Host: ", &self.host, "\r\n"]);
        }
        for (name, value) in headers {
            text.extend([name, ": ", value, "\r\n"]);
        }
        self.write(&(text + "\r\n"));
        self.answer(method == "HEAD")
    }

    /// Requests a websocket.
    pub(crate) fn upgrade(&mut self, headers: &[(&str, &str)]) -> Answer {
        let mut all = vec![
            ("Connection", "Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Version", "13"),
            ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ];
        all.extend(headers);
        self.get("/rpc/ws", &all)
    }

    /// Reads one answer.
    pub(crate) fn answer(&mut self, without_body: bool) -> Answer {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        let status = line.split(' ').nth(1).and_then(|word| word.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no answer: {line:?}"));
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim_end().split_once(':') else {
                break;
            };
            headers.push((name.to_lowercase(), value.trim().to_owned()));
        }
        let mut answer = Answer {
            status,
            headers,
            body: String::new(),
        };
        let length = answer.header("content-length");
        let length = length.map_or(0, |length| length.parse::<usize>().unwrap());
        if !without_body {
            let mut body = vec![0; length];
            self.stream.read_exact(&mut body).unwrap();
            answer.body = String::from_utf8(body).unwrap();
        }
        answer
    }

    /// The remaining bytes until the other end closes. A reset is an end, too.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            Err(error) => panic!("not closed: {error}"),
        }
        rest
    }
}

/// The header with this token.
pub(crate) fn bearer(token: &str) -> (&'static str, String) {
    ("Authorization", format!("Bearer {token}"))
}
