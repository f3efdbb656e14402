//! The CPU time of the server per exec: over HTTP and over RPC.

use std::io::Write as _;

use anyhow::{Context, Result, ensure};
use box_protocol::actions::{BoxCreate, CommandStart, CommandStartParams};
use box_rpc::{Options, Peer, Router, Session};
use box_transports::{ConnectOptions, Endpoint};
use serde_json::{Value, json};

use crate::boxd::Boxd;
use crate::http_client::Client;
use crate::pairs::Pairs;
use crate::process;

/// The number of commands of each client per round.
const EXECS: usize = 200;
/// The command of both clients.
const COMMAND: &str = "echo hello";

/// Measures and prints the bar.
pub(crate) fn run(rounds: u32) -> Result<()> {
    let server = Boxd::start()?;
    let runtime = process::runtime()?;
    let mut http = Http::start(&server.http)?;
    let rpc = runtime.block_on(Rpc::start(&server.tcp))?;
    let mut pairs = Pairs::default();
    // The first round warms up.
    for round in 0..=rounds {
        let over_http = per_exec(&server, || (0..EXECS).try_for_each(|_| http.exec()))?;
        let over_rpc = per_exec(&server, || {
            runtime.block_on(async {
                for _ in 0..EXECS {
                    rpc.exec().await?;
                }
                Ok(())
            })
        })?;
        if round > 0 {
            pairs.add(&[over_http], &[over_rpc]);
            pairs.end_round();
        }
    }
    let name = "server's CPU time per exec, OpenSandbox's endpoint over HTTP";
    pairs.print(name, "RPC over TCP", 1.5);
    Ok(())
}

/// Returns the CPU time of the server per exec, in milliseconds.
fn per_exec(server: &Boxd, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let before = server.process().cpu()?;
    work()?;
    let spent = server.process().cpu()?.saturating_sub(before);
    #[allow(clippy::cast_precision_loss, reason = "some hundred calls")]
    let calls = EXECS as f64;
    Ok(spent.as_secs_f64() * 1000.0 / calls)
}

/// A client of OpenSandbox's command endpoint, over one connection.
struct Http {
    client: Client,
    /// The whole request of a command.
    request: Vec<u8>,
}

impl Http {
    fn start(address: &str) -> Result<Self> {
        let mut client = Client::to(address)?;
        let mut ask = |line: &str, body: &Value| {
            client.write(&request(line, "", body)?)?;
            let answer = client.answer()?;
            let body: Value = serde_json::from_slice(&answer.body)?;
            ensure!(answer.status < 300, "refused: {body}");
            Ok(body)
        };
        let create = json!({
            "image": {"uri": "host"}, "timeout": 3600, "entrypoint": ["tail", "-f", "/dev/null"],
            "resourceLimits": {"cpu": "1", "memory": "2Gi"},
        });
        let created = ask("POST /v1/sandboxes", &create)?;
        let id = created["id"].as_str().context("no id")?;
        let lookup = format!("GET /v1/sandboxes/{id}/endpoints/44772");
        let found = ask(&lookup, &Value::Null)?;
        let endpoint = found["endpoint"].as_str().context("no endpoint")?;
        let (_, path) = endpoint.split_once('/').context("no path")?;
        let mut headers = String::new();
        for (name, value) in found["headers"].as_object().into_iter().flatten() {
            let value = value.as_str().context("a header")?;
            headers.extend([name, ": ", value, "\r\n"]);
        }
        let line = format!("POST /{path}/command");
        let request = request(&line, &headers, &json!({"command": COMMAND}))?;
        Ok(Self { client, request })
    }

    fn exec(&mut self) -> Result<()> {
        self.client.write(&self.request)?;
        let answer = self.client.answer()?;
        let text = String::from_utf8_lossy(&answer.body);
        ensure!(text.contains("execution_complete"), "failed: {text}");
        Ok(())
    }
}

fn request(line: &str, headers: &str, body: &Value) -> Result<Vec<u8>> {
    let body = body.to_string();
    let mut request = Vec::new();
    write!(
        request,
        "{line} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    Ok(request)
}

/// A client of the native protocol, over one connection.
struct Rpc {
    peer: Peer,
    command: CommandStartParams,
    _session: Session,
}

impl Rpc {
    async fn start(address: &str) -> Result<Self> {
        let endpoint: Endpoint = format!("tcp://{address}").parse()?;
        let connection = endpoint.connect(&ConnectOptions::default()).await?;
        let session = Session::start_boxed(connection, Router::empty(), Options::client());
        let peer = session.peer();
        let spec =
            json!({"spec": {"box_id": "bench", "cpus": 1, "memory_mb": 2048, "persistent": true}});
        peer.call::<BoxCreate>(&serde_json::from_value(spec)?)
            .await?;
        let command =
            json!({"box_id": "bench", "program": {"text": COMMAND}, "attach": {"view": "text"}});
        Ok(Self {
            peer,
            command: serde_json::from_value(command)?,
            _session: session,
        })
    }

    async fn exec(&self) -> Result<()> {
        let chunks = self.peer.stream::<CommandStart>(&self.command).await?;
        let info = chunks.finish().await?.info;
        ensure!(info.exit.and_then(|exit| exit.code) == Some(0), "{info:?}");
        Ok(())
    }
}
