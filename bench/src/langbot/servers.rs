//! The measured servers: our gateway, a minimal server, and the real programs.
//!
//! The gateway uses the fake backend. The minimal server does the least work that can answer LangBot's client.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use box_gateways::langbot::{ChunkedConnection, Frames, LangBot, Settings};
use box_rpc::{Caller, Codecs, Options, Session};
use box_runtime::fake::{FakeBackend, Reply};
use box_runtime::{BoxRuntime, RuntimeConfig};
use box_service::connector::InProcess;
use box_service::{BoxService, ServiceConfig};
use box_transports::server::Server as Listening;
use box_transports::{Endpoint, ListenOptions, stdio};
use serde_json::Value;

use crate::packages;
use crate::process::{self, Server};

/// The instance name of every client in the benchmark.
pub(super) const INSTANCE: &str = "bench";

/// The command that produces much output, and the size of that output.
pub(super) const LARGE: &str = "large";
pub(super) const LARGE_BYTES: usize = 100_000;

/// Returns LangBot's actions over the fake backend.
fn gateway() -> Result<Arc<box_gateways::langbot::Installation>> {
    let backend = FakeBackend::new();
    backend.answer_with(|text| {
        if text == LARGE {
            Reply::stdout(vec![b'x'; LARGE_BYTES])
        } else {
            Reply::stdout(text.as_bytes())
        }
    });
    let runtime = BoxRuntime::start(RuntimeConfig::with(backend));
    let service =
        BoxService::with_connector(ServiceConfig::default(), InProcess::new(runtime.router()))?;
    let settings = Settings {
        trusted_caller: Some(Caller::token(INSTANCE)),
        ..Settings::default()
    };
    let langbot = LangBot::new(runtime, service, settings)?;
    langbot
        .installation(&Caller::token(INSTANCE), INSTANCE)
        .context("the instance is refused")
}

/// Runs a benchmark server: `gateway-websocket`, `gateway-stdio` or `trivial`.
pub(crate) fn serve(name: &str) -> Result<()> {
    process::runtime()?.block_on(async {
        let options = Options {
            codecs: Codecs::Only(&Frames),
            ..Options::new(Caller::Local)
        };
        let endpoint: Endpoint = "ws://127.0.0.1:0/rpc/ws".parse()?;
        match name {
            "gateway-stdio" => {
                let lines = stdio::serve(&options.limits)?;
                let connection = ChunkedConnection::new(Box::new(lines), &options.limits);
                let (router, policy) = gateway()?.serve(true);
                let options = Options {
                    control_policy: Some(policy),
                    ..options
                };
                let session = Session::start(connection, router, options);
                session.closed().await;
                Ok(())
            }
            "gateway-websocket" => {
                process::end_with_parent();
                let listener = endpoint.listen(&ListenOptions::default()).await?;
                let (router, policy) = gateway()?.serve(true);
                let options = Options {
                    control_policy: Some(policy),
                    ..options
                };
                let server = Listening::start(listener, router, move |_| options.clone());
                process::announce(server.endpoint())?;
                std::future::pending().await
            }
            "trivial" => {
                process::end_with_parent();
                let mut listener = endpoint.listen(&ListenOptions::default()).await?;
                process::announce(listener.local_endpoint())?;
                loop {
                    let connection = listener.accept().await?.connection;
                    tokio::spawn(trivial(connection));
                }
            }
            _ => bail!("no server called {name}"),
        }
    })
}

/// Sends the same answer to every request, as soon as its id is known.
async fn trivial(connection: Box<dyn box_rpc::Connection>) {
    let (mut send, mut receive) = connection.split();
    while let Ok(Some(message)) = receive.receive().await {
        let Ok(frame) = serde_json::from_str::<Value>(&message) else {
            continue;
        };
        let answer = format!(
            r#"{{"seq_id":{},"code":0,"message":"success","data":{{"session_id":"s","backend_name":"fake","status":"completed","exit_code":0,"stdout":"true","stderr":"","duration_ms":0}},"chunk_status":"continue"}}"#,
            frame["seq_id"]
        );
        if send.send(answer).await.is_err() || send.flush().await.is_err() {
            return;
        }
    }
}

/// Returns the Python interpreter with LangBot's packages.
pub(super) fn python() -> Result<PathBuf> {
    packages::python("langbot", "0.7.18")
}

/// Returns the path of a script.
pub(super) fn script(name: &str) -> PathBuf {
    packages::script("langbot", name)
}

/// Starts one of our servers.
pub(super) fn ours(name: &str) -> Result<Server> {
    Server::own(&["langbot-server", name])
}

/// Starts LangBot's server.
pub(super) fn theirs() -> Result<Server> {
    let mut command = Command::new(python()?);
    command.arg(script("server.py")).arg("websocket");
    Server::start(command)
}

/// A server on pipes.
pub(super) struct Piped {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    next: u64,
}

impl Piped {
    pub(super) fn start(program: &Path, arguments: &[OsString]) -> Result<Self> {
        let mut child = Command::new(program)
            .args(arguments)
            .env("LANGBOT_BOX_TRUSTED_INSTANCE_UUID", INSTANCE)
            .env(
                "LANGBOT_BOX_CONTROL_TOKEN",
                "0123456789012345678901234567890123456789",
            )
            .env("LANGBOT_BOX_CONFIG", r#"{"backend":"host"}"#)
            .env("BOXD_LOG_LEVEL", "error")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let stdin = child.stdin.take().context("no input")?;
        let stdout = BufReader::with_capacity(1 << 16, child.stdout.take().context("no output")?);
        Ok(Self {
            child,
            stdin,
            stdout,
            next: 0,
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a request, and returns the length of its answer, whole or in pieces.
    pub(super) fn ask(&mut self, action: &str, data: &Value) -> Result<usize> {
        self.next += 1;
        let frame = super::client::frame(self.next, action, data);
        self.stdin.write_all(frame.as_bytes())?;
        self.stdin.write_all(b"\n")?;
        self.stdin.flush()?;
        let mut bytes = 0;
        let mut line = String::new();
        loop {
            line.clear();
            ensure!(self.stdout.read_line(&mut line)? > 0, "the server ended");
            bytes += line.len();
            if line.contains("\"chunk_end\"") {
                return Ok(bytes);
            }
            if line.contains("\"seq_id\"") && !line.contains("\"chunk_data\"") {
                ensure!(
                    line.replace(' ', "").contains("\"code\":0"),
                    "refused: {line}"
                );
                return Ok(bytes);
            }
        }
    }
}

impl Drop for Piped {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = self.stdout.read_to_end(&mut Vec::new());
    }
}
